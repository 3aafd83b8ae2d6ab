"""The plugin layers of the draft layer's input in torch, as the interpreter runs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from plugins.mtp import reference

Tensors = Mapping[str, Tensor]
Attributes = Mapping[str, Any]


def embed_norms(tensors: Tensors, attributes: Attributes) -> dict[str, Tensor]:
    """See `reference.embed_norms`."""
    return {"joined": reference.embed_norms(**tensors, eps=attributes["eps"])}


def rms_norm(tensors: Tensors, attributes: Attributes) -> dict[str, Tensor]:
    """See `reference.rms_norm`."""
    return {"normed": reference.rms_norm(**tensors, eps=attributes["eps"])}


DEFINITIONS: dict[str, Callable[[Tensors, Attributes], dict[str, Tensor]]] = {
    "embed_norms": embed_norms,
    "rms_norm": rms_norm,
}
