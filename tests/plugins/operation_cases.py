"""Plugin layers one by one, in Triton's interpreter: kernel and definition give the same.

Run by test_operations.py in a process of its own: the interpreter must be chosen before a kernel is
imported. Where several layers make one result, every mixture of kernels and definitions must give
it, so that what they hand to each other is defined too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from plugins import operations
from plugins.dsa import plan as dsa_plan
from plugins.dsa import reference as dsa_reference
from plugins.dsa.plugin import geometry_attributes as dsa_attributes
from plugins.qsa import plan as qsa_plan
from plugins.qsa.plugin import geometry_attributes as qsa_attributes
from plugins.support.errors import CapabilityError

QSA = qsa_plan.Geometry(
    heads=6, kv_heads=2, width=32, index_heads=4, index_width=32, ratio=4, blocks=8,
    dtype="float32", cache_dtype="float32",
)  # fmt: skip
FULL = dsa_plan.Geometry(
    heads=6, latent=40, rope=8, nope=16, value=20, index_heads=5, index_width=24, kept=16,
    dtype="float32",
)  # fmt: skip
SLIDING = dsa_plan.Geometry(
    heads=5, latent=56, rope=8, nope=24, value=20, index_heads=0, index_width=0, kept=0, window=9,
    dtype="float32",
)  # fmt: skip
# Layers that no chain below has: the draft layer's input is tested against its definition with the
# kernel; the kernels of `attend_hopper`, `attend_pair`, `window` and `window_split` are for compute
# capability 9.0 only.
ELSEWHERE = {"dsa::window", "mtp::embed_norms", "mtp::rms_norm"}

# An empty slot, a padding slot, lengths around the budget, more than it.
PAST = torch.tensor([0, 20, 14, 31, 83], dtype=torch.int32)
NEW = torch.tensor([3, 0, 2, 3, 3], dtype=torch.int32)
STEPS, BATCH = 3, 5

Stage = tuple[str, dict[str, Any]]
tried: set[str] = set()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(11)


def chain(
    stages: Sequence[Stage], inputs: Mapping[str, Tensor], kernels: Sequence[bool]
) -> dict[str, Tensor]:
    """Run stages, each by its kernel or by its definition; later ones see earlier outputs."""
    known = dict(inputs)
    for (name, attributes), by_kernel in zip(stages, kernels, strict=True):
        operation = operations.OPERATIONS[name]
        spec = operation.spec(attributes)
        tried.add(name)
        given = {a.name: known[a.name].clone() for a in spec.inputs}
        run: Callable[..., dict[str, Tensor]] = operations.DEFINITIONS[name]
        made = (
            operations.launch(operation, given, attributes) if by_kernel else run(given, attributes)
        )
        made |= {after: given[before] for after, before in spec.aliases.items()}
        assert set(made) == {a.name for a in spec.outputs}
        sizes = operation.outputs({n: tuple(t.shape) for n, t in given.items()}, attributes)
        for argument in spec.outputs:
            if argument.name in sizes:
                assert tuple(made[argument.name].shape) == sizes[argument.name], argument.name
                assert str(made[argument.name].dtype) == f"torch.{argument.dtype}"
        known |= made
        # What the later ones update is what `attend_tile` made.
        if name in ("qsa::attend_tile", "qsa::attend_apart"):
            known["together"] = made["out"]
        if name.startswith("dsa::select"):
            known["candidates"] = made["chosen"]
    return known


def every_mixture(stages: Sequence[Stage], inputs: Mapping[str, Tensor], result: str) -> Tensor:
    """The result, after comparing all ways to get it."""
    wanted = chain(stages, inputs, [False] * len(stages))[result]
    for kernels in itertools.product((False, True), repeat=len(stages)):
        found = chain(stages, inputs, kernels)[result]
        if found.dtype == torch.int32:
            assert torch.equal(found, wanted), kernels
        else:
            assert torch.isfinite(found).all()
            assert (found - wanted).abs().max() < 2e-5, kernels
    return wanted


def call(**tensors: Tensor) -> dict[str, Tensor]:
    return {"past": PAST, "new": NEW, **tensors}


# -- QSA -------------------------------------------------------------------------------------------

TILES = {"columns": 16, "warps": 4, "stages": 1}


def qsa(name: str, **attributes: Any) -> Stage:
    return f"qsa::{name}", {**qsa_attributes(QSA), **attributes}


def prepare_stage(axes: int, **geometry: Any) -> Stage:
    sections = {"section_t": 3, "section_h": 3, "section_w": 2}
    own = {"eps": 1e-6, "rotary": 16, "index_rotary": 12, "axes": axes, **sections}
    return "qsa::prepare", {**qsa_attributes(replace(QSA, **geometry)), **own}


def prepare_inputs(axes: int) -> dict[str, Tensor]:
    def frequencies(width: int) -> Tensor:
        return 1.0 / 1e4 ** (torch.arange(0, width, 2).float() / width)

    return call(
        q_gate=torch.randn(BATCH, STEPS, 6 * 2 * 32),
        key=torch.randn(BATCH, STEPS, 2 * 32),
        value=torch.randn(BATCH, STEPS, 2 * 32),
        index_qk=torch.randn(BATCH, STEPS, 5 * 32),
        **{f"{part}_weight": torch.randn(32) for part in ("q", "k", "index_q", "index_k")},
        frequencies=frequencies(16),
        index_frequencies=frequencies(12),
        positions=torch.randint(0, 90, (axes, BATCH, STEPS), dtype=torch.int32),
        position_state=torch.randint(0, 90, (BATCH, 3, axes), dtype=torch.int32),
        index_state=torch.randn(BATCH, 3, 32),
        key_cache_before=torch.randn(BATCH, 2, 96, 32),
        value_cache_before=torch.randn(BATCH, 2, 96, 32),
        index_keys_before=torch.randn(BATCH, 1, 24, 32),
    )


@pytest.mark.parametrize("axes", [1, 3])
def test_qsa_prepare(axes: int) -> None:
    """Every output and everything written in place; the rest of the caches stays as it was."""
    inputs = prepare_inputs(axes)
    stage, (other, attributes) = prepare_stage(axes), prepare_stage(axes, ratio=2)
    outputs = ["query", "key_cache", "value_cache", "index_query", "index_keys"]
    outputs += ["next_index_state", *(["next_position_state"] if axes == 3 else [])]
    kernel, made = (chain([stage], inputs, [way]) for way in (True, False))
    for name in outputs:
        assert (kernel[name] - made[name]).abs().max() < 2e-5, name
    assert (made["query"][1] == 0).all() and (made["index_query"][2, :, 2] == 0).all()
    for name in ("key_cache", "value_cache", "index_keys"):
        changed = (made[name] != inputs[f"{name}_before"]).any(-1).any(1)
        written = [row.nonzero().flatten().tolist() for row in changed]
        # Slot 2 completes the block of token 15, slot 3 the one of token 31.
        blocks: list[list[int]] = [[], [], [3], [7], [20]]
        tokens = [[0, 1, 2], [], [14, 15], [31, 32, 33], [83, 84, 85]]
        assert written == (blocks if name == "index_keys" else tokens), name
    # Negative control: blocks of two tokens are other blocks.
    inputs["index_state"], inputs["position_state"] = (
        inputs["index_state"][:, 2:], inputs["position_state"][:, 2:],
    )  # fmt: skip
    inputs["index_keys_before"] = torch.randn(BATCH, 1, 48, 32)
    pairs = chain([(other, attributes)], inputs, [False])["index_keys"]
    assert (pairs[4, 0, 41] - made["index_keys"][4, 0, 20]).abs().max() > 1e-2


def test_qsa_prepare_writes_float8() -> None:
    """Codes of both ways, a wrong scale being seen; the second keys saturate."""
    scales = {"k_scale": 0.05, "v_scale": 0.004}
    stage = prepare_stage(1, cache_dtype="float8_e4m3fn", **scales)
    inputs = prepare_inputs(1)
    for name in ("key_cache_before", "value_cache_before"):
        inputs[name] = torch.zeros(BATCH, 2, 96, 32).to(torch.float8_e4m3fn)
    kernel, defined = (chain([stage], inputs, [way]) for way in (True, False))
    exact = chain([prepare_stage(1)], prepare_inputs(1) | inputs | {
        name: torch.zeros(BATCH, 2, 96, 32) for name in ("key_cache_before", "value_cache_before")
    }, [False])  # fmt: skip
    for name, scale in (("key_cache", 0.05), ("value_cache", 0.004)):
        right = (exact[name] / scale).clamp(-448, 448)
        codes = defined[name].float()
        # Half a unit in the last of three places; below 2^-6 places are equally far apart.
        assert ((codes - right).abs() <= (right.abs() / 16).clamp_min(2**-10)).all(), name
        # Triton's interpreter loses the carry into the exponent, and values below 2^-6.
        kept = (defined[name].view(torch.uint8) & 7 != 0) & (right.abs() > 2**-6)
        assert kept.sum() > 500 and torch.equal(kernel[name].float()[kept], codes[kept]), name
        assert ((codes - right / 2).abs() > right.abs() / 8 + 2**-6).any()
    assert defined["value_cache"].float().abs().max() == 448
    assert kernel["value_cache"].float().abs().max() == 448


def test_qsa_scores_and_selection() -> None:
    inputs = call(
        index_query=torch.randn(BATCH, 4, STEPS, 32), index_keys=torch.randn(BATCH, 72, 32)
    )
    # The last slot has 71 blocks.
    inputs["past"] = torch.tensor([0, 20, 14, 31, 283], dtype=torch.int32)
    score = qsa("score", query_rows=4, tiles=2, **TILES)
    whole = every_mixture([score, qsa("select", width=72, warps=1)], inputs, "ids")
    grouped = [
        qsa("score_groups", query_rows=4, tiles=2, group=4, **TILES),
        qsa("select_grouped", width=18, group=4, warps=1),
    ]
    assert torch.equal(every_mixture(grouped, inputs, "ids"), whole)
    assert whole[4, 2, -1] > 8


def qsa_inputs() -> dict[str, Tensor]:
    scores = torch.rand(BATCH, STEPS, 24)
    select = operations.DEFINITIONS["qsa::select"]
    return call(
        q=torch.randn(BATCH, 6, STEPS, 32),
        k_cache=torch.randn(BATCH, 2, 96, 32),
        v_cache=torch.randn(BATCH, 2, 96, 32),
        blocks=select(call(scores=scores), qsa("select", width=32, warps=1)[1])["ids"],
        gate=torch.randn(BATCH, STEPS, 6 * 64),
    )


def test_qsa_attention() -> None:
    inputs, gated = qsa_inputs(), {"interleaved_gate": 1}
    whole = every_mixture([qsa("attend", **gated, **TILES)], inputs, "out")
    assert (whole[1] == 0).all() and (whole[2, 2] == 0).all()
    merge = qsa("merge", splits=2, **gated)
    split = every_mixture([qsa("attend_split", splits=2, **TILES), merge], inputs, "out")
    once = [qsa("attend_once", splits=3, columns=16, warps=4), qsa("merge", splits=3, **gated)]
    assert (every_mixture(once, inputs, "out") - whole).abs().max() < 2e-5
    assert (split - whole).abs().max() < 2e-5
    plain = {**inputs, "gate": inputs["gate"].view(BATCH, STEPS, 6, 2, 32)[:, :, :, 1].flatten(2)}
    other = every_mixture([qsa("attend", interleaved_gate=0, **TILES)], plain, "out")
    assert (other - whole).abs().max() < 2e-5


@pytest.mark.parametrize("rows", [2, 4])
def test_qsa_attention_in_tiles(rows: int) -> None:
    inputs = qsa_inputs()
    # Neighbours that share all blocks, beside those that share few.
    inputs["blocks"][3] = inputs["blocks"][3, :1]
    whole = every_mixture([qsa("attend", interleaved_gate=1, **TILES)], inputs, "out")
    tiled = {"tile_rows": rows, "interleaved_gate": 1, **TILES}
    stages = [
        qsa("unite", tile_rows=rows, words=24),
        qsa("attend_tile", **tiled),
        qsa("attend_apart", **tiled),
        qsa("attend_dense", lines=16, interleaved_gate=1, **TILES),
    ]
    assert (every_mixture(stages, inputs, "out") - whole).abs().max() < 2e-5
    joined = [stages[0], qsa("attend_hopper", tile_rows=rows, interleaved_gate=1, whole=0)]
    for by_kernel in (True, False):
        found = chain(joined, inputs, [by_kernel, False])["out"]
        assert (found - whole).abs().max() < 2e-5
    counts = chain(stages[:1], inputs, [False])["counts"].sum(-1)
    apart = counts > qsa_plan.union_limit(QSA, rows)
    assert apart.any() == (rows == 2) and not apart.all()


# -- DSA -------------------------------------------------------------------------------------------


def dsa(name: str, g: dsa_plan.Geometry = FULL, **attributes: Any) -> Stage:
    return f"dsa::{name}", {**dsa_attributes(g), **attributes}


def test_dsa_scores_and_selection() -> None:
    inputs = call(
        index_query=torch.randn(BATCH, STEPS, 5, 24),
        index_keys=torch.randn(BATCH, 1, 90, 24),
        head_weights=torch.randn(BATCH, STEPS, 5),
    )
    score = dsa("score", queries=2, tokens=16, warps=4, stages=1, run=32)
    whole = every_mixture([score, dsa("select_chunk", chunk=128, chunks=1)], inputs, "chosen")
    chunks = [
        dsa("select_chunk", chunk=32, chunks=3),
        dsa("select_among", chunk=32, width=48),
        dsa("select_among", chunk=32, width=32),
    ]
    assert torch.equal(every_mixture([score, *chunks], inputs, "chosen"), whole)
    visible = dsa_reference.visible_counts(inputs["past"], inputs["new"], STEPS)
    scores = chain([score], inputs, [False])["scores"]
    assert torch.equal(
        whole.view(BATCH, STEPS, 16), dsa_reference.select_tokens(scores, visible, 16)
    )
    assert whole[-1].tolist() != list(range(16))


def test_dsa_attention() -> None:
    visible = dsa_reference.visible_counts(PAST, NEW, STEPS)
    inputs = call(
        q_latent=torch.randn(BATCH, STEPS, 6, 40),
        q_rope=torch.randn(BATCH, STEPS, 6, 8),
        cache=torch.randn(BATCH, 1, 90, 48),
        tokens=dsa_reference.select_tokens(torch.randn(BATCH, STEPS, 90), visible, FULL.kept),
        gate=torch.randn(BATCH, STEPS, 6),
    )
    kernels = {"hopper": 0, "small": 1}
    whole = every_mixture([dsa("attend", **kernels)], inputs, "out")
    assert (whole[1] == 0).all() and (whole[2, 2] == 0).all()
    parts = [dsa("attend_split", splits=2, **kernels), dsa("merge", splits=2)]
    assert (every_mixture(parts, inputs, "out") - whole).abs().max() < 2e-5
    # Of two runs each gives the half of its channels that the other one finishes.
    runs = chain(parts[:1], inputs, [False])["partial"]
    pair = chain([dsa("attend_pair")], inputs, [False])
    assert (pair["out"] - whole).abs().max() < 2e-5
    assert torch.equal(pair["partial"][:, :, 0], runs[:, :, 0, :, 20:])
    assert torch.equal(pair["partial"][:, :, 1], runs[:, :, 1, :, :20])


@pytest.mark.parametrize("queries", [1, 2])
def test_dsa_window(queries: int) -> None:
    rows = 8 + STEPS
    inputs = call(
        q_latent=torch.randn(BATCH, STEPS, 5, 56),
        q_rope=torch.randn(BATCH, STEPS, 5, 8),
        cache=torch.randn(BATCH, 1, rows, 64),
        base=PAST - 8,
        gate=torch.randn(BATCH, STEPS, 5),
    )
    stages = [
        dsa("window_scores", SLIDING, queries=queries),
        dsa("window_values", SLIDING, queries=queries),
    ]
    found = every_mixture(stages, inputs, "out")
    whole = operations.DEFINITIONS["dsa::window"](inputs, dsa("window", SLIDING)[1])["out"]
    assert (found - whole).abs().max() < 2e-5
    assert (found[1] == 0).all()
    parts = [dsa("window_split", SLIDING, splits=queries + 1)]
    parts += [dsa("merge", SLIDING, splits=queries + 1)]
    for by_kernel in (True, False):
        merged = chain(parts, inputs, [False, by_kernel])["out"]
        assert (merged - whole).abs().max() < 2e-5
        assert (merged[1] == 0).all()


@pytest.mark.parametrize("window", [True, False])
def test_dsa_dense(window: bool) -> None:
    g = SLIDING if window else FULL
    rows = 8 + STEPS if window else 90
    inputs = call(
        q_nope=torch.randn(BATCH, STEPS, g.heads, g.nope),
        q_rope=torch.randn(BATCH, STEPS, g.heads, g.rope),
        expanded=torch.randn(BATCH, rows, g.heads, g.nope + g.value),
        cache=torch.randn(BATCH, 1, rows, g.latent + g.rope),
        gate=torch.randn(BATCH, STEPS, g.heads),
    )
    found = every_mixture([dsa("dense", g, hopper=0, small=1)], inputs, "out")
    assert (found[1] == 0).all()


# -- all -------------------------------------------------------------------------------------------


def test_every_operation_has_a_definition_and_was_tried() -> None:
    names = set(operations.OPERATIONS)
    assert set(operations.DEFINITIONS) == names
    assert tried | ELSEWHERE == names


def test_wrong_calls_are_refused() -> None:
    name, attributes = dsa("merge", splits=2)
    with pytest.raises(CapabilityError, match="no such plugin operation"):
        operations.implementation("dsa::none", attributes)
    with pytest.raises(CapabilityError, match="other attributes"):
        operations.implementation(name, {**attributes, "more": 1})
