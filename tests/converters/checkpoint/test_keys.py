"""The configuration reader reports everything at once and lets nothing pass."""

from __future__ import annotations

import pytest

from converters.checkpoint.keys import KeyReader
from plugins.support.errors import InputError


def test_all_problems_come_in_one_error():
    reader = KeyReader({"layers": "8", "hidden_sise": 64, "act": "gelu"}, "config.json")
    reader.integer("layers")
    reader.integer("hidden_size")
    reader.rely_on("act", "silu", "the only one")
    with pytest.raises(InputError) as caught:
        reader.finish()
    assert caught.value.where == "config.json"
    found = caught.value.found or ""
    assert "layers: expected an integer of at least 1, found '8'" in found
    assert "hidden_size: missing" in found
    assert "hidden_sise: unknown key, did you mean 'hidden_size'?" in found
    assert "act: expected 'silu' (the only one), found 'gelu'" in found


@pytest.mark.parametrize(
    ("getter", "value"),
    [
        ("integer", True),
        ("integer", 0),
        ("integer", 1.0),
        ("positive_number", 0),
        ("positive_number", float("inf")),
        ("positive_number", float("nan")),
        ("boolean", 1),
        ("integers", [1, -1]),
        ("integers", "12"),
        ("strings", [1]),
        ("token_ids", []),
        ("token_ids", None),
        ("token_ids", ["<eos>"]),
    ],
)
def test_values_are_not_coerced(getter: str, value: object):
    reader = KeyReader({"key": value}, "config.json")
    getattr(reader, getter)("key")
    with pytest.raises(InputError, match="not one this family"):
        reader.finish()


def test_a_clean_configuration_passes():
    reader = KeyReader({"a": 1, "b": 2.5, "c": [3], "d": None, "e": True, "f": 9}, "config.json")
    assert reader.integer("a") == 1
    assert reader.positive_number("b") == 2.5
    assert reader.token_ids("c") == [3]
    assert reader.optional_integer("d") is None
    assert reader.boolean("e")
    assert reader.token_ids("f") == [9]
    reader.rely_on_if_present("absent", 1, "why")
    reader.finish()


def test_problems_of_an_inner_object_carry_its_name():
    reader = KeyReader({"rope": {"theta": -1, "bsae": 2}, "gate": 3}, "config.json")
    inner = reader.table("rope")
    inner.positive_number("theta")
    inner.positive_number("base")
    reader.table("gate").integer("size")
    with pytest.raises(InputError) as caught:
        reader.finish()
    assert (caught.value.found or "").split("; ") == [
        "gate: expected an object, found 3",
        "rope.theta: expected a positive number, found -1",
        "rope.base: missing, and no default is safe",
        "rope.bsae: unknown key, did you mean 'base'?",
    ]


def test_true_is_not_one_for_a_precondition():
    reader = KeyReader({"step": True}, "config.json")
    reader.rely_on("step", 1, "every layer")
    with pytest.raises(InputError):
        reader.finish()
