"""DSA out of native layers, run by the interpreter on the very network, against the definition."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor

from plugins.dsa import lowering, reference
from plugins.trt.backend import load_backend
from plugins.trt.network import Network
from runtime.interpreter.execute import Interpreter
from runtime.interpreter.trace import trace

pytest.importorskip("tensorrt_rtx")

B, HEADS, LATENT, ROPE, NOPE, VALUE = 3, 4, 32, 8, 16, 20
INDEX_HEADS, INDEX_WIDTH, KEPT, WINDOW = 4, 16, 12, 9
SCALE = (NOPE + ROPE) ** -0.5
NAMES = {torch.float32: "float32", torch.int32: "int32", torch.bfloat16: "bfloat16"}

Define = Callable[[Network, dict], Mapping[str, object]]


def run(define: Define, inputs: Mapping[str, Tensor], dynamic: bool = True) -> dict[str, Tensor]:
    """Define a network over the inputs (batch dynamic), trace it, execute it."""
    net = Network(load_backend())
    tensors = {}
    for name, value in inputs.items():
        shape = list(value.shape)
        if dynamic:
            shape[0] = -1
        tensors[name] = net.input(name, NAMES[value.dtype], shape)
    for name, tensor in define(net, tensors).items():
        net.output(tensor, name)
    return Interpreter(trace(net), {}, strict=True).run(dict(inputs))


def lengths(past: list[int], new: list[int]) -> dict[str, Tensor]:
    return {
        "past": torch.tensor(past, dtype=torch.int32),
        "new": torch.tensor(new, dtype=torch.int32),
    }


def near(got: Tensor, want: Tensor, bound: float = 1e-5) -> None:
    assert torch.isfinite(got).all()
    assert (got - want).abs().max() <= bound


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(7)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(
    ("past", "new", "queries", "rows"),
    [
        ([0, 11, 30], [3, 1, 0], 3, 40),
        ([12, 0, 5], [1, 1, 1], 1, 40),
        ([0, 3, 0], [5, 4, 2], 5, 10),
    ],
)
def test_selection(past: list[int], new: list[int], queries: int, rows: int, groups: int) -> None:
    inputs = lengths(past, new) | {
        "index_query": torch.randn(B, queries, INDEX_HEADS, INDEX_WIDTH),
        "index_keys": torch.randn(B, 1, rows, INDEX_WIDTH),
        "head_weights": torch.randn(B, queries, INDEX_HEADS),
    }

    def define(net: Network, t: dict) -> Mapping[str, object]:
        visible = lowering.visible_counts(net, t["past"], t["new"], queries)
        chosen = lowering.select_tokens(
            net, t["index_query"], t["index_keys"], t["head_weights"], visible, KEPT, groups
        )
        return {"chosen": chosen, "visible": visible}

    got = run(define, inputs)
    visible = reference.visible_counts(inputs["past"], inputs["new"], queries)
    assert torch.equal(got["visible"], visible)
    scores = reference.index_scores(
        inputs["index_query"], inputs["index_keys"][:, 0], inputs["head_weights"]
    )
    want = reference.select_tokens(scores, visible, min(KEPT, rows))
    assert torch.equal(in_order(got["chosen"]), want)


def in_order(ids: Tensor) -> Tensor:
    """Ascending with the unused entries last, as the reference lists them."""
    far = ids.masked_fill(ids < 0, 2**30).sort(-1).values
    return far.masked_fill(far == 2**30, -1)


def test_selection_keeps_the_lowest_of_zero_scores() -> None:
    # One head with weight 1: half of the scores are exactly zero, and straddle the cut.
    inputs = lengths([29, 20, 0], [1, 1, 1]) | {
        "index_query": torch.randn(B, 1, 1, INDEX_WIDTH),
        "index_keys": torch.randn(B, 1, 30, INDEX_WIDTH),
        "head_weights": torch.tensor([1.0, -1.0, 1.0]).reshape(B, 1, 1),
    }

    def define(net: Network, t: dict) -> Mapping[str, object]:
        visible = lowering.visible_counts(net, t["past"], t["new"], 1)
        return {
            "chosen": lowering.select_tokens(
                net, t["index_query"], t["index_keys"], t["head_weights"], visible, 18
            )
        }

    scores = reference.index_scores(
        inputs["index_query"], inputs["index_keys"][:, 0], inputs["head_weights"]
    )
    visible = reference.visible_counts(inputs["past"], inputs["new"], 1)
    want = reference.select_tokens(scores, visible, 18)
    assert (scores[0, 0] > 0).sum() < 18 < 30
    assert torch.equal(in_order(run(define, inputs)["chosen"]), want)


def latent_inputs(queries: int, rows: int) -> dict[str, Tensor]:
    return {
        "q_latent": torch.randn(B, queries, HEADS, LATENT),
        "q_rope": torch.randn(B, queries, HEADS, ROPE),
        "cache": torch.randn(B, 1, rows, LATENT + ROPE),
        "gate": torch.randn(B, queries, HEADS),
    }


@pytest.mark.parametrize("queries", [1, 3])
def test_generation(queries: int) -> None:
    inputs = lengths([20, 3, 9], [queries, 1, 0]) | latent_inputs(queries, 32)
    visible = reference.visible_counts(inputs["past"], inputs["new"], queries)
    inputs["token_ids"] = reference.select_tokens(torch.randn(B, queries, 32), visible, KEPT)

    def define(net: Network, t: dict) -> Mapping[str, object]:
        seen = lowering.visible_counts(net, t["past"], t["new"], queries)
        attend = lowering.attend_generation
        args = (net, t["q_latent"], t["q_rope"], t["cache"], t["token_ids"], seen)
        return {
            "out": attend(*args, scale=SCALE, gate=t["gate"]),
            "latent_scale": attend(*args, scale=(LATENT + ROPE) ** -0.5, gate=t["gate"]),
        }

    got = run(define, inputs)
    want = reference.latent_attention(
        inputs["q_latent"],
        inputs["q_rope"],
        inputs["cache"][:, 0],
        inputs["token_ids"],
        scale=SCALE,
        gate=inputs["gate"],
    )
    near(got["out"], want)
    assert not got["out"][2].any() and not got["out"][1, 1:].any()
    # Scaling by the latent width instead of the expanded head is a typical mistake.
    assert (got["latent_scale"] - want).abs().max() > 1e-2


def expanded_inputs(queries: int) -> dict[str, Tensor]:
    return {
        "q_nope": torch.randn(B, queries, HEADS, NOPE),
        "q_rope": torch.randn(B, queries, HEADS, ROPE),
        "key_up": torch.randn(HEADS, NOPE, LATENT) * LATENT**-0.5,
        "value_up": torch.randn(HEADS, LATENT, VALUE) * LATENT**-0.5,
        "gate": torch.randn(B, queries, HEADS),
    }


def test_context_and_generation_agree() -> None:
    """Expanded and absorbed form of one selection, and both with the definition."""
    queries, rows = 7, 24
    inputs = lengths([14, 0, 2], [7, 5, 0]) | expanded_inputs(queries)
    inputs["cache"] = torch.randn(B, 1, rows, LATENT + ROPE)
    visible = reference.visible_counts(inputs["past"], inputs["new"], queries)
    inputs["token_ids"] = reference.select_tokens(torch.randn(B, queries, rows), visible, KEPT)
    weights = {name: inputs.pop(name) for name in ("key_up", "value_up")}

    def define(net: Network, t: dict) -> Mapping[str, object]:
        key_up, value_up = (net.literal(weights[n]) for n in ("key_up", "value_up"))
        seen = lowering.visible_counts(net, t["past"], t["new"], queries)
        keys, values = lowering.expand(net, t["cache"], key_up, value_up)
        query = net.transpose(net.concat([t["q_nope"], t["q_rope"]], 3), (0, 2, 1, 3))
        context = lowering.attend_context(
            net, query, keys, values, seen, scale=SCALE, token_ids=t["token_ids"], gate=t["gate"]
        )
        dense = lowering.attend_context(net, query, keys, values, seen, scale=SCALE)
        latent = lowering.attend_generation(
            net,
            lowering.absorb(net, t["q_nope"], key_up),
            t["q_rope"],
            t["cache"],
            t["token_ids"],
            seen,
            scale=SCALE,
            gate=t["gate"],
        )
        return {
            "context": context,
            "dense": dense,
            "generation": lowering.project(net, latent, value_up),
        }

    got = run(define, inputs)
    near(got["context"], got["generation"])
    latent = inputs["cache"][:, 0, :, :LATENT]
    expanded = reference.Expanded(
        torch.einsum("btl,hnl->bthn", latent, weights["key_up"]),
        torch.einsum("btl,hlv->bthv", latent, weights["value_up"]),
    )
    want = reference.expanded_attention(
        inputs["q_nope"],
        inputs["q_rope"],
        expanded,
        inputs["cache"][:, 0, :, LATENT:],
        visible,
        scale=SCALE,
    )
    near(got["dense"], want)
    absorbed = reference.latent_attention(
        torch.einsum("bshn,hnl->bshl", inputs["q_nope"], weights["key_up"]),
        inputs["q_rope"],
        inputs["cache"][:, 0],
        inputs["token_ids"],
        scale=SCALE,
        gate=inputs["gate"],
    )
    near(got["generation"], torch.einsum("bshl,hlv->bshv", absorbed, weights["value_up"]))
    # Without the selection the result is another one as soon as a query sees more than K tokens.
    assert (got["dense"] - got["context"]).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("rows", "base"),
    [(11, [0, 0, 0]), (40, [0, 0, 0]), (16, [18, 0, 2])],
    ids=["ring", "linear", "moving base"],
)
@pytest.mark.parametrize("queries", [1, 3])
def test_window_generation(rows: int, base: list[int], queries: int) -> None:
    inputs = lengths([26, 4, 9], [queries, 1, 0]) | latent_inputs(queries, rows)
    inputs["base"] = torch.tensor(base, dtype=torch.int32)

    def define(net: Network, t: dict) -> Mapping[str, object]:
        seen = lowering.visible_counts(net, t["past"], t["new"], queries)

        def attend(window: int) -> object:
            found = lowering.gather_window(
                net, t["cache"], t["past"], t["base"], window=window, queries=queries
            )
            args = (net, t["q_latent"], t["q_rope"], found, t["past"], seen)
            return lowering.attend_window(*args, window=window, scale=SCALE, gate=t["gate"])

        return {"out": attend(WINDOW), "short": attend(WINDOW - 1)}

    got = run(define, inputs)
    ids = reference.window_rows(
        inputs["past"],
        inputs["new"],
        inputs["base"],
        queries=queries,
        window=WINDOW,
        rows=rows,
    )
    want = reference.latent_attention(
        inputs["q_latent"],
        inputs["q_rope"],
        inputs["cache"][:, 0],
        ids,
        scale=SCALE,
        gate=inputs["gate"],
    )
    near(got["out"], want)
    assert not got["out"][2].any()
    # A window of 512 instead of 513 is a typical mistake.
    assert (got["short"][0] - want[0]).abs().max() > 1e-3


def test_window_context_agrees_with_window_generation() -> None:
    queries, rows = 6, 24
    inputs = lengths([14, 0, 2], [6, 4, 0]) | expanded_inputs(queries)
    inputs["cache"] = torch.randn(B, 1, rows, LATENT + ROPE)
    inputs["base"] = torch.tensor([3, 0, 0], dtype=torch.int32)
    weights = {name: inputs.pop(name) for name in ("key_up", "value_up")}

    def define(net: Network, t: dict) -> Mapping[str, object]:
        key_up, value_up = (net.literal(weights[n]) for n in ("key_up", "value_up"))
        seen = lowering.visible_counts(net, t["past"], t["new"], queries)
        found = lowering.gather_window(
            net, t["cache"], t["past"], t["base"], window=WINDOW, queries=queries
        )
        keys, values = lowering.expand(net, found, key_up, value_up)
        query = net.transpose(net.concat([t["q_nope"], t["q_rope"]], 3), (0, 2, 1, 3))
        context = lowering.attend_context(
            net, query, keys, values, seen,
            scale=SCALE, window=WINDOW, past=t["past"], gate=t["gate"],
        )  # fmt: skip
        latent = lowering.attend_window(
            net, lowering.absorb(net, t["q_nope"], key_up), t["q_rope"], found, t["past"], seen,
            window=WINDOW, scale=SCALE, gate=t["gate"],
        )  # fmt: skip
        return {"context": context, "generation": lowering.project(net, latent, value_up)}

    got = run(define, inputs)
    near(got["context"], got["generation"])
    assert got["context"][0].abs().max() > 0.1 and not got["context"][2].any()


def test_bfloat16_network_stays_close() -> None:
    inputs = lengths([20, 3, 9], [1, 1, 0])
    inputs |= {k: v.bfloat16() for k, v in latent_inputs(1, 32).items()}
    visible = reference.visible_counts(inputs["past"], inputs["new"], 1)
    inputs["token_ids"] = reference.select_tokens(torch.randn(B, 1, 32), visible, KEPT)

    def define(net: Network, t: dict) -> Mapping[str, object]:
        seen = lowering.visible_counts(net, t["past"], t["new"], 1)
        args = (net, t["q_latent"], t["q_rope"], t["cache"], t["token_ids"], seen)
        return {"out": lowering.attend_generation(*args, scale=SCALE, gate=t["gate"])}

    got = run(define, inputs)["out"]
    want = reference.latent_attention(
        inputs["q_latent"].float(),
        inputs["q_rope"].float(),
        inputs["cache"][:, 0].float(),
        inputs["token_ids"],
        scale=SCALE,
        gate=inputs["gate"],
    )
    assert got.dtype == torch.bfloat16
    assert ((got.float() - want).norm() / want.norm()) < 2e-2
