"""Planning the conversion of a checkpoint with the names and shapes of a released NVFP4 one.

    python -m benchmarks.planning --directory /path/with/space

The files are sparse: headers are real, values are holes. Everything that precedes the first byte of
a conversion is timed: headers, configuration, every shape and scale name, identity, tasks.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks import synthetic
from converters.checkpoint import convert
from converters.checkpoint.write import split_tasks
from tests.fixtures import qwen38_layout as layout


def released_config() -> dict[str, Any]:
    """The released sizes."""
    return layout.text_config(
        vocab_size=248320,
        hidden_size=2560,
        num_hidden_layers=48,
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 12,
        num_attention_heads=24,
        head_dim=256,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
        },
        max_position_embeddings=262144,
        linear_num_key_heads=16,
        linear_num_value_heads=48,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        num_experts=512,
        num_experts_per_tok=10,
        moe_intermediate_size=640,
        shared_expert_intermediate_size=640,
        hc_lowrank=320,
        indexer_n_heads=4,
        indexer_head_dim=128,
        indexer_budget=2048,
        ple_embed_dim=2560,
        heads_per_ngram=8,
        ngram_vocab_size_base=20000000,
        make_ngram_vocab_size_divisible_by=128,
        split_ngram_parts=128,
        bos_token_id=248044,
        eos_token_id=248044,
        mtp_num_hidden_layers=0,
    )


def main() -> None:
    """Print the times of some runs in one process, and the memory of the process."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--directory", type=Path, help="where to work; a temporary one if absent")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as temporary:
        source, target = Path(temporary) / "source", Path(temporary) / "target"
        size = synthetic.write(source, released_config(), "nvfp4", sparse=True)
        before = _peak()
        plans, tasks = [], []
        for _ in range(arguments.rounds):
            start = time.perf_counter()
            # Nothing of that size will be written.
            with mock.patch.object(convert, "require_space"):
                plan = convert.plan_conversion(source, target)
            planned = time.perf_counter()
            split_tasks(plan.recipes)
            plans.append(planned - start)
            tasks.append(time.perf_counter() - planned)
        count = len(plan.source.tensors)
    print(
        f"{count} tensors, {size / 1e9:.0f} GB: planning {statistics.median(plans):.1f} s "
        f"(fastest {min(plans):.1f}), tasks {statistics.median(tasks):.1f} s, "
        f"{(_peak() - before) / 1e6:.0f} MB"
    )


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
