"""Speculative decoding changes how fast tokens come, never which."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch

from plugins.support.errors import UsageError
from runtime.engine import Engine
from runtime.requests import GenerationRequest
from runtime.sampling import SamplingParams
from runtime.session import Session, prompt_logits
from runtime.speculative import Drafter, DraftState, draft_logits

NEW_TOKENS = 14
CHANCE = random.Random(11)
PROMPTS = [
    [CHANCE.randrange(3, 500) for _ in range(CHANCE.choice((1, 2, 9, 40, 64, 90)))]
    for _ in range(50)
]


@pytest.fixture(scope="module")
def engine(drafting_engine: Path) -> Iterator[Engine]:
    opened = Engine.load(drafting_engine, executor="interpreter", device="cpu")
    yield opened
    opened.close()


def _answers(
    engine: Engine, prompts: Sequence[list[int]], drafts: int | None, **sampling: float
) -> tuple[list[list[int]], int, int]:
    """Answers, and how many drafts were verified and accepted."""
    with Session(engine, num_draft_tokens=drafts) as session:
        handles = [
            session.submit(
                GenerationRequest(prompt, NEW_TOKENS, SamplingParams(seed=i, **sampling))  # type: ignore[arg-type]
            )
            for i, prompt in enumerate(prompts)
        ]
        results = [handle.result() for handle in handles]
        assert [last.error for _, last in results] == [None] * len(prompts)
        totals = session.stats().totals
    return [ids for ids, _ in results], totals.drafted, totals.accepted


@pytest.fixture(scope="module")
def plain(engine: Engine) -> list[list[int]]:
    answers, drafted, _ = _answers(engine, PROMPTS, 0)
    assert drafted == 0
    return answers


@pytest.mark.parametrize("drafts", [1, 2, 3])
def test_fifty_prompts_are_answered_the_same(
    engine: Engine, plain: list[list[int]], drafts: int
) -> None:
    answers, drafted, _ = _answers(engine, PROMPTS, drafts)
    assert answers == plain
    assert drafted >= drafts * len(PROMPTS)


def test_sampled_answers_are_the_same(engine: Engine) -> None:
    wish = {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.2}
    prompts = PROMPTS[:12]
    expected = _answers(engine, prompts, 0, **wish)[0]
    assert _answers(engine, prompts, 3, **wish)[0] == expected
    assert expected != _answers(engine, prompts, 0)[0]


def _force(monkeypatch: pytest.MonkeyPatch, answers: Mapping[int, list[int]], pattern: str) -> None:
    """Replace guesses: right where the pattern says 1, wrong elsewhere.

    `answers` are what must come, by the length of the prompt, which tells sequences apart.
    """
    real = Drafter.extend

    def extend(drafter: Drafter, states: Mapping[int, DraftState], width: int) -> None:
        real(drafter, states, width)
        for state in states.values():
            start = next(n for n in answers if n <= state.cached < n + NEW_TOKENS)
            # The newest token of the sequence stands at position `cached`.
            coming = [*answers[start][state.cached - start + 1 :], *[3] * len(pattern)]
            state.tokens = [
                token if right == "1" else (token + 1) % 500
                for token, right in zip(coming, pattern, strict=False)
            ]

    monkeypatch.setattr(Drafter, "extend", extend)


@pytest.mark.parametrize("pattern", ["".join(bits) for bits in itertools.product("01", repeat=3)])
def test_every_pattern_of_acceptance(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, pattern: str
) -> None:
    prompts = [[5] * 4, [9, 8, 7] * 10, [21, 33] * 32]
    expected = _answers(engine, prompts, 0)[0]
    answers = {len(p): a for p, a in zip(prompts, expected, strict=True)}
    _force(monkeypatch, answers, pattern)
    found, drafted, accepted = _answers(engine, prompts, 3)
    assert found == expected
    right = len(pattern) - len(pattern.lstrip("1"))
    # Every step gives the accepted drafts and one token more; the last one may give fewer.
    steps = -(-(NEW_TOKENS - 1) // (right + 1))
    assert drafted == 3 * 3 * steps
    assert 3 * (steps - 1) * right <= accepted <= 3 * steps * right


def test_a_wrong_rollback_is_noticed(
    engine: Engine, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison above sees rows of rejected drafts in a window."""
    real = engine._inputs

    def forgetful(phase: str, rows: Sequence[object]) -> dict[str, torch.Tensor]:
        inputs = real(phase, rows)  # type: ignore[arg-type]
        inputs["rejected_lengths"] = torch.zeros_like(inputs["rejected_lengths"])
        return inputs

    monkeypatch.setattr(engine, "_inputs", forgetful)
    assert _answers(engine, PROMPTS, 3)[0] != plain


def test_draft_logits_do_not_depend_on_the_chunks(engine: Engine) -> None:
    prompt = PROMPTS[3] + [17] * 70
    whole = draft_logits(engine, prompt)
    assert whole.shape == (len(prompt) - 1, 512)
    shorter = draft_logits(engine, prompt[:50])
    torch.testing.assert_close(shorter, whole[:49], atol=5e-5, rtol=0.0)


def test_the_first_guess_is_the_draft_layers_best(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the last position of a prompt comes the chosen token; the guess is about the next."""
    prompt = PROMPTS[3] + [17] * 70
    guesses: list[int] = []
    real = Drafter.extend

    def extend(drafter: Drafter, states: Mapping[int, DraftState], width: int) -> None:
        guesses.extend(state.tokens[0] for state in states.values())
        real(drafter, states, width)

    monkeypatch.setattr(Drafter, "extend", extend)
    first = int(prompt_logits(engine, prompt)[-1].argmax())
    _answers(engine, [prompt], 1)
    assert guesses[0] == int(draft_logits(engine, [*prompt, first])[-1].argmax())


def test_refusals(engine: Engine) -> None:
    with pytest.raises(UsageError, match="cannot verify that many"):
        Session(engine, num_draft_tokens=4)
    with pytest.raises(UsageError, match="no draft logits"):
        draft_logits(engine, [5])
    # A refused session leaves the engine free.
    Session(engine, num_draft_tokens=3).close()
