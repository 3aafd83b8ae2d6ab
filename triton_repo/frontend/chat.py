"""Chat messages and content parts: validation, rendering, media items in order of appearance."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from pydantic_core import from_json

from triton_repo.frontend import reasoning, tool_calls
from triton_repo.frontend.problems import problem

MODALITIES = ("image", "video", "audio")
MAX_MESSAGES = 1024
ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True)
class MediaReference:
    """A media item as a request names it.

    Attributes:
        modality: "image", "video" or "audio".
        url: http(s) URL or data URI; empty when `data` is set.
        data: encoded bytes that came in a tensor.
        options: processor options of this item alone.
        parameter: the request field that a message about this item names.
    """

    modality: str
    url: str = ""
    data: bytes = b""
    options: Mapping[str, Any] = field(default_factory=dict)
    parameter: str = ""

    @property
    def named(self) -> str:
        """The field name for messages."""
        return self.parameter or f"{self.modality}_url"


@dataclass(slots=True)
class Conversation:
    """Validated messages, and the media they refer to in order.

    `has_parts` tells whether a message has a list of parts for its content.
    """

    messages: list[dict[str, Any]]
    media: list[MediaReference]
    has_parts: bool = False


def parse_json(parameter: str, text: str, kind: type) -> Any:
    """JSON text of a request as a list or dict. Raises UsageError naming the parameter."""
    try:
        # Unlike the standard library's parser it refuses halves of surrogate pairs, which no
        # tokenizer takes.
        value = from_json(text)
    except ValueError as error:
        raise problem(parameter, "is not valid JSON", found=str(error)) from None
    if not isinstance(value, kind):
        name = "array" if kind is list else "object"
        raise problem(parameter, f"must be a JSON {name}", found=type(value).__name__)
    return value


def parse_messages(text: str) -> Conversation:
    """Messages from their JSON text.

    Content is a string or a list of parts: `{"type": "text", "text": …}`, `{"type": "image_url",
    "image_url": {"url": …}}` (also video_url and audio_url; the URL may stand directly), or
    `{"type": "input_audio", "input_audio": {"data": base64, "format": …}}`.
    """
    raw = parse_json("messages", text, list)
    if not raw:
        raise problem("messages", "must not be empty")
    if len(raw) > MAX_MESSAGES:
        raise problem(
            "messages", "has too many entries", expected=f"<= {MAX_MESSAGES}", found=len(raw)
        )
    # Nobody else has what was just parsed, so it is changed in place.
    conversation = Conversation(raw, [])
    for index, message in enumerate(raw):
        if not isinstance(message, dict):
            raise problem(
                f"messages[{index}]", "must be a JSON object", found=type(message).__name__
            )
        role = message.get("role")
        if role not in ROLES:
            raise problem(
                f"messages[{index}].role", "is not a role", expected=", ".join(ROLES), found=role
            )
        content = message.get("content")
        if content is None and role == "assistant":
            content = ""
        if isinstance(content, list):
            parts = [
                parse_part(f"messages[{index}].content[{i}]", part)
                for i, part in enumerate(content)
            ]
            conversation.media += [p for p in parts if isinstance(p, MediaReference)]
            conversation.has_parts = True
            message["content"] = [_template_part(p) for p in parts]
        elif not isinstance(content, str):
            raise problem(
                f"messages[{index}].content",
                "must be a string or a list of parts",
                found=type(content).__name__,
            )
        if message.get("tool_calls"):
            message["tool_calls"] = _calls(f"messages[{index}].tool_calls", message["tool_calls"])
    return conversation


def _calls(where: str, calls: Any) -> list[dict[str, Any]]:
    """Calls of an earlier answer; arguments that came as JSON text become the object they are."""
    if not isinstance(calls, list):
        raise problem(where, "must be a list", found=type(calls).__name__)
    parsed = []
    for index, call in enumerate(calls):
        place = f"{where}[{index}]"
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise problem(place, "is no call of a function with a name")
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            arguments = parse_json(f"{place}.arguments", arguments, dict)
        if not isinstance(arguments, dict):
            raise problem(
                f"{place}.arguments", "must be a JSON object", found=type(arguments).__name__
            )
        whole = {**function, "arguments": arguments}
        parsed.append({**call, "function": whole} if "function" in call else whole)
    return parsed


def parse_part(where: str, part: Any) -> str | MediaReference | list[int]:
    """One content part: text, a media reference or token ids."""
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise problem(where, "must be a string or a JSON object", found=type(part).__name__)
    kind = part.get("type")
    if kind in ("text", "input_text"):
        text = part.get("text")
        if not isinstance(text, str):
            raise problem(f"{where}.text", "must be a string", found=type(text).__name__)
        return text
    if kind == "token_ids":
        ids = part.get("token_ids")
        if not isinstance(ids, list) or not all(type(i) is int for i in ids):
            raise problem(f"{where}.token_ids", "must be a list of integers")
        return ids
    if kind == "input_audio":
        audio = part.get("input_audio")
        data = audio.get("data") if isinstance(audio, dict) else None
        if not isinstance(data, str):
            raise problem(f"{where}.input_audio.data", "must be a base64 string")
        return MediaReference(
            "audio", f"data:audio/*;base64,{data}", parameter=f"{where}.input_audio.data"
        )
    modality = str(kind).removesuffix("_url")
    if modality not in MODALITIES:
        expected = "text, token_ids, input_audio, " + ", ".join(f"{m}_url" for m in MODALITIES)
        raise problem(f"{where}.type", "is not a kind of part", expected=expected, found=kind)
    value = part.get(f"{modality}_url", part.get(modality, part.get("url")))
    # Options of this item stand beside its URL, which stands in the part or in an object of it.
    names = {"type", "url", "uuid", "cache_control", modality, f"{modality}_url"}
    options = {k: v for k, v in part.items() if k not in names}
    if isinstance(value, dict):
        options |= {k: v for k, v in value.items() if k != "url"}
        value = value.get("url")
    if not isinstance(value, str) or not value:
        raise problem(f"{where}.{modality}_url", "must be a URL", found=type(value).__name__)
    return MediaReference(modality, value, options=options, parameter=f"{where}.{modality}_url")


def _template_part(part: str | MediaReference | list[int]) -> dict[str, Any]:
    if isinstance(part, MediaReference):
        return {"type": part.modality}
    if isinstance(part, str):
        return {"type": "text", "text": part}
    raise problem("messages", "token_ids parts belong into content_parts, not into messages")


def check_tools(tools: Any) -> None:
    """Raise UsageError unless `tools` are functions with a name and a schema each."""
    if not isinstance(tools, list):
        raise problem("chat_template_kwargs", "tools must be a list", found=type(tools).__name__)
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise problem("chat_template_kwargs", f"{where} is no function with a name")
        schema = function.get("parameters")
        if schema is not None and not isinstance(schema, dict):
            raise problem("chat_template_kwargs", f"{where}: parameters must be a JSON schema")


class ChatTemplate:
    """A compiled chat template in the environment that chat templates are written for."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._template = _environment().from_string(source)
        # What every rendering knows, in one plain dict: jinja would chain and copy several.
        self._known: dict[str, Any] = {
            **self._template.globals,
            **special_tokens,
            "add_generation_prompt": True,
            "tools": None,
            "documents": None,
        }
        self._template.globals = {}
        self.knows_parts = (
            "type" in source
            and "content" in source
            and ("['type']" in source or '["type"]' in source or ".type" in source)
        )

        # Whether the model writes calls in the form that `tool_calls` reads.
        self.calls_tools = tool_calls.OPEN in source
        # Whether it thinks in the form that `reasoning` reads.
        self.thinks = reasoning.OPEN in source

    def render(self, messages: list[dict[str, Any]], kwargs: Mapping[str, Any]) -> str:
        """The prompt text. `kwargs` are the merged template options of server and request.

        Raises UsageError with the template's own words when it refuses the messages.
        """
        template = self._template
        values = {**self._known, **kwargs, "messages": messages}
        environment = template.environment
        context = environment.context_class(environment, values, template.name, template.blocks)
        try:
            return "".join(template.root_render_func(context))
        except jinja2.TemplateError as error:
            raise problem("messages", f"the chat template refuses them: {error.message}") from None
        except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
            raise problem(
                "messages", f"the chat template cannot render them ({type(error).__name__})"
            ) from None


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`: marks assistant text for training; here only its body matters."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Replace the block by its body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
    # Not jinja's own filter: that one escapes HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
