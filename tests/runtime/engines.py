"""A small engine directory with the real layout and fake engine files, for tests without builds."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from converters.attention import allowlist
from plugins.ngram import NgramConstants, layer_constants
from runtime.cache_plan import CachePlan
from runtime.contract import (
    BuildConfig,
    EngineConfig,
    EngineEntry,
    NgramEmbedding,
    Phase,
    Range,
    TensorSpec,
    WeightsEntry,
    engine_file,
    program_file,
    weights_file,
    write_config,
)
from runtime.identity import weights_identity

VOCAB = 50
WIDTH = 6
TABLE = "transformer.layers.1.ple.ngram_embedding.weight"
CONSTANTS: NgramConstants = layer_constants(
    vocab_size=VOCAB,
    ngram_size=3,
    heads_per_ngram=2,
    ngram_vocab_size_base=30,
    divisor=8,
    seed=1234,
    layer_number=0,
)


def host_input(name: str = "ple_embeddings.1") -> NgramEmbedding:
    return NgramEmbedding(
        name=name,
        table=TABLE,
        multipliers=CONSTANTS.multipliers,
        sizes=CONSTANTS.sizes,
        offsets=CONSTANTS.offsets,
        eos_token_id=2,
    )


def _entry(phase: Phase, slots: int, chunk: int, max_seq_len: int, tokens: int) -> EngineEntry:
    rows = -(-max_seq_len // 64) * 64 + chunk
    context = phase == "context"
    columns = -1 if context else tokens
    longest = chunk if context else tokens
    logits = -1 if context else tokens

    def spec(name: str, dtype: str, shape: tuple[int, ...], kind: str) -> TensorSpec:
        return TensorSpec.model_validate(
            {"name": name, "dtype": dtype, "shape": shape, "kind": kind}
        )

    inputs = [
        spec("input_ids", "int32", (-1, columns), "token"),
        spec("past_lengths", "int32", (-1,), "token"),
        spec("new_lengths", "int32", (-1,), "token"),
        spec("logits_positions", "int32", (-1, logits), "token"),
        spec("ple_embeddings.1", "float32", (-1, columns, 4 * WIDTH), "host"),
        spec("key_cache.0", "float32", (-1, 2, rows, 4), "cache"),
        spec("index_key_cache.0", "float32", (-1, 1, rows // 4, 8), "cache"),
        spec("recurrent_state.1", "float32", (-1, 3, 2), "state"),
        spec("transformer.vocab_embedding.weight", "float32", (VOCAB, 4), "weight"),
    ]
    if context:
        inputs.insert(4, spec("attention_span", "int32", (-1,), "token"))
    lowest, highest = (1, 64) if context else (1, tokens), (slots, longest)
    one, all_slots = (1,), (slots,)
    profile = {
        "input_ids": Range(min=lowest, opt=highest, max=highest),
        "past_lengths": Range(min=one, opt=all_slots, max=all_slots),
        "new_lengths": Range(min=one, opt=all_slots, max=all_slots),
        "logits_positions": Range(
            min=(1, 1 if context else tokens),
            opt=(slots, 1 if context else tokens),
            max=(slots, longest),
        ),
        "attention_span": Range(min=(64,), opt=(rows,), max=(rows,)),
    }
    for tensor in inputs:
        if tensor.kind in ("host", "cache", "state"):
            rest = tuple(longest if size == -1 else size for size in tensor.shape[1:])
            profile[tensor.name] = Range(min=(1, *rest), opt=(slots, *rest), max=(slots, *rest))
    outputs = [
        spec("logits", "float32", (-1, logits, VOCAB), "logits"),
        spec("key_cache.0.updated", "float32", (-1, 2, rows, 4), "cache"),
        spec("index_key_cache.0.updated", "float32", (-1, 1, rows // 4, 8), "cache"),
        spec("recurrent_state.1.next", "float32", (-1, 3, 2), "state"),
    ]
    return EngineEntry(
        file=engine_file(phase),
        file_bytes=8,
        program=program_file(phase),
        program_bytes=8,
        fingerprint=f"fake-{phase}",
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        profile=profile,
    )


def write_engine(
    path: Path, slots: int = 4, chunk: int = 64, max_seq_len: int = 200, draft: int = 0
) -> EngineConfig:
    """Write the directory at `path` and return its configuration."""
    path.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    weights = path / weights_file()
    save_file(
        {
            TABLE: torch.randn(CONSTANTS.rows, WIDTH, generator=generator),
            "transformer.vocab_embedding.weight": torch.randn(VOCAB, 4, generator=generator),
        },
        weights,
    )
    entries: dict[Phase, EngineEntry] = {
        "context": _entry("context", slots, chunk, max_seq_len, 1 + draft),
        "generation": _entry("generation", slots, chunk, max_seq_len, 1 + draft),
    }
    for entry in entries.values():
        (path / entry.file).write_bytes(b"vtrt1234")
        (path / entry.program).write_bytes(b"prog1234")
    config = EngineConfig(
        producer="test",
        flavor="tensorrt_rtx",
        tensorrt_version="1.7.1.116",
        targets=("8.9", "12.0"),
        attention=allowlist("language", ("decoder",), ran_on_cuda=True),
        engines=entries,
        weights=WeightsEntry(
            mode="inputs", file=weights_file(), identity=weights_identity(weights)
        ),
        cache_plan=CachePlan.from_tensors(entries["context"].inputs, slots, max_seq_len),
        host_inputs=(host_input(),),
        pretrained_config={"vocab_size": VOCAB, "eos_token_id": [2]},
        build_config=BuildConfig(
            max_batch_size=slots,
            max_seq_len=max_seq_len,
            max_input_len=max_seq_len - 20,
            max_num_tokens=slots * chunk,
            max_draft_len=draft,
        ),
    )
    write_config(config, path)
    return config
