"""What is known of a model's audio without the libraries that decode it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TRANSCRIBE = "transcribe"


def audio_settings(pretrained_config: Mapping[str, Any]) -> dict[str, Any]:
    """The part of an engine's `pretrained_config` that the audio front end reads; empty for a model
    that hears nothing.
    """
    block = pretrained_config.get("voxtral")
    if block is None:
        return {}
    names = (
        "num_mel_bins",
        "mel_ceiling",
        "max_source_positions",
        "tokens_per_chunk",
        "downsample_factor",
    )
    audio = {name: block["audio"][name] for name in names}
    own = {name: block[name] for name in ("realtime", "audio_token_id", "default_num_delay_tokens")}
    return {"voxtral": {**own, "audio": audio}}


def transcribes(row: Mapping[str, Any], streaming: bool) -> bool:
    """Whether a request is a transcription; a realtime model (`streaming`) does nothing else."""
    return streaming or row.get("task") == TRANSCRIBE
