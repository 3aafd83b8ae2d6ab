"""One decision about truncation and one about padding, applied to every parallel array.

A parallel array is any array whose entry i describes prompt token i: offsets, masks, type ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, TypeVar

from triton_repo.frontend.problems import problem

Side = Literal["left", "right"]
T = TypeVar("T")
Offset = tuple[int, int]

# Most chunks of a prompt that is embedded in chunks.
MAX_CHUNKS = 64
# What a padded position holds in each parallel array.
PAD_VALUES: dict[str, Any] = {
    "offsets": (0, 0),
    "token_type_ids": 0,
    "is_token_mask": True,
    "assistant_mask": 0,
    "prompt_table_extra_ids": 0,
}


@dataclass(frozen=True)
class Limits:
    """Lengths in tokens.

    Attributes:
        context: the context length; None when unknown.
        output: tokens the request may generate; 0 for pooling, None for "as many as fit".
        prompt: longest prompt, where that is less than the context; None for no such limit.
        chunked: whether a longer prompt is taken in chunks; only without output.
    """

    context: int | None
    output: int | None = 0
    prompt: int | None = None
    chunked: bool = False

    def __post_init__(self) -> None:
        if self.context is not None and self.output is not None and self.output > self.context:
            raise problem(
                "max_tokens",
                "is larger than the context length",
                expected=f"at most {self.context}",
                found=self.output,
            )

    @cached_property
    def window(self) -> int | None:
        """Tokens of the longest prompt that the model takes at once; None when unknown."""
        return min((n for n in (self.context, self.prompt) if n is not None), default=None)

    @cached_property
    def longest(self) -> int | None:
        """Tokens of the longest input, in as many chunks as are allowed; None when unknown."""
        if not self.chunked:
            return self.context
        return None if self.window is None else self.window * MAX_CHUNKS

    @property
    def open_truncation(self) -> int | None:
        """What a truncation of -1 keeps: the context, less one position when output follows, and
        no more than the longest prompt.
        """
        if self.context is None:
            return self.prompt
        keep = self.context if self.output == 0 else max(self.context - 1, 0)
        return keep if self.prompt is None else min(keep, self.prompt)


@dataclass(frozen=True)
class TokenizeOptions:
    """How one prompt becomes ids. Copy with `replace`, which keeps every flag.

    Attributes:
        truncate: ids to keep; -1 for all that fit; None for no truncation.
        side: the side that is cut; "left" keeps the end of the prompt. None: the tokenizer decides.
        pad: length to pad to; -1 for the context length; None for none.
        add_special_tokens: None means: yes for raw text, no for rendered chats.
        want_offsets: whether character offsets are returned.
        lowercase: lower-case the text first.
    """

    truncate: int | None = None
    side: Side | None = None
    pad: int | None = None
    add_special_tokens: bool | None = None
    want_offsets: bool = False
    lowercase: bool = False

    def replace(self, **changes: Any) -> TokenizeOptions:
        """A copy with `changes`."""
        return replace(self, **changes)


def resolve_padding(padding: str | bool | int | None, max_length: int | None) -> int | bool | None:
    """The pad target that `padding` asks for: None = no wish, False = explicitly none.

    Accepts "max_length", "do_not_pad", booleans as such or as text, and a length.
    """
    value = _boolean_or_number(padding)
    if value is None:
        return None
    if value is False or value == "do_not_pad":
        return False
    if value == "max_length":
        return max_length if max_length is not None else -1
    if isinstance(value, int) and not isinstance(value, bool):
        if value < -1:
            raise problem("padding", "is not a length", expected=">= -1", found=value)
        return value
    raise problem(
        "padding",
        "is not supported",
        expected='"max_length", "do_not_pad" or a length',
        found=padding,
    )


def resolve_truncation(value: str | bool | None, max_length: int | None) -> int | bool | None:
    """The truncation that `truncation` asks for: None = no wish, False = explicitly none."""
    value = _boolean_or_number(value)  # type: ignore[assignment]
    if value is None:
        return None
    if value is False or value == "do_not_truncate":
        return False
    if value is True or value == "longest_first":
        return max_length if max_length is not None else -1
    raise problem(
        "truncation",
        "is not supported",
        expected='"longest_first", "do_not_truncate" or a boolean',
        found=value,
    )


def _boolean_or_number(value: str | bool | int | None) -> str | bool | int | None:
    if not isinstance(value, str):
        return value
    lowered = value.strip().lower()
    if lowered in ("true", "false"):
        return lowered == "true"
    if lowered.removeprefix("-").isdecimal() and lowered.isascii():
        return int(lowered)
    return lowered


def check_truncation(truncate: int | None, side: str | None) -> None:
    """Refuse a truncation below -1 and a side that is neither left nor right."""
    if truncate is not None and truncate < -1:
        raise problem("truncate_prompt_tokens", "is too small", expected=">= -1", found=truncate)
    if side is not None and side not in ("left", "right"):
        raise problem("truncation_side", "is not a side", expected='"left" or "right"', found=side)


def truncation_slice(
    length: int, truncate: int | None, side: str | None, default_side: str, limits: Limits
) -> slice | None:
    """The part of `length` ids that stays; None when nothing is cut.

    `side` is the request's explicit side, `default_side` the tokenizer's. Raises UsageError for a
    side that is none and for a truncation larger than the context.
    """
    check_truncation(None, side)
    if truncate is None:
        return None
    if truncate < 0:
        keep = limits.open_truncation
        if keep is None:
            return None
    else:
        keep = truncate
        if limits.context is not None and keep > limits.context:
            raise problem(
                "truncate_prompt_tokens",
                "is larger than the context length",
                expected=f"at most {limits.context}",
                found=keep,
            )
    if keep >= length:
        return None
    return slice(length - keep, length) if (side or default_side) == "left" else slice(0, keep)


@dataclass(frozen=True)
class Selection:
    """Which positions of a prompt stay, as slices in order: computed once, applied to all."""

    slices: tuple[slice, ...]

    def apply(self, values: Sequence[T]) -> list[T]:
        """The selected entries of one array."""
        return [v for s in self.slices for v in values[s]]


def select(
    length: int,
    options: TokenizeOptions,
    default_side: str,
    limits: Limits,
    specials: tuple[int, int] = (0, 0),
) -> Selection | None:
    """The selection that truncates a prompt of `length` ids; None when nothing is cut.

    `specials` counts the special tokens in front and behind. An explicit side cuts them like any
    token; without one they stay, as a tokenizer's own truncation does, unless fewer tokens than
    specials are asked for.
    """
    cut = truncation_slice(length, options.truncate, options.side, default_side, limits)
    if cut is None:
        return None
    head, tail = specials
    keep = cut.stop - cut.start
    if options.side is not None or head + tail == 0 or keep < head + tail:
        return Selection((cut,))
    content = keep - head - tail
    if default_side == "left":
        middle = slice(length - tail - content, length - tail)
    else:
        middle = slice(head, head + content)
    return Selection((slice(0, head), middle, slice(length - tail, length)))


@dataclass(slots=True)
class Prompt:
    """Token ids and the arrays parallel to them.

    Attributes:
        ids: token ids.
        arrays: parallel arrays by name; each as long as `ids`.
        real_length: ids that are not padding.
    """

    ids: Sequence[int]
    arrays: dict[str, list[Any]] = field(default_factory=dict)
    real_length: int = -1

    def __post_init__(self) -> None:
        if self.real_length < 0:
            self.real_length = len(self.ids)
        for name, values in self.arrays.items():
            if len(values) != len(self.ids):
                # Slicing an array by its own length would misalign it without a sign.
                raise problem(
                    name,
                    "does not have one entry per prompt token",
                    expected=f"{len(self.ids)} entries",
                    found=len(values),
                )

    @property
    def attention_mask(self) -> list[int]:
        """1 for every id, 0 for padding."""
        return [1] * self.real_length + [0] * (len(self.ids) - self.real_length)

    def truncated(self, selection: Selection | None) -> Prompt:
        """The prompt reduced by `selection`."""
        if selection is None:
            return self
        arrays = {name: selection.apply(values) for name, values in self.arrays.items()}
        return Prompt(selection.apply(self.ids), arrays)

    def padded(self, target: int | None, pad_id: int | None, limits: Limits) -> Prompt:
        """The prompt padded on the right to `target` (-1: the context); never shorter."""
        if target is None:
            return self
        if target < 0:
            if limits.context is None:
                raise problem("padding", "needs a context length to pad to")
            target = limits.context
        missing = target - len(self.ids)
        if missing <= 0:
            return self
        if pad_id is None:
            raise problem("padding", "needs a pad token, and the tokenizer has none")
        arrays = {n: [*v, *[PAD_VALUES[n]] * missing] for n, v in self.arrays.items()}
        return Prompt([*self.ids, *[pad_id] * missing], arrays, self.real_length)

    def check_length(self, limits: Limits) -> None:
        """Raise UsageError when the prompt is longer than allowed, or leaves no room for output."""
        if limits.chunked and limits.longest is not None:
            if self.real_length > limits.longest:
                raise problem(
                    "text_input",
                    "the prompt is too long to be embedded in chunks",
                    expected=f"at most {MAX_CHUNKS} chunks of {limits.window} tokens",
                    found=f"{self.real_length} tokens",
                )
            if len(self.ids) == self.real_length:
                return
        if limits.prompt is not None and self.real_length > limits.prompt:
            raise problem(
                "text_input",
                "the prompt is too long",
                expected=f"at most {limits.prompt} tokens",
                found=f"{self.real_length} tokens",
            )
        if limits.context is None:
            return
        if len(self.ids) > limits.context:
            raise problem(
                "text_input",
                "the prompt is longer than the context",
                expected=f"at most {limits.context} tokens",
                found=f"{len(self.ids)} tokens",
            )
        if limits.output != 0 and self.real_length >= limits.context:
            raise problem(
                "text_input",
                "the prompt fills the context and leaves no room for output",
                expected=f"at most {limits.context - 1} tokens",
                found=f"{self.real_length} tokens",
            )


def check_media_truncation(
    cut: slice | None, length: int, spans: Sequence[tuple[int, int]]
) -> list[tuple[int, int]]:
    """Media spans (offset, length) after cutting an expanded prompt of `length` ids to `cut`.

    Raises UsageError when a span would be split or dropped.
    """
    start, stop = (0, length) if cut is None else (cut.start, cut.stop)
    for offset, size in spans:
        if offset < start or offset + size > stop:
            raise problem(
                "truncate_prompt_tokens",
                "would cut a media item out of the prompt",
                expected=f"a limit that keeps tokens {offset} to {offset + size}",
                found=f"tokens {start} to {stop} kept",
            )
    return [(offset - start, size) for offset, size in spans]
