"""The one table of model families."""

from __future__ import annotations

from pathlib import Path

from converters import qwen38
from converters.checkpoint.config import CONFIG_FILE, CheckpointConfig, read_config
from converters.checkpoint.json_files import read_json_object
from converters.family import Family
from plugins.support.errors import InputError

_ALL: tuple[Family, ...] = (qwen38.FAMILY,)
# Hugging Face `model_type` -> family.
FAMILIES: dict[str, Family] = {kind: family for family in _ALL for kind in family.model_types}


def family_for(model_type: object, where: str) -> Family:
    """The family of a `model_type`. Raises InputError listing the known ones."""
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise InputError(
            "no converter for this model type",
            where=f"{where}: model_type",
            expected=", ".join(sorted(FAMILIES)),
            found=str(model_type),
        )
    return family


def family_of(config: CheckpointConfig) -> Family:
    """The family that a converted checkpoint belongs to."""
    return family_for(config.model_type, CONFIG_FILE)


def read_checkpoint_config(directory: Path) -> CheckpointConfig:
    """Read and check `config.json` of a converted checkpoint, as its family's config class.

    Raises InputError when it is missing, of another format version or not as it must be.
    """
    path = directory / CONFIG_FILE
    content = read_json_object(path, "checkpoint configuration")
    return read_config(directory, family_for(content.get("model_type"), str(path)).config_class)
