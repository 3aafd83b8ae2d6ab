"""A TensorRT logger that remembers.

Most misuse of the TensorRT API is only logged as an error while the call returns something that
looks usable, so the log is the return value that counts.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

# Logged on machines without a CUDA driver or before the first device call; neither says
# anything about the network.
_HARMLESS = (
    re.compile(r"catchCudaError.*\(cudaError 35\b", re.DOTALL),
    re.compile(r"Thread context has not been set"),
)
_REPORT = re.compile(r"^Layers:|^Total (Activation|Weights) Memory|^Max Scratch Memory")


class RecordingLogger(Protocol):
    """What the facade needs of the logger.

    Attributes:
        errors: error messages since the last `take_errors`, harmless lines removed.
        warnings: every warning.
        report: messages that describe the built engine (layer list and memory totals).
    """

    errors: list[str]
    warnings: list[str]
    report: list[str]

    def take_errors(self) -> list[str]:
        """Return the collected errors and forget them."""


def is_harmless(message: str) -> bool:
    """Whether an error line belongs to the two kinds that mean nothing."""
    return any(pattern.search(message) for pattern in _HARMLESS)


def make_logger(trt: Any) -> Any:
    """Create a `RecordingLogger` that is also a `trt.ILogger` of the given module."""

    class Logger(trt.ILogger):
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []
            self.warnings: list[str] = []
            self.report: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                if not is_harmless(message):
                    self.errors.append(message)
            elif severity == trt.ILogger.WARNING:
                self.warnings.append(message)
            elif _REPORT.match(message):
                self.report.append(message)

        def take_errors(self) -> list[str]:
            errors, self.errors = self.errors, []
            return errors

    return Logger()


@contextmanager
def no_collection() -> Iterator[None]:
    """Keep python's cyclic garbage collector out of the block.

    TensorRT calls the logger while it holds a lock that destroying a builder needs: a collection
    that starts in the callback and finds an old network would wait for itself for ever.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
