"""Two tenants with one prompt: a cache salt keeps their prefix caches apart.

python -m triton_repo.examples.tenants "A long shared prompt"
"""

from __future__ import annotations

import argparse
import sys

import requests


def main(arguments: list[str] | None = None) -> int:
    """Send the prompt twice per tenant; print how many cache blocks each request reused."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    chosen = parser.parse_args(arguments)

    for tenant in ("tenant-a", "tenant-a", "tenant-b", "tenant-b"):
        answer = requests.post(
            f"{chosen.url}/v2/models/tensorrt_llm_bls/generate",
            json={"text_input": chosen.prompt, "max_tokens": 1, "cache_salt": tenant},
            timeout=300,
        )
        body = answer.json()
        if "error" in body:
            print(f"{answer.status_code}: {body['error']}", file=sys.stderr)
            return 1
        # The output is left out by an engine without a prefix cache.
        print(f"{tenant}: {body.get('kv_cache_reused_blocks', 'no')} blocks reused")
    return 0


if __name__ == "__main__":
    sys.exit(main())
