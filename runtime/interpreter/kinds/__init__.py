"""The layer kinds the interpreter knows: one function each, that prepares a node for the shapes
of a call.
"""

from __future__ import annotations

from collections.abc import Callable

from runtime.interpreter.kinds import algebra, attention, elementwise, quantization, shapes
from runtime.interpreter.kinds.call import Bound, Call, PluginOp
from runtime.interpreter.kinds.plugin import plugin

__all__ = ["KINDS", "SHAPE_OPERANDS", "VIEWS", "Bound", "Call", "PluginOp"]

KINDS: dict[str, Callable[[Call], Bound]] = {
    "activation": elementwise.activation,
    "attention": attention.attention,
    "cast": elementwise.cast,
    "concat": shapes.concat,
    "convolution": algebra.convolution,
    "cumulative": algebra.cumulative,
    "dequantize": quantization.dequantize,
    "dynamic_quantize": quantization.dynamic_quantize,
    "elementwise": elementwise.elementwise,
    "fill": shapes.fill,
    "gather": shapes.gather,
    "identity": elementwise.identity,
    "kv_cache_update": attention.kv_cache_update,
    "matmul": algebra.matmul,
    "normalization": algebra.normalization,
    "plugin": plugin,
    "quantize": quantization.quantize,
    "reduce": algebra.reduce,
    "rotary_embedding": attention.rotary_embedding,
    "scatter": shapes.scatter,
    "select": elementwise.select,
    "shape": shapes.shape,
    "shuffle": shapes.shuffle,
    "slice": shapes.slice_,
    "softmax": algebra.softmax,
    "squeeze": shapes.squeeze,
    "topk": algebra.topk,
    "unary": elementwise.unary,
    "unsqueeze": shapes.unsqueeze,
}

# Operands whose values shape the result; they must follow from the shapes of a call's inputs.
SHAPE_OPERANDS: dict[str, tuple[int, ...]] = {
    "cumulative": (1,),
    "fill": (0,),
    "shuffle": (1,),
    "slice": (1, 2, 3),
    "squeeze": (1,),
    "topk": (1,),
    "unsqueeze": (1,),
}

# Kinds that copy nothing, so that applying them ahead of time costs no memory.
VIEWS = frozenset({"identity", "shuffle", "slice", "squeeze", "unsqueeze"})
