"""The network of full TensorRT, with QSA as plugin layers, against the oracle and the lowering.

Full TensorRT is a stand-in (`tests.plugins.full_trt`); the interpreter runs the plugin layers by
their definition. The kernels' agreement with it is tested in `tests.plugins`, and in a network in
kernel_cases.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from converters.definition import EngineLimits
from converters.qwen38.oracle import Oracle, canonical
from plugins import operations
from plugins.qsa import kernel
from runtime.interpreter.execute import Interpreter
from tests.converters.qwen38.driver import Driver
from tests.converters.qwen38.test_network import LONG
from tests.converters.qwen38.tiny import PERIOD, Tiny, tiny
from tests.plugins.interpreted import assert_passes

LIMITS = EngineLimits(2, 256, chunk_size=128, max_draft_len=2, max_logits_tokens=128)
TOKENS = LONG[:110]


@pytest.fixture(scope="module")
def checkpoint() -> Tiny:
    return tiny()


@pytest.fixture(scope="module")
def driver(checkpoint: Tiny) -> Driver:
    return checkpoint.driver(LIMITS, plugins=True)


@pytest.fixture(scope="module")
def expected(checkpoint: Tiny) -> dict[str, Tensor]:
    return Oracle(checkpoint.hf_dir, lowest_id_wins=True).run(TOKENS)


@pytest.fixture(autouse=True)
def _fresh(driver: Driver) -> None:
    driver.reset()


def _close(found: Tensor, expected: Tensor, tolerance: float = 5e-5) -> None:
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=0.0)


def _ops(driver: Driver, phase: str) -> list[str]:
    """Plugin operations of one layer, in order."""
    nodes = [n for n in driver.programs[phase].nodes if n.kind == "plugin"]  # type: ignore[index]
    first = nodes[0].scope.split(".")[1]
    return [n.attributes["op"] for n in nodes if n.scope.split(".")[1] == first]


def _kinds(driver: Driver, phase: str) -> set[str]:
    """Kinds of layers in the sparse attention."""
    nodes = driver.programs[phase].nodes  # type: ignore[index]
    return {n.kind for n in nodes if n.scope.startswith("layers.3.mixer")}


def test_attention_is_plugin_layers_and_nothing_else(checkpoint: Tiny, driver: Driver) -> None:
    first = ["qsa::prepare", "qsa::score", "qsa::select"]
    assert _ops(driver, "generation") == [*first, "qsa::attend"]
    prefill = ["qsa::unite", "qsa::attend_tile", "qsa::attend_apart", "qsa::attend_dense"]
    assert _ops(driver, "context") == [*first, *prefill]
    plain = checkpoint.driver(LIMITS)
    native = {"softmax", "topk", "kv_cache_update", "rotary_embedding", "reduce"}
    for phase in ("context", "generation"):
        assert not native & _kinds(driver, phase)
        assert native <= _kinds(plain, phase) and "plugin" not in _kinds(plain, phase)


def test_caches_are_the_same_inputs_and_outputs_in_both_flavours(
    checkpoint: Tiny, driver: Driver
) -> None:
    """A plugin layer updates network inputs in place, and nothing reads one before that."""
    plain = checkpoint.driver(LIMITS)
    for phase in ("context", "generation"):
        found, native = driver.programs[phase], plain.programs[phase]
        assert found.aliases == native.aliases and len(found.aliases) == 6
        assert set(found.outputs) == set(native.outputs)
        for name in {*found.aliases, *found.aliases.values()}:
            assert found.tensors[name] == native.tensors[name], name
        for cache in found.aliases.values():
            (reader,) = [node for node in found.nodes if cache in node.inputs]
            assert reader.attributes["op"] == "qsa::prepare"
        assert driver.definitions[phase].kinds == plain.definitions[phase].kinds


def test_every_tap_equals_the_oracle(driver: Driver, expected: dict[str, Tensor]) -> None:
    taps = list(driver.programs["context"].taps)
    pieces = [driver.call("context", [TOKENS[:64]], fetch=taps)[0]]
    pieces.append(driver.call("context", [TOKENS[64:]], fetch=taps)[0])
    for name, value in expected.items():
        found = canonical(name, torch.cat([piece[name] for piece in pieces]))
        if name.endswith("selected_blocks"):
            assert torch.equal(found, value), name
        else:
            _close(found, value, 1e-4)


@pytest.mark.parametrize("lengths", [[7, 64, 39], [1, 3, 60, 46]])
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


def test_uniform_decode_beside_a_padding_slot(driver: Driver, expected: dict[str, Tensor]) -> None:
    rows = [driver.call("context", [[], TOKENS[:50]])[1]["logits"]]
    for start in range(50, 110, 3):
        before = {name: value.clone() for name, value in driver.memory.items()}
        pieces = [[], TOKENS[start : start + 3]]
        rows.append(driver.call("generation", pieces)[1]["logits"])
        for name, value in before.items():
            # Unlike the update by native layers, not even rows that nothing reads are written.
            assert torch.equal(driver.memory[name][0], value[0]), name
            # A step of three tokens completes no block when it begins with one.
            closed = start // 4 != (start + 3) // 4
            same = name.startswith("index_key_cache") and not closed
            assert torch.equal(driver.memory[name][1], value[1]) == same, name
    _close(torch.cat(rows), expected["logits"])


def test_a_wrong_plugin_is_seen(driver: Driver, expected: dict[str, Tensor]) -> None:
    """Negative controls: another selection, no gate, and keys of the token before."""
    right = {
        name: operations.implementation(name, driver_attributes(driver, name))
        for name in ("qsa::prepare", "qsa::select", "qsa::attend_tile")
    }

    def late(inputs: tuple, attributes: dict) -> tuple:
        outputs = right["qsa::prepare"](inputs)
        outputs[1].copy_(outputs[1].roll(1, 2))
        return outputs

    def shifted(inputs: tuple, attributes: dict) -> tuple:
        (ids,) = right["qsa::select"](inputs)
        return (torch.where(ids > 0, ids - 1, ids),)

    def ungated(inputs: tuple, attributes: dict) -> tuple:
        return right["qsa::attend_tile"]((*inputs[:-1], torch.zeros_like(inputs[-1])))

    wrong = {"qsa::prepare": late, "qsa::select": shifted, "qsa::attend_tile": ungated}
    for name, broken in wrong.items():
        driver.runs["context"] = Interpreter(
            driver.programs["context"], driver.weights, plugin_ops={name: broken}
        )
        found = driver.call("context", [TOKENS])[0]["logits"]
        assert (found - expected["logits"]).abs().max() > 1e-2, name
        driver.reset()
    driver.bind(driver.weights)


def driver_attributes(driver: Driver, op: str) -> dict:
    """Attributes of a plugin operation in the context network."""
    nodes = [n for n in driver.programs["context"].nodes if n.attributes.get("op") == op]
    return nodes[0].attributes["values"]


@pytest.mark.parametrize(
    ("slots", "ops"),
    [(1, ["qsa::attend_once", "qsa::merge"]), (4, ["qsa::attend_split", "qsa::merge"])],
)
def test_split_rows_and_long_selections_equal_the_lowering(
    slots: int, ops: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A budget of 64 blocks, cut over programs; longer rows selected by groups of blocks.

    Eight index heads, so that no score is zero for several blocks: ties are open in the lowering.
    """
    monkeypatch.setattr(kernel, "SELECT_WHOLE", 32)
    checkpoint = tiny(**PERIOD, indexer_budget=256, indexer_n_heads=8)
    limits = EngineLimits(slots, 512, chunk_size=256, max_logits_tokens=256)
    tokens = torch.randint(3, 500, (300,), generator=torch.Generator().manual_seed(3)).tolist()
    logits = []
    for plugins in (True, False):
        driver = checkpoint.driver(limits, plugins=plugins)
        if plugins:
            chosen = ["qsa::prepare", "qsa::score_groups", "qsa::select_grouped"]
            assert _ops(driver, "generation") == [*chosen, *ops]
            assert _ops(driver, "context")[:3] == chosen
        others = [[5, 6]] * (slots - 1)
        rows = [driver.call("context", [tokens[:256], *others])[0]["logits"]]
        rows.append(driver.call("context", [tokens[256:290], *others])[0]["logits"])
        for token in tokens[290:]:
            rows.append(driver.call("generation", [[token], *[[8]] * (slots - 1)])[0]["logits"])
        logits.append(torch.cat(rows))
    _close(logits[0], logits[1])


def test_kernels_in_the_network() -> None:
    assert_passes(Path(__file__).with_name("kernel_cases.py"))


def test_budgets_that_the_kernels_do_not_take_stay_native() -> None:
    checkpoint = tiny(**PERIOD, indexer_budget=24, indexer_compress_ratio=8)
    driver = checkpoint.driver(LIMITS, plugins=True)
    assert "plugin" not in _kinds(driver, "context") | _kinds(driver, "generation")
