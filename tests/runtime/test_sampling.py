"""Sampling against its definition, written out per row in plain Python."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.support.errors import UsageError
from runtime.sampling import SamplingParams, TokenChooser, choose_tokens

VOCAB = 30


def _logits(rows: int, seed: int = 0, width: int = VOCAB) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, width, generator=generator) * 3


def _chooser(answer: tuple[int, ...] = (), **options: Any) -> TokenChooser:
    own = {"prompt", "end_ids", "bad_ids", "bias"}
    chooser = TokenChooser(
        SamplingParams(**{k: v for k, v in options.items() if k not in own}),
        VOCAB,
        **{k: v for k, v in options.items() if k in own},
    )
    for token in answer:
        chooser.accept(token)
    return chooser


def _token(logits: torch.Tensor, chooser: TokenChooser) -> int:
    return choose_tokens(logits, [chooser])[0].token_id


def _distribution(logits: list[float], params: SamplingParams) -> dict[int, float]:
    """Probabilities of the ids that can be drawn, from the definition of top-k and top-p."""
    order = sorted(range(len(logits)), key=lambda i: -logits[i])[: params.top_k or len(logits)]
    weights = [
        math.exp((logits[i] - logits[order[0]]) / params.effective_temperature) for i in order
    ]
    total = sum(weights)
    kept: dict[int, float] = {}
    reached = 0.0
    for token, weight in zip(order, weights, strict=True):
        if kept and params.top_p is not None and reached >= params.top_p:
            break
        kept[token] = weight / total
        reached += weight / total
    return {token: weight / sum(kept.values()) for token, weight in kept.items()}


def test_default_takes_the_most_likely_token_of_every_row() -> None:
    logits = _logits(5)
    results = choose_tokens(logits, [_chooser() for _ in range(5)])
    assert [result.token_id for result in results] == logits.argmax(-1).tolist()


def test_log_probs_are_the_models_own() -> None:
    logits = _logits(3)
    choosers = [
        _chooser(top_log_probs=4),
        _chooser((1, 2), temperature=2.0, seed=1, frequency_penalty=1.0),
        _chooser(top_log_probs=2, bad_ids=[[int(logits[2].argmax())]]),
    ]
    results = choose_tokens(logits, choosers)
    expected = torch.log_softmax(logits.double(), dim=-1)
    for row, result in enumerate(results):
        assert result.log_prob == pytest.approx(float(expected[row, result.token_id]), abs=1e-5)
    assert [len(result.top_log_probs) for result in results] == [4, 0, 2]
    best = torch.topk(expected[0], 4)
    assert [token for token, _ in results[0].top_log_probs] == best.indices.tolist()
    assert [value for _, value in results[0].top_log_probs] == pytest.approx(
        best.values.tolist(), abs=1e-5
    )


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 100),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.sampled_from([None, 0, 2, 3, 5, 29, 30, 1000]),
    top_p=st.sampled_from([None, 0.01, 0.5, 0.9, 1.0]),
)
def test_drawn_ids_are_those_of_the_definition(
    seed: int, temperature: float, top_k: int | None, top_p: float | None
) -> None:
    """Sweeping the random number finds every id, each as often as its probability says."""
    logits = _logits(1, seed)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    expected = _distribution(logits[0].tolist(), params)
    draws = 400
    choosers = [_Fixed(params, VOCAB, draw=(index + 0.5) / draws) for index in range(draws)]
    results = choose_tokens(logits.expand(draws, -1), choosers)
    counts = Counter(result.token_id for result in results)
    assert set(counts) <= set(expected)
    for token, probability in expected.items():
        assert counts[token] / draws == pytest.approx(probability, abs=1.01 / draws)


def test_flat_distributions_look_at_the_whole_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few first candidates give what many give, for rows that need few and rows that need many."""
    logits = torch.stack([_logits(1, seed)[0] * (0.05 if seed % 2 else 2.0) for seed in range(40)])
    params = SamplingParams(temperature=1.0, top_p=0.9)
    choosers = [_Fixed(params, VOCAB, draw=(row + 0.5) / 40) for row in range(40)]
    expected = choose_tokens(logits, choosers)
    monkeypatch.setattr("runtime.sampling._FIRST_CANDIDATES", 3)
    assert choose_tokens(logits, choosers) == expected


class _Fixed(TokenChooser):
    """A chooser whose random number is given."""

    def __init__(self, params: SamplingParams, vocab_size: int, draw: float) -> None:
        super().__init__(params, vocab_size)
        self._draw = draw

    def uniform(self) -> float:
        return self._draw


def test_random_numbers_are_uniform_and_depend_on_seed_and_place_alone() -> None:
    def stream(seed: int, count: int) -> list[float]:
        chooser = _chooser(seed=seed)
        values = []
        for index in range(count):
            values.append(chooser.uniform())
            chooser.accept(index % VOCAB)
        return values

    values = np.array(stream(5, 4000))
    assert values.min() >= 0
    assert values.max() < 1
    histogram, _ = np.histogram(values, bins=10, range=(0, 1))
    assert abs(histogram - 400).max() < 5 * math.sqrt(400)
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.05
    assert stream(5, 10) == stream(5, 10)
    assert not set(stream(5, 100)) & set(stream(6, 100))
    # Neighbouring seeds must not be shifted copies of each other.
    assert _chooser(seed=None)._seed != _chooser(seed=None)._seed


def test_a_row_does_not_depend_on_the_others() -> None:
    logits = _logits(6)
    options: list[dict[str, Any]] = [
        {"temperature": 1.0, "seed": 1},
        {"temperature": 0.7, "top_k": 3, "seed": 2},
        {"top_p": 0.8, "seed": 3},
        {},
        {"temperature": 1.2, "top_k": 17, "top_p": 0.9, "seed": 4},
        {"temperature": 3.0, "seed": 5, "repetition_penalty": 1.3, "prompt": [1, 2, 3]},
    ]
    together = choose_tokens(logits, [_chooser(**option) for option in options])
    for row, option in enumerate(options):
        assert choose_tokens(logits[row : row + 1], [_chooser(**option)]) == [together[row]]
    backwards = choose_tokens(logits.flip(0), [_chooser(**option) for option in options[::-1]])
    assert backwards[::-1] == together


def test_ids_beyond_the_vocabulary_are_never_chosen() -> None:
    logits = _logits(4, width=VOCAB + 6)
    logits[:, VOCAB:] = 50.0
    choosers = [_chooser(), _chooser(temperature=5.0, seed=1), _chooser(top_k=40), _chooser()]
    for row, result in enumerate(choose_tokens(logits, choosers)):
        assert 0 <= result.token_id < VOCAB
        expected = torch.log_softmax(logits[row, :VOCAB].double(), dim=-1)
        assert result.log_prob == pytest.approx(float(expected[result.token_id]), abs=1e-5)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 50),
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8),
    answer=st.lists(st.integers(0, VOCAB - 1), max_size=8),
    repetition=st.sampled_from([0.5, 1.0, 1.7]),
    presence=st.sampled_from([-1.0, 0.0, 2.0]),
    frequency=st.sampled_from([-0.5, 0.0, 1.5]),
)
def test_penalties_follow_their_definition(
    seed: int,
    prompt: list[int],
    answer: list[int],
    repetition: float,
    presence: float,
    frequency: float,
) -> None:
    logits = _logits(1, seed)
    chooser = _chooser(
        tuple(answer),
        prompt=prompt,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
    )
    expected = []
    for token, value in enumerate(logits[0].tolist()):
        if token in prompt or token in answer:
            value = value / repetition if value > 0 else value * repetition
        value -= frequency * answer.count(token)
        value -= presence if token in answer else 0
        expected.append(value)
    assert _token(logits, chooser) == int(np.argmax(np.array(expected, dtype=np.float32)))
    if chooser.adjusts():
        assert chooser.adjust(logits[0]).tolist() == pytest.approx(expected, abs=1e-5)


def test_bias_moves_the_choice() -> None:
    bias = torch.zeros(VOCAB)
    bias[7] = 100.0
    assert _token(_logits(1), _chooser(bias=bias)) == 7


def test_end_ids_wait_for_min_tokens() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 4], logits[0, 9] = 5.0, 4.0
    options: dict[str, Any] = {"min_tokens": 2, "end_ids": (4,)}
    assert _token(logits, _chooser((), **options)) == 9
    assert _token(logits, _chooser((9,), **options)) == 9
    assert _token(logits, _chooser((9, 9), **options)) == 4


def test_bad_words_are_stopped_at_their_last_id() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 4], logits[0, 9] = 5.0, 4.0
    assert _token(logits, _chooser(bad_ids=[[4]])) == 9
    assert _token(logits, _chooser(bad_ids=[[1, 4]])) == 4
    assert _token(logits, _chooser((1,), bad_ids=[[1, 4]])) == 9
    assert _token(logits, _chooser((4, 1), bad_ids=[[1, 4]])) == 9
    assert _token(logits, _chooser((1, 2), bad_ids=[[1, 4]])) == 4
    assert _token(logits, _chooser((2, 3), bad_ids=[[1, 2, 3, 4], [3, 3, 4]])) == 4
    # The prompt's ids are not part of the answer.
    assert _token(logits, _chooser(prompt=[1], bad_ids=[[1, 4]])) == 4


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_rows_without_finite_logits_say_so(bad: float) -> None:
    logits = _logits(3)
    logits[1, 5] = bad
    results = choose_tokens(logits, [_chooser(temperature=1.0, seed=1) for _ in range(3)])
    assert [result.error is None for result in results] == [True, False, True]
    assert results[1].token_id == -1


def test_row_without_any_allowed_token_says_so() -> None:
    everything = [[token] for token in range(VOCAB)]
    result = choose_tokens(_logits(1), [_chooser(bad_ids=everything)])[0]
    assert result.error == "bias, bad_ids and min_tokens leave no token to choose"


def test_extreme_temperatures_stay_finite() -> None:
    logits = _logits(1) * 1000
    assert _token(logits, _chooser(temperature=1e-6, seed=3)) == int(logits.argmax())
    assert 0 <= _token(logits, _chooser(temperature=1e6, seed=3)) < VOCAB


@pytest.mark.parametrize(
    ("options", "temperature"),
    [
        ({}, 0.0),
        ({"top_k": 1}, 0.0),
        ({"top_k": 1, "temperature": 0.7}, 0.0),
        ({"top_k": 0}, 0.0),
        ({"top_k": 5}, 1.0),
        ({"top_p": 0.5}, 1.0),
        ({"temperature": 0.0, "top_k": 5}, 0.0),
        ({"temperature": 0.3}, 0.3),
    ],
)
def test_when_sampling_is_meant(options: dict[str, Any], temperature: float) -> None:
    assert SamplingParams(**options).effective_temperature == temperature


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"seed": -1},
        {"seed": 1 << 64},
        {"min_tokens": -1},
        {"repetition_penalty": 0.0},
        {"presence_penalty": math.nan},
        {"frequency_penalty": math.inf},
        {"top_log_probs": 101},
    ],
)
def test_parameters_out_of_range_are_named(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        SamplingParams(**options)
    assert caught.value.where == next(iter(options))
