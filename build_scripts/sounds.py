"""What the command line of `run` says about audio."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Sounds:
    """What the command line says about audio.

    Attributes:
        files: values of `--audio`, in order.
        request: file with chat messages or a transcription task.
    """

    files: tuple[Path, ...] = ()
    request: Path | None = None

    def __bool__(self) -> bool:
        return bool(self.files) or self.request is not None
