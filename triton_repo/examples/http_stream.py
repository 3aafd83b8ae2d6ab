"""An answer that grows, over plain HTTP with server-sent events.

    python -m triton_repo.examples.http_stream "Once upon a time" --max-tokens 32

Closing the connection ends the generation.
"""

from __future__ import annotations

import argparse
import json
import sys

import requests


def main(arguments: list[str] | None = None) -> int:
    """Print the pieces as they come; exit code 1 with the server's message when it refuses."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="tensorrt_llm_bls")
    chosen = parser.parse_args(arguments)

    request = {"text_input": chosen.prompt, "max_tokens": chosen.max_tokens, "stream": True}
    with requests.post(
        f"{chosen.url}/v2/models/{chosen.model}/generate_stream",
        json=request,
        stream=True,
        timeout=300,
    ) as answer:
        for line in answer.iter_lines():
            if not line.startswith(b"data: "):
                continue
            event = json.loads(line.removeprefix(b"data: "))
            if "error" in event:
                print(f"{answer.status_code}: {event['error']}", file=sys.stderr)
                return 1
            print(event["text_output"], end="", flush=True)
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
