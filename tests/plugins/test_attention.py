"""The list of attention implementations: permissions, one message, notices told once."""

from __future__ import annotations

import pytest

from plugins import attention
from plugins.attention import Allowlist, Choice, Row
from plugins.support.errors import CapabilityError

CPU = Choice("interpreter", "cpu", "tensorrt_rtx")
GPU = Choice("tensorrt", "cuda", "tensorrt_rtx")
ALL = ("audio", "context", "generation")


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_given", set())


def row(component: attention.Component, choice: Choice, recent: str | None = None) -> Row:
    return Row(
        component=component,
        implementation=choice.implementation,
        device=choice.device,
        flavors=(choice.flavor,),
        recent=recent,
    )


def listed(*rows: Row) -> Allowlist:
    return Allowlist(model="model", rows=rows)


def test_every_component_of_the_engines_needs_a_row() -> None:
    half = listed(row("decoder", CPU))
    half.require(("context", "generation", "draft"), CPU)
    with pytest.raises(CapabilityError) as caught:
        half.require(ALL, CPU)
    assert caught.value.where == "audio_encoder"
    with pytest.raises(CapabilityError) as caught:
        half.require(ALL, GPU)
    # One message for both, whatever is missing.
    assert caught.value.where == "audio_encoder, decoder"
    assert caught.value.expected == "interpreter on cpu"


@pytest.mark.parametrize(
    "other",
    [
        Choice("interpreter", "cuda", "tensorrt_rtx"),
        Choice("tensorrt", "cuda", "tensorrt_rtx"),
        Choice("interpreter", "cpu", "tensorrt"),
    ],
)
def test_a_row_permits_nothing_beside_itself(other: Choice) -> None:
    only = listed(row("decoder", CPU))
    assert only.refusal(("context",), CPU) is None
    assert only.refusal(("context",), other) is not None


def test_no_notice_for_what_is_in_use() -> None:
    both = listed(row("decoder", CPU), row("decoder", GPU, "was added yesterday"))
    assert both.notices(("context",), CPU) == []
    # It is the row that tells, not the place in the list.
    turned = listed(*reversed(both.rows))
    assert turned.notices(("context",), CPU) == []


def test_one_notice_per_process_with_the_rows_own_words() -> None:
    both = listed(
        row("decoder", GPU, "was added yesterday"), row("audio_encoder", GPU, "is a guess")
    )
    assert both.notices(ALL, GPU) == [
        "model, audio_encoder: attention by tensorrt on cuda (tensorrt_rtx) is a guess",
        "model, decoder: attention by tensorrt on cuda (tensorrt_rtx) was added yesterday",
    ]
    assert both.notices(ALL, GPU) == []
    other = Allowlist(model="other", rows=both.rows)
    assert len(other.notices(("context",), GPU)) == 1


def test_engines_carry_the_rows_of_their_flavour() -> None:
    both = listed(row("decoder", CPU), row("decoder", Choice("tensorrt", "cuda", "tensorrt")))
    assert both.of_flavor("tensorrt_rtx").rows == both.rows[:1]
    assert both.of_flavor("tensorrt").rows == both.rows[1:]


def test_removing_a_row_removes_the_permission() -> None:
    """The negative control of the families' lists: what they permit hangs on single rows."""
    from converters.attention import allowlist

    whole = allowlist("voxtral", ("decoder", "audio_encoder"), ran_on_cuda=False)
    assert whole.refusal(ALL, CPU) is None
    for gone in whole.rows:
        less = Allowlist(model="voxtral", rows=tuple(r for r in whole.rows if r is not gone))
        refused = [
            c
            for c in (
                CPU,
                GPU,
                Choice("interpreter", "cuda", "tensorrt"),
                Choice("tensorrt", "cuda", "tensorrt"),
            )
            if less.refusal(ALL, c) is not None
        ]
        assert len(refused) == 1, gone
