"""Tool calls in the answer of a Dots3 model.

    <dots_function_call>
    <invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>
    </dots_function_call>

A block holds any number of `invoke`, or one JSON object with `name` and `arguments` (also called
`parameters`); there may be several blocks. Text before the first block is content. Calls of tools
that the request does not know are left out; when none is left, the whole text is content.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from triton_repo.frontend.stop import without_partial

OPEN, CLOSE = "<dots_function_call>", "</dots_function_call>"
_BLOCK = re.compile(f"{OPEN}(.*?)(?:{CLOSE}|$)", re.DOTALL)
# Names have a bound, so that no text takes quadratic time.
_INVOKE = re.compile(r"<invoke\s+name=([^>]{1,256})>(.*?)</invoke>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter\s+name=([^>]{1,256})>(.*?)</parameter>", re.DOTALL)
# References to definitions and alternatives are followed so far.
_DEPTH = 10

Schema = Mapping[str, Any]


class ToolCallParser:
    """Takes an answer apart piece by piece; one object per answer.

    Args:
        tools: as chat templates take them: functions with a `name` and a JSON schema `parameters`,
            wrapped in `{"type": "function", "function": …}` or not.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._schemas: dict[str, Schema] = {}
        for tool in tools:
            function = tool.get("function", tool)
            self._schemas[str(function["name"])] = _mapping(function.get("parameters"))
        self._held = ""
        self._in_calls = False

    def feed(self, piece: str) -> str:
        """Content that may be shown now; what may be the beginning of a block is held back."""
        self._held += piece
        if self._in_calls:
            return ""
        at = self._held.find(OPEN)
        self._in_calls = at >= 0
        shown = self._held[:at] if self._in_calls else without_partial(self._held, OPEN)
        self._held = self._held[len(shown) :]
        return shown

    def finish(self) -> tuple[str, list[dict[str, Any]]]:
        """The rest of the content, and the calls: `{"name": …, "arguments": {…}}` each."""
        rest, self._held = self._held, ""
        calls = self._calls(rest) if self._in_calls else []
        return ("" if calls else rest), calls

    def _calls(self, text: str) -> list[dict[str, Any]]:
        calls = []
        for body in _BLOCK.findall(text):
            invokes = _elements(_INVOKE, body, "</invoke>")
            found = [self._invoked(*invoke) for invoke in invokes] if invokes else [_object(body)]
            calls += [call for call in found if call and call["name"] in self._schemas]
        return calls

    def _invoked(self, name: str, body: str) -> dict[str, Any]:
        name = _unquoted(name)
        schema = self._schemas.get(name, {})
        properties = _mapping(schema.get("properties"))
        arguments = {}
        for key, value in _elements(_PARAMETER, body, "</parameter>"):
            types = _types(properties.get(_unquoted(key)), schema, _DEPTH, set())
            arguments[_unquoted(key)] = _typed(value.strip(), types)
        return {"name": name, "arguments": arguments}


def _elements(pattern: re.Pattern[str], text: str, end: str) -> list[tuple[str, str]]:
    """Names and bodies of elements; behind the last end there can be none."""
    return pattern.findall(text[: text.rfind(end) + len(end)])


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _unquoted(name: str) -> str:
    name = name.strip()
    if len(name) > 1 and name[0] == name[-1] and name[0] in "\"'":
        name = name[1:-1]
    return name


def _object(body: str) -> dict[str, Any] | None:
    """The call that a JSON object describes, None when it is none."""
    try:
        value = _json(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(arguments, dict):
        return None
    return {"name": value["name"], "arguments": arguments}


def _types(schema: Any, root: Schema, depth: int, seen: set[int]) -> list[str]:
    """The types that a schema allows, in its order; references and alternatives are followed.

    No part is looked at twice, however often it is referred to.
    """
    if not isinstance(schema, Mapping) or depth == 0 or id(schema) in seen:
        return []
    seen.add(id(schema))
    kind = schema.get("type")
    kinds = kind if isinstance(kind, list) else [kind]
    types = [name for name in kinds if isinstance(name, str)]
    target = str(schema.get("$ref", "")).removeprefix("#/$defs/")
    further = [_mapping(root.get("$defs")).get(target)]
    for key in ("anyOf", "oneOf", "allOf"):
        alternatives = schema.get(key)
        further += alternatives if isinstance(alternatives, list) else []
    for other in further:
        types += _types(other, root, depth - 1, seen)
    return types


def _typed(text: str, types: Sequence[str]) -> Any:
    """A value as the first type that takes it; JSON where none does, and else the text itself."""
    if text == "null":
        return None
    for kind in types:
        try:
            return _READERS.get(kind, _json)(text)
        except (ValueError, RecursionError):
            continue
    if types:
        return text
    try:
        return _json(text)
    except (ValueError, RecursionError):
        return text


def _json(text: str) -> Any:
    return json.loads(text, parse_constant=_no_number)


def _number(text: str) -> int | float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return int(value) if value.is_integer() else value


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        value = _number(text)
        if isinstance(value, float):
            raise
        return value


def _boolean(text: str) -> bool:
    if text.lower() not in _BOOLEANS:
        raise ValueError(text)
    return _BOOLEANS[text.lower()]


def _no_number(text: str) -> Any:
    raise ValueError(text)


_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}
_READERS: dict[str, Callable[[str], Any]] = {
    "string": str,
    "integer": _integer,
    "number": _number,
    "boolean": _boolean,
}
