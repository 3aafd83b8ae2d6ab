"""The torch definition of QSA against the transformers module and against brute force."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen4ExpTextConfig
from transformers.models.qwen4_exp.modeling_qwen4_exp import (
    Qwen4ExpTextAttention,
    Qwen4ExpTextRotaryEmbedding,
)

from plugins.qsa import reference

RATIO, BUDGET, HEADS, KV_HEADS, WIDTH, INDEX_HEADS, INDEX_WIDTH = 4, 16, 6, 2, 32, 2, 16
THETA, EPS, ROTARY = 10000.0, 1e-6, 8
SELECTION = reference.Selection(ratio=RATIO, blocks=BUDGET // RATIO)


def _module() -> tuple[Qwen4ExpTextAttention, Qwen4ExpTextRotaryEmbedding]:
    config = Qwen4ExpTextConfig(
        vocab_size=64,
        hidden_size=64,
        num_hidden_layers=1,
        layer_types=["full_attention"],
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=WIDTH,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": THETA,
            "partial_rotary_factor": ROTARY / WIDTH,
            "mrope_interleaved": True,
            "mrope_section": [2, 1, 1],
        },
        indexer_n_heads=INDEX_HEADS,
        indexer_kv_heads=1,
        indexer_head_dim=INDEX_WIDTH,
        indexer_budget=BUDGET,
        indexer_compress_ratio=RATIO,
        ple_layer_ids=[],
        eos_token_id=2,
        attn_implementation="eager",
    )
    torch.manual_seed(11)
    module = Qwen4ExpTextAttention(config, 0).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.dim() == 1 else 0.2))
    return module, Qwen4ExpTextRotaryEmbedding(config)


def _transformers(hidden: torch.Tensor) -> torch.Tensor:
    module, rope = _module()
    tokens = hidden.shape[1]
    positions = torch.arange(tokens)[None].expand(3, hidden.shape[0], -1)
    causal = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    mask = torch.zeros(tokens, tokens).masked_fill(~causal, torch.finfo(torch.float32).min)
    with torch.no_grad():
        mask = mask.expand(hidden.shape[0], 1, -1, -1)
        return module(hidden, rope(hidden, positions), mask, None)[0]


def _reference(
    hidden: torch.Tensor, selection: reference.Selection
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs, and which queries [B, S] have no tie at the edge of their budget."""
    module, _ = _module()
    positions = torch.arange(hidden.shape[1])[None].expand(hidden.shape[0], -1)
    with torch.no_grad():
        ready = reference.prepare(
            module.q_proj(hidden),
            module.k_proj(hidden),
            module.v_proj(hidden),
            module.indexer.index_qk_proj(hidden),
            q_norm=module.q_norm.weight,
            k_norm=module.k_norm.weight,
            index_q_norm=module.indexer.q_layernorm.weight,
            positions=positions,
            rotary_dim=ROTARY,
            index_rotary_dim=ROTARY,
            theta=THETA,
            eps=EPS,
        )
        pooled = reference.pool_index_keys(
            ready.index_key,
            module.indexer.k_layernorm.weight,
            ratio=RATIO,
            rotary_dim=ROTARY,
            theta=THETA,
            eps=EPS,
        )
        mixed = reference.sparse_attention(
            ready.query,
            ready.key,
            ready.value,
            ready.index_query,
            pooled,
            positions,
            selection=selection,
            scale=WIDTH**-0.5,
            gate=ready.gate,
        )
        scores = reference.block_scores(ready.index_query, pooled)
        visible = reference.visible_blocks(positions, RATIO)
        hidden_blocks = torch.arange(scores.shape[-1]) >= visible[..., None]
        ranked = scores.masked_fill(hidden_blocks, -1.0).sort(dim=-1, descending=True).values
        ranked = torch.nn.functional.pad(ranked, (0, selection.blocks + 1), value=-1.0)
        last, first_out = ranked[..., selection.blocks - 1], ranked[..., selection.blocks]
        return module.o_proj(mixed), (last != first_out) | (last < 0)


@pytest.mark.parametrize("tokens", [1, 3, 4, 19, 50])
def test_equals_the_transformers_module(tokens: int) -> None:
    hidden = torch.randn(2, tokens, 64, generator=torch.Generator().manual_seed(tokens))
    ours, untied = _reference(hidden, SELECTION)
    # transformers leaves the order of equal scores open, and relu makes scores of exactly zero.
    assert untied.float().mean() > 0.8
    torch.testing.assert_close(ours[untied], _transformers(hidden)[untied], atol=2e-5, rtol=1e-5)


def test_a_wrong_budget_is_seen() -> None:
    hidden = torch.randn(1, 50, 64, generator=torch.Generator().manual_seed(3))
    wrong = reference.Selection(ratio=RATIO, blocks=SELECTION.blocks + 1)
    _, untied = _reference(hidden, SELECTION)
    ours, _ = _reference(hidden, wrong)
    assert (ours - _transformers(hidden))[untied].abs().max() > 1e-2


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 12),
    st.integers(1, 5),
    st.lists(st.integers(-1, 47), min_size=1, max_size=6),
    st.integers(0, 2**31 - 1),
)
def test_selection_keeps_the_best_and_breaks_ties_by_lowest_id(
    count: int, blocks: int, positions: list[int], seed: int
) -> None:
    queries = torch.tensor([positions])
    generator = torch.Generator().manual_seed(seed)
    # Few distinct values, so that ties at the boundary are the rule.
    scores = torch.randint(0, 3, (1, len(positions), count), generator=generator).float()
    visible = reference.visible_blocks(queries, RATIO).clamp_max(count)
    chosen = reference.select_blocks(scores, visible, blocks)
    assert chosen.dtype == torch.int32
    assert chosen.shape == (1, len(positions), blocks)
    for row, seen in enumerate(visible[0].tolist()):
        ranked = sorted(range(seen), key=lambda b: (-scores[0, row, b].item(), b))
        expected = sorted(ranked[:blocks])
        assert chosen[0, row].tolist() == expected + [-1] * (blocks - len(expected))


def test_rows_hold_their_blocks_and_the_tail() -> None:
    blocks = torch.tensor(
        [[[0, 3, -1], [1, -1, -1], [-1, -1, -1], [-1, -1, -1]]], dtype=torch.int32
    )
    positions = torch.tensor([[17, 7, 1, -1]])
    rows = reference.expand_tokens(blocks, positions, RATIO)[0].tolist()
    used = [sorted(t for t in row if t >= 0) for row in rows]
    assert used == [[0, 1, 2, 3, 12, 13, 14, 15, 16, 17], [4, 5, 6, 7], [0, 1], []]
    assert all(len(row) == reference.Selection(RATIO, 3).row_width for row in rows)


def test_a_row_without_tokens_gives_zeros_and_not_nan() -> None:
    query, cache = torch.randn(1, 2, 2, 8), torch.randn(1, 1, 5, 8)
    ids = torch.tensor([[[-1, -1], [0, -1]]], dtype=torch.int32)
    out = reference.attend(query, cache, cache, ids, scale=1.0)
    assert torch.equal(out[0, 0], torch.zeros(16))
    torch.testing.assert_close(out[0, 1], cache[0, 0, 0].repeat(2))


def test_the_output_has_the_dtype_of_the_query() -> None:
    query, cache = torch.randn(1, 2, 70, 8).bfloat16(), torch.randn(1, 1, 70, 8).bfloat16()
    ids = torch.arange(70, dtype=torch.int32)[None, :, None]
    out = reference.attend(query, cache, cache, ids, scale=1.0)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out[0, :, :8], cache[0, 0])
