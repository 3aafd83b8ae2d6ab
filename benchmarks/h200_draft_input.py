"""Checks and times the draft layer's input on one GPU, at Dots3's real sizes.

    python3 benchmarks/h200_draft_input.py [--out results.json]

The fused operation (lookup, zero at position 0, both RMS norms) against the unfused order: lookup,
zero, norm, norm, join, with the norm's own kernel, and out of torch operations as the interpreter
runs native layers. Before anything is timed, both are compared with float64, and fused and unfused
with each other bit by bit. Times are medians over replays of a CUDA graph that goes through input
sets too many for the cache; the table has 152064 rows, so looked-up rows come from memory. A floor
is the bytes that must move over the measured copy rate.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.graph_time import timed
from plugins import operations
from plugins.aot.quick import Operation
from plugins.mtp import reference
from plugins.mtp.plan import Rows
from plugins.mtp.plugin import EMBED_NORMS, RMS_NORM, row_attributes

VOCAB, WIDTH, EPS = 152064, 5120, 1e-5
TOKENS = (1, 4, 16, 64, 256, 1024, 8192)
# Input sets per graph, by bytes that they move together: more than the 50 MB of the cache.
SET_BYTES = 400e6
Inputs = dict[str, Tensor]


def copy_rate() -> float:
    """Bytes read and written per second by a large kernel; a plain copy in a graph is none."""
    data = torch.randn(2**29, device="cuda")
    target = torch.empty_like(data)
    return 2 * data.nbytes / timed([lambda: torch.neg(data, out=target)]) * 1e6


def run(operation: Operation, given: Inputs, rows: Tensor) -> dict[str, Tensor]:
    dtype = str(rows.dtype).removeprefix("torch.")
    attributes = row_attributes(Rows(rows.shape[-1], EPS, dtype))
    return operations.launch(operation, given, attributes)


def fused(given: Inputs) -> Tensor:
    return run(EMBED_NORMS, given, given["hidden"])["joined"]


def kernel_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return run(RMS_NORM, {"x": x, "weight": weight}, x)["normed"]


def unfused(given: Inputs, norm: Callable[[Tensor, Tensor, float], Tensor]) -> Tensor:
    rows = torch.nn.functional.embedding(given["ids"].clamp(max=VOCAB - 1), given["table"])
    rows = torch.where((given["positions"] == 0)[..., None], 0.0, rows)
    first = norm(rows, given["embed_weight"], EPS)
    return torch.cat([first, norm(given["hidden"], given["hidden_weight"], EPS)], -1)


def inputs(tokens: int, table: Tensor) -> Inputs:
    def weight() -> Tensor:
        return (torch.rand(WIDTH, device="cuda") + 0.5).to(table.dtype)

    positions = torch.randint(1, 9000, (1, tokens), device="cuda", dtype=torch.int32)
    positions[0, tokens // 2] = 0
    return {
        "ids": torch.randint(0, VOCAB, (1, tokens), device="cuda", dtype=torch.int32),
        "positions": positions,
        "table": table,
        "hidden": torch.randn(1, tokens, WIDTH, device="cuda").to(table.dtype) * 3,
        "embed_weight": weight(),
        "hidden_weight": weight(),
    }


def error(got: Tensor, want: Tensor) -> float:
    """Relative error in the 2-norm; NaN and unwritten elements make it NaN."""
    return float((got.double() - want).norm() / want.norm())


def exact(given: Inputs) -> Tensor:
    """The definition in float64."""

    def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.double()
        return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()

    return unfused(given, norm)


def check(dtype: torch.dtype, table: Tensor) -> dict[str, object]:
    given = inputs(333, table)
    one, other = fused(given), unfused(given, kernel_norm)
    native = unfused(given, reference.rms_norm)
    wrong = unfused({**given, "positions": given["positions"] + 1}, kernel_norm)
    result = {
        "dtype": str(dtype).removeprefix("torch."),
        "error": error(one, exact(given)),
        "native_error": error(native, exact(given)),
        "differing_bits": int((one != other).sum()),
        "differing_from_native": int((one != native).sum()),
        "elements": one.numel(),
        "position_0_read": error(wrong, exact(given)),
    }
    bound = 1e-6 if dtype == torch.float32 else 5e-3
    assert result["error"] < bound, result  # type: ignore[operator]
    assert result["differing_bits"] == 0, result
    assert result["position_0_read"] > 0.02, result  # type: ignore[operator]
    return result


def measure(tokens: int, table: Tensor, rate: float) -> dict[str, float]:
    row = WIDTH * table.element_size()
    moved = tokens * (4 * row + 8) + 2 * row
    sets = [inputs(tokens, table) for _ in range(max(2, min(64, int(SET_BYTES // moved))))]
    projection = torch.randn(WIDTH, 2 * WIDTH, device="cuda").to(table.dtype)
    joined = [fused(one) for one in sets[:2]]
    return {
        "tokens": tokens,
        "bytes": moved,
        "floor": moved / rate * 1e6,
        "fused": timed([lambda s=s: fused(s) for s in sets]),
        "unfused": timed([lambda s=s: unfused(s, kernel_norm) for s in sets]),
        "native": timed([lambda s=s: unfused(s, reference.rms_norm) for s in sets]),
        "fused_again": timed([lambda s=s: fused(s) for s in sets]),
        "projection": timed([lambda x=x: x @ projection.T for x in joined]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    checks = []
    for dtype in (torch.float32, torch.bfloat16):
        table = torch.randn(VOCAB, WIDTH, device="cuda").to(dtype)
        checks.append(check(dtype, table))
        print(checks[-1])
    rate = copy_rate()
    rows = [measure(tokens, table, rate) for tokens in TOKENS]
    print(f"copy {rate / 1e12:.2f} TB/s")
    names = ("tokens", "floor", "fused", "fused_again", "unfused", "native", "projection")
    print(*(f"{name:>11}" for name in names))
    for row in rows:
        print(*(f"{row[name]:11.2f}" for name in names))
    if options.out:
        content = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "copy_rate": rate,
            "checks": checks,
            "rows": rows,
        }
        options.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
