"""The one table of model families."""

from __future__ import annotations

from pathlib import Path

from converters import dots3, qwen38, voxtral
from converters.checkpoint.config import CONFIG_FILE, CheckpointConfig, read_config
from converters.checkpoint.hf_layout import LayoutOf
from converters.checkpoint.json_files import read_json_object
from converters.checkpoint.source import SourceCheckpoint
from converters.dots3 import export as dots3_export
from converters.family import Family
from converters.qwen38 import export as qwen38_export
from plugins.support.contract import Contract
from plugins.support.errors import InputError

_FAMILY: Contract[Family] = Contract.of(Family)
_ALL = tuple(_FAMILY.require(each) for each in (qwen38.FAMILY, dots3.FAMILY, voxtral.FAMILY))
# Hugging Face `model_type` -> family.
FAMILIES: dict[str, Family] = {kind: family for family in _ALL for kind in family.model_types}
# Family -> its Hugging Face layout, for the ones that can be exported.
_LAYOUTS: dict[str, LayoutOf] = {"qwen38": qwen38_export.layout, "dots3": dots3_export.layout}


def family_for(model_type: object, where: str) -> Family:
    """The family of a `model_type`. Raises InputError listing the known ones."""
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise InputError(
            "no converter for this model type",
            where=f"{where}: model_type",
            expected=", ".join(sorted(FAMILIES)),
            found=str(model_type),
            fix="`build-engine inspect DIR` tells what a directory is",
        )
    return family


def model_type_of(source: SourceCheckpoint) -> object:
    """The `model_type` of a checkpoint; files in Mistral's layout do not say it themselves.

    Raises InputError for a layout that no family reads.
    """
    if source.layout == "huggingface":
        return source.config.get("model_type")
    found = voxtral.mistral_model_type(source.config)
    if found is None:
        raise InputError(
            "no converter for this model in Mistral's layout",
            where=str(source.config_file),
            expected="multimodal.whisper_model_args, as Voxtral has",
            found=", ".join(sorted(source.config)),
            fix="convert the Hugging Face files of the model",
        )
    return found


def family_of(config: CheckpointConfig) -> Family:
    """The family that a converted checkpoint belongs to."""
    return family_for(config.model_type, CONFIG_FILE)


def layout_of(config: CheckpointConfig) -> LayoutOf:
    """The Hugging Face layout of a family. Raises InputError when it has none yet."""
    layout = _LAYOUTS.get(family_of(config).name)
    if layout is None:
        raise InputError(
            "checkpoints of this family cannot be exported",
            where=f"{CONFIG_FILE}: model_type",
            expected=", ".join(_LAYOUTS),
            found=config.model_type,
        )
    return layout


def read_checkpoint_config(directory: Path) -> CheckpointConfig:
    """Read and check `config.json` of a converted checkpoint, as its family's config class.

    Raises InputError when it is missing, of another format version or not as it must be.
    """
    path = directory / CONFIG_FILE
    content = read_json_object(path, "checkpoint configuration")
    return read_config(directory, family_for(content.get("model_type"), str(path)).config_class)
