"""Kinds that move values."""

from __future__ import annotations

from typing import Any

import torch

from runtime.interpreter.kinds.call import Bound, Call
from runtime.interpreter.kinds.elementwise import identity
from runtime.interpreter.kinds.host import free_to_read


def shape(call: Call) -> Bound:
    """The operand's shape as int64."""
    sizes = torch.tensor(call.tensor(0).shape, dtype=torch.int64)
    return Bound(lambda: sizes, ())


def shuffle(call: Call) -> Bound:
    """Transpose, reshape, transpose, each optional."""
    x = call.tensor(0)
    first = list(call.attribute("first"))[: x.dim()]
    permuted = [x.shape[i] for i in first]
    reshapes = call.has(1) or call.attribute("dims") is not None
    dims = permuted
    if reshapes:
        dims = call.host(1) if call.has(1) else list(call.attribute("dims"))
        if call.attribute("zero_keeps"):
            dims = [permuted[i] if d == 0 else d for i, d in enumerate(dims)]
    second = list(call.attribute("second"))[: len(dims)]
    moves_first = first != list(range(len(first)))
    moves_second = second != list(range(len(second)))
    if not reshapes:
        # Without a reshape two transpositions are one.
        order = [first[i] for i in second]
        if order == list(range(len(order))):
            return identity(call)
        return Bound(lambda x: x.permute(order), (0,))
    if not moves_first and not moves_second:
        return Bound(lambda x: x.reshape(dims), (0,))
    if not moves_second:
        return Bound(lambda x: x.permute(first).reshape(dims), (0,))
    return Bound(lambda x: x.permute(first).reshape(dims).permute(second), (0,))


def _insert(sizes: list[int], axes: list[int]) -> list[int]:
    result: list[int] = []
    source = iter(sizes)
    for axis in range(len(sizes) + len(axes)):
        result.append(1 if axis in axes else next(source))
    return result


def unsqueeze(call: Call) -> Bound:
    """Insert dimensions of 1 at the positions named by the second operand."""
    x = call.tensor(0)
    rank = x.dim() + len(call.host(1))
    axes = [a % rank for a in call.host(1)]
    if len(axes) == 1:
        axis = axes[0]
        return Bound(lambda x: x.unsqueeze(axis), (0,))
    sizes = _insert(list(x.shape), axes)
    return Bound(lambda x: x.reshape(sizes), (0,))


def squeeze(call: Call) -> Bound:
    """Remove the dimensions of 1 named by the second operand."""
    x = call.tensor(0)
    axes = [a % x.dim() for a in call.host(1)] if call.has(1) else None
    if axes is None:
        axes = [i for i, n in enumerate(x.shape) if n == 1]
    if any(x.shape[a] != 1 for a in axes):
        raise call.unknown("squeeze", f"axes {axes} of {list(x.shape)}")
    sizes = [n for i, n in enumerate(x.shape) if i not in axes]
    return Bound(lambda x: x.reshape(sizes), (0,))


def concat(call: Call) -> Bound:
    """Join along an axis."""
    axis = int(call.attribute("axis"))
    count = len(call.values)
    if len({call.tensor(i).dtype for i in range(count)}) != 1:
        raise call.unknown("mix of types", [str(call.tensor(i).dtype) for i in range(count)])
    return Bound(lambda *tensors: torch.cat(tensors, axis), tuple(range(count)))


def slice_(call: Call) -> Bound:
    """start, size and stride per dimension; stride 0 repeats."""
    x = call.tensor(0)

    def numbers(name: str, index: int) -> list[int]:
        values = call.host(index) if call.has(index) else list(call.attribute(name))
        if len(values) != x.dim():
            raise call.unknown(f"slice {name}", values)
        return values

    start, size, stride = numbers("start", 1), numbers("size", 2), numbers("stride", 3)
    for extent, first, count, step in zip(x.shape, start, size, stride, strict=True):
        last = first + (count - 1) * step
        if count > 0 and not (0 <= first < extent and 0 <= last < extent):
            raise call.unknown("slice", f"{first}..{last} of a dimension of {extent}")
    moved = [i for i in range(x.dim()) if (start[i], size[i]) != (0, x.shape[i]) or stride[i] != 1]
    if not moved:
        return identity(call)
    if len(moved) == 1 and stride[moved[0]] == 1:
        axis, first, count = moved[0], start[moved[0]], size[moved[0]]
        return Bound(lambda x: x.narrow(axis, first, count), (0,))
    repeated = [i for i in moved if stride[i] == 0]
    if len(repeated) == len(moved) and all(x.shape[i] == 1 for i in repeated):
        return Bound(lambda x: x.expand(size), (0,))
    if any(stride[i] < 0 for i in moved):
        chosen = [torch.arange(n) * s + f for f, n, s in zip(start, size, stride, strict=True)]
        grid = torch.meshgrid(*[c.to(x.device) for c in chosen], indexing="ij")
        return Bound(lambda x: x[grid], (0,))
    index: tuple[Any, ...] = tuple(
        slice(f, f + 1) if s == 0 else slice(f, f + (n - 1) * s + 1 if n else f, s)
        for f, n, s in zip(start, size, stride, strict=True)
    )
    if not repeated:
        return Bound(lambda x: x[index], (0,))
    return Bound(lambda x: x[index].expand(size), (0,))


def fill(call: Call) -> Bound:
    """start + sum of index * step."""
    if call.attribute("op") != "LINSPACE":
        raise call.unknown("fill", call.attribute("op"))
    sizes = call.host(0) if call.has(0) else list(call.attribute("shape"))
    dtype, device = call.out_dtypes[0], call.device
    if not call.has(1) and not call.has(2):
        start, step = call.attribute("start"), call.attribute("step")
        if len(sizes) != 1:
            raise call.unknown("fill", "rank other than 1 without step tensor")
        values = (torch.arange(sizes[0], dtype=torch.float64) * step + start).to(dtype).to(device)
        return Bound(lambda: values, ())
    grids = []
    for axis, size in enumerate(sizes):
        view = [1] * len(sizes)
        view[axis] = size
        grids.append(torch.arange(size, dtype=dtype, device=device).reshape(view))

    def run(start: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        result = start.reshape(())
        for axis, grid in enumerate(grids):
            result = result + grid * step.reshape(-1)[axis]
        return result

    return Bound(run, (1, 2))


def gather(call: Call) -> Bound:
    """Take values by index: along an axis, element by element, or by coordinates."""
    mode = call.attribute("mode")
    axis, batch = int(call.attribute("axis")), int(call.attribute("elementwise_dims"))
    if mode == "ELEMENT":
        return Bound(lambda x, i: torch.gather(x, axis, i.long()), (0, 1))
    if mode == "ND":
        return _gather_nd(call, batch)
    if mode != "DEFAULT":
        raise call.unknown("gather", mode)
    x, idx = call.tensor(0), call.tensor(1)
    if batch == 0:
        sizes = [*x.shape[:axis], *idx.shape, *x.shape[axis + 1 :]]
        if idx.dim() == 1:
            return Bound(lambda x, i: x.index_select(axis, i), (0, 1))
        return Bound(lambda x, i: x.index_select(axis, i.reshape(-1)).reshape(sizes), (0, 1))
    return _gather_batched(x, idx, axis, batch)


def _gather_batched(x: torch.Tensor, idx: torch.Tensor, axis: int, batch: int) -> Bound:
    """Leading dimensions of x and idx run together; whole rows behind `axis` are copied."""
    sizes = [*x.shape[:axis], *idx.shape[batch:], *x.shape[axis + 1 :]]
    count = int(torch.Size(idx.shape[batch:]).numel())
    extent, row = x.shape[axis], x.shape[axis + 1 :].numel()
    leads = x.shape[:axis].numel()
    middle = [1] * (axis - batch)
    base = torch.arange(leads, device=x.device).reshape(*x.shape[:axis], 1) * extent
    flat = [*idx.shape[:batch], *middle, count]
    wide = [*x.shape[:axis], count, *[1] * (x.dim() - axis - 1)]
    full = [*x.shape[:axis], count, *x.shape[axis + 1 :]]

    def run(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        i = i.reshape(flat)
        if x.is_contiguous():
            _require_range(i, extent)
            rows = (base + i).reshape(-1)
            return x.view(leads * extent, row).index_select(0, rows).reshape(sizes)
        spread = i.long().expand(*x.shape[:axis], count).reshape(wide).expand(full)
        return torch.gather(x, axis, spread).reshape(sizes)

    return Bound(run, (0, 1))


def _require_range(i: torch.Tensor, extent: int) -> None:
    """A flattened index must not wander into the neighbouring row; looked at where that is free."""
    if free_to_read(i) and i.numel():
        low, high = torch.aminmax(i)
        if int(low) < 0 or int(high) >= extent:
            raise IndexError(f"index {int(low)}..{int(high)} outside 0..{extent - 1}")


def _gather_nd(call: Call, batch: int) -> Bound:
    x, idx = call.tensor(0), call.tensor(1)
    depth = idx.shape[-1]
    lead = []
    for axis in range(batch):
        view = [1] * (idx.dim() - 1)
        view[axis] = x.shape[axis]
        lead.append(torch.arange(x.shape[axis], device=x.device).reshape(view))

    def run(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        i = i.long()
        return x[tuple([*lead, *[i[..., d] for d in range(depth)]])]

    return Bound(run, (0, 1))


def scatter(call: Call) -> Bound:
    """A copy of the data with values replaced, element by element or by coordinates."""
    mode = call.attribute("mode")
    if mode == "ELEMENT":
        axis = int(call.attribute("axis"))
        return Bound(lambda x, i, u: x.scatter(axis, i.long(), u), (0, 1, 2))
    if mode != "ND":
        raise call.unknown("scatter", mode)
    depth = call.tensor(1).shape[-1]

    def run(x: torch.Tensor, i: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        i = i.long()
        return x.index_put(tuple(i[..., d] for d in range(depth)), u)

    return Bound(run, (0, 1, 2))
