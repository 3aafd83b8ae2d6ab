"""One answer over plain HTTP.

python -m triton_repo.examples.http_generate "Once upon a time" --max-tokens 32
"""

from __future__ import annotations

import argparse
import sys

import requests


def main(arguments: list[str] | None = None) -> int:
    """Print the answer; exit code 1 with the server's message when it refuses."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="tensorrt_llm_bls")
    chosen = parser.parse_args(arguments)

    answer = requests.post(
        f"{chosen.url}/v2/models/{chosen.model}/generate",
        json={
            "text_input": chosen.prompt,
            "max_tokens": chosen.max_tokens,
            "exclude_input_in_output": True,
        },
        timeout=300,
    )
    body = answer.json()
    if "error" in body:
        print(f"{answer.status_code}: {body['error']}", file=sys.stderr)
        return 1
    print(body["text_output"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
