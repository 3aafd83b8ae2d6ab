"""The way of one request row to an engine input; `prepare` shows the order of operations.

The order is part of the contract: most front-end bugs are steps in the wrong order, or a step that
one of several paths forgot. There is one path for raw text, token ids, chat messages, content
parts and pre-processed features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from triton_repo.frontend import chat
from triton_repo.frontend.encoding import Encoding
from triton_repo.frontend.limits import Limits, Offset, Prompt, check_media_truncation, select
from triton_repo.frontend.media import MediaItem, load_media
from triton_repo.frontend.options import (
    PROMPT_FIELDS,
    FrontEnd,
    RequestOptions,
    Row,
    check_ids,
    request_options,
    with_defaults,
)
from triton_repo.frontend.problems import problem
from triton_repo.frontend.reasoning import Reasoning, reasoning_after

if TYPE_CHECKING:
    from triton_repo.frontend.audio.live import LiveAudio


@dataclass(frozen=True)
class MediaSpan:
    """Where one media item stands in the prompt."""

    modality: str
    offset: int
    length: int
    key: int


@dataclass(slots=True)
class Prepared:
    """One engine input.

    Attributes:
        options: what the request asks for besides the prompt.
        prompt: ids; `prompt.arrays` holds `offsets` where there are any.
        max_tokens: most tokens of the answer that fit; 0 for an embedding.
        media: where media items stand in the prompt.
        features: the spectrograms of a request with audio, float32 [chunks, mels, frames], or
            [1, mels, frames] of a stream.
        window: size of the chunks in which a longer prompt is embedded; None where it is one.
        is_plain: known to be nothing but ids, all of them real, and options that hold as they are.
    """

    options: RequestOptions
    prompt: Prompt
    max_tokens: int
    media: list[MediaSpan]
    features: npt.NDArray[np.float32] | None = None
    window: int | None = None
    is_plain: bool = False

    @property
    def real_ids(self) -> list[int]:
        """Prompt ids without padding."""
        return list(self.prompt.ids[: self.prompt.real_length])


@dataclass(slots=True)
class _Tokenised:
    """Between the steps: ids, offsets, counts of special tokens, media positions."""

    encoding: Encoding
    media: list[tuple[int, MediaItem]]
    spans: list[MediaSpan]
    features: npt.NDArray[np.float32] | None = None
    reasoning: Reasoning = ""

    @property
    def is_text(self) -> bool:
        """Whether there is nothing but ids of text."""
        return not (self.media or self.spans) and self.features is None


def prepare(request: Row, server: FrontEnd) -> Prepared:
    """Turn one request row (public field names) into an engine input.

    Raises UsageError that names the field when the request asks for what cannot be.
    """
    # 1. Server defaults and request options become one set.
    return _prepared(with_defaults(request, server.defaults), server)


def _prepared(row: Row, server: FrontEnd, tokenised: _Tokenised | None = None) -> Prepared:
    """The steps after the first; `tokenised` when the prompt is already there."""
    # What the request asks for, the salt too, is checked before any work is done.
    options = request_options(row, server)
    # 2.-6. Render, guard, normalise, tokenise, map offsets back to the untrimmed text.
    if tokenised is None and server.audio is not None:
        tokenised = _hear(row, server, options)
    if tokenised is None:
        tokenised = _tokenise(row, server, options)
    # 7.-10. Truncate, pad, check the length; a prompt with media is expanded first, because the
    # limit holds for the expanded prompt. Of most prompts it is known that nothing is to be done.
    ids = tokenised.encoding.ids
    if tokenised.is_text and 0 < len(ids) <= options.untouched_length:
        asked = options.with_reasoning(tokenised.reasoning)
        return Prepared(asked, Prompt(ids), options.max_tokens or 0, [], is_plain=True)
    prompt, spans = _fit(tokenised, options, server)
    # 11. Text that is echoed comes from the final ids: `Prepared.real_ids`.
    # 12. Everything that isolates caches travels with every engine input, in the options.
    return Prepared(
        options=options.with_reasoning(tokenised.reasoning),
        prompt=prompt,
        max_tokens=_max_tokens(options, prompt),
        media=spans,
        features=tokenised.features,
        window=_window(prompt, spans, options.limits),
    )


def prepare_live(request: Row, server: FrontEnd) -> tuple[Prepared, LiveAudio]:
    """As `prepare`, for a stream that is heard while it is spoken; the audio comes later.

    Raises UsageError for a model that hears none, and for fields that a stream has no use for.
    """
    assert server.audio is not None
    row = with_defaults(request, server.defaults)
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


def _max_tokens(options: RequestOptions, prompt: Prompt) -> int:
    if options.task == "embed":
        return 0
    context, wanted = options.limits.context, options.max_tokens
    room = context - prompt.real_length if context is not None else None
    if wanted is None:
        return room or 1
    return int(wanted) if room is None else min(int(wanted), room)


def _tokenise(row: Row, server: FrontEnd, options: RequestOptions) -> _Tokenised:
    given = options.prompt_fields
    if len(given) != 1:
        raise problem(
            "text_input", "give exactly one prompt", expected=" or ".join(PROMPT_FIELDS),
            found=", ".join(given) or "none",
        )  # fmt: skip
    extra: list[chat.MediaReference] = []
    if options.beside_prompt:
        for name in ("audio_samples", "language", "delay_ms"):
            if name in row:
                raise problem(name, "this model does not take audio")
        extra = _media_in_tensors(row)
    if "input_ids" in row:
        ids = list(row["input_ids"])
        check_ids("input_ids", ids, server)
        spans = _features(row.get("mm_features"), len(ids))
        if extra:
            raise problem("input_ids", "media beside ids need content_parts")
        return _Tokenised(Encoding(ids, None, (0, 0)), [], spans)
    if "mm_features" in row:
        raise problem("mm_features", "needs input_ids")
    if "content_parts" in row:
        return _tokenise_parts(row["content_parts"], extra, server, options)
    add_special = options.tokenize.add_special_tokens
    reasoning: Reasoning = ""
    if "messages" in row:
        conversation = chat.parse_messages(row["messages"])
        media, sentinels = _load(conversation.media + extra, server, options)
        text = _render(conversation, server, options.template_kwargs, sentinels)
        if server.chat_template is not None and server.chat_template.thinks:
            reasoning = reasoning_after(text)
        special = False if add_special is None else add_special
    else:
        text = row["text_input"]
        media, sentinels = _load(extra, server, options)
        if sentinels:
            text = "".join(sentinels) + text.replace("\x00", "")
        special = add_special is not False
    if not media:
        encoding = _tokenise_text(text, special, options, server)
        return _Tokenised(encoding, [], [], reasoning=reasoning)
    encoding, positions = _tokenise_with_media(text, special, options, media, sentinels, server)
    return _Tokenised(encoding, positions, [], reasoning=reasoning)


def _load(
    references: Sequence[chat.MediaReference], server: FrontEnd, options: RequestOptions
) -> tuple[list[MediaItem], list[str]]:
    """The media, and what stands for each in the text."""
    if not references:
        return [], []
    media = load_media(references, options.mm_kwargs, server.geometry, server.media)
    return media, [f"\x00{i}\x00" for i in range(len(media))]


def _media_in_tensors(row: Row) -> list[chat.MediaReference]:
    """Media that came beside the prompt, in tensors of their own."""
    media = [
        chat.MediaReference("image", url, parameter="image_url_input")
        for url in row.get("image_url_input", ())
    ]
    media += [
        chat.MediaReference(modality, data=data, parameter=f"{modality}_bytes_input")
        for modality in ("image", "video")
        for data in row.get(f"{modality}_bytes_input", ())
    ]
    media += [
        chat.MediaReference("audio", url, parameter="audio_url") for url in row.get("audio_url", ())
    ]
    if "audio_bytes" in row:
        media.append(chat.MediaReference("audio", data=row["audio_bytes"], parameter="audio_bytes"))
    return media


def _hear(row: Row, server: FrontEnd, options: RequestOptions) -> _Tokenised | None:
    """Steps 2 to 6 of a request with audio or messages to a model that hears."""
    # Decoding needs libraries that servers of text do without.
    from triton_repo.frontend.audio.requests import hear

    assert server.audio is not None
    most = server.context if server.audio.streaming else (server.max_prompt or server.context)
    hearing = hear(
        row, server.audio, server.media, most,
        lambda count: _check_characters(count, options, server),
    )  # fmt: skip
    if hearing is None:
        return None
    ids = hearing.heard.ids
    check_ids("input_ids", ids, server)
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
    if not sentinels and not conversation.has_parts:
        return template.render(conversation.messages, kwargs)
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


def _tokenise_text(text: str, special: bool, wanted: RequestOptions, server: FrontEnd) -> Encoding:
    """Steps 3 to 6 for one text."""
    options = wanted.tokenize
    # 3. A text that cannot fit is refused, or cut, before the tokenizer spends time on it.
    cut_left = 0
    longest = _check_characters(len(text), wanted, server)
    if longest is not None and len(text) > longest:
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


def _check_characters(count: int, wanted: RequestOptions, server: FrontEnd) -> int | None:
    """Raise UsageError for so many characters that they cannot fit, unless the prompt is to be cut;
    returns how many can fit, None where that is unknown.
    """
    if wanted.limits.longest is None:
        return None
    longest = wanted.limits.longest * server.tokenizer.max_chars_per_token
    if count > longest and wanted.tokenize.truncate is None:
        raise problem(
            "text_input", "is longer than the context can hold",
            expected=f"at most {longest} characters", found=f"{count} characters",
        )  # fmt: skip
    return longest


def _tokenise_with_media(
    text: str,
    special: bool,
    options: RequestOptions,
    media: Sequence[MediaItem],
    sentinels: Sequence[str],
    server: FrontEnd,
) -> tuple[Encoding, list[tuple[int, MediaItem]]]:
    """Ids with one placeholder per item, and the items' positions. There are no offsets."""
    # Characters are not cut here: which of them stand for media is only known afterwards.
    _check_characters(len(text) - sum(map(len, sentinels)), options, server)
    if options.tokenize.lowercase:
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
    text: str, extra: Sequence[chat.MediaReference], server: FrontEnd, options: RequestOptions
) -> _Tokenised:
    """Content parts: texts, token ids and media in order, without a template."""
    raw = chat.parse_json("content_parts", text, list)
    parts = [chat.parse_part(f"content_parts[{i}]", part) for i, part in enumerate(raw)]
    references = [p for p in parts if isinstance(p, chat.MediaReference)]
    items = load_media([*references, *extra], options.mm_kwargs, server.geometry, server.media)
    remaining = iter(items)
    ids: list[int] = []
    positions: list[tuple[int, MediaItem]] = []

    def place(item: MediaItem) -> None:
        positions.append((len(ids), item))
        ids.append(_placeholder_id(item.modality, server))

    _check_characters(sum(len(p) for p in parts if isinstance(p, str)), options, server)
    special = options.tokenize.add_special_tokens is True
    plain = replace(options, tokenize=options.tokenize.replace(want_offsets=False))
    for index, part in enumerate(parts):
        if isinstance(part, chat.MediaReference):
            place(next(remaining))
        elif isinstance(part, str):
            ids += _tokenise_text(part, special and index == 0, plain, server).ids
        else:
            check_ids(f"content_parts[{index}].token_ids", part, server)
            ids += part
    for item in remaining:
        place(item)
    return _Tokenised(Encoding(ids, None, (0, 0)), positions, [])


def _fit(
    tokenised: _Tokenised, wanted: RequestOptions, server: FrontEnd
) -> tuple[Prompt, list[MediaSpan]]:
    """Steps 7 to 10: expand placeholders, truncate, pad, check; every array goes along."""
    encoding, options, limits = tokenised.encoding, wanted.tokenize, wanted.limits
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
    ids: Sequence[int], media: Sequence[tuple[int, MediaItem]]
) -> tuple[Sequence[int], list[MediaSpan]]:
    """Each placeholder becomes as many as its item has tokens."""
    if not media:
        return ids, []
    out: list[int] = []
    spans: list[MediaSpan] = []
    start = 0
    for position, item in media:
        out += ids[start:position]
        spans.append(MediaSpan(item.modality, len(out), item.tokens, item.key))
        out += [ids[position]] * item.tokens
        start = position + 1
    out += ids[start:]
    return out, spans


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
