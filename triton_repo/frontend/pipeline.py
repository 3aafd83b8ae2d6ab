"""The way of one request row to an engine input; `prepare` shows the order of operations.

The order is part of the contract: most front-end bugs are steps in the wrong order, or a step that
one of several paths forgot. There is one path for raw text, token ids, chat messages, content
parts and pre-processed features.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from triton_repo.frontend import chat, words
from triton_repo.frontend.audio.settings import TRANSCRIBE, transcribes
from triton_repo.frontend.geometry import VisionGeometry
from triton_repo.frontend.limits import (
    Limits,
    Offset,
    Prompt,
    TokenizeOptions,
    check_media_truncation,
    check_truncation,
    resolve_padding,
    resolve_truncation,
    select,
)
from triton_repo.frontend.media import MediaItem, MediaPolicy, load_media
from triton_repo.frontend.mm_kwargs import merge, view
from triton_repo.frontend.output import TextOptions
from triton_repo.frontend.problems import problem
from triton_repo.frontend.reasoning import Reasoning, reasoning_after
from triton_repo.frontend.salt import cache_salt_id
from triton_repo.frontend.sampling import Sampling, parse_sampling
from triton_repo.frontend.tokenizer import Encoding, Tokenizer

if TYPE_CHECKING:
    from triton_repo.frontend.audio.frontend import AudioFrontEnd
    from triton_repo.frontend.audio.live import LiveAudio

PROMPT_FIELDS = ("text_input", "input_ids", "messages", "content_parts")
TASKS = ("generate", "embed")
# Options that reach the chat template through their own fields.
RESERVED_TEMPLATE_KEYS = frozenset({"messages", "chat_template", "tokenize"})

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


@dataclass(frozen=True)
class MediaSpan:
    """Where one media item stands in the prompt."""

    modality: str
    offset: int
    length: int
    key: int


@dataclass(frozen=True)
class Prepared:
    """One engine input. `prompt.arrays` holds `offsets` where there are any.

    `window` is the size of the chunks in which a longer prompt is embedded; None where it is one.
    `features` are the spectrograms of a request with audio, float32 [chunks, mels, frames], or
    [1, mels, frames] of a stream.
    """

    task: str
    prompt: Prompt
    max_tokens: int
    sampling: Sampling
    text: TextOptions
    end_ids: tuple[int, ...]
    pad_id: int | None
    stop_ids: list[list[int]] | None
    bad_ids: list[list[int]] | None
    cache_salt_id: int | None
    mm_views: dict[str, dict[str, Any]]
    media: list[MediaSpan]
    features: npt.NDArray[np.float32] | None = None
    window: int | None = None

    @property
    def real_ids(self) -> list[int]:
        """Prompt ids without padding."""
        return self.prompt.ids[: self.prompt.real_length]


@dataclass
class _Tokenised:
    """Between the steps: ids, offsets, counts of special tokens, media positions."""

    encoding: Encoding
    media: list[tuple[int, MediaItem]]
    spans: list[MediaSpan]
    features: npt.NDArray[np.float32] | None = None
    reasoning: Reasoning = ""


def prepare(request: Row, server: FrontEnd) -> Prepared:
    """Turn one request row (public field names) into an engine input.

    Raises UsageError that names the field when the request asks for what cannot be.
    """
    # 1. Server defaults and request options become one set; None means "not set".
    return _prepared(
        {**server.defaults, **{k: v for k, v in request.items() if v is not None}}, server
    )


def _prepared(row: Row, server: FrontEnd, tokenised: _Tokenised | None = None) -> Prepared:
    """The steps after the first; `tokenised` when the prompt is already there."""
    task, limits, options = _options(row, server)
    template_kwargs = _template_kwargs(row, server)
    mm_kwargs = _mm_kwargs(row, server)
    # The salt is checked before any work is done, and attached at the end for every path.
    salt = cache_salt_id(row.get("cache_salt"))
    # 2.-6. Render, guard, normalise, tokenise, map offsets back to the untrimmed text.
    if tokenised is None and server.audio is not None:
        tokenised = _hear(row, server)
    if tokenised is None:
        tokenised = _tokenise(row, server, options, limits, template_kwargs, mm_kwargs)
    # 7.-10. Truncate, pad, check the length; a prompt with media is expanded first, because the
    # limit holds for the expanded prompt.
    prompt, spans = _fit(tokenised, options, limits, server)
    max_tokens = _max_tokens(row, task, prompt, limits)
    # 11. Text that is echoed comes from the final ids: `Prepared.real_ids`.
    stop_words = words.check_words("stop_words", row.get("stop_words") or ())
    bad_words = words.check_words("bad_words", row.get("bad_words") or ())
    end_ids = _end_ids(row, server)
    # 12. Everything that isolates caches travels with every engine input.
    return Prepared(
        task=task,
        prompt=prompt,
        max_tokens=max_tokens,
        sampling=parse_sampling({k: row[k] for k in SAMPLING_FIELDS if k in row}),
        text=TextOptions(
            stop_words=stop_words,
            include_stop=bool(row.get("include_stop_str_in_output", False)),
            skip_special_tokens=bool(row.get("skip_special_tokens", True)),
            end_ids=end_ids,
            tools=_tools(row, server, template_kwargs),
            reasoning=tokenised.reasoning,
        ),
        end_ids=end_ids,
        pad_id=_pad_id(row, server),
        stop_ids=_stop_ids(stop_words, tokenised.reasoning, server),
        bad_ids=words.bad_sequences(server.tokenizer, bad_words) if bad_words else None,
        cache_salt_id=salt,
        mm_views={m: view(mm_kwargs, m) if mm_kwargs else {} for m in chat.MODALITIES},
        media=spans,
        features=tokenised.features,
        window=_window(prompt, spans, limits),
    )


def prepare_live(request: Row, server: FrontEnd) -> tuple[Prepared, LiveAudio]:
    """As `prepare`, for a stream that is heard while it is spoken; the audio comes later.

    Raises UsageError for a model that hears none, and for fields that a stream has no use for.
    """
    assert server.audio is not None
    row = {**server.defaults, **{k: v for k, v in request.items() if v is not None}}
    for name in (*PROMPT_FIELDS, "audio_bytes", "audio_url", "language"):
        if row.get(name) is not None:
            raise problem(name, "has no place in a stream; its audio comes in audio_samples")
    if row.get("truncate_prompt_tokens") is not None:
        raise problem("truncate_prompt_tokens", "a stream cannot be cut")
    ids, audio = server.audio.live(row.get("delay_ms"))
    return _prepared(row, server, _Tokenised(Encoding(ids, None, (0, 0)), [], [])), audio


def _window(prompt: Prompt, spans: Sequence[MediaSpan], limits: Limits) -> int | None:
    """The size of chunks, where the prompt does not fit without."""
    window = limits.window if limits.chunked else None
    if window is None or prompt.real_length <= window:
        return None
    if spans:
        raise problem("enable_chunked_processing", "cannot cut a prompt with media into chunks")
    return window


def _stop_ids(
    stop_words: Sequence[str], reasoning: Reasoning, server: FrontEnd
) -> list[list[int]] | None:
    """Stop words as ids; none where they may occur in thoughts, which only their text tells."""
    if not stop_words or reasoning:
        return None
    return words.stop_sequences(server.tokenizer, stop_words)


def _max_tokens(row: Row, task: str, prompt: Prompt, limits: Limits) -> int:
    if task == "embed":
        return 0
    room = limits.context - prompt.real_length if limits.context is not None else None
    if row.get("max_tokens") is None:
        return room or 1
    wanted = int(row["max_tokens"])
    return wanted if room is None else min(wanted, room)


SAMPLING_FIELDS = (
    "temperature", "top_k", "top_p", "seed", "random_seed", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "length_penalty", "min_tokens",
    "num_return_sequences", "beam_width",
)  # fmt: skip


def _options(row: Row, server: FrontEnd) -> tuple[str, Limits, TokenizeOptions]:
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
    if request and not server.media.trust_request_kwargs:
        raise problem("mm_processor_kwargs", "is not allowed per request on this server")
    return merge(server.mm_processor_kwargs, request)


def _tokenise(
    row: Row,
    server: FrontEnd,
    options: TokenizeOptions,
    limits: Limits,
    template_kwargs: Mapping[str, Any],
    mm_kwargs: Mapping[str, Any],
) -> _Tokenised:
    given = [name for name in PROMPT_FIELDS if row.get(name) is not None]
    if len(given) != 1:
        raise problem(
            "text_input", "give exactly one prompt", expected=" or ".join(PROMPT_FIELDS),
            found=", ".join(given) or "none",
        )  # fmt: skip
    extra = [
        chat.MediaReference("image", url, parameter="image_url_input")
        for url in row.get("image_url_input") or ()
    ]
    extra += [
        chat.MediaReference("image", data=data, parameter="image_bytes_input")
        for data in row.get("image_bytes_input") or ()
    ]
    extra += [
        chat.MediaReference("audio", url, parameter="audio_url")
        for url in row.get("audio_url") or ()
    ]
    if row.get("audio_bytes") is not None:
        extra.append(chat.MediaReference("audio", data=row["audio_bytes"], parameter="audio_bytes"))
    for name in ("audio_samples", "language", "delay_ms"):
        if row.get(name) is not None:
            raise problem(name, "this model does not take audio")
    if row.get("input_ids") is not None:
        ids = list(row["input_ids"])
        _check_ids("input_ids", ids, server)
        spans = _features(row.get("mm_features"), len(ids))
        if extra:
            raise problem("input_ids", "media beside ids need content_parts")
        return _Tokenised(Encoding(ids, None, (0, 0)), [], spans)
    if row.get("mm_features") is not None:
        raise problem("mm_features", "needs input_ids")
    if row.get("content_parts") is not None:
        return _tokenise_parts(row["content_parts"], extra, server, options, limits, mm_kwargs)
    reasoning: Reasoning = ""
    if row.get("messages") is not None:
        conversation = chat.parse_messages(row["messages"])
        media = load_media(conversation.media + extra, mm_kwargs, server.geometry, server.media)
        sentinels = [f"\x00{i}\x00" for i in range(len(media))]
        text = _render(conversation, server, template_kwargs, sentinels)
        if server.chat_template is not None and server.chat_template.thinks:
            reasoning = reasoning_after(text)
        special = False if options.add_special_tokens is None else options.add_special_tokens
    else:
        text = row["text_input"]
        media = load_media(extra, mm_kwargs, server.geometry, server.media)
        sentinels = [f"\x00{i}\x00" for i in range(len(media))]
        if sentinels:
            text = "".join(sentinels) + text.replace("\x00", "")
        special = options.add_special_tokens is not False
    if not media:
        encoding = _tokenise_text(text, special, options, limits, server)
        return _Tokenised(encoding, [], [], reasoning=reasoning)
    encoding, positions = _tokenise_with_media(text, special, options, media, sentinels, server)
    return _Tokenised(encoding, positions, [], reasoning=reasoning)


def _hear(row: Row, server: FrontEnd) -> _Tokenised | None:
    """Steps 2 to 6 of a request with audio or messages to a model that hears."""
    # Decoding needs libraries that servers of text do without.
    from triton_repo.frontend.audio.requests import hear

    assert server.audio is not None
    most = server.context if server.audio.streaming else (server.max_prompt or server.context)
    hearing = hear(row, server.audio, server.media, most)
    if hearing is None:
        return None
    ids = hearing.heard.ids
    _check_ids("input_ids", ids, server)
    spans = [MediaSpan("audio", *span) for span in hearing.spans]
    if server.audio.streaming and row.get("truncate_prompt_tokens") is not None:
        raise problem("truncate_prompt_tokens", "a stream cannot be cut")
    return _Tokenised(Encoding(ids, None, (0, 0)), [], spans, hearing.heard.features)


def _render(
    conversation: chat.Conversation,
    server: FrontEnd,
    kwargs: Mapping[str, Any],
    sentinels: Sequence[str],
) -> str:
    """Prompt text; each media part is a sentinel, or the template's own placeholder."""
    template = server.chat_template
    if template is None:
        raise problem("messages", "this tokenizer has no chat template; use text_input")
    remaining = iter(sentinels)
    for message in conversation.messages:
        content = message["content"]
        if isinstance(content, str):
            # A sentinel must not come from the text of a client.
            message["content"] = content.replace("\x00", "") if sentinels else content
        elif not template.knows_parts:
            message["content"] = "".join(
                p["text"].replace("\x00", "") if p["type"] == "text" else next(remaining)
                for p in content
            )
    # Media that came in tensors stand in front of the conversation.
    return "".join(list(remaining) if not template.knows_parts else []) + template.render(
        conversation.messages, kwargs
    )


def _tokenise_text(
    text: str, special: bool, options: TokenizeOptions, limits: Limits, server: FrontEnd
) -> Encoding:
    """Steps 3 to 6 for one text."""
    # 3. A text that cannot fit is refused, or cut, before the tokenizer spends time on it.
    cut_left = 0
    if limits.longest is not None:
        longest = limits.longest * server.tokenizer.max_chars_per_token
        if len(text) > longest:
            if options.truncate is None:
                raise problem(
                    "text_input", "is longer than the context can hold",
                    expected=f"at most {longest} characters", found=f"{len(text)} characters",
                )  # fmt: skip
            if options.side == "left":
                cut_left = len(text) - longest
                text = text[cut_left:]
            elif options.side == "right":
                text = text[:longest]
    # 4. Normalisation must not move characters under offsets.
    if options.lowercase:
        lowered = text.lower()
        if options.want_offsets and len(lowered) != len(text):
            raise problem("lowercase", "changes the length of this text; offsets would not fit")
        text = lowered
    # 5. Tokenise.
    encoding = server.tokenizer.encode(text, special, options.want_offsets)
    # 6. Offsets refer to the text before the cut; special tokens stay (0, 0).
    if cut_left and encoding.offsets is not None:
        moved = [(a + cut_left, b + cut_left) if a != b else (a, b) for a, b in encoding.offsets]
        encoding = Encoding(encoding.ids, moved, encoding.specials)
    return encoding


def _tokenise_with_media(
    text: str,
    special: bool,
    options: TokenizeOptions,
    media: Sequence[MediaItem],
    sentinels: Sequence[str],
    server: FrontEnd,
) -> tuple[Encoding, list[tuple[int, MediaItem]]]:
    """Ids with one placeholder per item, and the items' positions. There are no offsets."""
    if options.lowercase:
        text = text.lower()
    ids: list[int] = []
    positions: list[tuple[int, MediaItem]] = []
    if sentinels[0] in text:
        encoding = Encoding([], None, (0, 0))
        for index, (item, sentinel) in enumerate(zip(media, sentinels, strict=True)):
            before, _, text = text.partition(sentinel)
            ids += server.tokenizer.encode(before, special and index == 0, False).ids
            positions.append((len(ids), item))
            ids.append(_placeholder_id(item.modality, server))
        ids += server.tokenizer.encode(text, False, False).ids
        return Encoding(ids, None, encoding.specials), positions
    encoding = server.tokenizer.encode(text, special, False)
    expected = [(_placeholder_id(item.modality, server), item) for item in media]
    found = [i for i, t in enumerate(encoding.ids) if t in {p for p, _ in expected}]
    if len(found) != len(media) or any(
        encoding.ids[i] != p for i, (p, _) in zip(found, expected, strict=True)
    ):
        raise problem(
            "messages", "the placeholders in the prompt do not match the media items",
            expected=f"{len(media)} placeholders", found=len(found),
        )  # fmt: skip
    return encoding, [(i, item) for i, (_, item) in zip(found, expected, strict=True)]


def _tokenise_parts(
    text: str,
    extra: Sequence[chat.MediaReference],
    server: FrontEnd,
    options: TokenizeOptions,
    limits: Limits,
    mm_kwargs: Mapping[str, Any],
) -> _Tokenised:
    """Content parts: texts, token ids and media in order, without a template."""
    raw = chat.parse_json("content_parts", text, list)
    parts = [chat.parse_part(f"content_parts[{i}]", part) for i, part in enumerate(raw)]
    references = [p for p in parts if isinstance(p, chat.MediaReference)]
    items = load_media([*references, *extra], mm_kwargs, server.geometry, server.media)
    remaining = iter(items)
    ids: list[int] = []
    positions: list[tuple[int, MediaItem]] = []

    def place(item: MediaItem) -> None:
        positions.append((len(ids), item))
        ids.append(_placeholder_id(item.modality, server))

    special = options.add_special_tokens is True
    for index, part in enumerate(parts):
        if isinstance(part, chat.MediaReference):
            place(next(remaining))
        elif isinstance(part, str):
            plain = options.replace(want_offsets=False)
            ids += _tokenise_text(part, special and index == 0, plain, limits, server).ids
        else:
            _check_ids(f"content_parts[{index}].token_ids", part, server)
            ids += part
    for item in remaining:
        place(item)
    return _Tokenised(Encoding(ids, None, (0, 0)), positions, [])


def _fit(
    tokenised: _Tokenised, options: TokenizeOptions, limits: Limits, server: FrontEnd
) -> tuple[Prompt, list[MediaSpan]]:
    """Steps 7 to 10: expand placeholders, truncate, pad, check; every array goes along."""
    encoding = tokenised.encoding
    ids, spans = _expand(encoding.ids, tokenised.media)
    spans += tokenised.spans
    arrays: dict[str, list[Any]] = {}
    if encoding.offsets is not None and options.want_offsets and not spans:
        arrays["offsets"] = list[Offset](encoding.offsets)
    prompt = Prompt(ids, arrays)
    selection = select(
        len(ids), options, server.tokenizer.truncation_side, limits,
        encoding.specials if not spans else (0, 0),
    )  # fmt: skip
    if spans:
        cut = selection.slices[0] if selection is not None else None
        places = check_media_truncation(cut, len(ids), [(s.offset, s.length) for s in spans])
        spans = [
            MediaSpan(s.modality, offset, length, s.key)
            for s, (offset, length) in zip(spans, places, strict=True)
        ]
    prompt = prompt.truncated(selection)
    if not prompt.ids:
        raise problem("text_input", "the prompt has no tokens", expected="at least 1", found=0)
    prompt = prompt.padded(options.pad, server.tokenizer.pad_id, limits)
    prompt.check_length(limits)
    return prompt, spans


def _expand(
    ids: list[int], media: Sequence[tuple[int, MediaItem]]
) -> tuple[list[int], list[MediaSpan]]:
    """Each placeholder becomes as many as its item has tokens."""
    out: list[int] = []
    spans: list[MediaSpan] = []
    start = 0
    for position, item in media:
        out += ids[start:position]
        spans.append(MediaSpan(item.modality, len(out), item.tokens, item.key))
        out += [ids[position]] * item.tokens
        start = position + 1
    return out + ids[start:], spans


def _features(text: str | None, length: int) -> list[MediaSpan]:
    """Spans of features that a client has processed itself; the ids hold their placeholders."""
    if text is None:
        return []
    spans: list[MediaSpan] = []
    for index, feature in enumerate(chat.parse_json("mm_features", text, list)):
        where = f"mm_features[{index}]"
        if not isinstance(feature, dict):
            raise problem(where, "must be a JSON object", found=type(feature).__name__)
        modality = feature.get("modality")
        if modality not in chat.MODALITIES:
            raise problem(f"{where}.modality", "is not a modality", found=modality)
        numbers = []
        for name, low, high in (("offset", 0, length), ("length", 1, length), ("key", 0, 1 << 64)):
            value = feature.get(name)
            if type(value) is not int or not low <= value < high + (name == "length"):
                raise problem(f"{where}.{name}", "is out of range", found=value)
            numbers.append(value)
        offset, size, key = numbers
        if offset + size > length or (spans and offset < spans[-1].offset + spans[-1].length):
            raise problem(where, "does not fit the prompt, or overlaps the feature before it")
        spans.append(MediaSpan(modality, offset, size, key))
    return spans


def _placeholder_id(modality: str, server: FrontEnd) -> int:
    token = server.placeholders.get(modality)
    token_id = server.tokenizer.token_id(token) if token is not None else None
    if token_id is None:
        raise problem(f"{modality}_url", f"this model does not take {modality} inputs")
    return token_id


def _check_ids(parameter: str, ids: Sequence[int], server: FrontEnd) -> None:
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
    _check_ids("end_id", [end_id], server)
    return (int(end_id),)


def _pad_id(row: Row, server: FrontEnd) -> int | None:
    """The request's pad id, else the tokenizer's, else its end id as the classic backend does."""
    pad_id = row.get("pad_id")
    if pad_id is not None:
        _check_ids("pad_id", [pad_id], server)
        return int(pad_id)
    if server.tokenizer.pad_id is not None:
        return server.tokenizer.pad_id
    return server.end_ids[0] if server.end_ids else None
