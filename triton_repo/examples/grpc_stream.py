"""An answer that grows, over gRPC; Ctrl-C ends the generation.

python -m triton_repo.examples.grpc_stream "Once upon a time" --max-tokens 32
"""

from __future__ import annotations

import argparse
import queue
import sys
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient


def tensor(name: str, datatype: str, value: Any) -> Any:
    """One value as an input with a batch dimension."""
    dtype = {"BYTES": np.object_, "INT32": np.int32, "BOOL": np.bool_}[datatype]
    out = grpcclient.InferInput(name, [1, 1], datatype)
    out.set_data_from_numpy(np.array([[value]], dtype=dtype))
    return out


def main(arguments: list[str] | None = None) -> int:
    """Print the pieces as they come; exit code 1 with the server's message when it refuses."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--url", default="127.0.0.1:8001")
    parser.add_argument("--model", default="tensorrt_llm_bls")
    chosen = parser.parse_args(arguments)

    events: queue.Queue[tuple[Any, Any]] = queue.Queue()
    client = grpcclient.InferenceServerClient(chosen.url)
    # One stream per request: an error on a stream does not say which request it belongs to.
    client.start_stream(lambda result, error: events.put((result, error)))
    client.async_stream_infer(
        chosen.model,
        [
            tensor("text_input", "BYTES", chosen.prompt.encode()),
            tensor("max_tokens", "INT32", chosen.max_tokens),
            tensor("stream", "BOOL", True),
        ],
        enable_empty_final_response=True,
    )
    try:
        while True:
            # Never wait without a limit: a lost server sends no final response.
            result, error = events.get(timeout=300)
            if error is not None:
                print(error, file=sys.stderr)
                return 1
            response = result.get_response()
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
