"""The network facade: everything a network definition may call."""

from __future__ import annotations

from plugins.trt.core import Constant, NetworkCore, PluginCall
from plugins.trt.loops import Loop, LoopLayers
from plugins.trt.shapes import Dim
from plugins.trt.types import Tensor

__all__ = ["Constant", "Dim", "Loop", "Network", "NetworkCore", "PluginCall", "Tensor"]


class Network(LoopLayers):
    """A strongly typed TensorRT network that refuses every mistake at its line.

    See `NetworkCore` for the constructor and for inputs, outputs, weights and plugins;
    `ElementwiseLayers`, `ShapeLayers`, `AlgebraLayers`, `AttentionLayers`,
    `QuantizationLayers` and `LoopLayers` for the layers.
    """
