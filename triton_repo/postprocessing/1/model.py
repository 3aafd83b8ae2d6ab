"""Triton model `postprocessing`."""

from __future__ import annotations

from typing import Any

import triton_python_backend_utils as pb_utils

from triton_repo.models.postprocessing import Postprocessing


class TritonPythonModel:
    """What Triton's Python backend calls."""

    def initialize(self, args: dict[str, str]) -> None:
        self._model = Postprocessing(pb_utils, args)

    def execute(self, requests: list[Any]) -> Any:
        return self._model.execute(requests)

    def finalize(self) -> None:
        self._model.close()
