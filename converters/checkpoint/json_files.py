"""JSON files from strangers: read whole, checked to be objects, refused with a sentence."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from plugins.support.errors import InputError

# Far above any real config or index; stops a mistaken path from filling the memory.
MAX_JSON_BYTES = 512 * 1024 * 1024


def read_json_object(path: Path, what: str) -> dict[str, Any]:
    """The object in `path`. Raises InputError when it is missing, too large or not an object."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise InputError(f"the {what} is too large to be one", where=str(path))
        text = path.read_bytes()
    except OSError as error:
        raise InputError(
            f"the {what} cannot be read", where=str(path), found=error.strerror or str(error)
        ) from error
    return parse_json_object(text, str(path), what)


def parse_json_object(text: bytes, where: str, what: str) -> dict[str, Any]:
    """The object in `text`; a key that occurs twice is an error, not an overwrite."""
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        raise InputError(f"the {what} is not valid JSON", where=where, found=str(error)) from error
    if not isinstance(value, dict):
        raise InputError(
            f"the {what} is not a JSON object", where=where, found=type(value).__name__
        )
    return value


def _without_repeats(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"key {repeated!r} occurs twice")
    return result
