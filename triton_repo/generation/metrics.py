"""Custom metrics of the generation model.

Every call of Triton's metric objects happens under one lock: from several threads at once they
crash the server. All metrics exist with value 0 before the first request.
"""

from __future__ import annotations

import threading
from typing import Any

_COUNTERS = {
    "requests": "Sequences accepted",
    "requests_failed": "Sequences that ended with an error",
    "requests_cancelled": "Sequences that were cancelled",
    "prompt_tokens": "Prompt tokens accepted",
    "generated_tokens": "Tokens generated",
    "cache_reused_blocks": "Cache blocks that were reused",
    "time_to_first_token_us": "Sum of the times to the first token, in microseconds",
    "first_tokens": "First tokens; divides the sum above",
}
_GAUGES = {
    "requests_active": "Sequences that hold a slot now",
    "requests_waiting": "Sequences that wait for a slot now",
}
PREFIX = "trtllm_toolchain_"


class Metrics:
    """The metrics of one model instance.

    Args:
        pb_utils: Triton's module; None for use outside a server, where calls do nothing.
        model: label value.
    """

    def __init__(self, pb_utils: Any, model: str) -> None:
        self._lock = threading.Lock()
        self._metrics: dict[str, Any] = {}
        # Families must outlive their metrics.
        self._families: list[Any] = []
        if pb_utils is None:
            return
        for names, kind in (
            (_COUNTERS, pb_utils.MetricFamily.COUNTER),
            (_GAUGES, pb_utils.MetricFamily.GAUGE),
        ):
            for name, description in names.items():
                family = pb_utils.MetricFamily(
                    name=PREFIX + name, description=description, kind=kind
                )
                self._families.append(family)
                self._metrics[name] = family.Metric(labels={"model": model, "version": "1"})

    def add(self, **amounts: float) -> None:
        """Increase counters by name."""
        with self._lock:
            for name, amount in amounts.items():
                if amount and name in self._metrics:
                    self._metrics[name].increment(amount)

    def set(self, **values: float) -> None:
        """Set gauges by name."""
        with self._lock:
            for name, value in values.items():
                if name in self._metrics:
                    self._metrics[name].set(value)
