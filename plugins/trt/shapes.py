"""Shape layers of the network facade: reshape, slice, concat, gather, scatter, shape arithmetic.

A dimension that a layer takes (`Dim`) is a python int, or an INT64 tensor of shape [1] where it
depends on the shapes of this call's inputs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from plugins.trt.elementwise import ElementwiseLayers
from plugins.trt.types import INTS, Tensor

Dim: TypeAlias = int | Tensor


class ShapeLayers(ElementwiseLayers):
    """Layers that move values without computing. All raise BuildError."""

    # -- shape arithmetic ----------------------------------------------------------------------

    def dim(self, x: Tensor, axis: int) -> Dim:
        """Size of a dimension: an int if static, else an INT64 tensor [1]."""
        axis = self._axis(x, axis, "dim")
        size = self.shape(x)[axis]
        if size >= 0:
            return size
        key = (x.name, axis)
        if key not in self._dims:
            if x.name not in self._shape_tensors:
                self._shape_tensors[x.name] = self._one(self.raw.add_shape(x), "shape")
            vector = self._shape_tensors[x.name]
            layer = self.raw.add_slice(vector, (axis,), (1,), (1,))
            self._dims[key] = self._one(layer, "dim")
        return self._dims[key]

    def _dim_binary(
        self,
        a: Dim,
        b: Dim,
        static: Callable[[int, int], int],
        dynamic: Callable[[Dim, Dim], Tensor],
    ) -> Dim:
        if isinstance(a, int) and isinstance(b, int):
            return static(a, b)
        return dynamic(a, b)

    def dim_add(self, a: Dim, b: Dim) -> Dim:
        """a + b of dimensions."""
        return self._dim_binary(a, b, operator.add, self.add)

    def dim_sub(self, a: Dim, b: Dim) -> Dim:
        """a - b of dimensions."""
        return self._dim_binary(a, b, operator.sub, self.sub)

    def dim_mul(self, a: Dim, b: Dim) -> Dim:
        """a * b of dimensions."""
        return self._dim_binary(a, b, operator.mul, self.mul)

    def dim_floor_div(self, a: Dim, b: Dim) -> Dim:
        """a // b of dimensions."""
        return self._dim_binary(a, b, operator.floordiv, self.floor_div)

    def dim_min(self, a: Dim, b: Dim) -> Dim:
        """The smaller dimension."""
        return self._dim_binary(a, b, min, self.minimum)

    def dim_max(self, a: Dim, b: Dim) -> Dim:
        """The larger dimension."""
        return self._dim_binary(a, b, max, self.maximum)

    def dims(self, values: Sequence[Dim]) -> Tensor:
        """Join dimensions to one INT64 shape tensor."""
        parts: list[Tensor] = []
        run: list[int] = []
        for value in values:
            if isinstance(value, int):
                run.append(value)
                continue
            if run:
                parts.append(self._int_vector(tuple(run)))
                run = []
            parts.append(self._dim_vector(value))
        if run:
            parts.append(self._int_vector(tuple(run)))
        return parts[0] if len(parts) == 1 else self.concat(parts, 0)

    def _dim_vector(self, value: Tensor) -> Tensor:
        if self.dtype(value) != "int64" or self.shape(value) not in ((), (1,)):
            raise self._fail(
                "a dimension must be an int or an INT64 tensor [1]",
                "dims",
                found=f"{self.dtype(value)} {list(self.shape(value))}",
            )
        return value if self.shape(value) else self.unsqueeze(value, (0,))

    def _int_vector(self, values: tuple[int, ...], dtype: torch.dtype = torch.int64) -> Tensor:
        key = (values, dtype)
        if key not in self._vectors:
            kind = "i64" if dtype == torch.int64 else "i32"
            name = f"vector.{kind}." + "_".join(map(str, values))
            self._vectors[key] = self._constant(torch.tensor(values, dtype=dtype), name, None, None)
        return self._vectors[key]

    def iota(self, n: Dim, start: int = 0) -> Tensor:
        """start, start+1, ... as int32 [n]."""
        layer = self.raw.add_fill(
            (n,) if isinstance(n, int) else (0,),
            self.trt.FillOperation.LINSPACE,
            self.trt.int32,
        )
        if not isinstance(n, int):
            layer.set_input(0, self._dim_vector(n))
        layer.set_input(1, self._scalar(start, "int32", 0))
        layer.set_input(2, self._scalar(1, "int32", 1))
        return self._one(layer, "iota")

    # -- moving values -------------------------------------------------------------------------

    def reshape(self, x: Tensor, dims: Sequence[Dim]) -> Tensor:
        """Change the shape; one entry may be -1. Zero means zero, not "keep"."""
        if sum(1 for d in dims if isinstance(d, int) and d == -1) > 1:
            raise self._fail("only one dimension may be -1", "reshape", found=str(list(dims)))
        layer = self.raw.add_shuffle(x)
        layer.zero_is_placeholder = False
        if all(isinstance(d, int) for d in dims):
            target = tuple(int(d) for d in dims)
            self._check_volume(x, target)
            if target == self.shape(x) and -1 not in target:
                layer = self.raw.add_identity(x)
            else:
                layer.reshape_dims = target
        else:
            layer.set_input(1, self.dims(dims))
        return self._one(layer, "reshape")

    def _check_volume(self, x: Tensor, target: tuple[int, ...]) -> None:
        source = self.shape(x)
        if -1 in source:
            return
        known = 1
        for size in target:
            known *= size if size != -1 else 1
        volume = 1
        for size in source:
            volume *= size
        whole = volume == known if -1 not in target else known != 0 and volume % known == 0
        if not whole:
            raise self._fail(
                "the new shape holds another number of values",
                "reshape",
                expected=f"{volume} values ({list(source)})",
                found=str(list(target)),
            )

    def transpose(self, x: Tensor, perm: Sequence[int]) -> Tensor:
        """Permute dimensions: output dimension i is input dimension perm[i]."""
        if sorted(perm) != list(range(self.rank(x))):
            raise self._fail(
                "not a permutation of the dimensions",
                "transpose",
                expected=f"each of 0..{self.rank(x) - 1} once",
                found=str(list(perm)),
            )
        layer = self.raw.add_shuffle(x)
        layer.first_transpose = tuple(perm)
        return self._one(layer, "transpose")

    def unsqueeze(self, x: Tensor, axes: Sequence[int]) -> Tensor:
        """Insert dimensions of 1; `axes` are positions in the result."""
        rank = self.rank(x) + len(axes)
        wanted = tuple(sorted(a % rank for a in axes))
        layer = self.raw.add_unsqueeze(x, self._int_vector(wanted, torch.int32))
        return self._one(layer, "unsqueeze")

    def squeeze(self, x: Tensor, axes: Sequence[int]) -> Tensor:
        """Remove dimensions of 1."""
        wanted = tuple(sorted(self._axis(x, a, "squeeze") for a in axes))
        for axis in wanted:
            if self.shape(x)[axis] not in (1, -1):
                raise self._fail(
                    "only dimensions of 1 can be removed",
                    "squeeze",
                    found=f"dimension {axis} of {list(self.shape(x))}",
                )
        return self._one(self.raw.add_squeeze(x, self._int_vector(wanted, torch.int32)), "squeeze")

    def concat(self, tensors: Sequence[Tensor], axis: int) -> Tensor:
        """Join along an existing dimension."""
        if not tensors:
            raise self._fail("nothing to join", "concat")
        axis = self._axis(tensors[0], axis, "concat")
        first = tensors[0]
        for t in tensors[1:]:
            same = self.rank(t) == self.rank(first) and all(
                i == axis or m == n or -1 in (m, n)
                for i, (m, n) in enumerate(zip(self.shape(first), self.shape(t), strict=True))
            )
            if not same or self.dtype(t) != self.dtype(first):
                raise self._fail(
                    "the tensors cannot be joined",
                    "concat",
                    expected=f"{self.dtype(first)} {list(self.shape(first))} besides axis {axis}",
                    found=f"{self.dtype(t)} {list(self.shape(t))} ({t.name})",
                )
        layer = self.raw.add_concatenation(list(tensors))
        if layer is not None:
            layer.axis = axis
        return self._one(layer, "concat")

    def slice(
        self,
        x: Tensor,
        start: Sequence[Dim],
        size: Sequence[Dim],
        stride: Sequence[int] | None = None,
    ) -> Tensor:
        """Take size[i] values from start[i] on, every stride[i]-th (default 1; 0 repeats)."""
        rank = self.rank(x)
        stride = tuple(stride) if stride is not None else (1,) * rank
        if not len(start) == len(size) == len(stride) == rank:
            raise self._fail(
                "one entry per dimension is needed",
                "slice",
                expected=str(rank),
                found=f"start {len(start)}, size {len(size)}, stride {len(stride)}",
            )
        for axis, extent in enumerate(self.shape(x)):
            first, count, step = start[axis], size[axis], stride[axis]
            if extent < 0 or not isinstance(first, int) or not isinstance(count, int):
                continue
            last = first + (count - 1) * step
            if count < 0 or (count > 0 and not (0 <= first < extent and 0 <= last < extent)):
                raise self._fail(
                    f"the slice leaves dimension {axis}",
                    "slice",
                    expected=f"0..{extent - 1}",
                    found=f"{first}..{last}",
                )
        static_start = all(isinstance(d, int) for d in start)
        static_size = all(isinstance(d, int) for d in size)
        zeros = (0,) * rank
        layer = self.raw.add_slice(
            x,
            tuple(start) if static_start else zeros,
            tuple(size) if static_size else zeros,
            stride,
        )
        if layer is not None and not static_start:
            layer.set_input(1, self.dims(start))
        if layer is not None and not static_size:
            layer.set_input(2, self.dims(size))
        return self._one(layer, "slice")

    def narrow(self, x: Tensor, axis: int, start: Dim, size: Dim) -> Tensor:
        """Take `size` values from `start` on along one axis, everything of the others."""
        axis = self._axis(x, axis, "narrow")
        starts: list[Dim] = [0] * self.rank(x)
        sizes = [self.dim(x, i) if i != axis else size for i in range(self.rank(x))]
        starts[axis] = start
        return self.slice(x, starts, sizes)

    def expand(self, x: Tensor, dims: Sequence[Dim]) -> Tensor:
        """Repeat dimensions of 1 to the given sizes; -1 keeps a dimension."""
        if len(dims) != self.rank(x):
            raise self._fail(
                "one entry per dimension is needed",
                "expand",
                expected=str(self.rank(x)),
                found=str(len(dims)),
            )
        sizes: list[Dim] = []
        strides = []
        for axis, (old, new) in enumerate(zip(self.shape(x), dims, strict=True)):
            keep = isinstance(new, int) and new == -1
            repeats = old == 1 and not keep and not (isinstance(new, int) and new == 1)
            if isinstance(new, int) and not keep and not repeats and old not in (new, -1):
                raise self._fail(
                    "only dimensions of 1 can be repeated",
                    "expand",
                    expected=f"1 or {new}",
                    found=f"dimension {axis} of {list(self.shape(x))}",
                )
            sizes.append(self.dim(x, axis) if keep else new)
            strides.append(0 if repeats else 1)
        if all(strides):
            return x
        return self.slice(x, [0] * len(sizes), sizes, strides)

    # -- gather and scatter --------------------------------------------------------------------

    def _index(self, idx: Tensor, op: str) -> None:
        if self.dtype(idx) not in INTS:
            raise self._fail("indices must be int32 or int64", op, found=self.dtype(idx))

    def gather(self, x: Tensor, idx: Tensor, axis: int, elementwise_dims: int = 0) -> Tensor:
        """x indexed along `axis`; the index dimensions replace it.

        The first `elementwise_dims` dimensions of x and idx run together (like a batch).
        """
        self._index(idx, "gather")
        axis = self._axis(x, axis, "gather")
        if not 0 <= elementwise_dims <= min(axis, self.rank(idx)):
            raise self._fail(
                "element-wise dimensions must lie before the axis",
                "gather",
                expected=f"0..{min(axis, self.rank(idx))}",
                found=str(elementwise_dims),
            )
        layer = self.raw.add_gather(x, idx, axis)
        if layer is not None:
            layer.num_elementwise_dims = elementwise_dims
        return self._one(layer, "gather")

    def _agree(self, op: str, fits: bool, *tensors: Tensor) -> None:
        """TensorRT infers a shape for indices that do not fit and fails when it builds."""
        if not fits:
            raise self._fail(
                "the shapes do not fit",
                op,
                found=", ".join(f"{self.dtype(t)} {list(self.shape(t))}" for t in tensors),
            )

    def _same_shape(self, a: Sequence[int], b: Sequence[int]) -> bool:
        return len(a) == len(b) and all(m == n or -1 in (m, n) for m, n in zip(a, b, strict=True))

    def gather_elements(self, x: Tensor, idx: Tensor, axis: int) -> Tensor:
        """out[i][j] = x[i][idx[i][j]] for axis 1; result has the shape of idx."""
        self._index(idx, "gather_elements")
        axis = self._axis(x, axis, "gather_elements")
        own, other = list(self.shape(x)), list(self.shape(idx))
        fits = len(own) == len(other)
        if fits:
            own[axis] = other[axis]
        self._agree("gather_elements", fits and self._same_shape(own, other), x, idx)
        layer = self.raw.add_gather_v2(x, idx, self.trt.GatherMode.ELEMENT)
        if layer is not None:
            layer.axis = axis
        return self._one(layer, "gather_elements")

    def gather_nd(self, x: Tensor, idx: Tensor, elementwise_dims: int = 0) -> Tensor:
        """The last dimension of idx holds coordinates into x, behind the first dimensions that
        run together.
        """
        self._index(idx, "gather_nd")
        depth = self.shape(idx)[-1] if self.rank(idx) else -1
        fits = 1 <= depth <= self.rank(x) - elementwise_dims and elementwise_dims < self.rank(idx)
        self._agree("gather_nd", fits, x, idx)
        layer = self.raw.add_gather_v2(x, idx, self.trt.GatherMode.ND)
        if layer is not None:
            layer.num_elementwise_dims = elementwise_dims
        return self._one(layer, "gather_nd")

    def scatter_elements(self, data: Tensor, idx: Tensor, updates: Tensor, axis: int) -> Tensor:
        """data with data[i][idx[i][j]] = updates[i][j] for axis 1; indices must differ."""
        op = "scatter_elements"
        self._index(idx, op)
        axis = self._axis(data, axis, op)
        fits = self._same_shape(self.shape(idx), self.shape(updates))
        fits &= self.rank(idx) == self.rank(data) and self.dtype(updates) == self.dtype(data)
        self._agree(op, fits, data, idx, updates)
        layer = self.raw.add_scatter(data, idx, updates, self.trt.ScatterMode.ELEMENT)
        if layer is not None:
            layer.axis = axis
        return self._one(layer, op)

    def scatter_nd(self, data: Tensor, idx: Tensor, updates: Tensor) -> Tensor:
        """data with the parts named by the coordinates in idx's last dimension replaced."""
        op = "scatter_nd"
        self._index(idx, op)
        depth = self.shape(idx)[-1] if self.rank(idx) else -1
        fits = 1 <= depth <= self.rank(data) and self.dtype(updates) == self.dtype(data)
        if fits:
            wanted = (*self.shape(idx)[:-1], *self.shape(data)[depth:])
            fits = self._same_shape(wanted, self.shape(updates))
        self._agree(op, fits, data, idx, updates)
        layer = self.raw.add_scatter(data, idx, updates, self.trt.ScatterMode.ND)
        return self._one(layer, op)
