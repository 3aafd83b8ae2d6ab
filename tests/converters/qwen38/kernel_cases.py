"""The network with its plugin layers run by their kernels, in Triton's interpreter.

Run by test_network_plugins.py in a process of its own: the interpreter must be chosen before a
kernel is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from converters.definition import EngineLimits
from plugins import operations
from runtime.interpreter.execute import Interpreter
from tests.converters.qwen38.driver import Driver
from tests.converters.qwen38.tiny import PERIOD, tiny

LIMITS = EngineLimits(3, 192, chunk_size=64, max_draft_len=2, max_logits_tokens=64)
TOKENS = torch.randint(3, 500, (100,), generator=torch.Generator().manual_seed(5)).tolist()


def by_kernel(op: str, ran: list[str]) -> Any:
    """An operation as the interpreter calls implementations, always by its kernel."""
    operation = operations.OPERATIONS[op]

    def run(inputs: tuple[Tensor, ...], attributes: Mapping[str, Any]) -> tuple[Tensor, ...]:
        spec = operation.spec(attributes)
        given = {a.name: tensor for a, tensor in zip(spec.inputs, inputs, strict=True)}
        made = operations.launch(operation, given, attributes)
        made |= {after: given[before] for after, before in spec.aliases.items()}
        ran.append(op)
        return tuple(made[a.name] for a in spec.outputs)

    return run


def answers(driver: Driver) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Two slots, one of them used before, and a padding slot; what is left in the memory."""
    driver.reset()
    driver.call("context", [TOKENS[50:80], [], []])
    driver.free(0)
    rows = [r["logits"] for r in driver.call("context", [TOKENS[:33], [], TOKENS[40:45]])]
    for start in range(33, 42, 3):
        pieces = [TOKENS[start : start + 3], [], TOKENS[start + 12 : start + 15]]
        rows += [r["logits"] for r in driver.call("generation", pieces)]
    return rows, {name: tensor.clone() for name, tensor in driver.memory.items()}


@pytest.mark.parametrize("broken", [False, True])
def test_kernels_in_the_network_give_what_the_definitions_give(broken: bool) -> None:
    """Of the generation engine: a chunk of a prompt has too many programs for the interpreter."""
    driver = tiny(**PERIOD).driver(LIMITS, plugins=True)
    wanted, memory = answers(driver)
    ran: list[str] = []
    program = driver.programs["generation"]
    names = {n.attributes["op"] for n in program.nodes if n.kind == "plugin"}
    ops = {name: by_kernel(name, ran) for name in names}
    if broken:
        # Negative control: the raw keys of an open block are taken for another slot's.
        right, state = ops["qsa::prepare"], 12
        ops["qsa::prepare"] = lambda inputs, attributes: right(
            (*inputs[:state], inputs[state].roll(1, 0), *inputs[state + 1 :]), attributes
        )
    driver.runs["generation"] = Interpreter(program, driver.weights, plugin_ops=ops)
    found, left = answers(driver)
    off = max(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True) if len(b))
    caches = [name for name in memory if "cache" in name]
    left_off = max(float((left[name] - memory[name]).abs().max()) for name in caches)
    assert set(ran) == {"qsa::prepare", "qsa::score", "qsa::select", "qsa::attend"} == names
    assert (left_off < 1e-5) == (not broken)
    assert broken or off < 1e-5
