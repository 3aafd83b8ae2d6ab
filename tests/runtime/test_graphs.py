"""Generation calls as graphs: same answers, uniform batches, nothing that waits for the device.

Graphs are recorded calls here; on a CUDA device the last test captures and replays real ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from converters.definition import EngineLimits
from plugins.support.errors import UsageError
from runtime.contract import read_config
from runtime.engine import Engine
from runtime.executors.interpreter import InterpreterExecutor
from runtime.host_inputs import open_host_inputs
from runtime.interpreter.kinds import algebra, attention, shapes
from runtime.requests import GenerationRequest
from runtime.rows import Row
from runtime.session import Session, prompt_logits
from tests.converters.dots3.tiny import tiny as dots3
from tests.converters.qwen38.tiny import tiny as qwen38
from tests.fixtures.qwen38_deterministic import GOLDEN_GREEDY, GOLDEN_PROMPT
from tests.runtime.fake_trt import FakeStream

CPU = torch.device("cpu")


@pytest.fixture
def graphed(deterministic_engine: Path) -> Iterator[tuple[Engine, FakeStream]]:
    config, stream = read_config(deterministic_engine), FakeStream()
    executor = InterpreterExecutor(config, deterministic_engine, CPU, stream)
    engine = Engine(config, executor, open_host_inputs(config, deterministic_engine))
    yield engine, stream
    engine.close()


def test_replayed_calls_give_the_golden_continuation(graphed: tuple[Engine, FakeStream]) -> None:
    engine, stream = graphed
    with Session(engine, threaded=False) as session:
        request = GenerationRequest(GOLDEN_PROMPT, 16)
        assert session.submit(request).result()[0] == GOLDEN_GREEDY
        # Both sets of states of one width.
        assert stream.captures == 2 and stream.replays > 5
        others = [session.submit(GenerationRequest(GOLDEN_PROMPT[:n], 9)) for n in (3, 30, 44)]
        again = session.submit(request)
        assert again.result()[0] == GOLDEN_GREEDY
        assert all(handle.result()[1].finish_reason == "length" for handle in others)


def test_a_graph_of_other_addresses_would_be_noticed(graphed: tuple[Engine, FakeStream]) -> None:
    """Negative control: replaying the graph of the other set of states."""
    engine, _ = graphed
    memory = engine.executor._memory["context"]  # type: ignore[attr-defined]
    whole = prompt_logits(engine, GOLDEN_PROMPT, phase="generation")
    assert torch.equal(prompt_logits(engine, GOLDEN_PROMPT, phase="generation"), whole)
    forms = engine.executor._repeated._forms  # type: ignore[attr-defined]
    width = engine.executor.generation_widths[0]
    for swapped in (True, False):
        forms[(width, swapped)].replay = forms[(width, False)].replay
    wrong = prompt_logits(engine, GOLDEN_PROMPT, phase="generation")
    assert (wrong - whole).abs().max() > 1e-2 and memory is not None


class Spy:
    """Keeps the lengths of every generation call."""

    def __init__(self, engine: Engine) -> None:
        self.lengths: list[list[int]] = []
        original: Callable[..., Any] = engine.executor.step

        def step(phase: str, first: int, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
            if phase == "generation":
                self.lengths.append(inputs["new_lengths"].tolist())
            result: torch.Tensor = original(phase, first, inputs)
            return result

        engine.executor.step = step  # type: ignore[method-assign,assignment]


@pytest.mark.parametrize("drafts", [0, 2, 3])
def test_every_generation_call_is_uniform(drafting_engine: Path, drafts: int) -> None:
    """Whatever prompts, lengths and ends coincide; all else goes through the context engine."""
    engine = Engine.load(drafting_engine, executor="interpreter", device="cpu")
    spy = Spy(engine)
    prompts = [[(7 * n + i) % 500 + 3 for i in range(n)] for n in (1, 5, 64, 30, 65, 2, 17)]
    with Session(engine, threaded=False, num_draft_tokens=drafts) as session:
        handles = [
            session.submit(GenerationRequest(prompt, 3 + 2 * i)) for i, prompt in enumerate(prompts)
        ]
        for handle in handles:
            assert handle.result()[1].finish_reason == "length"
    engine.close()
    assert {length for call in spy.lengths for length in call} == {0, 1 + drafts}
    assert any(0 in call for call in spy.lengths)


def test_a_batch_that_is_not_uniform_is_refused(drafting_engine: Path) -> None:
    engine = Engine.load(drafting_engine, executor="interpreter", device="cpu")
    ids = list(range(3, 20))
    with pytest.raises(UsageError, match="uniform"):
        engine.step("generation", 0, [Row(ids, 0, 2, range(2)), None, Row(ids, 0, 1, range(1))])
    engine.close()


class Watch(TorchDispatchMode):
    """Notes what a CUDA graph cannot hold: values read back, and values made on the host."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "equal", "lift_fresh", "is_nonzero", "unique")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in self.FORBIDDEN:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def _drivers() -> Sequence[Any]:
    limits = EngineLimits(2, 192, chunk_size=128, max_draft_len=1)
    made = []
    for checkpoint in (qwen38(), dots3(index_topk=16)):
        made += [checkpoint.driver(limits, plugins=plugins) for plugins in (False, True)]
    return made


def test_a_prepared_generation_call_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checked on the CPU, with the checks of indices left out that only a CPU makes."""
    for driver in _drivers():
        for module in (algebra, attention, shapes):
            monkeypatch.setattr(module, "free_to_read", lambda x: False)
        run = driver.runs["generation"]
        driver.call("context", [[5] * 40, [6] * 3])
        assert run.host_reads == ()
        for _ in range(3):
            driver.call("generation", [[7, 8], []])
        assert run.host_reads == () and len(run.plans) == 1
        plan = next(iter(run.plans.values()))
        registers = plan.template.copy()
        inputs = _inputs(driver)
        for name, value in inputs.items():
            registers[run._slots[name]] = value
        with torch.no_grad(), Watch() as watch:
            plan.run(registers)
        assert watch.found == []
        # With them, what is forbidden is seen.
        for module in (algebra, attention, shapes):
            monkeypatch.setattr(module, "free_to_read", lambda x: True)
        registers = plan.template.copy()
        for name, value in inputs.items():
            registers[run._slots[name]] = value
        with torch.no_grad(), Watch() as watch:
            plan.run(registers)
        assert "_local_scalar_dense" in watch.found


def _inputs(driver: Any) -> dict[str, torch.Tensor]:
    """Inputs of a generation call of two slots."""
    program = driver.programs["generation"]
    given = {
        "past_lengths": torch.tensor([50, 50], dtype=torch.int32),
        "new_lengths": torch.tensor([2, 0], dtype=torch.int32),
    }
    for name in program.inputs:
        if name in driver.memory:
            given[name] = driver.memory[name][:2]
        elif name not in given:
            info = program.tensors[name]
            sizes = [2 if size == -1 else size for size in info.shape]
            given[name] = torch.zeros(sizes, dtype=getattr(torch, info.dtype))
    return given


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu(deterministic_engine: Path) -> None:
    config, device = read_config(deterministic_engine), torch.device("cuda", 0)
    executor = InterpreterExecutor(config, deterministic_engine, device)
    engine = Engine(config, executor, open_host_inputs(config, deterministic_engine))
    with Session(engine, threaded=False) as session:
        assert session.submit(GenerationRequest(GOLDEN_PROMPT, 16)).result()[0] == GOLDEN_GREEDY
    assert executor._repeated is not None
    assert any(form.replay is not None for form in executor._repeated._forms.values())
    engine.close()
