"""The draft network on the interpreter against its oracle, and what it must not do."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from converters.definition import EngineLimits, Phase
from converters.dots3.controls import negative_controls
from converters.dots3.oracle import DraftOracle, Oracle
from tests.converters.dots3.driver import Driver
from tests.converters.dots3.tiny import tiny

PHASES: tuple[Phase, ...] = ("context", "draft")
LIMITS = EngineLimits(2, 128, chunk_size=64, max_draft_len=3, max_logits_tokens=64)
IDS = torch.randint(3, 500, (60,), generator=torch.Generator().manual_seed(5)).tolist()
NEXT = "hidden_states.next_draft"
DRAFT_CONTROLS = {c.name: c for c in negative_controls(tiny().config) if c.phase == "draft"}


@pytest.fixture(scope="module")
def driver() -> Driver:
    return tiny().driver(LIMITS, phases=PHASES)


@pytest.fixture(scope="module")
def hidden(driver: Driver) -> Tensor:
    """The text model's hidden states at every position of IDS."""
    return driver.call("context", [IDS])[0]["hidden_states"]


@pytest.fixture(scope="module")
def oracle() -> DraftOracle:
    return DraftOracle(tiny().hf_dir, Oracle(tiny().hf_dir))


@pytest.fixture(autouse=True)
def _fresh(driver: Driver) -> None:
    driver.reset()


def _close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=5e-5, rtol=0.0)


def test_the_text_model_hands_over_its_normed_hidden_states(driver: Driver) -> None:
    out = driver.call("context", [IDS])[0]["hidden_states"]
    _close(out, Oracle(tiny().hf_dir).run(IDS)["final_hidden"])


@pytest.mark.parametrize("cut", [59, 1, 9, 30])
def test_one_pass_and_two_equal_the_oracle(
    driver: Driver, oracle: DraftOracle, hidden: Tensor, cut: int
) -> None:
    logits, following = oracle.run(IDS[1:], hidden[:-1])
    parts = [driver.call("draft", [IDS[1 : 1 + cut]], hidden=[hidden[:cut]], past=[0])[0]]
    if cut < 59:
        rest = driver.call("draft", [IDS[1 + cut :]], hidden=[hidden[cut:-1]], past=[cut])
        parts.append(rest[0])
    _close(torch.cat([part["logits"] for part in parts]), logits)
    _close(torch.cat([part[NEXT] for part in parts]), following)


@pytest.mark.parametrize("guesses", [1, 2])
def test_guesses_leave_no_trace(
    driver: Driver, oracle: DraftOracle, hidden: Tensor, guesses: int
) -> None:
    """Recycled hidden states give further drafts; the true ones replace them afterwards."""
    expected = oracle.run(IDS[1:], hidden[:-1])[0]
    out = driver.call("draft", [[], IDS[1:21]], hidden=[hidden[:0], hidden[:20]], past=[0, 0])[1]
    position = 20
    for accepted in (1, 3, 2, 1, 1, 4):
        token, last = 7, out[NEXT][-1:]
        for step in range(guesses):
            recycled = torch.cat([hidden[:position], *([last] if step == 0 else [])])
            if step == 0:
                wanted = oracle.run([*IDS[1 : position + 1], token], recycled)[0][-1]
            guess = driver.call(
                "draft", [[], [token]], hidden=[hidden[:0], last], past=[0, position + step]
            )[1]
            if step == 0:
                _close(guess["logits"][-1], wanted)
            last = guess[NEXT]
        driver.rejected[1] = guesses
        piece = slice(position, position + accepted)
        out = driver.call(
            "draft",
            [[], IDS[position + 1 : position + 1 + accepted]],
            hidden=[hidden[:0], hidden[piece]],
            past=[0, position],
        )[1]
        driver.rejected[1] = 0
        _close(out["logits"], expected[piece])
        position += accepted


def test_forgotten_guesses_are_seen(driver: Driver, oracle: DraftOracle, hidden: Tensor) -> None:
    expected = oracle.run(IDS[1:], hidden[:-1])[0]
    out = driver.call("draft", [IDS[1:21]], hidden=[hidden[:20]], past=[0])[0]
    driver.call("draft", [[7]], hidden=[out[NEXT][-1:]], past=[20])
    out = driver.call("draft", [IDS[21:22]], hidden=[hidden[20:21]], past=[20])[0]
    assert (out["logits"][0] - expected[20]).abs().max() > 1e-2


@pytest.mark.parametrize(
    "mistake",
    ["position 0", "embedding last", "shared embedding", "hidden before the norm", "no last norm"],
)
def test_mistakes_are_seen(
    driver: Driver, oracle: DraftOracle, hidden: Tensor, mistake: str
) -> None:
    expected = oracle.run(IDS[1:], hidden[:-1])[0]
    right = dict(tiny().weights)
    past, given = 0, hidden[:-1]
    if mistake == "position 0":
        past = 1
    elif mistake == "embedding last":
        first, second = right["mtp.eh_proj.weight"].chunk(2, dim=1)
        right["mtp.eh_proj.weight"] = torch.cat([second, first], dim=1)
    elif mistake == "shared embedding":
        right["mtp.vocab_embedding.weight"] = right["transformer.vocab_embedding.weight"]
    elif mistake == "hidden before the norm":
        given = given / right["transformer.ln_f.weight"]
    else:
        right["mtp.ln_f.weight"] = torch.ones_like(right["mtp.ln_f.weight"])
    driver.bind(right)
    try:
        out = driver.call("draft", [IDS[1:]], hidden=[given], past=[past])[0]
    finally:
        driver.bind(tiny().weights)
    assert (out["logits"] - expected).abs().max() > 1e-2


@pytest.mark.parametrize("name", DRAFT_CONTROLS)
def test_mistakes_of_a_conversion_are_seen(
    driver: Driver, oracle: DraftOracle, hidden: Tensor, name: str
) -> None:
    expected = oracle.run(IDS[1:], hidden[:-1])[0]
    changed = DRAFT_CONTROLS[name].weights(tiny().weights)
    driver.bind({**tiny().weights, **changed})
    try:
        out = driver.call("draft", [IDS[1:]], hidden=[hidden[:-1]], past=[0])[0]
    finally:
        driver.bind(tiny().weights)
    assert (out["logits"] - expected).abs().max() > 1e-2


def test_a_text_model_alone_has_no_draft_mistakes() -> None:
    assert len(DRAFT_CONTROLS) == 4
    text = negative_controls(tiny(draft=False).config)
    assert text and all(control.phase == "context" for control in text)
