"""Contracts: everything that is lacking is named, and nothing that is right is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Literal, Protocol

import pytest

from plugins.support.contract import Contract
from plugins.support.errors import CapabilityError


class Target(Protocol):
    """The interface of a target model of speculative decoding, as other engines probe it."""

    supports_eagle3: Literal[True]
    config: Any

    @property
    def layers(self) -> int: ...

    def forward(self, input_ids: Any, positions: Any, hidden: Any = None) -> Any: ...

    def embed_input_ids(self, input_ids: Any) -> Any: ...


TARGET: Contract[Target] = Contract.of(Target)


def right() -> SimpleNamespace:
    return SimpleNamespace(
        supports_eagle3=True,
        config={},
        layers=2,
        forward=lambda input_ids, positions, hidden=None: input_ids,
        embed_input_ids=lambda input_ids: input_ids,
    )


def test_what_is_right_comes_back_itself() -> None:
    target = right()
    assert TARGET.violations(target) == []
    assert TARGET.require(target) is target


@pytest.mark.parametrize("name", [member.name for member in TARGET.members])
def test_each_missing_member_is_named(name: str) -> None:
    target = right()
    delattr(target, name)
    assert TARGET.violations(target) == [f"no {name}"]
    setattr(target, name, None)
    assert TARGET.violations(target) == [f"no {name}"]


def test_all_members_are_read_off_the_protocol() -> None:
    names = {member.name for member in TARGET.members}
    assert names == {"supports_eagle3", "config", "layers", "forward", "embed_input_ids"}


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("supports_eagle3", False, ["supports_eagle3 is False"]),
        ("forward", 3, ["forward is no method"]),
        ("forward", lambda input_ids, positions: 0, ["forward takes no hidden"]),
        (
            "forward",
            lambda ids, positions, hidden=None: 0,
            ["forward takes no input_ids", "forward needs ids, which not every call gives"],
        ),
        (
            "forward",
            lambda input_ids, positions, hidden: 0,
            ["forward needs hidden, which not every call gives"],
        ),
        ("forward", lambda input_ids, **rest: 0, ["forward takes no positions",
                                                  "forward takes no hidden"]),
        ("embed_input_ids", lambda *args, **kwargs: 0, []),
        ("embed_input_ids", lambda input_ids, scale=1.0: 0, []),
    ],
)  # fmt: skip
def test_values_and_parameters(name: str, value: Any, words: list[str]) -> None:
    target = right()
    setattr(target, name, value)
    assert TARGET.violations(target) == words


def test_one_error_names_everything() -> None:
    with pytest.raises(CapabilityError, match="not a usable Target") as caught:
        TARGET.require(SimpleNamespace(config={}), "the draft's target")
    assert caught.value.where == "the draft's target"
    assert caught.value.found == ("no supports_eagle3; no layers; no forward; no embed_input_ids")
    assert caught.value.expected is not None and "embed_input_ids" in caught.value.expected


def test_a_class_is_no_object_of_it() -> None:
    """`isinstance` with a runtime protocol says yes here."""

    class Ready:
        supports_eagle3 = True
        config = "any"
        layers = 2

        def forward(self, input_ids: Any, positions: Any, hidden: Any = None) -> Any:
            return input_ids

        def embed_input_ids(self, input_ids: Any) -> Any:
            return input_ids

    assert TARGET.violations(Ready()) == []
    assert TARGET.violations(Ready) == ["the class Ready itself, not an object of it"]


def test_a_protocol_that_extends_another_has_both() -> None:
    class Hearing(Target, Protocol):
        def embed_audio(self, features: Any) -> Any: ...

        def forward(self, input_ids: Any, positions: Any, *, heard: Any = None) -> Any: ...

    contract: Contract[Any] = Contract.of(Hearing)
    assert contract.violations(right()) == ["forward takes no heard", "no embed_audio"]
