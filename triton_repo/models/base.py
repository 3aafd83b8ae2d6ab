"""What all models of the repository share."""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

from plugins.support.errors import ToolchainError
from triton_repo.frontend.problems import one_line
from triton_repo.tensor_io import Array


def limit_threads(count: int) -> None:
    """Keep libraries of this process from starting one thread per core each."""
    os.environ["OMP_NUM_THREADS"] = str(count)
    os.environ["RAYON_NUM_THREADS"] = str(count)
    os.environ["FASTOKENS_BPE_THREADS"] = str(count)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def hide_from_collector() -> None:
    """Exempt what is loaded by now from garbage collection: looking through all of it stops the
    process for milliseconds, and nothing of it is garbage.
    """
    gc.collect()
    gc.freeze()


def set_up_logging(model: str) -> None:
    """Log to the server's output, with the model's name."""
    logging.basicConfig(
        stream=sys.stderr, level=logging.WARNING, format=f"%(levelname).1s {model}: %(message)s"
    )
    logging.getLogger("triton_repo").setLevel(logging.INFO)


def refuse_to_start(pb_utils: Any, error: Exception) -> NoReturn:
    """Turn an exception of `initialize` into one line in the server's log."""
    if isinstance(error, ToolchainError):
        text = one_line(error) + (f"; {error.fix}" if error.fix else "")
    elif isinstance(error, ImportError):
        text = f"{error} (interpreter {sys.executable})"
    else:
        text = f"{type(error).__name__}: {error}"
    raise pb_utils.TritonModelException(" ".join(text.split())) from None


def belongs_to_stream(request: Any) -> bool:
    """Whether a request carries a sequence id, as the pieces of one stream do."""
    return request.correlation_id() not in (0, "")


def tensors_of(request: Any) -> dict[str, Array]:
    """All input tensors of a request by name."""
    return {t.name(): t.as_numpy() for t in request.inputs()}


def request_id_of(request: Any) -> str:
    """The client's request id; the generate endpoint passes a JSON `id` as a parameter."""
    given: str = request.request_id()
    if given:
        return given
    parameters = request.parameters()
    return str(json.loads(parameters).get("id", "")) if len(parameters) > 2 else ""


def decoupled(config: Mapping[str, Any]) -> bool:
    """Whether the model may send several responses per request."""
    return bool(config.get("model_transaction_policy", {}).get("decoupled", False))
