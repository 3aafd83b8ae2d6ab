"""Kinds that combine values."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
import torch.nn.functional as F

from runtime.interpreter.kinds.call import Bound, Call, Function
from runtime.interpreter.kinds.host import free_to_read

# Networks mark entries that must not be chosen by scores below this.
MASKED_SCORE = -1e29


def reduce(call: Call) -> Bound:
    """Sum, mean, maximum, minimum or product over axes."""
    op, axes, keep = call.attribute("op"), list(call.attribute("axes")), call.attribute("keep")
    dtype = call.out_dtypes[0]
    call.tensor(0)

    def product(x: torch.Tensor) -> torch.Tensor:
        for axis in sorted(axes, reverse=True):
            x = torch.prod(x, axis, keepdim=keep, dtype=dtype)
        return x

    table: dict[str, Function] = {
        "SUM": lambda x: torch.sum(x, axes, keepdim=keep, dtype=dtype),
        "AVG": lambda x: torch.mean(x, axes, keepdim=keep),
        "MAX": lambda x: torch.amax(x, axes, keepdim=keep),
        "MIN": lambda x: torch.amin(x, axes, keepdim=keep),
        "PROD": product,
    }
    if op not in table:
        raise call.unknown("reduction", op)
    return Bound(table[op], (0,))


def matmul(call: Call) -> Bound:
    """Batched matrix product; an operand may be transposed or a vector."""
    a, b = call.tensor(0), call.tensor(1)
    op_a, op_b = call.attribute("op0"), call.attribute("op1")
    known = {"NONE", "TRANSPOSE", "VECTOR"}
    if op_a not in known or op_b not in known:
        raise call.unknown("matrix operation", (op_a, op_b))
    if "VECTOR" in (op_a, op_b):
        return _with_vectors(op_a, op_b)
    shared = all(n == 1 for n in b.shape[:-2])
    if op_a == "NONE" and shared and a.dim() > 2:
        # One matrix for all leading dimensions: a single product instead of a batched one.
        sizes = [*a.shape[:-1], b.shape[-2 if op_b == "TRANSPOSE" else -1]]
        inner, outer = b.shape[-2:]
        if op_b == "TRANSPOSE":
            return Bound(lambda a, b: F.linear(a, b.reshape(inner, outer)), (0, 1))

        def flat(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return torch.mm(a.reshape(-1, inner), b.reshape(inner, outer)).reshape(sizes)

        return Bound(flat, (0, 1))
    if op_a == "NONE" and op_b == "NONE":
        return Bound(torch.matmul, (0, 1))
    if op_a == "NONE":
        return Bound(lambda a, b: torch.matmul(a, b.mT), (0, 1))
    if op_b == "NONE":
        return Bound(lambda a, b: torch.matmul(a.mT, b), (0, 1))
    return Bound(lambda a, b: torch.matmul(a.mT, b.mT), (0, 1))


def _with_vectors(op_a: str, op_b: str) -> Bound:
    def run(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a = a.unsqueeze(-2) if op_a == "VECTOR" else a.mT if op_a == "TRANSPOSE" else a
        b = b.unsqueeze(-1) if op_b == "VECTOR" else b.mT if op_b == "TRANSPOSE" else b
        result = torch.matmul(a, b)
        if op_b == "VECTOR":
            result = result.squeeze(-1)
            return result.squeeze(-1) if op_a == "VECTOR" else result
        return result.squeeze(-2)

    return Bound(run, (0, 1))


def softmax(call: Call) -> Bound:
    """exp(x) / sum(exp(x)) along an axis."""
    axis = int(call.attribute("axis"))
    return Bound(lambda x: torch.softmax(x, axis), (0,))


def topk(call: Call) -> Bound:
    """The k largest or smallest values, sorted, and their int32 indices."""
    op, axis = call.attribute("op"), int(call.attribute("axis"))
    if op not in ("MAX", "MIN"):
        raise call.unknown("top-k", op)
    k = call.host(1)[0] if call.has(1) else int(call.attribute("k"))
    largest, dtype = op == "MAX", call.out_dtypes[1]

    def run(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, indices = torch.topk(x, k, axis, largest=largest)
        if largest and axis == x.dim() - 1 and k < x.shape[axis]:
            indices = _tied_as_unmasked(x, values, indices)
        return values, indices.to(dtype)

    return Bound(run, (0,))


def _tied_as_unmasked(x: torch.Tensor, values: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Give equal values at the edge of the choice the order of a row without its masked end.

    Which of several equal values belong to the k largest is open in TensorRT and in torch, where
    it changes with the length of the row. A reference that never computes the masked entries
    chooses among the others alone; choosing the same here lets results be compared exactly. On a
    GPU nothing is compared that closely, and nothing may wait for the device.
    """
    if not free_to_read(x) or x.numel() == 0 or float(x.amin()) > MASKED_SCORE:
        return indices
    last = values[..., -1:]
    tied = (x == last).sum(-1) > (values == last).sum(-1)
    tied &= last.squeeze(-1) > MASKED_SCORE
    if not bool(tied.any()):
        return indices
    indices = indices.clone()
    k = values.shape[-1]
    for place in tied.nonzero().tolist():
        row = x[tuple(place)]
        kept = row > MASKED_SCORE
        count = int(kept.sum())
        if bool(kept[:count].all()):
            indices[tuple(place)] = torch.topk(row[:count], k).indices
    return indices


def cumulative(call: Call) -> Bound:
    """Running sum along the axis named by the second operand."""
    axis = call.host(1)[0] % call.tensor(0).dim()
    exclusive, reverse = call.attribute("exclusive"), call.attribute("reverse")
    dtype = call.out_dtypes[0]

    def run(x: torch.Tensor) -> torch.Tensor:
        if reverse:
            x = x.flip(axis)
        if exclusive:
            first = torch.zeros_like(x.narrow(axis, 0, 1))
            x = torch.cat((first, x.narrow(axis, 0, x.shape[axis] - 1)), axis)
        x = torch.cumsum(x, axis, dtype=dtype)
        return x.flip(axis) if reverse else x

    return Bound(run, (0,))


def convolution(call: Call) -> Bound:
    """Convolution over two or three spatial dimensions, without bias or with one as third
    operand.
    """
    rank = call.tensor(0).dim()
    if rank not in (4, 5):
        raise call.unknown("convolution", f"rank {rank}")
    function: Function = F.conv2d if rank == 4 else F.conv3d
    stride, dilation = list(call.attribute("stride")), list(call.attribute("dilation"))
    before, after = list(call.attribute("before")), list(call.attribute("after"))
    groups = int(call.attribute("groups"))
    arguments = (0, 1, 2) if call.has(2) else (0, 1)
    # float32 is meant as such; cuDNN would round it to TF32 unless told otherwise.
    exact: Callable[[], AbstractContextManager[None]] = nullcontext
    if call.device.type == "cuda":
        exact = partial(torch.backends.cudnn.flags, enabled=True, allow_tf32=False)

    def run(
        x: torch.Tensor, kernel: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        padding = before
        if before != after:
            pads = [p for pair in zip(reversed(before), reversed(after), strict=True) for p in pair]
            x, padding = F.pad(x, pads), [0] * len(before)
        with exact():
            result = function(x, kernel, bias, stride, padding, dilation, groups)
        assert isinstance(result, torch.Tensor)
        return result

    return Bound(run, arguments)


def normalization(call: Call) -> Bound:
    """(x - mean) / sqrt(variance + epsilon) * scale + bias over axes, in float32."""
    axes, epsilon = list(call.attribute("axes")), float(call.attribute("epsilon"))
    if int(call.attribute("groups")) != 1:
        raise call.unknown("normalisation", "groups")
    dtype = call.out_dtypes[0]

    def run(x: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        variance, mean = torch.var_mean(wide, axes, correction=0, keepdim=True)
        result = (wide - mean) * torch.rsqrt(variance + epsilon)
        return (result * scale.float() + bias.float()).to(dtype)

    return Bound(run, (0, 1, 2))
