"""The runtime over a real engine directory: golden numbers, and equal results however tokens
arrive.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.engine import Engine
from runtime.executors.interpreter import InterpreterExecutor
from runtime.requests import GenerationRequest
from runtime.sampling import SamplingParams
from runtime.session import Session, prompt_logits
from tests.fixtures.qwen38_deterministic import (
    GOLDEN_ARGMAX,
    GOLDEN_GREEDY,
    GOLDEN_LAST_LOGITS,
    GOLDEN_PROMPT,
)

# Two ways through the same fp32 arithmetic; the network's own rounding is 3e-6.
TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def engine(deterministic_engine: Path) -> Engine:
    return Engine.load(deterministic_engine, executor="interpreter", device="cpu")


@pytest.fixture(scope="module")
def golden(engine: Engine) -> torch.Tensor:
    return prompt_logits(engine, GOLDEN_PROMPT)


def _prompt(length: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    ids: list[int] = torch.randint(3, 512, (length,), generator=generator).tolist()
    return ids


def test_golden_logits(golden: torch.Tensor) -> None:
    assert golden.shape == (len(GOLDEN_PROMPT), 512)
    assert golden[-1, :6].tolist() == pytest.approx(GOLDEN_LAST_LOGITS, abs=2e-4)
    assert int(golden[-1].argmax()) == GOLDEN_ARGMAX


@pytest.mark.parametrize(
    "how", [{"chunk": [1, 12, 7, 1, 29]}, {"chunk": 17}, {"phase": "generation"}]
)
def test_a_prompt_can_be_cut_anywhere(
    engine: Engine, golden: torch.Tensor, how: dict[str, Any]
) -> None:
    assert torch.allclose(prompt_logits(engine, GOLDEN_PROMPT, **how), golden, atol=TOLERANCE)


def test_long_prompts_need_several_calls(engine: Engine) -> None:
    prompt = _prompt(150)
    whole = prompt_logits(engine, prompt)
    assert torch.allclose(prompt_logits(engine, prompt, [50] * 3), whole, atol=TOLERANCE)
    stepwise = prompt_logits(engine, prompt, phase="generation")
    assert torch.allclose(stepwise, whole, atol=TOLERANCE)


def test_a_used_slot_is_as_good_as_new(engine: Engine, golden: torch.Tensor) -> None:
    prompt_logits(engine, _prompt(200))
    assert torch.equal(prompt_logits(engine, GOLDEN_PROMPT), golden)


def test_golden_continuation_alone_and_in_company(engine: Engine) -> None:
    lengths = (3, 100, 17, 64, 50, 1)
    with Session(engine, threaded=False) as session:
        request = GenerationRequest(GOLDEN_PROMPT, 16)
        assert session.submit(request).result()[0] == GOLDEN_GREEDY
        alone = [session.submit(GenerationRequest(_prompt(n), 12)).result()[0] for n in lengths]
        handles = []
        for length in lengths:
            handles.append(session.submit(GenerationRequest(_prompt(length), 12)))
            handles.append(session.submit(request))
            session.step()
        results = [handle.result()[0] for handle in handles]
    assert results[0::2] == alone
    assert results[1::2] == [GOLDEN_GREEDY] * len(lengths)


def test_seeded_sampling_comes_back_in_any_company(engine: Engine) -> None:
    sampling = SamplingParams(temperature=0.8, top_k=40, top_p=0.95, seed=11)
    request = GenerationRequest(GOLDEN_PROMPT, 12, sampling)
    with Session(engine) as session:
        alone = session.submit(request).result()[0]
        crowd = [session.submit(GenerationRequest(_prompt(n), 20)) for n in (5, 70, 33)]
        again = session.submit(request).result()[0]
        assert all(handle.result()[1].finish_reason == "length" for handle in crowd)
    assert alone == again
    assert alone != GOLDEN_GREEDY[:12]


def test_forgotten_states_and_contexts_are_noticed(
    deterministic_engine: Path,
    engine: Engine,
    golden: torch.Tensor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The equalities above can fail: without fresh states or n-gram context logits differ."""
    with monkeypatch.context() as patch:
        patch.setattr(InterpreterExecutor, "begin", lambda self, slot: None)
        stale = prompt_logits(engine, GOLDEN_PROMPT)
    assert float((stale - golden).abs().max()) > 1e-2
    host = engine._host_inputs[0]
    with monkeypatch.context() as patch:
        original = type(host).__call__
        patch.setattr(
            type(host), "__call__", lambda s, t, c, n, r: original(s, t, c * 0 + s.fill, n, r)
        )
        contextless = prompt_logits(engine, GOLDEN_PROMPT, 17)
    assert float((contextless - golden).abs().max()) > 1e-2
    assert torch.equal(prompt_logits(engine, GOLDEN_PROMPT), golden)
