"""How to read each TensorRT layer class: its program kind, inputs and attributes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from plugins.support.errors import CapabilityError

Attributes = dict[str, Any]


@dataclass(frozen=True)
class Reader:
    """Binding class, program kind, attribute function of one `LayerType`."""

    cls: str
    kind: str
    read: Callable[[Any], Attributes]


def _none(_: Any) -> Attributes:
    return {}


def _axes(mask: int) -> list[int]:
    return [axis for axis in range(32) if mask >> axis & 1]


def _dims(value: Any) -> list[int] | None:
    """A Dims property as a list; None where the layer takes it from an input instead."""
    if value is None:
        return None
    try:
        return [int(v) for v in value]
    except ValueError:
        # An unset Dims has length -1.
        return None


def _op(raw: Any) -> Attributes:
    return {"op": raw.op.name}


def _activation(raw: Any) -> Attributes:
    return {"op": raw.type.name, "alpha": raw.alpha, "beta": raw.beta}


def _reduce(raw: Any) -> Attributes:
    return {"op": raw.op.name, "axes": _axes(raw.axes), "keep": raw.keep_dims}


def _matmul(raw: Any) -> Attributes:
    return {"op0": raw.op0.name, "op1": raw.op1.name}


def _softmax(raw: Any) -> Attributes:
    return {"axis": _axes(raw.axes)[0]}


def _topk(raw: Any) -> Attributes:
    return {"op": raw.op.name, "k": raw.k, "axis": _axes(raw.axes)[0]}


def _gather(raw: Any) -> Attributes:
    return {"mode": raw.mode.name, "axis": raw.axis, "elementwise_dims": raw.num_elementwise_dims}


def _scatter(raw: Any) -> Attributes:
    element = raw.mode.name == "ELEMENT"
    return {"mode": raw.mode.name, "axis": raw.axis if element else 0}


def _axis(raw: Any) -> Attributes:
    return {"axis": raw.axis}


def _slice(raw: Any) -> Attributes:
    if raw.mode.name != "STRICT_BOUNDS":
        raise CapabilityError(
            "the interpreter knows only slices within bounds", where=raw.name, found=raw.mode.name
        )
    present = [raw.num_inputs > i and raw.get_input(i) is not None for i in range(4)]
    return {
        "start": None if present[1] else _dims(raw.start),
        "size": None if present[2] else _dims(raw.shape),
        "stride": None if present[3] else _dims(raw.stride),
    }


def _shuffle(raw: Any) -> Attributes:
    dynamic = raw.num_inputs > 1 and raw.get_input(1) is not None
    return {
        "first": list(raw.first_transpose),
        "dims": None if dynamic else _dims(raw.reshape_dims),
        "second": list(raw.second_transpose),
        "zero_keeps": raw.zero_is_placeholder,
    }


def _fill(raw: Any) -> Attributes:
    dynamic = raw.num_inputs > 0 and raw.get_input(0) is not None
    dims = None if dynamic else _dims(raw.shape)
    return {"op": raw.operation.name, "shape": dims, "start": raw.alpha, "step": raw.beta}


def _cumulative(raw: Any) -> Attributes:
    return {"exclusive": raw.exclusive, "reverse": raw.reverse}


def _convolution(raw: Any) -> Attributes:
    return {
        "groups": raw.num_groups,
        "stride": list(raw.stride_nd),
        "before": list(raw.pre_padding),
        "after": list(raw.post_padding),
        "dilation": list(raw.dilation_nd),
    }


def _normalization(raw: Any) -> Attributes:
    return {"axes": _axes(raw.axes), "epsilon": raw.epsilon, "groups": raw.num_groups}


def _granularity(raw: Any) -> Attributes:
    try:
        block = _dims(raw.block_shape)
    except RuntimeError:
        # Asking for a block shape that was never set raises.
        block = None
    return {"axis": raw.axis, "block": block or None}


def _dynamic_quantize(raw: Any) -> Attributes:
    return {"axis": raw.axis, "block_size": raw.block_size}


def _attention(raw: Any) -> Attributes:
    attention = raw.attention
    causal = "NONE"
    if hasattr(attention, "causal_kind"):
        causal = attention.causal_kind.name
    elif attention.causal:
        causal = "UPPER_LEFT"
    if attention.norm_op.name != "SOFTMAX":
        raise CapabilityError("the interpreter knows only softmax attention", where=raw.name)
    if hasattr(attention, "query_form") and attention.query_form.name != "PADDED_BHND":
        raise CapabilityError("the interpreter knows only padded attention", where=raw.name)
    return {"causal": causal}


def _rotary(raw: Any) -> Attributes:
    return {"interleaved": raw.interleaved, "rotary_dim": raw.rotary_embedding_dim}


READERS: dict[str, Reader] = {
    "ACTIVATION": Reader("IActivationLayer", "activation", _activation),
    "ATTENTION_OUTPUT": Reader("IAttentionOutputLayer", "attention", _attention),
    "CAST": Reader("ICastLayer", "cast", _none),
    "CONCATENATION": Reader("IConcatenationLayer", "concat", _axis),
    "CONVOLUTION": Reader("IConvolutionLayer", "convolution", _convolution),
    "CUMULATIVE": Reader("ICumulativeLayer", "cumulative", _cumulative),
    "DEQUANTIZE": Reader("IDequantizeLayer", "dequantize", _granularity),
    "DYNAMIC_QUANTIZE": Reader("IDynamicQuantizeLayer", "dynamic_quantize", _dynamic_quantize),
    "ELEMENTWISE": Reader("IElementWiseLayer", "elementwise", _op),
    "FILL": Reader("IFillLayer", "fill", _fill),
    "GATHER": Reader("IGatherLayer", "gather", _gather),
    "IDENTITY": Reader("IIdentityLayer", "identity", _none),
    "KV_CACHE_UPDATE": Reader("IKVCacheUpdateLayer", "kv_cache_update", _none),
    "MATRIX_MULTIPLY": Reader("IMatrixMultiplyLayer", "matmul", _matmul),
    "NORMALIZATION": Reader("INormalizationLayer", "normalization", _normalization),
    # Its attributes are those that the network noted: a plugin layer tells nothing.
    "PLUGIN_V3": Reader("IPluginV3Layer", "plugin", _none),
    "QUANTIZE": Reader("IQuantizeLayer", "quantize", _granularity),
    "REDUCE": Reader("IReduceLayer", "reduce", _reduce),
    "ROTARY_EMBEDDING": Reader("IRotaryEmbeddingLayer", "rotary_embedding", _rotary),
    "SCATTER": Reader("IScatterLayer", "scatter", _scatter),
    "SELECT": Reader("ISelectLayer", "select", _none),
    "SHAPE": Reader("IShapeLayer", "shape", _none),
    "SHUFFLE": Reader("IShuffleLayer", "shuffle", _shuffle),
    "SLICE": Reader("ISliceLayer", "slice", _slice),
    "SOFTMAX": Reader("ISoftMaxLayer", "softmax", _softmax),
    "SQUEEZE": Reader("ISqueezeLayer", "squeeze", _none),
    "TOPK": Reader("ITopKLayer", "topk", _topk),
    "UNARY": Reader("IUnaryLayer", "unary", _op),
    "UNSQUEEZE": Reader("IUnsqueezeLayer", "unsqueeze", _none),
}


def inputs_of(layer_type: str, raw: Any) -> list[Any]:
    """The input tensors of a layer of known class, None where an optional one is absent.

    Attention keeps its inputs on another object: query, key, value, mask, key lengths.
    """
    if layer_type != "ATTENTION_OUTPUT":
        return [raw.get_input(i) for i in range(raw.num_inputs)]
    attention = raw.attention
    inputs = [attention.get_input(i) for i in range(3)]
    return [*inputs, attention.mask, getattr(attention, "key_value_lengths", None)]
