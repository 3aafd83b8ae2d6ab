"""Token budgets and placeholder counts, from the very view of options that the processor gets.

The grid model is the one of patch-merging vision towers (patch, spatial merge, temporal patch):
an image of h x w pixels, resized to multiples of patch x merge within the pixel limits, gives one
token per merged patch; a video gives that per pair of frames.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from triton_repo.frontend.mm_kwargs import view
from triton_repo.frontend.problems import problem

# Beyond this ratio the short side would be rounded away.
MAX_ASPECT_RATIO = 200


@dataclass(frozen=True)
class VisionGeometry:
    """Sizes of a vision tower, in pixels and frames, and its default pixel limits."""

    patch: int = 16
    merge: int = 2
    temporal: int = 2
    image_pixels: tuple[int, int] = (65536, 16_777_216)
    video_pixels: tuple[int, int] = (4096, 25_165_824)

    def pixel_limits(self, kwargs: Mapping[str, Any], modality: str) -> tuple[int, int]:
        """(smallest, largest) pixels of an item; of a whole video for "video".

        Reads `size.shortest_edge` and `size.longest_edge`, flat or scoped. The older `min_pixels`
        and `max_pixels` win over them, as in processors of transformers.
        """
        options = view(kwargs, modality)
        low, high = self.image_pixels if modality == "image" else self.video_pixels
        size = options.get("size")
        size = size if isinstance(size, Mapping) else {}
        low = _positive("min_pixels", options, _positive("size.shortest_edge", size, low))
        high = _positive("max_pixels", options, _positive("size.longest_edge", size, high))
        return min(low, high), high

    def max_tokens(self, kwargs: Mapping[str, Any], modality: str) -> int:
        """The most placeholder tokens one item can expand to: its share of the encoder budget.

        Of a video in whole temporal patches, and of sides that are not rounded up to one token.
        """
        _, high = self.pixel_limits(kwargs, modality)
        return high // self._pixels_per_token(modality)

    def _pixels_per_token(self, modality: str) -> int:
        area = (self.patch * self.merge) ** 2
        return area if modality == "image" else area * self.temporal

    def tokens(
        self, kwargs: Mapping[str, Any], modality: str, height: int, width: int, frames: int = 1
    ) -> int:
        """Placeholder tokens of one item of the given size; equals what the processor returns.

        A video of fewer frames than a patch has is filled up with its last one.
        """
        low, high = self.pixel_limits(kwargs, modality)
        factor = self.patch * self.merge
        if modality == "image":
            h, w = smart_resize(height, width, factor, low, high)
            return (h // factor) * (w // factor)
        frames = max(frames, self.temporal)
        h, w = smart_resize(height, width, factor, low, high, frames, self.temporal)
        return math.ceil(frames / self.temporal) * (h // factor) * (w // factor)


def smart_resize(
    height: int, width: int, factor: int, low: int, high: int, frames: int = 0, temporal: int = 1
) -> tuple[int, int]:
    """Nearest size in multiples of `factor` with about the same aspect and low <= h*w <= high.

    With `frames` the limits are those of a whole video, by the rule of Qwen3-VL's processor: the
    frames in whole patches of `temporal` are compared with them, and all frames are scaled.
    """
    if frames and min(height, width) < factor:
        scale = factor / min(height, width)
        height, width = int(height * scale), int(width * scale)
    count = frames or 1
    pixels = count * height * width
    h = max(factor, round(height / factor) * factor)
    w = max(factor, round(width / factor) * factor)
    patched = round(count / temporal) * temporal * h * w
    if patched > high:
        beta = math.sqrt(pixels / high)
        h = max(factor, math.floor(height / beta / factor) * factor)
        w = max(factor, math.floor(width / beta / factor) * factor)
    elif patched < low:
        beta = math.sqrt(low / pixels)
        h = math.ceil(height * beta / factor) * factor
        w = math.ceil(width * beta / factor) * factor
    return h, w


def _positive(parameter: str, options: Mapping[str, Any], default: int) -> int:
    value = options.get(parameter.rpartition(".")[2])
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise problem(
            f"mm_processor_kwargs {parameter}",
            "is not a number of pixels",
            expected=">= 1",
            found=value,
        )
    return value
