"""The networks of full TensorRT, with DSA as plugin layers, against the oracle and the lowering.

Full TensorRT is a stand-in (`tests.plugins.full_trt`); the interpreter runs the plugin layers by
their definition. The kernels' agreement with it is tested in `tests.plugins`.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from converters.definition import EngineLimits
from converters.dots3.oracle import Oracle, canonical
from plugins import operations
from plugins.dsa import kernel
from runtime.interpreter.execute import Interpreter
from tests.converters.dots3.driver import Driver
from tests.converters.dots3.test_network import IDS, _padding_is_inert
from tests.converters.dots3.tiny import Tiny, tiny

LIMITS = EngineLimits(2, 192, chunk_size=128, max_draft_len=2, max_logits_tokens=128)
TOKENS = IDS[:110]
DECODE = ["dsa::attend_split", "dsa::merge"]
WINDOW = ["dsa::window_scores", "dsa::window_values"]


@pytest.fixture(scope="module")
def checkpoint() -> Tiny:
    """16 tokens are kept, because the selection kernels take powers of two."""
    return tiny(index_topk=16)


@pytest.fixture(scope="module")
def driver(checkpoint: Tiny) -> Driver:
    return checkpoint.driver(LIMITS, plugins=True)


@pytest.fixture(scope="module")
def expected(checkpoint: Tiny) -> dict[str, Tensor]:
    return Oracle(checkpoint.hf_dir).run(TOKENS)


@pytest.fixture(autouse=True)
def _fresh(driver: Driver) -> None:
    driver.reset()


def _close(found: Tensor, expected: Tensor, tolerance: float = 5e-5) -> None:
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=0.0)


def _ops(driver: Driver, phase: str, layer: int) -> list[str]:
    """Plugin operations of one layer, in order."""
    return [
        node.attributes["op"]
        for node in driver.programs[phase].nodes  # type: ignore[index]
        if node.kind == "plugin" and f"{node.scope}.".startswith(f"layers.{layer}.")
    ]


def test_attention_is_plugin_layers(driver: Driver) -> None:
    select = ["dsa::score", "dsa::select_chunk"]
    for layer, kind in enumerate(driver.config.dots3.layer_types):
        full = kind == "full_attention"
        assert _ops(driver, "generation", layer) == ([*select, "dsa::attend"] if full else WINDOW)
        assert _ops(driver, "context", layer) == (
            [*select, "dsa::attend"] if full else ["dsa::dense"]
        )
    for phase in ("context", "generation"):
        nodes = driver.programs[phase].nodes  # type: ignore[index]
        inside = {n.kind for n in nodes if n.scope.endswith("attention")}
        assert "plugin" in inside and not {"softmax", "topk"} & inside


def test_every_tap_equals_the_oracle(driver: Driver, expected: dict[str, Tensor]) -> None:
    taps = [t for t in driver.programs["context"].taps if t in expected]
    pieces = [driver.call("context", [TOKENS[:64]], fetch=taps)[0]]
    pieces.append(driver.call("context", [TOKENS[64:]], fetch=taps)[0])
    for name, value in expected.items():
        found = torch.cat([canonical(name, piece[name]) for piece in pieces])
        if name.endswith("selected_tokens"):
            assert torch.equal(found, value), name
        else:
            _close(found, value)


@pytest.mark.parametrize("lengths", [[7] * 15 + [5], [1, 8, 9, 10, 64, 18]], ids=str)
def test_chunks_equal_the_oracle(
    driver: Driver, expected: dict[str, Tensor], lengths: list[int]
) -> None:
    rows, start = [], 0
    for length in lengths:
        rows.append(driver.call("context", [[], TOKENS[start : start + length]])[1]["logits"])
        start += length
    _close(torch.cat(rows), expected["logits"])


def test_a_used_slot_equals_a_fresh_one(driver: Driver, expected: dict[str, Tensor]) -> None:
    driver.call("context", [[9] * 90])
    driver.call("generation", [[7, 7, 7]])
    driver.free(0)
    _close(driver.call("context", [TOKENS])[0]["logits"], expected["logits"])


@pytest.mark.parametrize("start", [0, 40])
def test_uniform_decode_beside_a_padding_slot(
    driver: Driver, expected: dict[str, Tensor], start: int
) -> None:
    """From the first token on, and behind a prompt; some steps accept fewer tokens."""
    rows = [driver.call("context", [[], TOKENS[:start]])[1]["logits"]] if start else []
    position, accepted = start, 3
    while position + 3 <= len(TOKENS):
        before = {name: value.clone() for name, value in driver.memory.items()}
        pieces = [[], TOKENS[position : position + 3]]
        out = driver.call("generation", pieces, accept=[0, accepted])[1]["logits"]
        _padding_is_inert(driver, before, pieces)
        rows.append(out[:accepted])
        position += accepted
        accepted = accepted % 3 + 1
    _close(torch.cat(rows), expected["logits"][:position])


def test_a_wrong_plugin_is_seen(driver: Driver, expected: dict[str, Tensor]) -> None:
    """Negative controls: another selection, a shifted window, a missing gate."""
    nodes = {n.attributes["op"]: n for n in driver.programs["context"].nodes if n.kind == "plugin"}
    right = {
        name: operations.implementation(name, node.attributes["values"])
        for name, node in nodes.items()
    }

    def shifted(inputs: tuple, attributes: dict) -> tuple:
        (tokens,) = right["dsa::select_chunk"](inputs)
        return (torch.where(tokens > 0, tokens - 1, tokens),)

    def ungated(inputs: tuple, attributes: dict) -> tuple:
        return right["dsa::attend"]((*inputs[:-1], torch.zeros_like(inputs[-1])))

    def late(inputs: tuple, attributes: dict) -> tuple:
        run = operations.implementation("dsa::dense", {**attributes, "window": 8})
        return run(inputs)

    for name, broken in (
        ("dsa::select_chunk", shifted),
        ("dsa::attend", ungated),
        ("dsa::dense", late),
    ):
        driver.runs["context"] = Interpreter(
            driver.programs["context"], driver.weights, plugin_ops={name: broken}
        )
        found = driver.call("context", [TOKENS])[0]["logits"]
        assert (found - expected["logits"]).abs().max() > 1e-2, name
        driver.reset()
    driver.bind(driver.weights)


def test_split_rows_and_long_selections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """128 tokens kept, their lists cut over two programs, chosen in chunks on two levels."""
    monkeypatch.setattr(kernel, "SELECT_CHUNK", 256)
    monkeypatch.setattr(kernel, "SELECT_CHUNK_FEW", 256)
    kinds = ["full_attention", "sliding_attention"]
    checkpoint = tiny(draft=False, num_hidden_layers=2, layer_types=kinds, index_topk=128)
    driver = checkpoint.driver(EngineLimits(1, 512, chunk_size=320), plugins=True)
    select = ["dsa::score", "dsa::select_chunk"]
    assert _ops(driver, "generation", 0)[:2] == select
    assert _ops(driver, "generation", 0)[-2:] == DECODE
    assert set(_ops(driver, "generation", 0)[2:-2]) == {"dsa::select_among"}
    tokens = torch.randint(3, 500, (330,), generator=torch.Generator().manual_seed(3)).tolist()
    wanted = Oracle(checkpoint.hf_dir).run(tokens)["logits"]
    rows = [driver.call("context", [tokens[:320]])[0]["logits"]]
    rows += [driver.call("generation", [[token]])[0]["logits"] for token in tokens[320:]]
    _close(torch.cat(rows), wanted)


def test_counts_that_the_selection_kernels_do_not_take_stay_native() -> None:
    checkpoint = tiny()
    driver = checkpoint.driver(LIMITS, phases=("generation",), plugins=True)
    assert _ops(driver, "generation", 0) == ["dsa::attend"]
    wanted = Oracle(checkpoint.hf_dir).run(TOKENS[:60])["logits"]
    rows = [driver.call("generation", [TOKENS[i : i + 3]])[0]["logits"] for i in range(0, 60, 3)]
    _close(torch.cat(rows), wanted)
