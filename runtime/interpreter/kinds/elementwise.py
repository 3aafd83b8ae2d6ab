"""Element-wise kinds."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from runtime.interpreter.kinds.call import Bound, Call, Function


def cast(call: Call) -> Bound:
    """Convert the element type; floating point to integer truncates."""
    dtype = call.out_dtypes[0]
    if call.tensor(0).dtype == dtype:
        return identity(call)
    return Bound(lambda x: x.to(dtype), (0,))


def identity(call: Call) -> Bound:
    """Pass a tensor through."""
    call.tensor(0)
    return Bound(lambda x: x, (0,))


def _truncating_div(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.div(a, b, rounding_mode="trunc")


def _binary(op: str, floating: bool) -> Function | None:
    table: dict[str, Function] = {
        "SUM": torch.add,
        "SUB": torch.sub,
        "PROD": torch.mul,
        "MAX": torch.maximum,
        "MIN": torch.minimum,
        "DIV": torch.div if floating else _truncating_div,
        "FLOOR_DIV": torch.floor_divide,
        "POW": torch.pow,
        "AND": torch.logical_and,
        "OR": torch.logical_or,
        "XOR": torch.logical_xor,
        "EQUAL": torch.eq,
        "GREATER": torch.gt,
        "LESS": torch.lt,
    }
    return table.get(op)


def elementwise(call: Call) -> Bound:
    """Two operands of one rank and type."""
    a, b = call.tensor(0), call.tensor(1)
    op = call.attribute("op")
    function = _binary(op, a.is_floating_point())
    if function is None:
        raise call.unknown("element-wise operation", op)
    if a.dim() != b.dim() or a.dtype != b.dtype:
        raise call.unknown("mix of operands", f"{a.dtype} {a.shape} and {b.dtype} {b.shape}")
    return Bound(function, (0, 1))


def _sign(x: torch.Tensor) -> torch.Tensor:
    return torch.sign(x)


_UNARY: dict[str, Function] = {
    "EXP": torch.exp,
    "LOG": torch.log,
    "SQRT": torch.sqrt,
    "RECIP": torch.reciprocal,
    "ABS": torch.abs,
    "NEG": torch.neg,
    "SIN": torch.sin,
    "COS": torch.cos,
    "TAN": torch.tan,
    "SINH": torch.sinh,
    "COSH": torch.cosh,
    "ASIN": torch.asin,
    "ACOS": torch.acos,
    "ATAN": torch.atan,
    "ASINH": torch.asinh,
    "ACOSH": torch.acosh,
    "ATANH": torch.atanh,
    "CEIL": torch.ceil,
    "FLOOR": torch.floor,
    "ROUND": torch.round,
    "ERF": torch.erf,
    "NOT": torch.logical_not,
    "SIGN": torch.sign,
    "ISINF": torch.isinf,
    "ISNAN": torch.isnan,
}


def unary(call: Call) -> Bound:
    """One operand."""
    call.tensor(0)
    op = call.attribute("op")
    if op not in _UNARY:
        raise call.unknown("unary operation", op)
    return Bound(_UNARY[op], (0,))


def activation(call: Call) -> Bound:
    """Activation functions; alpha and beta as TensorRT defines them."""
    call.tensor(0)
    op = call.attribute("op")
    alpha, beta = float(call.attribute("alpha")), float(call.attribute("beta"))
    table: dict[str, Function] = {
        "RELU": torch.relu,
        "SIGMOID": torch.sigmoid,
        "TANH": torch.tanh,
        "LEAKY_RELU": lambda x: F.leaky_relu(x, alpha),
        "ELU": lambda x: F.elu(x, alpha),
        "SELU": lambda x: beta * torch.where(x > 0, x, alpha * torch.expm1(x)),
        "SOFTSIGN": F.softsign,
        # threshold: torch would otherwise switch to the identity at beta * x = 20.
        "SOFTPLUS": lambda x: alpha * F.softplus(x, beta, threshold=80.0),
        "CLIP": lambda x: torch.clamp(x, alpha, beta),
        "HARD_SIGMOID": lambda x: torch.clamp(alpha * x + beta, 0.0, 1.0),
        "SCALED_TANH": lambda x: alpha * torch.tanh(beta * x),
        "THRESHOLDED_RELU": lambda x: torch.where(x > alpha, x, torch.zeros_like(x)),
        "GELU_ERF": F.gelu,
        "GELU_TANH": lambda x: F.gelu(x, approximate="tanh"),
    }
    if op not in table:
        raise call.unknown("activation", op)
    if op == "SOFTPLUS" and math.isclose(alpha, 1.0) and math.isclose(beta, 1.0):
        return Bound(lambda x: F.softplus(x, 1.0, 80.0), (0,))
    return Bound(table[op], (0,))


def select(call: Call) -> Bound:
    """The second operand where the first is true, else the third."""
    if call.tensor(0).dtype != torch.bool:
        raise call.unknown("condition type", call.tensor(0).dtype)
    call.tensor(1)
    call.tensor(2)
    return Bound(torch.where, (0, 1, 2))
