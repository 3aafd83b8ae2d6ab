"""Media items of a request: fetched, checked, measured, and keyed for caches."""

from __future__ import annotations

import hashlib
import io
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from plugins.support.errors import UsageError
from triton_repo.frontend.chat import MediaReference
from triton_repo.frontend.fetch import FetchLimits, RequestFetches
from triton_repo.frontend.geometry import MAX_ASPECT_RATIO, VisionGeometry
from triton_repo.frontend.mm_kwargs import SCOPES, injective, merge, own_options
from triton_repo.frontend.problems import problem

MAX_PIXELS = 64 << 20
# Others are not only seldom: some decoders start programs, or have no limits of their own.
IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
# What an item may say of itself without changing how it is processed.
HARMLESS_OPTIONS = frozenset({"detail"})
MAX_AUDIO_SECONDS = 3600
AUDIO_TOKENS_PER_SECOND = 12.5


class MediaPending(Exception):
    """A request names media; who asked cannot wait until they are fetched and decoded."""


@dataclass(frozen=True)
class MediaPolicy:
    """What media a server takes.

    Attributes:
        fetch: limits of one fetch.
        max_items: items per request and modality.
        trust_request_kwargs: whether a request may set processor options at all.
        max_item_tokens: cap of the tokens that request options may make of one item.
        may_wait: False raises MediaPending in place of fetching or decoding anything.
    """

    fetch: FetchLimits = field(default_factory=FetchLimits)
    max_items: Mapping[str, int] = field(
        default_factory=lambda: {"image": 64, "video": 1, "audio": 16}
    )
    trust_request_kwargs: bool = True
    max_item_tokens: int = 65536
    may_wait: bool = True


@dataclass(frozen=True)
class MediaItem:
    """One item, ready for placeholder expansion.

    Attributes:
        modality: "image", "video" or "audio".
        key: 64-bit content key; depends on the bytes and on this modality's effective options.
        tokens: placeholder tokens in the prompt.
    """

    modality: str
    key: int
    tokens: int


def media_key(modality: str, content: bytes, options: Mapping[str, Any]) -> int:
    """64-bit cache key of one item. Only this modality's options take part."""
    digest = hashlib.sha256()
    digest.update(injective([modality, dict(options)]))
    digest.update(injective(content))
    return int.from_bytes(digest.digest()[:8], "little")


def admit(references: Sequence[MediaReference], policy: MediaPolicy) -> None:
    """Before the first item is fetched: refuse more than the server takes.

    Raises UsageError, and MediaPending where the policy says so and there is an item.
    """
    for modality, limit in policy.max_items.items():
        count = sum(r.modality == modality for r in references)
        if count > limit:
            raise problem(f"{modality}_url", "too many items", expected=f"<= {limit}", found=count)
    if references and not policy.may_wait:
        raise MediaPending


def load_media(
    references: Sequence[MediaReference],
    kwargs: Mapping[str, Any],
    geometry: VisionGeometry,
    policy: MediaPolicy,
) -> list[MediaItem]:
    """Fetch and measure all items; `kwargs` are the merged processor options.

    The placeholder count comes from the same view of the options as the key. Raises UsageError for
    media that cannot be, and MediaPending.
    """
    if not references:
        return []
    admit(references, policy)
    fetches = RequestFetches(policy.fetch)
    items = []
    for reference in references:
        modality, own = reference.modality, dict(reference.options)
        if not policy.trust_request_kwargs and own.keys() - HARMLESS_OPTIONS:
            name = min(own.keys() - HARMLESS_OPTIONS)
            raise problem(
                reference.named, "processor options are not allowed per request", found=name
            )
        content = reference.data or fetches.fetch(reference.url, reference.named)
        if not content:
            raise problem(reference.named, "is empty")
        # An item's own options are the innermost scope, for its tokens and for its key.
        effective = merge(kwargs, {SCOPES[modality]: own}) if own else kwargs
        try:
            tokens = _count_tokens(reference, content, effective, geometry)
        except UsageError as error:
            if own and error.where != reference.named:
                # What is wrong with the options is wrong with the item that brought them.
                error.where = f"{reference.named}: {error.where}"
            raise
        if tokens > policy.max_item_tokens:
            raise problem(
                reference.named,
                "expands to too many tokens",
                expected=f"<= {policy.max_item_tokens}",
                found=tokens,
            )
        key = media_key(modality, content, own_options(effective, modality))
        items.append(MediaItem(modality, key, tokens))
    return items


def _count_tokens(
    reference: MediaReference,
    content: bytes,
    kwargs: Mapping[str, Any],
    geometry: VisionGeometry,
) -> int:
    modality, parameter = reference.modality, reference.named
    if modality == "audio":
        seconds = _audio_seconds(content, parameter)
        return max(1, -int(-seconds * AUDIO_TOKENS_PER_SECOND // 1))
    width, height, frames = _image_size(content, modality, parameter)
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise problem(
            parameter,
            "has an extreme aspect ratio",
            expected=f"<= {MAX_ASPECT_RATIO}",
            found=f"{width} x {height}",
        )
    return geometry.tokens(kwargs, modality, height, width, frames)


def _image_size(content: bytes, modality: str, parameter: str) -> tuple[int, int, int]:
    """(width, height, frames) from the header; refuses what would be a bomb to decode.

    A video may be an animated image; containers need a decoder that this server does not have.
    """
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(content), formats=IMAGE_FORMATS) as image:
                width, height = image.size
                frames = getattr(image, "n_frames", 1) if modality == "video" else 1
                if width * height * frames > MAX_PIXELS:
                    raise problem(
                        parameter,
                        "has too many pixels",
                        expected=f"<= {MAX_PIXELS}",
                        found=f"{width} x {height} x {frames}",
                    )
                # The header may promise what the body does not hold.
                image.load()
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise problem(parameter, "has too many pixels", expected=f"<= {MAX_PIXELS}") from None
    except (OSError, SyntaxError, ValueError, EOFError, OverflowError):
        raise problem(parameter, f"is not a readable {modality}") from None
    return width, height, frames


def _audio_seconds(content: bytes, parameter: str) -> float:
    import soundfile

    try:
        info = soundfile.info(io.BytesIO(content))
    except (RuntimeError, OSError, ValueError):
        raise problem(parameter, "is not a readable audio file") from None
    seconds = float(info.frames) / info.samplerate
    if not 0 < seconds <= MAX_AUDIO_SECONDS:
        raise problem(parameter, "has a length that is not allowed", found=f"{seconds:g} s")
    return seconds
