"""A chat: messages go to the model's own template on the server.

python -m triton_repo.examples.chat "Who are you?" --system "Be brief." --max-tokens 64
"""

from __future__ import annotations

import argparse
import json
import sys

import requests


def main(arguments: list[str] | None = None) -> int:
    """Print the assistant's answer; exit code 1 with the server's message when it refuses."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("message")
    parser.add_argument("--system")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    chosen = parser.parse_args(arguments)

    messages = [{"role": "user", "content": chosen.message}]
    if chosen.system:
        messages.insert(0, {"role": "system", "content": chosen.system})
    request = {
        # Structured fields travel as JSON text: Triton's STRING inputs take no objects.
        "messages": json.dumps(messages),
        "max_tokens": chosen.max_tokens,
        "exclude_input_in_output": True,
    }
    for name in ("temperature", "seed"):
        if getattr(chosen, name) is not None:
            request[name] = getattr(chosen, name)
    answer = requests.post(
        f"{chosen.url}/v2/models/tensorrt_llm_bls/generate", json=request, timeout=300
    )
    body = answer.json()
    if "error" in body:
        print(f"{answer.status_code}: {body['error']}", file=sys.stderr)
        return 1
    print(body["text_output"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
