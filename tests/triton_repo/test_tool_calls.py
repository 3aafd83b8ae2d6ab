"""Tool calls of an answer: what is one, what is content, and what becomes of values."""

from __future__ import annotations

from typing import Any

import pytest

from triton_repo.frontend.tool_calls import ToolCallParser

WEATHER = {
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "least": {"type": "number"},
            "metric": {"type": "boolean"},
            "place": {"$ref": "#/$defs/place"},
            "level": {"anyOf": [{"type": "null"}, {"type": "integer"}]},
            "either": {"type": ["integer", "string"]},
            "tags": {"type": "array", "items": {"type": "string"}},
            "loop": {"$ref": "#/$defs/loop"},
        },
        "$defs": {
            "place": {"allOf": [{"$ref": "#/$defs/name"}]},
            "name": {"type": "string"},
            "loop": {"$ref": "#/$defs/loop"},
        },
    },
}
TOOLS = [{"type": "function", "function": WEATHER}, {"name": "stop"}]


def call(body: str, name: str = '"weather"') -> str:
    return f"<dots_function_call><invoke name={name}>{body}</invoke></dots_function_call>"


def parse(text: str, size: int | None = None) -> tuple[str, list[dict[str, Any]], list[str]]:
    """Content, calls and the pieces in which the content came."""
    parser = ToolCallParser(TOOLS)
    step = size or max(len(text), 1)
    pieces = [parser.feed(text[i : i + step]) for i in range(0, len(text), step)]
    rest, calls = parser.finish()
    return "".join([*pieces, rest]), calls, pieces


def arguments(body: str) -> dict[str, Any]:
    content, calls, _ = parse(call(body))
    assert content == ""
    assert [one["name"] for one in calls] == ["weather"]
    found: dict[str, Any] = calls[0]["arguments"]
    return found


@pytest.mark.parametrize("size", [None, 1, 2, 7])
def test_several_calls_and_blocks(size: int | None) -> None:
    text = (
        "Let me look.\n<dots_function_call>\n"
        '<invoke name="weather"><parameter name="city"> Ulm </parameter></invoke>\n'
        "<invoke name='weather'><parameter name='days'>3</parameter></invoke>"
        "</dots_function_call> and <dots_function_call><invoke name=stop></invoke>"
        "</dots_function_call>"
    )
    content, calls, _ = parse(text, size)
    assert content == "Let me look.\n"
    assert calls == [
        {"name": "weather", "arguments": {"city": "Ulm"}},
        {"name": "weather", "arguments": {"days": 3}},
        {"name": "stop", "arguments": {}},
    ]


@pytest.mark.parametrize(
    ("parameter", "text", "value"),
    [
        ("city", "12", "12"),
        ("city", "null", None),
        ("city", ' "Ulm" ', '"Ulm"'),
        ("days", "3", 3),
        ("days", "3.0", 3),
        ("days", "three", "three"),
        ("days", "3.5", "3.5"),
        ("least", "2", 2),
        ("least", "2.0", 2),
        ("least", "2.5", 2.5),
        ("least", "nan", "nan"),
        ("metric", "True", True),
        ("metric", "1", True),
        ("metric", "false", False),
        ("metric", "perhaps", "perhaps"),
        ("place", "5", "5"),
        ("level", "5", 5),
        ("level", "null", None),
        ("either", "5", 5),
        ("either", "five", "five"),
        ("tags", '["a", 1]', ["a", 1]),
        ("tags", "a, b", "a, b"),
        ("loop", "[1]", [1]),
        # Not in the schema.
        ("other", '{"a": 1}', {"a": 1}),
        ("other", "Ulm", "Ulm"),
        ("other", "NaN", "NaN"),
    ],
)
def test_values_have_the_types_of_the_schema(parameter: str, text: str, value: object) -> None:
    found = arguments(f'<parameter name="{parameter}">{text}</parameter>')
    assert found == {parameter: value}
    assert type(found[parameter]) is type(value)


@pytest.mark.parametrize("key", ["arguments", "parameters"])
def test_a_json_object_instead(key: str) -> None:
    text = f'<dots_function_call>\n{{"name": "weather", "{key}": {{"days": 2}}}}\n'
    for end in ("</dots_function_call>", ""):
        content, calls, _ = parse(text + end, 3)
        assert (content, calls) == ("", [{"name": "weather", "arguments": {"days": 2}}])


@pytest.mark.parametrize(
    "text",
    [
        "No call at all, 1 < 2.",
        "Ends like one <dots_function",
        call('<parameter name="city">Ulm</parameter>', name="unknown"),
        "Before " + call("", name="unknown") + " after",
        "<dots_function_call>{broken</dots_function_call>",
        '<dots_function_call>{"name": 5}</dots_function_call>',
        '<dots_function_call>{"name": "stop", "arguments": {"a": NaN}}</dots_function_call>',
        '<dots_function_call>["weather"]</dots_function_call>',
        '<dots_function_call>{"name": "weather", "arguments": [1]}</dots_function_call>',
        '<dots_function_call><invoke name="weather"><parameter name="city">Ulm',
        "",
        " <thi",
    ],
)
@pytest.mark.parametrize("size", [None, 1])
def test_without_a_valid_call_everything_is_content(text: str, size: int | None) -> None:
    content, calls, _ = parse(text, size)
    assert (content, calls) == (text, [])


def test_unknown_tools_are_left_out() -> None:
    text = "Now " + call("", name="unknown") + call("", name="stop")
    assert parse(text)[:2] == ("Now ", [{"name": "stop", "arguments": {}}])


def test_content_comes_while_it_is_written() -> None:
    """Only what may begin a block waits."""
    _, _, pieces = parse("ab<do not", 1)
    assert pieces == ["a", "b", "", "", "", "<do ", "n", "o", "t"]


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": []},
        {"properties": {"a": 5}},
        {"properties": {"a": {"type": {"type": "string"}}}},
        {"properties": {"a": {"type": [["string"]]}}},
        {"properties": {"a": {"anyOf": "string", "$ref": 3}}, "$defs": []},
    ],
    ids=str,
)
def test_schemas_that_say_nothing(schema: dict[str, Any]) -> None:
    parser = ToolCallParser([{"name": "f", "parameters": schema}])
    assert parser.feed(call('<parameter name="a">[1]</parameter>', name="f")) == ""
    assert parser.finish() == ("", [{"name": "f", "arguments": {"a": [1]}}])


def test_hostile_schemas_and_answers_end() -> None:
    """Alternatives that refer to each other, and openings without an end."""
    many = {"anyOf": [{"$ref": f"#/$defs/{i}"} for i in range(40)]}
    schema = {"properties": {"a": many}, "$defs": {str(i): dict(many) for i in range(40)}}
    parser = ToolCallParser([{"name": "f", "parameters": schema}])
    parser.feed(call('<parameter name="a">x</parameter>' + "<parameter name=" * 20000, name="f"))
    assert parser.finish()[1] == [{"name": "f", "arguments": {"a": "x"}}]
    for text in ("<invoke name=" * 50000, "<invoke name=f>" * 50000):
        assert parse("<dots_function_call>" + text)[1] == []
