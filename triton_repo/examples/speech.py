"""Text of a recording, or of speech while it is spoken.

python -m triton_repo.examples.speech A.wav
python -m triton_repo.examples.speech A.wav --live    # a realtime model; 16 kHz, in pieces of 80 ms
"""

from __future__ import annotations

import argparse
import queue
import secrets
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import tritonclient.grpc as grpcclient

RATE = 16000
PIECE = RATE * 80 // 1000


def tensor(name: str, datatype: str, values: Any) -> Any:
    """Values as an input with a batch dimension."""
    out = grpcclient.InferInput(name, [1, len(values)], datatype)
    out.set_data_from_numpy(values[None])
    return out


def send_file(client: Any, path: Path) -> None:
    """The whole file, in whichever container it is, as one request."""
    inputs = [
        tensor("audio_bytes", "UINT8", np.frombuffer(path.read_bytes(), np.uint8)),
        tensor("task", "BYTES", np.array([b"transcribe"], dtype=np.object_)),
        tensor("stream", "BOOL", np.array([True])),
    ]
    client.async_stream_infer("tensorrt_llm_bls", inputs, enable_empty_final_response=True)


def send_pieces(client: Any, path: Path, pace: float) -> None:
    """The samples in pieces: requests with one sequence id, whose first one gets all the text.

    `pace` is the time from piece to piece in units of their length; 1 is the pace of a microphone.
    """
    samples, rate = soundfile.read(path, dtype="float32")
    if rate != RATE or samples.ndim != 1:
        raise SystemExit(f"{path}: pieces must be {RATE} Hz mono")
    number = secrets.randbits(63) | 1
    for start in range(0, len(samples), PIECE):
        last = start + PIECE >= len(samples)
        client.async_stream_infer(
            "tensorrt_llm_bls",
            [tensor("audio_samples", "FP32", samples[start : start + PIECE])],
            request_id="text" if start == 0 else "piece",
            sequence_id=number,
            sequence_start=start == 0,
            sequence_end=last,
            enable_empty_final_response=True,
        )
        if not last:
            time.sleep(pace * PIECE / RATE)


def main(arguments: list[str] | None = None) -> int:
    """Print the text as it comes; exit code 1 with the server's message when it refuses."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--live", action="store_true", help="send it in pieces while it plays")
    parser.add_argument("--pace", type=float, default=1.0, help="0 sends all pieces at once")
    parser.add_argument("--url", default="127.0.0.1:8001")
    chosen = parser.parse_args(arguments)

    events: queue.Queue[tuple[Any, Any]] = queue.Queue()
    client = grpcclient.InferenceServerClient(chosen.url)
    client.start_stream(lambda result, error: events.put((result, error)))
    try:
        if chosen.live:
            send_pieces(client, chosen.file, chosen.pace)
        else:
            send_file(client, chosen.file)
        while True:
            # Never wait without a limit: a lost server sends no final response.
            result, error = events.get(timeout=300)
            if error is not None:
                print(error, file=sys.stderr)
                return 1
            response = result.get_response()
            if response.id == "piece":
                continue
            if response.outputs:
                text = result.as_numpy("text_output").reshape(-1)[0]
                print(text.decode(), end="", flush=True)
            if response.parameters["triton_final_response"].bool_param:
                print()
                return 0
    finally:
        client.stop_stream(cancel_requests=True)
        client.close()


if __name__ == "__main__":
    sys.exit(main())
