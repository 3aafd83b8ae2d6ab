"""Triton model `tensorrt_llm_bls`."""

from __future__ import annotations

from typing import Any

import triton_python_backend_utils as pb_utils

from triton_repo.models.bls import Bls


class TritonPythonModel:
    """What Triton's Python backend calls."""

    def initialize(self, args: dict[str, str]) -> None:
        self._model = Bls(pb_utils, args)

    def execute(self, requests: list[Any]) -> Any:
        return self._model.execute(requests)

    def finalize(self) -> None:
        self._model.close()
