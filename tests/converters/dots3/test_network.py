"""The text network on the interpreter against the oracle, in every way to cut a run."""

from __future__ import annotations

import itertools
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from converters.checkpoint.config import WEIGHTS_FILE, read_config
from converters.checkpoint.convert import convert
from converters.definition import EngineLimits
from converters.dots3.config import Dots3CheckpointConfig
from converters.dots3.oracle import Oracle, canonical
from tests.converters.dots3.driver import Driver
from tests.converters.dots3.tiny import Tiny, tiny

LIMITS = EngineLimits(max_batch_size=4, max_seq_len=192, chunk_size=128, max_logits_tokens=128)
# More than index_topk = 12 and than the window of 9, and more than one cache block of 64.
COUNT = 150
IDS = torch.randint(3, 500, (COUNT,), generator=torch.Generator().manual_seed(17)).tolist()


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
def expected(checkpoint: Tiny) -> dict[str, Tensor]:
    return Oracle(checkpoint.hf_dir).run(IDS)


def _close(found: Tensor, expected: Tensor, tolerance: float = 5e-5) -> None:
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=0.0)


def _chunked(driver: Driver, lengths: list[int], slot: int = 0) -> Tensor:
    """IDS in chunks of these lengths through the context network."""
    rows, start = [], 0
    for length in lengths:
        pieces = [[] for _ in range(slot)] + [IDS[start : start + length]]
        rows.append(driver.call("context", pieces)[slot]["logits"])
        start += length
    return torch.cat(rows)


def test_every_tap_equals_the_oracle(driver: Driver, expected: dict[str, Tensor]) -> None:
    taps = list(driver.programs["context"].taps)
    assert set(expected) == {"logits", *taps}
    pieces = [driver.call("context", [IDS[:128]], fetch=taps)[0]]
    pieces.append(driver.call("context", [IDS[128:]], fetch=taps)[0])
    for name, value in expected.items():
        found = torch.cat([canonical(name, piece[name]) for piece in pieces])
        if name.endswith("selected_tokens"):
            assert torch.equal(found, value), name
            # A query sees min(position + 1, 12) tokens.
            assert found[:, 0].tolist() == [min(i + 1, 12) for i in range(COUNT)]
        else:
            _close(found, value)


@pytest.mark.parametrize("lengths", [[7] * 21 + [3], [1, 8, 9, 10, 64, 58], [128, 22]], ids=str)
def test_chunks_equal_one_pass(
    driver: Driver, expected: dict[str, Tensor], lengths: list[int]
) -> None:
    _close(_chunked(driver, lengths), expected["logits"])


def test_token_by_token_equals_one_pass(driver: Driver, expected: dict[str, Tensor]) -> None:
    """The absorbed form, from the first token on, with equal selections."""
    taps = [f"layers.{layer}.selected_tokens" for layer in (0, 1, 5)]
    steps = [driver.call("generation", [[token]], fetch=taps)[0] for token in IDS]
    _close(torch.cat([step["logits"] for step in steps]), expected["logits"])
    for tap in taps:
        found = torch.cat([canonical(tap, step[tap]) for step in steps])
        assert torch.equal(found, expected[tap]), tap


def test_a_used_slot_equals_a_fresh_one(driver: Driver, expected: dict[str, Tensor]) -> None:
    driver.call("context", [[9] * 90])
    for _ in range(11):
        driver.call("generation", [[77]])
    driver.free(0)
    _close(_chunked(driver, [128, 22]), expected["logits"])


def test_attention_span_changes_nothing(driver: Driver, expected: dict[str, Tensor]) -> None:
    rows = [driver.call("context", [IDS[:100]], span=192)[0]["logits"]]
    rows.append(driver.call("context", [IDS[100:]], span=192)[0]["logits"])
    _close(torch.cat(rows), expected["logits"])


def test_slots_do_not_see_each_other(driver: Driver, expected: dict[str, Tensor]) -> None:
    """Four slots at different places, in both phases, with padding slots in between."""
    others = [[9, 8, 7, 6] * 10, IDS[40:90], [5] * 50]
    rows: list[list[Tensor]] = [[] for _ in range(4)]

    def step(phase: str, pieces: list[list[int]]) -> None:
        before = {name: value.clone() for name, value in driver.memory.items()}
        for slot, out in enumerate(driver.call(phase, pieces)):  # type: ignore[arg-type]
            assert torch.isfinite(out["logits"]).all()
            rows[slot].append(out["logits"])
        _padding_is_inert(driver, before, pieces)

    step("context", [others[0][:20], [], others[1][:3], IDS[:90]])
    step("context", [[], others[2][:49], [], IDS[90:101]])
    for token in range(101, 120):
        step("generation", [[], others[2][49:] if token == 110 else [], [], [IDS[token]]])
    step("context", [others[0][20:], [], others[1][3:], IDS[120:]])
    _close(torch.cat(rows[3]), expected["logits"])
    for slot, tokens in ((0, others[0]), (1, others[2]), (2, others[1])):
        driver.reset()
        _close(torch.cat(rows[slot]), driver.call("context", [tokens])[0]["logits"])


def _padding_is_inert(driver: Driver, before: dict[str, Tensor], pieces: list[list[int]]) -> None:
    """Slots without tokens: states bit-equal, visible cache rows bit-equal."""
    for name, slot in itertools.product(before, range(len(pieces))):
        old, new = before[name][slot], driver.memory[name][slot]
        if "cache" in name and not pieces[slot]:
            rows = driver.limits.visible_rows
            assert torch.equal(old[:, :rows], new[:, :rows]), (name, slot)
        elif not pieces[slot]:
            assert torch.equal(old, new), (name, slot)
        else:
            assert not torch.equal(old, new), (name, slot)


@pytest.mark.parametrize("drafts", [1, 2, 3])
def test_rejected_drafts_leave_no_trace(
    checkpoint: Tiny, driver: Driver, expected: dict[str, Tensor], drafts: int
) -> None:
    """Steps of 1 + k tokens of which any number is accepted, beside a padding slot; window states
    and index keys are those of a run without drafts at every step.
    """
    limits = EngineLimits(2, 192, chunk_size=128, max_draft_len=drafts, max_logits_tokens=128)
    plain, driver = driver, checkpoint.driver(limits)
    rows = [driver.call("context", [[], IDS[:30]])[1]["logits"]]
    plain.call("context", [[], IDS[:30]])
    chance = random.Random(drafts)
    position, step = 30, 1 + drafts
    # Every pattern once, then at random.
    counts = [*range(step, 0, -1), *(chance.randint(1, step) for _ in range(20))]
    for count in counts:
        wrong = [(token + 1) % 500 for token in IDS[position + count : position + step]]
        piece = [*IDS[position : position + count], *wrong]
        before = {name: value.clone() for name, value in driver.memory.items()}
        out = driver.call("generation", [[], piece], accept=[0, count])[1]
        _padding_is_inert(driver, before, [[], piece])
        rows.append(out["logits"][:count])
        for token in IDS[position : position + count]:
            plain.call("generation", [[], [token]])
        position += count
        _same_memory(driver, plain, position, drafts)
    rows.append(driver.call("context", [[], IDS[position:]])[1]["logits"])
    _close(torch.cat(rows), expected["logits"])


def _same_memory(driver: Driver, plain: Driver, length: int, drafts: int) -> None:
    """What the next call of slot 1 can see, with and without rejected drafts."""
    window = driver.config.dots3.sliding_window - 1
    for name, found in driver.memory.items():
        wanted = plain.memory[name][1]
        if "cache" in name:
            _close(found[1][:, :length], wanted[:, :length])
        else:
            first = drafts - driver.rejected[1]
            _close(found[1][first : first + window], wanted)


def test_forgotten_rejections_are_seen(checkpoint: Tiny, expected: dict[str, Tensor]) -> None:
    limits = EngineLimits(1, 192, chunk_size=128, max_draft_len=2, max_logits_tokens=128)
    driver = checkpoint.driver(limits)
    driver.call("context", [IDS[:30]])
    driver.call("generation", [[IDS[30], 4, 4]], accept=[1])
    driver.rejected = [0]
    found = driver.call("generation", [IDS[31:34]])[0]["logits"]
    assert (found - expected["logits"][31:34]).abs().max() > 1e-2


@pytest.mark.parametrize(
    "changes",
    [
        {"index_topk": 300},
        {"sliding_window_size": 1},
        {"sliding_window_size": 200},
        {"norm_topk_prob": False, "routed_scaling_factor": 2.5},
        {"first_k_dense_replace": 0},
        {"index_head_dim": 8},
    ],
    ids=lambda changes: ",".join(changes),
)
def test_other_configurations_equal_the_oracle(changes: dict[str, Any]) -> None:
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    checkpoint = tiny(draft=False, **{"num_hidden_layers": 3, "layer_types": kinds, **changes})
    driver = checkpoint.driver(EngineLimits(1, 128, chunk_size=64, max_logits_tokens=64))
    tokens = IDS[:90]
    rows = [driver.call("context", [tokens[:60]])[0]["logits"]]
    rows += [driver.call("generation", [[token]])[0]["logits"] for token in tokens[60:]]
    _close(torch.cat(rows), Oracle(checkpoint.hf_dir).run(tokens)["logits"])


def test_the_definition_is_exact_whatever_the_type() -> None:
    """With float32 arithmetic, a bf16 checkpoint's network equals the oracle on its weights."""
    half = tiny(dtype="bfloat16")
    oracle = Oracle(half.hf_dir, "bfloat16")
    ids = oracle.sample_ids(100)
    assert len(ids) == 96
    driver = half.driver(
        EngineLimits(1, 128, chunk_size=64, max_logits_tokens=64), promote_floats=True
    )
    rows = [driver.call("context", [ids[:64]])[0]["logits"]]
    rows += [driver.call("generation", [[token]])[0]["logits"] for token in ids[64:]]
    _close(torch.cat(rows), oracle.run(ids)["logits"])
    # The rounding of the weights is what the oracle must not leave out.
    assert (torch.cat(rows) - Oracle(half.hf_dir).run(ids)["logits"]).abs().max() > 1e-2


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_finite(dtype: str) -> None:
    """Routing and selections flip in half precision, so values cannot be compared."""
    driver = tiny(dtype=dtype).driver(LIMITS)
    rows = [driver.call("context", [IDS[:128]])[0]["logits"]]
    rows += [driver.call("generation", [[token]])[0]["logits"] for token in IDS[128:140]]
    assert torch.cat(rows).dtype == torch.float32
    assert torch.isfinite(torch.cat(rows)).all()


def test_a_checkpoint_in_the_layout_of_the_training(
    checkpoint: Tiny, expected: dict[str, Tensor], tmp_path: Path
) -> None:
    """Rotary lanes of the index heads behind the plain ones, as files without a note have them."""
    shutil.copytree(checkpoint.hf_dir, tmp_path / "hf")
    path = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if ".indexer." in name and "weights_proj" not in name:
            tensors[name] = tensor.unflatten(0, (-1, 16)).roll(-8, 1).flatten(0, 1)
    save_file(tensors, path, metadata={"format": "pt"})
    found = Oracle(tmp_path / "hf").run(IDS)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    convert(tmp_path / "hf", tmp_path / "checkpoint")
    config = read_config(tmp_path / "checkpoint", Dots3CheckpointConfig)
    assert config.dots3.index_rope == "tail"
    weights = load_file(tmp_path / "checkpoint" / WEIGHTS_FILE)
    driver = Tiny(tmp_path / "hf", config, weights).driver(LIMITS, phases=("context",))
    _close(driver.call("context", [IDS[:128]])[0]["logits"], expected["logits"][:128])


@pytest.mark.parametrize("drafts", [0, 3])
def test_sliding_layers_keep_their_window_only(checkpoint: Tiny, drafts: int) -> None:
    """Whatever the length of a sequence; full layers have a latent and an index key per token."""
    for length in (128, 512):
        limits = EngineLimits(1, length, chunk_size=64, max_draft_len=drafts)
        memory = checkpoint.driver(limits).memory
        assert {name for name in memory if "state" in name} == {
            f"window_state.{layer}" for layer in (2, 3, 4)
        }
        for layer in (2, 3, 4):
            assert memory[f"window_state.{layer}"].shape == (1, 8 + drafts, 56 + 8)
        for layer in (0, 1, 5):
            rows = limits.cache_rows
            assert memory[f"latent_cache.{layer}"].shape == (1, 1, rows, 32 + 8)
            assert memory[f"index_key_cache.{layer}"].shape == (1, 1, rows, 16)
