"""The text network on the interpreter: golden numbers, the oracle, and every way to cut a run."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from converters.definition import EngineLimits
from converters.qwen38.oracle import Oracle, canonical
from tests.converters.qwen38.driver import Driver
from tests.converters.qwen38.tiny import PERIOD, Tiny, tiny
from tests.fixtures.qwen38_deterministic import (
    GOLDEN_ARGMAX,
    GOLDEN_GREEDY,
    GOLDEN_LAST_LOGITS,
    GOLDEN_MAX_LOGIT,
    GOLDEN_PROMPT,
)

LIMITS = EngineLimits(max_batch_size=4, max_seq_len=256, chunk_size=128, max_logits_tokens=128)
# Frobenius norm of the bundle after each layer; layer 0 before the PLE addition of layer 1.
GOLDEN_NORMS = {1: 154.84445, 2: 165.12039, 3: 166.15994, 4: 174.3751, 5: 184.144, 6: 193.12458}
GOLDEN_BLOCKS = {
    3: {18: {0, 1, 2, 3}, 19: {0, 2, 3, 4}, 30: {0, 2, 4, 5}, 31: {0, 1, 3, 7}, 49: {0, 4, 7, 8}},
    7: {18: {0, 1, 2, 3}, 19: {0, 1, 2, 4}, 30: {0, 1, 3, 6}, 31: {3, 5, 6, 7}, 49: {4, 5, 8, 9}},
}
GENERATOR = torch.Generator().manual_seed(17)
LONG = torch.randint(3, 512, (150,), generator=GENERATOR).tolist()
LONG[60] = LONG[61] = LONG[100] = 2


@pytest.fixture(scope="module")
def checkpoint() -> Tiny:
    return tiny()


@pytest.fixture(scope="module")
def driver(checkpoint: Tiny) -> Driver:
    return checkpoint.driver(LIMITS)


@pytest.fixture(autouse=True)
def _fresh(driver: Driver) -> None:
    driver.reset()


@pytest.fixture(scope="module")
def long_logits(driver: Driver) -> Tensor:
    """Logits of LONG in two calls, [150, vocab]."""
    driver.reset()
    return _chunked(driver, [128, 22])


def _close(found: Tensor, expected: Tensor, tolerance: float = 5e-5) -> None:
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=0.0)


def _chunked(driver: Driver, lengths: list[int], slot: int = 0) -> Tensor:
    """LONG in chunks of these lengths through the context network."""
    rows, start = [], 0
    for length in lengths:
        pieces = [[] for _ in range(slot)] + [LONG[start : start + length]]
        rows.append(driver.call("context", pieces)[slot]["logits"])
        start += length
    return torch.cat(rows)


def test_golden_prompt(driver: Driver) -> None:
    taps = [f"layers.{layer}.bundle" for layer in GOLDEN_NORMS]
    taps += [f"layers.{layer}.selected_blocks" for layer in GOLDEN_BLOCKS]
    out = driver.call("context", [GOLDEN_PROMPT], fetch=[*taps, "layers.1.ple", "final_hidden"])[0]
    last = out["logits"][-1]
    _close(last[:6], torch.tensor(GOLDEN_LAST_LOGITS), 2e-6)
    assert int(last.argmax()) == GOLDEN_ARGMAX
    assert float(last.max()) == pytest.approx(GOLDEN_MAX_LOGIT, abs=2e-6)
    for layer, norm in GOLDEN_NORMS.items():
        assert float(out[f"layers.{layer}.bundle"].norm()) == pytest.approx(norm, abs=2e-4)
    ple = out["layers.1.ple"].flatten(1)
    assert float(ple.norm()) == pytest.approx(71.034363, abs=1e-4)
    _close(ple[49, :4], torch.tensor([0.04405, 0.092806, 0.64962, 0.617695]), 1e-5)
    _close(out["final_hidden"][49, :3], torch.tensor([-0.10672, -0.39151, 0.390726]), 1e-5)
    for layer, rows in GOLDEN_BLOCKS.items():
        for token, blocks in rows.items():
            chosen = out[f"layers.{layer}.selected_blocks"][token].tolist()
            assert set(chosen) - {-1} == blocks, (layer, token)


def test_golden_greedy_continuation(driver: Driver) -> None:
    tokens = [int(driver.call("context", [GOLDEN_PROMPT])[0]["logits"][-1].argmax())]
    while len(tokens) < len(GOLDEN_GREEDY):
        tokens.append(int(driver.call("generation", [[tokens[-1]]])[0]["logits"][-1].argmax()))
    assert tokens == GOLDEN_GREEDY


def test_every_tap_equals_the_oracle(checkpoint: Tiny, driver: Driver) -> None:
    expected = Oracle(checkpoint.hf_dir).run(LONG)
    taps = list(driver.programs["context"].taps)
    assert set(expected) == {"logits", *taps}
    pieces = [driver.call("context", [LONG[:128]], fetch=taps)[0]]
    pieces.append(driver.call("context", [LONG[128:]], fetch=taps)[0])
    for name, value in expected.items():
        found = canonical(name, torch.cat([piece[name] for piece in pieces]))
        if name.endswith("selected_blocks"):
            assert torch.equal(found, value), name
        else:
            _close(found, value, 1e-4)


@pytest.mark.parametrize("lengths", [[7, 128, 15], [1, 3, 60, 64, 22], [64, 65, 21]])
def test_chunks_equal_one_another(driver: Driver, long_logits: Tensor, lengths: list[int]) -> None:
    _close(_chunked(driver, lengths), long_logits)


def test_step_by_step_equals_chunks(driver: Driver, long_logits: Tensor) -> None:
    rows = [driver.call("context", [LONG[:5]])[0]["logits"]]
    rows += [driver.call("generation", [[token]])[0]["logits"] for token in LONG[5:]]
    _close(torch.cat(rows), long_logits)


def test_a_used_slot_equals_a_fresh_one(driver: Driver, long_logits: Tensor) -> None:
    driver.call("context", [GOLDEN_PROMPT])
    for _ in range(9):
        driver.call("generation", [[77]])
    driver.free(0)
    _close(_chunked(driver, [128, 22]), long_logits)


def test_attention_span_changes_nothing(driver: Driver, long_logits: Tensor) -> None:
    rows = [driver.call("context", [LONG[:100]], span=256)[0]["logits"]]
    rows.append(driver.call("context", [LONG[100:]], span=192, length=128)[0]["logits"])
    _close(torch.cat(rows), long_logits)


def test_slots_do_not_see_each_other(driver: Driver, long_logits: Tensor) -> None:
    """Four slots at different places, in both phases, with padding slots in between."""
    others = [GOLDEN_PROMPT, LONG[40:90], [9] * 50]
    rows = [[] for _ in range(4)]

    def step(phase: str, pieces: list[list[int]]) -> None:
        before = {name: value.clone() for name, value in driver.memory.items()}
        for slot, out in enumerate(driver.call(phase, pieces)):  # type: ignore[arg-type]
            rows[slot].append(out["logits"])
        _padding_is_inert(driver, before, pieces)

    step("context", [others[0][:20], [], others[1][:3], LONG[:90]])
    step("context", [[], others[2][:49], [], LONG[90:101]])
    for token in range(101, 120):
        step("generation", [[], others[2][49:] if token == 110 else [], [], [LONG[token]]])
    step("context", [others[0][20:], [], others[1][3:], LONG[120:]])
    _close(torch.cat(rows[3]), long_logits)
    for slot, tokens in ((0, others[0]), (1, others[2]), (2, others[1])):
        driver.reset()
        alone = driver.call("context", [tokens])[0]["logits"]
        _close(torch.cat(rows[slot]), alone)


def _padding_is_inert(driver: Driver, before: dict[str, Tensor], pieces: list[list[int]]) -> None:
    """Slots without tokens: states bit-equal, visible cache rows bit-equal."""
    for name, slot in itertools.product(before, range(len(pieces))):
        old, new = before[name][slot], driver.memory[name][slot]
        if "cache" in name and not pieces[slot]:
            rows = driver.limits.visible_rows // (4 if name.startswith("index") else 1)
            assert torch.equal(old[:, :rows], new[:, :rows]), (name, slot)
        elif not pieces[slot]:
            assert torch.equal(old, new), (name, slot)
        else:
            assert not torch.equal(old, new), (name, slot)


def test_repeated_tokens_stay_exact(driver: Driver) -> None:
    """One token again and again makes equal keys, the hard case of the chunked recurrence."""
    tokens = [9] * 130
    chunked = torch.cat(
        [driver.call("context", [part])[0]["logits"] for part in (tokens[:128], tokens[128:])]
    )
    driver.reset()
    stepped = torch.cat([driver.call("generation", [[t]])[0]["logits"] for t in tokens])
    _close(chunked, stepped)


def test_three_tokens_per_step(checkpoint: Tiny, long_logits: Tensor) -> None:
    """Uniform decode of 1 + 2 tokens, some steps accepting fewer, beside a padding slot."""
    limits = EngineLimits(2, 256, chunk_size=128, max_draft_len=2, max_logits_tokens=128)
    driver = checkpoint.driver(limits)
    rows = [driver.call("context", [[], LONG[:64]])[1]["logits"]]
    start = 64
    for count in itertools.cycle([3, 1, 2, 3]):
        if start + count > 110:
            break
        before = {name: value.clone() for name, value in driver.memory.items()}
        pieces = [[], LONG[start : start + count]]
        rows.append(driver.call("generation", pieces)[1]["logits"])
        _padding_is_inert(driver, before, pieces)
        start += count
    rows.append(driver.call("context", [[], LONG[start:]])[1]["logits"])
    _close(torch.cat(rows), long_logits)


@pytest.mark.parametrize(
    "changes",
    [
        {"linear_value_head_dim": 24},
        {"ple_layer_ids": [2, 3]},
        {"ple_layer_ids": []},
        {"output_gate_type": "silu"},
        {"norm_topk_prob": False},
        {"indexer_n_heads": 4, "indexer_budget": 24, "indexer_compress_ratio": 8},
    ],
    ids=lambda changes: ",".join(changes),
)
def test_other_configurations_equal_the_oracle(changes: dict[str, object]) -> None:
    checkpoint = tiny(**PERIOD, **changes)
    driver = checkpoint.driver(EngineLimits(1, 128, chunk_size=64, max_logits_tokens=64))
    tokens = LONG[:80]
    rows = [driver.call("context", [tokens[:60]])[0]["logits"]]
    rows += [driver.call("generation", [[token]])[0]["logits"] for token in tokens[60:]]
    expected = Oracle(checkpoint.hf_dir).run(tokens)["logits"]
    _close(torch.cat(rows), expected, 1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_near_float32(
    checkpoint: Tiny, long_logits: Tensor, dtype: str
) -> None:
    half = tiny(dtype=dtype).driver(LIMITS)
    rows = [half.call("context", [LONG[:128]])[0]["logits"]]
    rows += [half.call("generation", [[token]])[0]["logits"] for token in LONG[128:]]
    found = torch.cat(rows)
    assert found.dtype == torch.float32
    assert torch.isfinite(found).all()
    assert (found.argmax(-1) == long_logits.argmax(-1)).float().mean() > 0.9
    assert (found - long_logits).abs().mean() < 0.05


def test_the_definition_is_exact_whatever_the_type() -> None:
    """With float32 arithmetic, a bf16 checkpoint's network equals the oracle on its weights."""
    half = tiny(dtype="bfloat16")
    oracle = Oracle(half.hf_dir, "bfloat16")
    ids = oracle.sample_ids(64)
    assert len(ids) == 63
    assert half.config.qwen38.ngram_eos_token_id in ids
    driver = half.driver(
        EngineLimits(1, 128, chunk_size=64, max_logits_tokens=64), promote_floats=True
    )
    rows = [driver.call("context", [ids[:50]])[0]["logits"]]
    rows += [driver.call("generation", [[token]])[0]["logits"] for token in ids[50:]]
    _close(torch.cat(rows), oracle.run(ids)["logits"], 1e-4)
    # The rounding of the weights is what the oracle must not leave out.
    assert (torch.cat(rows) - Oracle(half.hf_dir).run(ids)["logits"]).abs().max() > 5e-3
