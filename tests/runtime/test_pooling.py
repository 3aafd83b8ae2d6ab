"""Embeddings of real engines against transformers, alone and beside generation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from converters.dots3.oracle import Oracle as Dots3Oracle
from converters.qwen38.oracle import Oracle as Qwen38Oracle
from plugins.support.errors import UsageError
from runtime.engine import Engine
from runtime.pooling import Pool
from runtime.requests import GenerationRequest
from runtime.session import Session
from tests.fixtures.qwen38_deterministic import GOLDEN_GREEDY, GOLDEN_PROMPT
from tests.runtime.engines import write_engine

TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def qwen38(deterministic_engine: Path) -> Engine:
    return Engine.load(deterministic_engine, executor="interpreter", device="cpu")


@pytest.fixture(scope="module")
def hidden(deterministic_checkpoint: Path) -> Iterator[Qwen38Oracle]:
    yield Qwen38Oracle(deterministic_checkpoint, "float32")


def _prompt(length: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    ids: list[int] = torch.randint(3, 500, (length,), generator=generator).tolist()
    return ids


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x / x.norm()


def _embed(session: Session, prompt: list[int]) -> torch.Tensor:
    ids, last = session.submit(GenerationRequest(prompt, 0, embed=True)).result()
    assert (ids, last.finish_reason) == ([], "stop")
    assert last.embedding is not None
    assert last.embedding.dtype == torch.float32
    return last.embedding


@pytest.mark.parametrize("length", [1, 10, 64, 65, 150])
def test_mean(qwen38: Engine, hidden: Qwen38Oracle, length: int) -> None:
    prompt = _prompt(length)
    with Session(qwen38, threaded=False) as session:
        found = _embed(session, prompt)
    states = hidden.run(prompt)["final_hidden"]
    assert torch.allclose(found, _unit(states.mean(0)), atol=TOLERANCE)
    if length > 1:
        # The check tells one pooling, and one prompt, from another.
        for other in (states[-1], states[:-1].mean(0), states.sum(0) + states[0]):
            assert not torch.allclose(found, _unit(other), atol=10 * TOLERANCE)


def test_last_with_drafts(drafting_engine: Path) -> None:
    oracle = Dots3Oracle(drafting_engine.with_name(f"{drafting_engine.name}-hf"), "float32")
    engine = Engine.load(drafting_engine, executor="interpreter", device="cpu")
    with Session(engine, threaded=False) as session:
        for length in (1, 64, 90):
            prompt = _prompt(length)
            states = oracle.run(prompt)["final_hidden"]
            assert torch.allclose(_embed(session, prompt), _unit(states[-1]), atol=1e-4)
            assert length == 1 or not torch.allclose(
                _embed(session, prompt), _unit(states.mean(0)), atol=1e-3
            )


def test_beside_generation(qwen38: Engine) -> None:
    prompts = [_prompt(n) for n in (3, 100, 17, 64, 130)]
    with Session(qwen38, threaded=False) as session:
        alone = [_embed(session, prompt) for prompt in prompts]
        handles = []
        for prompt in prompts:
            handles.append(session.submit(GenerationRequest(prompt, 0, embed=True)))
            handles.append(session.submit(GenerationRequest(GOLDEN_PROMPT, 16)))
        results = [handle.result() for handle in handles]
    for vector, (_, last) in zip(alone, results[::2], strict=True):
        assert last.embedding is not None
        assert torch.allclose(last.embedding, vector, atol=TOLERANCE)
    assert [ids for ids, _ in results[1::2]] == [GOLDEN_GREEDY] * len(prompts)


def test_refusals(qwen38: Engine, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no tokens"):
        GenerationRequest([1], 4, embed=True).check(qwen38.config)
    with pytest.raises(UsageError, match="too long"):
        GenerationRequest([1] * 256, 0, embed=True).check(qwen38.config)
    with pytest.raises(UsageError, match="no pooling"):
        GenerationRequest([1], 0, embed=True).check(write_engine(tmp_path / "engine"))


@pytest.mark.parametrize("value", [0.0, float("inf"), float("nan")])
def test_no_vector_without_direction(value: float) -> None:
    pool = Pool("mean")
    pool.add(torch.full((2, 4), value))
    with pytest.raises(ArithmeticError):
        pool.vector()
