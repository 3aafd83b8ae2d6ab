"""What a request asks for besides its prompt, read and checked once for equal requests.

Requests of one application differ in their prompts and hardly in their options, and reading the
options costs as much as tokenising a short chat. The last few sets of options are remembered.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any, get_args

from triton_repo.frontend import chat, words
from triton_repo.frontend.audio.settings import TRANSCRIBE, transcribes
from triton_repo.frontend.geometry import VisionGeometry
from triton_repo.frontend.limits import (
    Limits,
    TokenizeOptions,
    check_truncation,
    resolve_padding,
    resolve_truncation,
)
from triton_repo.frontend.media import MediaPolicy
from triton_repo.frontend.mm_kwargs import merge, view
from triton_repo.frontend.output import TextOptions
from triton_repo.frontend.problems import problem
from triton_repo.frontend.reasoning import Reasoning
from triton_repo.frontend.salt import cache_salt_id
from triton_repo.frontend.sampling import Sampling, parse_sampling
from triton_repo.frontend.tokenizer import Tokenizer

if TYPE_CHECKING:
    from functools import _lru_cache_wrapper

    from triton_repo.frontend.audio.frontend import AudioFrontEnd

TASKS = ("generate", "embed")
PROMPT_FIELDS = ("text_input", "input_ids", "messages", "content_parts")
# Fields that make up the prompt. Of these an option may depend on whether they are there.
PROMPT_VALUES = frozenset(
    {
        *PROMPT_FIELDS,
        "mm_features",
        "image_url_input",
        "image_bytes_input",
        "video_bytes_input",
        "audio_bytes",
        "audio_url",
        "audio_samples",
        "language",
        "delay_ms",
    }
)
SAMPLING_FIELDS = (
    "temperature", "top_k", "top_p", "seed", "random_seed", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "length_penalty", "min_tokens",
    "num_return_sequences", "beam_width",
)  # fmt: skip
# All others that are read here.
OPTION_FIELDS = frozenset(
    {
        "max_tokens",
        "bad_words",
        "stop_words",
        "end_id",
        "pad_id",
        "cache_salt",
        "truncate_prompt_tokens",
        "truncation_side",
        "truncation",
        "padding",
        "max_length",
        "add_special_tokens",
        "return_token_offsets",
        "lowercase",
        "chat_template_kwargs",
        "mm_processor_kwargs",
        "task",
        "enable_chunked_processing",
        "include_stop_str_in_output",
        "skip_special_tokens",
        *SAMPLING_FIELDS,
    }
)
# Options that reach the chat template through their own fields.
RESERVED_TEMPLATE_KEYS = frozenset({"messages", "chat_template", "tokenize"})
# How many sets of options are remembered, and the most characters of one: descriptions of tools
# are long, and clients must not fill the memory.
REMEMBERED = 32
REMEMBERED_CHARACTERS = 1 << 15

Row = Mapping[str, Any]


@dataclass(frozen=True)
class FrontEnd:
    """What a server knows before the first request.

    Attributes:
        tokenizer: the model's tokenizer.
        context: context length in tokens; None when unknown.
        max_prompt: longest prompt in tokens, where that is less than the context.
        vocab_size: ids the engine accepts are below it.
        end_ids: ids that end a sequence unless the request says otherwise.
        defaults: request fields that hold when a request does not set them.
        chat_template_kwargs, mm_processor_kwargs: the server's options, below the request's.
        placeholders: per modality the placeholder token's string.
        geometry, media: how media expand, and what is allowed; no modality when None.
        audio: the audio side of a model that hears; None for others.
    """

    tokenizer: Tokenizer
    context: int | None
    vocab_size: int
    end_ids: tuple[int, ...] = ()
    max_prompt: int | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    chat_template: chat.ChatTemplate | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    mm_processor_kwargs: Mapping[str, Any] = field(default_factory=dict)
    placeholders: Mapping[str, str] = field(default_factory=dict)
    geometry: VisionGeometry = field(default_factory=VisionGeometry)
    media: MediaPolicy = field(default_factory=MediaPolicy)
    audio: AudioFrontEnd | None = None

    @cached_property
    def at_once(self) -> FrontEnd:
        """The same for who cannot wait: raises MediaPending for requests that name media."""
        return replace(self, media=replace(self.media, may_wait=False))

    @cached_property
    def remembered_options(self) -> _lru_cache_wrapper[RequestOptions]:
        """`_read` of this front end, with its last results; 1, 1.0 and True all differ."""
        return lru_cache(REMEMBERED, typed=True)(partial(_read, self))


@dataclass(frozen=True, eq=False)
class RequestOptions:
    """What one request asks for besides its prompt; shared by all that ask for the same.

    Attributes:
        prompt_fields: those of `PROMPT_FIELDS` that the request has.
        beside_prompt: fields of `PROMPT_VALUES` that it has besides.
        task: "generate", "transcribe" or "embed".
        limits, tokenize: how the prompt is cut, padded and checked.
        max_tokens: as the request has it.
        template_kwargs, mm_kwargs: options of server and request, merged once for all readers.
        mm_views: `mm_kwargs` as each modality sees them.
        stop_ids, bad_ids: ids of the stop words and the bad words; None for none.
        cache_salt_id: 64-bit salt of cache keys; None for none.
    """

    prompt_fields: tuple[str, ...]
    beside_prompt: frozenset[str]
    task: str
    limits: Limits
    tokenize: TokenizeOptions
    max_tokens: int | None
    template_kwargs: Mapping[str, Any]
    mm_kwargs: Mapping[str, Any]
    mm_views: Mapping[str, Mapping[str, Any]]
    sampling: Sampling
    text: TextOptions
    end_ids: tuple[int, ...]
    pad_id: int | None
    stop_ids: list[list[int]] | None
    bad_ids: list[list[int]] | None
    cache_salt_id: int | None

    @cached_property
    def untouched_length(self) -> int:
        """The most ids of a prompt that nothing cuts, fills or refuses, and that leaves room for
        `max_tokens`; 0 where there is more to look at.
        """
        how, limits = self.tokenize, self.limits
        if self.task != "generate" or how.truncate is not None or how.pad is not None:
            return 0
        if how.want_offsets or self.max_tokens is None:
            return 0
        room = sys.maxsize if limits.context is None else limits.context - self.max_tokens
        return room if limits.prompt is None else min(room, limits.prompt)

    def with_reasoning(self, reasoning: Reasoning) -> RequestOptions:
        """The options of an answer that begins with thoughts."""
        return self._thinking[reasoning] if reasoning else self

    @cached_property
    def _thinking(self) -> dict[str, RequestOptions]:
        # Stop words may occur in thoughts; where those end, only the text tells.
        return {
            how: replace(self, text=replace(self.text, reasoning=how), stop_ids=None)
            for how in get_args(Reasoning)
        }


def with_defaults(request: Row, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The request over a server's defaults; None means "not set"."""
    row = {k: v for k, v in request.items() if v is not None}
    if "seed" in row or "random_seed" in row:
        # Two names of one field.
        defaults = {k: v for k, v in defaults.items() if k not in ("seed", "random_seed")}
    return {**defaults, **row}


def request_options(row: Row, server: FrontEnd) -> RequestOptions:
    """The options of a row that holds the server's defaults too.

    Raises UsageError that names the field when the request asks for what cannot be.
    """
    flat: list[Any] = []
    characters = 0
    for name, value in row.items():
        if name in PROMPT_VALUES:
            value = True
        elif name not in OPTION_FIELDS:
            continue
        elif isinstance(value, str):
            characters += len(value)
        elif isinstance(value, (list, tuple)):
            value = tuple(value)
            characters += sum(map(len, value))
        flat += (name, value)
    if characters > REMEMBERED_CHARACTERS:
        return _read(server, *flat)
    return server.remembered_options(*flat)


def _read(server: FrontEnd, *flat: Any) -> RequestOptions:
    """The options for names and values in turn; a prompt's value is True."""
    row: dict[str, Any] = dict(zip(flat[::2], flat[1::2], strict=True))
    task, limits, tokenize = _tokenize_options(row, server)
    template_kwargs = _template_kwargs(row, server)
    mm_kwargs = _mm_kwargs(row, server)
    stop_words = words.check_words("stop_words", row.get("stop_words") or ())
    bad_words = words.check_words("bad_words", row.get("bad_words") or ())
    end_ids = _end_ids(row, server)
    return RequestOptions(
        prompt_fields=tuple(name for name in PROMPT_FIELDS if name in row),
        beside_prompt=PROMPT_VALUES.difference(PROMPT_FIELDS).intersection(row),
        task=task,
        limits=limits,
        tokenize=tokenize,
        max_tokens=row.get("max_tokens"),
        template_kwargs=template_kwargs,
        mm_kwargs=mm_kwargs,
        mm_views={m: view(mm_kwargs, m) if mm_kwargs else {} for m in chat.MODALITIES},
        sampling=parse_sampling({k: row[k] for k in SAMPLING_FIELDS if k in row}),
        text=TextOptions(
            stop_words=stop_words,
            include_stop=bool(row.get("include_stop_str_in_output", False)),
            skip_special_tokens=bool(row.get("skip_special_tokens", True)),
            end_ids=end_ids,
            tools=_tools(row, server, template_kwargs),
        ),
        end_ids=end_ids,
        pad_id=_pad_id(row, server),
        stop_ids=words.stop_sequences(server.tokenizer, stop_words) if stop_words else None,
        bad_ids=words.bad_sequences(server.tokenizer, bad_words) if bad_words else None,
        cache_salt_id=cache_salt_id(row.get("cache_salt")),
    )


def _tokenize_options(row: Row, server: FrontEnd) -> tuple[str, Limits, TokenizeOptions]:
    task = row.get("task", "generate")
    tasks = TASKS if server.audio is None else (*TASKS, TRANSCRIBE)
    if task not in tasks:
        raise problem("task", "is not a task", expected=" or ".join(tasks), found=task)
    if server.audio is not None and task != "embed" and transcribes(row, server.audio.streaming):
        task = TRANSCRIBE
    max_tokens = row.get("max_tokens")
    if task != "embed":
        # A transcription is as long as what was said.
        if max_tokens is None and task == "generate":
            raise problem("max_tokens", "is required")
        if max_tokens is not None and max_tokens < 1:
            raise problem("max_tokens", "is out of range", expected=">= 1", found=max_tokens)
    if row.get("min_tokens") is not None and row["min_tokens"] > (max_tokens or 0):
        raise problem(
            "min_tokens", "is larger than max_tokens", expected=f"<= {max_tokens}",
            found=row["min_tokens"],
        )  # fmt: skip
    output = 0 if task == "embed" else max_tokens
    chunked = bool(row.get("enable_chunked_processing", False))
    if chunked and task != "embed":
        raise problem(
            "enable_chunked_processing", "is for embeddings", expected="task embed", found=task
        )
    limits = Limits(server.context, output, server.max_prompt, chunked)
    max_length = row.get("max_length")
    if max_length is not None and max_length < 1:
        raise problem("max_length", "is out of range", expected=">= 1", found=max_length)
    truncate, side = row.get("truncate_prompt_tokens"), row.get("truncation_side")
    check_truncation(truncate, side)
    wish = resolve_truncation(row.get("truncation"), max_length)
    if wish is False:
        truncate = None
    elif truncate is None and wish is not None:
        truncate = int(wish)
    pad = resolve_padding(row.get("padding"), max_length)
    return task, limits, TokenizeOptions(
        truncate=truncate,
        side=side,
        pad=None if pad is None or pad is False else int(pad),
        add_special_tokens=row.get("add_special_tokens"),
        want_offsets=bool(row.get("return_token_offsets", False)),
        lowercase=bool(row.get("lowercase", False)),
    )  # fmt: skip


def _template_kwargs(row: Row, server: FrontEnd) -> dict[str, Any]:
    """Server and request options for the chat template, merged once for all who read them."""
    text = row.get("chat_template_kwargs")
    request = chat.parse_json("chat_template_kwargs", text, dict) if text is not None else {}
    for key in request:
        if key in RESERVED_TEMPLATE_KEYS:
            raise problem("chat_template_kwargs", "sets a reserved name", found=key)
    return {**server.chat_template_kwargs, **request}


def _tools(row: Row, server: FrontEnd, template_kwargs: Mapping[str, Any]) -> str:
    """The functions whose calls are taken out of the answer, as JSON text; empty for none."""
    tools, template = template_kwargs.get("tools"), server.chat_template
    if not tools or template is None or not template.calls_tools or row.get("messages") is None:
        return ""
    chat.check_tools(tools)
    return json.dumps(tools, ensure_ascii=False)


def _mm_kwargs(row: Row, server: FrontEnd) -> dict[str, Any]:
    text = row.get("mm_processor_kwargs")
    if text is None:
        return merge(server.mm_processor_kwargs, {}) if server.mm_processor_kwargs else {}
    request = chat.parse_json("mm_processor_kwargs", text, dict)
    if request and server.audio is not None:
        raise problem("mm_processor_kwargs", "this model's audio is processed in one way only")
    if request and not server.media.trust_request_kwargs:
        raise problem("mm_processor_kwargs", "is not allowed per request on this server")
    return merge(server.mm_processor_kwargs, request)


def check_ids(parameter: str, ids: Sequence[int], server: FrontEnd) -> None:
    """Raise UsageError for an id that the engine does not have."""
    if ids and not (min(ids) >= 0 and max(ids) < server.vocab_size):
        bad = next(i for i in ids if not 0 <= i < server.vocab_size)
        raise problem(
            parameter, "holds an id that is out of range",
            expected=f"0 to {server.vocab_size - 1}", found=bad,
        )  # fmt: skip


def _end_ids(row: Row, server: FrontEnd) -> tuple[int, ...]:
    """The request's end id (-1: none), else the model's."""
    end_id = row.get("end_id")
    if end_id is None:
        # In a stream the end of a sentence is ordinary output; the audio's end is the end.
        return () if server.audio is not None and server.audio.streaming else server.end_ids
    if end_id == -1:
        return ()
    check_ids("end_id", [end_id], server)
    return (int(end_id),)


def _pad_id(row: Row, server: FrontEnd) -> int | None:
    """The request's pad id, else the tokenizer's, else its end id as the classic backend does."""
    pad_id = row.get("pad_id")
    if pad_id is not None:
        check_ids("pad_id", [pad_id], server)
        return int(pad_id)
    if server.tokenizer.pad_id is not None:
        return server.tokenizer.pad_id
    return server.end_ids[0] if server.end_ids else None
