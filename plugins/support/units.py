"""Numbers of bytes for people."""

from __future__ import annotations


def size(nbytes: int) -> str:
    """`nbytes` for people: "1.4 MB"."""
    value = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"
