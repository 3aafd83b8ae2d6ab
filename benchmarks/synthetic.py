"""A Qwen3.8-shaped checkpoint of any size, written in bounded memory, for measurements only."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from converters.checkpoint.header import Shape, build_header
from plugins.support.dtypes import BY_NAME
from tests.fixtures import qwen38_layout as layout

_BLOCK_ELEMENTS = 16 * 1024 * 1024
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


def shapes_on_disk(text: Mapping[str, Any], *, stacked_experts: bool) -> dict[str, Shape]:
    """Names and shapes of all bf16 tensors; meta tensors stand in for the values."""
    weights = {
        name: torch.empty(shape, dtype=torch.bfloat16, device="meta")
        for name, shape in layout.text_shapes(text).items()
    }
    tensors = layout.released_tensors(weights, text, stacked_experts=stacked_experts)
    return {name: tuple(t.shape) for name, t in tensors.items() if t.dtype == torch.bfloat16}


def write(directory: Path, gigabytes: float, *, stacked_experts: bool, **sizes: int) -> int:
    """Write the checkpoint, with other `sizes` of `text_config`; bytes of its tensors."""
    text = text_config(gigabytes, **sizes)
    directory.mkdir(parents=True)
    config = layout.released_config(text, torch.bfloat16)
    (directory / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    block = (torch.randn(_BLOCK_ELEMENTS) * 0.02).bfloat16().view(torch.uint8).numpy().data
    shapes = shapes_on_disk(text, stacked_experts=stacked_experts)
    weight_map: dict[str, str] = {}
    total = 0
    for number, group in enumerate(_groups(shapes)):
        file = f"part-{number}.safetensors"
        header, _ = build_header((name, BY_NAME["bfloat16"], shapes[name]) for name in group)
        with (directory / file).open("wb") as output:
            output.write(header)
            for name in group:
                left = 2 * math.prod(shapes[name])
                total += left
                while left:
                    left -= output.write(block[: min(left, len(block))])
        weight_map |= dict.fromkeys(group, file)
    buffers = layout.ngram_buffers(text)
    layout.save_file(buffers, directory / "constants.safetensors")
    weight_map |= dict.fromkeys(buffers, "constants.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return total


def _groups(shapes: Mapping[str, Shape]) -> Iterator[list[str]]:
    group: list[str] = []
    size = 0
    for name, shape in shapes.items():
        group.append(name)
        size += 2 * math.prod(shape)
        if size >= _FILE_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group
