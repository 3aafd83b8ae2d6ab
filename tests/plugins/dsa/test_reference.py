"""The torch definition of DSA against the transformers indexer and its own other forms."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.dots3_note.modeling_dots3_note import Dots3NoteTextIndexer

from plugins.dsa import reference

B, S, HEADS, LATENT, ROPE, NOPE, VALUE = 2, 20, 4, 24, 8, 16, 12
KEPT = 6


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(3)


def test_selection_equals_transformers() -> None:
    config = SimpleNamespace(
        hidden_size=32, q_lora_rank=24, index_n_heads=16, index_head_dim=16, qk_rope_head_dim=8,
        index_topk=KEPT,
    )  # fmt: skip
    # So many heads that no score is exactly zero: transformers leaves ties open.
    indexer = Dots3NoteTextIndexer(config, 0)
    for weight in indexer.parameters():
        torch.nn.init.normal_(weight)
    hidden, latent = torch.randn(B, S, 32), torch.randn(B, S, 24)
    # Rotation by nothing: queries and keys are then permuted alike, which no dot product sees.
    unit = (torch.ones(B, S, 8), torch.zeros(B, S, 8))
    causal = torch.full((S, S), float("-inf")).triu(1).expand(B, S, S)
    theirs = indexer(hidden, latent, unit, causal, torch.arange(S))
    with torch.no_grad():
        query = indexer.wq_b(latent).reshape(B, S, 16, 16)
        keys = indexer.k_norm(indexer.wk(hidden))
        weights = indexer.weights_proj(hidden)
    visible = reference.visible_counts(torch.zeros(B, dtype=torch.int32), torch.full((B,), S), S)
    scores = reference.index_scores(query, keys, weights)
    ours = reference.select_tokens(scores, visible, KEPT)
    # Weights without their sign are a typical mistake.
    biased = reference.select_tokens(
        reference.index_scores(query, keys, weights.abs()), visible, KEPT
    )
    wrong = 0
    for b in range(B):
        for s in range(S):
            want = {t for t in theirs[b, s].tolist() if t <= s}
            assert {t for t in ours[b, s].tolist() if t >= 0} == want
            wrong += {t for t in biased[b, s].tolist() if t >= 0} != want
    assert wrong > S


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_selection_is_the_first_of_a_full_order(data: st.DataObject) -> None:
    tokens = data.draw(st.integers(1, 12))
    count = data.draw(st.integers(1, 14))
    visible = data.draw(st.integers(0, tokens))
    levels = st.sampled_from([-1.0, 0.0, 0.5, 2.0])
    values = data.draw(st.lists(levels, min_size=tokens, max_size=tokens))
    got = reference.select_tokens(
        torch.tensor(values).reshape(1, 1, -1), torch.tensor([[visible]]), count
    )[0, 0].tolist()
    best = sorted(range(visible), key=lambda t: (-values[t], t))[:count]
    assert got == sorted(best) + [-1] * (count - len(best))


def test_absorbed_and_expanded_form_agree() -> None:
    key_up, value_up = torch.randn(HEADS, NOPE, LATENT), torch.randn(HEADS, LATENT, VALUE)
    q_nope, q_rope = torch.randn(B, S, HEADS, NOPE), torch.randn(B, S, HEADS, ROPE)
    cache, gate = torch.randn(B, S, LATENT + ROPE), torch.randn(B, S, HEADS)
    scale = (NOPE + ROPE) ** -0.5
    visible = reference.visible_counts(torch.zeros(B, dtype=torch.int32), torch.full((B,), S), S)
    every = torch.arange(S, dtype=torch.int32).expand(B, S, S)
    ids = every.masked_fill(every >= visible[..., None], -1)
    q_latent = torch.einsum("bshn,hnl->bshl", q_nope, key_up)
    latent = reference.latent_attention(q_latent, q_rope, cache, ids, scale=scale, gate=gate)
    expanded = reference.Expanded(
        torch.einsum("btl,hnl->bthn", cache[..., :LATENT], key_up),
        torch.einsum("btl,hlv->bthv", cache[..., :LATENT], value_up),
    )
    k_rope = cache[..., LATENT:]
    want = reference.expanded_attention(
        q_nope, q_rope, expanded, k_rope, visible, scale=scale, gate=gate
    )
    # The gate is one scalar per head: it may be applied before the value up-projection.
    torch.testing.assert_close(
        torch.einsum("bshl,hlv->bshv", latent, value_up), want, atol=2e-4, rtol=2e-4
    )


def test_window_is_itself_and_the_tokens_before() -> None:
    past, new = torch.tensor([30, 2], dtype=torch.int32), torch.tensor([2, 1], dtype=torch.int32)
    base = torch.tensor([25, 0], dtype=torch.int32)
    rows = reference.window_rows(past, new, base, queries=2, window=5, rows=7)
    assert rows[0, 0].tolist() == [1, 2, 3, 4, 5]
    assert rows[0, 1].tolist() == [2, 3, 4, 5, 6]
    assert rows[1, 0].tolist() == [-1, -1, 0, 1, 2]
    assert rows[1, 1].tolist() == [-1] * 5


def test_padding_rows_are_zero_whatever_the_cache_holds() -> None:
    cache = torch.full((1, 4, LATENT + ROPE), float("nan"))
    q_latent, q_rope = torch.randn(1, 2, HEADS, LATENT), torch.randn(1, 2, HEADS, ROPE)
    ids = torch.full((1, 2, 3), -1, dtype=torch.int32)
    out = reference.latent_attention(q_latent, q_rope, cache, ids, scale=1.0)
    assert not out.any()
