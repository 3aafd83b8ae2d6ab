"""A Qwen3.8-shaped checkpoint of any size, written in bounded memory, for measurements only."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from converters.checkpoint.header import Shape, build_header
from plugins.support.dtypes import BY_NAME
from tests.fixtures import qwen38_layout as layout

# How the routed experts lie: stacked or one by one in bfloat16, or one by one as codes and scales.
Experts = Literal["stacked", "single", "fp8", "nvfp4"]
Stored = tuple[str, Shape]

_BLOCK_BYTES = 32 * 1024 * 1024
_FILE_BYTES = 2 * 10**9


def text_config(
    gigabytes: float, *, hidden: int = 1024, expert: int = 512, experts: int = 64
) -> dict[str, Any]:
    """A configuration whose bf16 tensors take about that much; a third of it is the PLE table.

    Four layers with experts of that size are the least.
    """
    per_layer = 3 * hidden * expert * experts * 2
    periods = max(1, round(gigabytes * 1e9 * 0.62 / per_layer / 4))
    table_rows = int(gigabytes * 1e9 * 0.33 / 2 / 64)
    return layout.text_config(
        hidden_size=hidden,
        moe_intermediate_size=expert,
        num_experts=experts,
        num_hidden_layers=4 * periods,
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * periods,
        ple_embed_dim=256,
        ngram_vocab_size_base=max(table_rows // 4, 1000),
        split_ngram_parts=16,
    )


def tensors_on_disk(text: Mapping[str, Any], experts: Experts) -> dict[str, Stored]:
    """Element types and shapes of all floating-point tensors but those of the draft layer.

    Meta tensors stand in for the values.
    """
    weights = {
        name: torch.empty(shape, dtype=torch.bfloat16, device="meta")
        for name, shape in layout.text_shapes(text).items()
    }
    released = layout.released_tensors(weights, text, stacked_experts=experts == "stacked")
    tensors: dict[str, Stored] = {}
    for name, tensor in released.items():
        if ".experts." in name and experts in ("fp8", "nvfp4"):
            tensors |= _codes_and_scales(name, *tensor.shape, experts)
        elif tensor.dtype == torch.bfloat16:
            tensors[name] = "bfloat16", tuple(tensor.shape)
    return tensors


def _codes_and_scales(name: str, rows: int, columns: int, kind: Experts) -> dict[str, Stored]:
    if kind == "fp8":
        return {
            name: ("float8_e4m3fn", (rows, columns)),
            f"{name}_scale_inv": ("bfloat16", (-(-rows // 128), -(-columns // 128))),
        }
    return {
        name: ("uint8", (rows, columns // 2)),
        f"{name}_scale": ("float8_e4m3fn", (rows, columns // 16)),
        f"{name}_scale_2": ("float32", ()),
        name.removesuffix("weight") + "input_scale": ("float32", ()),
    }


def write(
    directory: Path,
    text: Mapping[str, Any],
    experts: Experts,
    *,
    sparse: bool = False,
) -> int:
    """Write the checkpoint of a text configuration; bytes of its tensors.

    Args:
        directory: new.
        text: see `text_config`.
        experts: how they are stored.
        sparse: names and shapes only; the files have holes for the values.
    """
    directory.mkdir(parents=True)
    config = layout.released_config(text, torch.bfloat16)
    (directory / "config.json").write_text(json.dumps(config))
    tensors = tensors_on_disk(text, experts)
    blocks = {} if sparse else _blocks()
    weight_map: dict[str, str] = {}
    total = 0
    for number, group in enumerate(_groups(tensors)):
        file = f"part-{number}.safetensors"
        stored = [(name, *tensors[name]) for name in group]
        header, _ = build_header((name, BY_NAME[dtype], shape) for name, dtype, shape in stored)
        with (directory / file).open("wb") as output:
            output.write(header)
            for name in group:
                left = _nbytes(tensors[name])
                total += left
                if sparse:
                    output.truncate(output.seek(left, 1))
                    continue
                block = blocks[tensors[name][0], "scale" in name]
                while left:
                    left -= output.write(block[: min(left, len(block))])
        weight_map |= dict.fromkeys(group, file)
    buffers = layout.ngram_buffers(text)
    layout.save_file(buffers, directory / "constants.safetensors")
    weight_map |= dict.fromkeys(buffers, "constants.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return total


def _blocks() -> dict[tuple[str, bool], memoryview]:
    """Values to repeat, by element type and whether they are scales."""
    torch.manual_seed(0)
    values = torch.randn(_BLOCK_BYTES // 2) * 0.02
    scales = values.abs() + 0.1
    made: dict[tuple[str, bool], torch.Tensor] = {
        ("bfloat16", False): values.bfloat16(),
        ("bfloat16", True): scales.bfloat16(),
        ("float8_e4m3fn", False): (values * 1000).to(torch.float8_e4m3fn),
        ("float8_e4m3fn", True): scales.to(torch.float8_e4m3fn),
        ("uint8", False): torch.randint(0, 256, values.shape, dtype=torch.uint8),
        ("float32", True): torch.full((1,), 0.001),
    }
    return {key: tensor.view(torch.uint8).numpy().data for key, tensor in made.items()}


def _nbytes(stored: Stored) -> int:
    dtype, shape = stored
    return BY_NAME[dtype].nbytes(math.prod(shape))


def _groups(tensors: Mapping[str, Stored]) -> Iterator[list[str]]:
    group: list[str] = []
    size = 0
    for name, stored in tensors.items():
        group.append(name)
        size += _nbytes(stored)
        if size >= _FILE_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group
