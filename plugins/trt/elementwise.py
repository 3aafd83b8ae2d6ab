"""Element-wise layers of the network facade."""

from __future__ import annotations

from plugins.trt.core import NetworkCore
from plugins.trt.types import FLOATS, INTS, Tensor, to_trt

Operand = Tensor | float | int


class ElementwiseLayers(NetworkCore):
    """Casts, arithmetic, comparisons, activations.

    Two operands must have the same rank and element type (dimensions of 1 broadcast); a python
    number takes the other operand's rank and type. All raise BuildError.
    """

    def cast(self, x: Tensor, dtype: str) -> Tensor:
        """Convert the element type; a tensor that has it already is returned as it is."""
        if self.dtype(x) == dtype:
            return x
        return self._one(self.raw.add_cast(x, to_trt(self.trt, dtype)), "cast")

    def _binary(self, a: Operand, b: Operand, member: str) -> Tensor:
        op = member.lower()
        if isinstance(a, int | float) and isinstance(b, int | float):
            raise self._fail("one operand must be a tensor", op, found=f"{a} and {b}")
        if isinstance(a, int | float):
            a = self._scalar(a, self.dtype(b), self.rank(b))
        elif isinstance(b, int | float):
            b = self._scalar(b, self.dtype(a), self.rank(a))
        self._same_kind(a, b, op)
        kind = getattr(self.trt.ElementWiseOperation, member)
        return self._one(self.raw.add_elementwise(a, b, kind), op)

    def _same_kind(self, a: Tensor, b: Tensor, op: str) -> None:
        if self.dtype(a) != self.dtype(b):
            raise self._fail(
                "the operands have different element types",
                op,
                expected=f"{self.dtype(a)} ({a.name})",
                found=f"{self.dtype(b)} ({b.name})",
            )
        first, second = self.shape(a), self.shape(b)
        fits = len(first) == len(second) and all(
            m == n or 1 in (m, n) or -1 in (m, n) for m, n in zip(first, second, strict=True)
        )
        if not fits:
            raise self._fail(
                "the operands' shapes do not fit (equal rank, dimensions equal or 1)",
                op,
                expected=f"{list(first)} ({a.name})",
                found=f"{list(second)} ({b.name})",
            )

    def add(self, a: Operand, b: Operand) -> Tensor:
        """a + b."""
        return self._binary(a, b, "SUM")

    def sub(self, a: Operand, b: Operand) -> Tensor:
        """a - b."""
        return self._binary(a, b, "SUB")

    def mul(self, a: Operand, b: Operand) -> Tensor:
        """a * b."""
        return self._binary(a, b, "PROD")

    def div(self, a: Operand, b: Operand) -> Tensor:
        """a / b; integers truncate, so integer division must say `floor_div`."""
        tensor = b if isinstance(a, int | float) else a
        if not isinstance(tensor, int | float) and self.dtype(tensor) in INTS:
            raise self._fail("integers divide by floor_div", "div", found=self.dtype(tensor))
        return self._binary(a, b, "DIV")

    def floor_div(self, a: Operand, b: Operand) -> Tensor:
        """floor(a / b)."""
        return self._binary(a, b, "FLOOR_DIV")

    def maximum(self, a: Operand, b: Operand) -> Tensor:
        """The larger value."""
        return self._binary(a, b, "MAX")

    def minimum(self, a: Operand, b: Operand) -> Tensor:
        """The smaller value."""
        return self._binary(a, b, "MIN")

    def pow(self, a: Operand, b: Operand) -> Tensor:
        """a to the power of b."""
        return self._binary(a, b, "POW")

    def greater(self, a: Operand, b: Operand) -> Tensor:
        """a > b, bool."""
        return self._binary(a, b, "GREATER")

    def less(self, a: Operand, b: Operand) -> Tensor:
        """a < b, bool."""
        return self._binary(a, b, "LESS")

    def equal(self, a: Operand, b: Operand) -> Tensor:
        """a == b, bool."""
        return self._binary(a, b, "EQUAL")

    def greater_equal(self, a: Operand, b: Operand) -> Tensor:
        """a >= b, bool (not a < b, hence true for NaN)."""
        return self.logical_not(self.less(a, b))

    def less_equal(self, a: Operand, b: Operand) -> Tensor:
        """a <= b, bool (not a > b, hence true for NaN)."""
        return self.logical_not(self.greater(a, b))

    def logical_and(self, a: Tensor, b: Tensor) -> Tensor:
        """a and b, bool."""
        return self._binary(a, b, "AND")

    def logical_or(self, a: Tensor, b: Tensor) -> Tensor:
        """a or b, bool."""
        return self._binary(a, b, "OR")

    def _unary(self, x: Tensor, member: str) -> Tensor:
        kind = getattr(self.trt.UnaryOperation, member)
        return self._one(self.raw.add_unary(x, kind), member.lower())

    def logical_not(self, x: Tensor) -> Tensor:
        """not x, bool."""
        return self._unary(x, "NOT")

    def exp(self, x: Tensor) -> Tensor:
        """e to the power of x."""
        return self._unary(x, "EXP")

    def log(self, x: Tensor) -> Tensor:
        """Natural logarithm."""
        return self._unary(x, "LOG")

    def sqrt(self, x: Tensor) -> Tensor:
        """Square root."""
        return self._unary(x, "SQRT")

    def recip(self, x: Tensor) -> Tensor:
        """1 / x."""
        return self._unary(x, "RECIP")

    def neg(self, x: Tensor) -> Tensor:
        """-x."""
        return self._unary(x, "NEG")

    def abs(self, x: Tensor) -> Tensor:
        """|x|."""
        return self._unary(x, "ABS")

    def sign(self, x: Tensor) -> Tensor:
        """-1, 0 or 1."""
        return self._unary(x, "SIGN")

    def sin(self, x: Tensor) -> Tensor:
        """Sine of radians."""
        return self._unary(x, "SIN")

    def cos(self, x: Tensor) -> Tensor:
        """Cosine of radians."""
        return self._unary(x, "COS")

    def floor(self, x: Tensor) -> Tensor:
        """Largest integer not above x; x floating point."""
        return self._unary(x, "FLOOR")

    def _activation(self, x: Tensor, member: str, alpha: float = 0.0, beta: float = 0.0) -> Tensor:
        if self.dtype(x) not in FLOATS:
            raise self._fail("activations need floating point", member.lower(), found=self.dtype(x))
        layer = self.raw.add_activation(x, getattr(self.trt.ActivationType, member))
        if layer is not None and (alpha or beta):
            layer.alpha, layer.beta = alpha, beta
        return self._one(layer, member.lower())

    def sigmoid(self, x: Tensor) -> Tensor:
        """1 / (1 + exp(-x))."""
        return self._activation(x, "SIGMOID")

    def relu(self, x: Tensor) -> Tensor:
        """max(x, 0)."""
        return self._activation(x, "RELU")

    def tanh(self, x: Tensor) -> Tensor:
        """Hyperbolic tangent."""
        return self._activation(x, "TANH")

    def softplus(self, x: Tensor) -> Tensor:
        """log(1 + exp(x))."""
        return self._activation(x, "SOFTPLUS", 1.0, 1.0)

    def gelu_tanh(self, x: Tensor) -> Tensor:
        """GELU in its tanh approximation."""
        return self._activation(x, "GELU_TANH")

    def gelu_erf(self, x: Tensor) -> Tensor:
        """GELU by the error function."""
        return self._activation(x, "GELU_ERF")

    def silu(self, x: Tensor) -> Tensor:
        """x * sigmoid(x)."""
        return self.mul(x, self.sigmoid(x))

    def select(self, condition: Tensor, a: Operand, b: Operand) -> Tensor:
        """a where `condition` (bool) is true, else b; a or b may be a number."""
        if isinstance(a, int | float) and isinstance(b, int | float):
            raise self._fail("one choice must be a tensor", "select", found=f"{a} and {b}")
        if isinstance(a, int | float):
            a = self._scalar(a, self.dtype(b), self.rank(b))
        elif isinstance(b, int | float):
            b = self._scalar(b, self.dtype(a), self.rank(a))
        if self.dtype(condition) != "bool":
            raise self._fail("the condition must be bool", "select", found=self.dtype(condition))
        self._same_kind(a, b, "select")
        if self.rank(condition) != self.rank(a):
            raise self._fail(
                "condition and choices have different ranks",
                "select",
                expected=str(list(self.shape(a))),
                found=str(list(self.shape(condition))),
            )
        return self._one(self.raw.add_select(condition, a, b), "select")
