"""Request mistakes: one line that starts with the parameter's name."""

from __future__ import annotations

from plugins.support.errors import ToolchainError, UsageError

MAX_SHOWN = 60


def problem(
    parameter: str, what: str, *, expected: str | None = None, found: object = None
) -> UsageError:
    """An error about one request parameter; `found` is shortened for the answer."""
    shown = None if found is None else shorten(found)
    return UsageError(what, where=parameter, expected=expected, found=shown)


def shorten(value: object) -> str:
    """A value for a message: printable, one line, at most 60 characters."""
    text = repr(value) if isinstance(value, (str, bytes)) else str(value)
    text = " ".join(text.split())
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."


def one_line(error: ToolchainError) -> str:
    """`parameter: what; expected …; found …`, the form every client sees."""
    parts = [f"{error.where}: {error.what}" if error.where else error.what]
    if error.expected is not None:
        parts.append(f"expected {error.expected}")
    if error.found is not None:
        parts.append(f"found {error.found}")
    return "; ".join(parts)
