"""A tokenizer with a vocabulary of real size, for measurements without a released checkpoint.

    python -m benchmarks.vocabulary TOKENIZER_DIR OUT_DIR [--ids 40000]

Byte pairs of the sources of Python's standard library, with the normaliser, pre-tokenizer, special
tokens and chat template of TOKENIZER_DIR.
"""

from __future__ import annotations

import argparse
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from transformers import AutoTokenizer


def sources() -> Iterator[str]:
    """The texts of the standard library's modules and tests, without installed packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        if "site-packages" not in path.parts:
            yield path.read_text("utf-8", errors="ignore")


def main() -> None:
    """Train and save."""
    parser = argparse.ArgumentParser(description="Tokenizer with a vocabulary of real size.")
    parser.add_argument("tokenizer", type=Path, metavar="TOKENIZER_DIR")
    parser.add_argument("out", type=Path, metavar="OUT_DIR")
    parser.add_argument("--ids", type=int, default=40000)
    chosen = parser.parse_args()
    base = AutoTokenizer.from_pretrained(chosen.tokenizer)
    trained = base.train_new_from_iterator(sources(), chosen.ids)
    trained.save_pretrained(chosen.out)
    print(f"{len(trained)} ids in {chosen.out}")


if __name__ == "__main__":
    main()
