"""What hearing costs: spectrograms against transformers, whole requests, and live speech.

    OMP_NUM_THREADS=1 python -m benchmarks.audio

Makes the two tiny Voxtrals of the tests, trained and realtime, and gives them the recordings of the
tests. Prints markdown tables.
"""

from __future__ import annotations

import queue
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
import tritonclient.grpc as grpcclient
from transformers import WhisperFeatureExtractor

from build_scripts import engines
from converters.checkpoint.convert import convert
from runtime.audio import AudioEncoder
from runtime.engine import Engine
from runtime.requests import GenerationRequest
from runtime.session import Session
from tests.fixtures.tekken import write_tekken
from tests.fixtures.voxtral_checkpoint import materialise, recordings
from tests.fixtures.voxtral_deterministic import write_huggingface
from triton_repo.examples.speech import RATE, send_pieces
from triton_repo.frontend.audio.frontend import AudioFrontEnd
from triton_repo.frontend.audio.mel import log_mel_chunks
from triton_repo.generate import write_repository
from triton_repo.server import running

ROUNDS = 9
CHUNK = 30 * RATE
TIMEOUT_S = 60


def median_s(work: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Median wall time of `work` after one call to warm up."""
    work()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def spectrograms(speech: np.ndarray[Any, np.dtype[np.float32]]) -> None:
    """Ours and transformers' whole call on the same padded samples, and how far they differ."""
    extractor = WhisperFeatureExtractor(feature_size=128)
    print("| audio | ours ms | x realtime | transformers ms | x realtime | gain | difference |")
    print("|---|---|---|---|---|---|---|")
    for seconds in (3, 30, 300):
        samples = np.resize(speech, seconds * RATE)
        padded = np.pad(samples, (0, -len(samples) % CHUNK))

        def theirs(padded: Any = padded) -> Any:
            features = extractor(
                padded, sampling_rate=RATE, padding="longest", truncation=False, return_tensors="np"
            )
            return features["input_features"][0]

        def ours(samples: Any = samples) -> Any:
            return log_mel_chunks(samples, CHUNK)

        difference = np.abs(np.concatenate(list(ours()), axis=1) - theirs()).max()
        a, b = median_s(ours), median_s(theirs)
        print(
            f"| {seconds} s | {a * 1e3:.1f} | {seconds / a:.0f} | {b * 1e3:.1f} | "
            f"{seconds / b:.0f} | {b / a:.1f} | {difference:.1e} |"
        )


def requests(engine_dir: Path, files: Sequence[Path]) -> None:
    """Seconds per second of audio of every step of a transcription."""
    print("\n| audio | decode ms | prompt, spectrogram ms | audio engine ms | text ms | s per s |")
    print("|---|---|---|---|---|---|")
    engine = Engine.load(engine_dir, executor="interpreter", device="cpu")
    assert engine.tokenizer_dir is not None
    front_end = AudioFrontEnd(engine.config.pretrained_config, engine.tokenizer_dir)
    with Session(engine) as session:
        for path in files:
            seconds, steps = transcribed(path, front_end, AudioEncoder(engine), session)
            cells = " | ".join(f"{step * 1e3:.1f}" for step in steps)
            print(f"| {path.stem}, {seconds:.1f} s | {cells} | {sum(steps) / seconds:.3f} |")


def transcribed(
    path: Path, front_end: AudioFrontEnd, encoder: AudioEncoder, session: Session
) -> tuple[float, list[float]]:
    """Seconds of audio, and seconds of every step from the file to its last word."""
    data = path.read_bytes()
    samples = front_end.decode(data, path.name)
    heard = front_end.transcribe(samples)
    assert heard.features is not None
    features = torch.from_numpy(heard.features)
    rows = encoder.rows(features)

    def answer() -> object:
        return session.submit(GenerationRequest(heard.ids, 200, end_ids=(2,), audio=rows)).result()

    return len(samples) / RATE, [
        median_s(lambda: front_end.decode(data, path.name)),
        median_s(lambda: front_end.transcribe(samples)),
        median_s(lambda: encoder.rows(features)),
        median_s(answer, 3),
    ]


def first_text(url: str, path: Path, pace: float) -> tuple[float, float]:
    """Seconds from the first piece to the first text and to the end of the text."""
    events: queue.Queue[tuple[Any, Any, float]] = queue.Queue()
    client = grpcclient.InferenceServerClient(url)
    client.start_stream(lambda result, error: events.put((result, error, time.perf_counter())))
    start = time.perf_counter()
    first = 0.0
    try:
        send_pieces(client, path, pace)
        while True:
            result, error, when = events.get(timeout=TIMEOUT_S)
            if error is not None:
                raise RuntimeError(str(error))
            response = result.get_response()
            if response.id == "piece":
                continue
            if response.outputs and result.as_numpy("text_output").reshape(-1)[0]:
                first = first or when - start
            if response.parameters["triton_final_response"].bool_param:
                return first, when - start
    finally:
        client.stop_stream()
        client.close()


def streams(engine_dir: Path, path: Path) -> None:
    """Time to the first text of a stream through a real tritonserver."""
    print("\n| pieces of 80 ms | first text ms | end of text ms | audio ms |\n|---|---|---|---|")
    length = soundfile.info(path).frames
    with tempfile.TemporaryDirectory(prefix="audio-") as directory:
        repository = write_repository(engine_dir, Path(directory) / "model_repository")
        with running(repository) as server:
            first_text(server.grpc_url, path, 0.0)
            for name, pace in (("at the pace of a microphone", 1.0), ("all at once", 0.0)):
                seen = [first_text(server.grpc_url, path, pace) for _ in range(5)]
                first, last = (statistics.median(column) for column in zip(*seen, strict=True))
                print(f"| {name} | {first * 1e3:.0f} | {last * 1e3:.0f} | {length / RATE:.2f} s |")


def build(hf_dir: Path, engine_dir: Path, max_seq_len: int) -> Path:
    """Convert and build with the defaults of the command line but for the length."""
    checkpoint = engine_dir.with_name(f"{engine_dir.name}-checkpoint")
    convert(hf_dir, checkpoint)
    limits = engines.Request(8, max_seq_len, None, 0, 512, 8192, "auto", None, "auto")
    engines.build(checkpoint, engine_dir, limits)
    return engine_dir


def main() -> None:
    """Print the tables."""
    torch.set_num_threads(1)
    files = [recording.path for recording in recordings()]
    with tempfile.TemporaryDirectory(prefix="audio-") as directory:
        base = Path(directory)
        trained = build(materialise(base / "trained"), base / "engine", 1024)
        source = write_huggingface(base / "streaming", realtime=True)
        write_tekken(source, realtime=True)
        realtime = build(source, base / "realtime-engine", 512)
        spectrograms(np.concatenate([soundfile.read(path, dtype="float32")[0] for path in files]))
        requests(trained, files)
        streams(realtime, files[1])


if __name__ == "__main__":
    main()
