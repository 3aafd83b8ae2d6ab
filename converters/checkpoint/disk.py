"""Whether a result fits on the disk, asked before its first byte is written."""

from __future__ import annotations

import shutil
from pathlib import Path

from plugins.support.errors import InputError
from plugins.support.units import size

_CONFIG_RESERVE = 1024 * 1024


def require_space(target: Path, work: Path, nbytes: int) -> None:
    """Raise InputError when a result of `nbytes` does not fit where `target` will be.

    Blocks that an interrupted run has filled already, in its directory `work`, count as there.
    """
    parent = target.resolve().parent
    while not parent.exists():
        parent = parent.parent
    needed = nbytes + _CONFIG_RESERVE
    if work.is_dir():
        filled = sum(path.stat().st_blocks * 512 for path in work.iterdir() if path.is_file())
        needed -= min(needed, filled)
    free = shutil.disk_usage(parent).free
    if needed > free:
        raise InputError(
            "not enough disk space for the result",
            where=str(parent),
            expected=size(needed),
            found=f"{size(free)} free",
            fix="free space or choose another place; nothing was written",
        )
