"""`config.json` of a TensorRT-LLM checkpoint: what every family writes.

Key names are TensorRT-LLM's. A family adds one block under its own name and nothing else; an
unknown key is an error, so a misspelt one never loads silently.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from converters.checkpoint.json_files import read_json_object
from plugins.support.errors import InputError

FORMAT_VERSION: Literal[1] = 1
PRODUCER = "trtllm-toolchain"
CONFIG_FILE = "config.json"
WEIGHTS_FILE = "rank0.safetensors"
QUANT_FILE = "quant_cfg.json"
TOKENIZER_DIR = "tokenizer"

ComputeDType = Literal["float32", "float16", "bfloat16"]


class Strict(BaseModel):
    """Base of every block: no unknown keys, no coercion, immutable."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Mapping(Strict):
    """How the model is spread over ranks."""

    world_size: int = 1
    tp_size: int = 1
    pp_size: int = 1
    cp_size: int = 1
    moe_tp_size: int = 1
    moe_ep_size: int = 1


class Quantization(Strict):
    """What is stored quantised; per-module entries are in `quant_cfg.json` when mixed."""

    quant_algo: str | None = None
    kv_cache_quant_algo: str | None = None
    group_size: int | None = None
    exclude_modules: list[str] = Field(default_factory=list)


class SourceIdentity(Strict):
    """The Hugging Face checkpoint that was converted: counts and one digest over its content."""

    files: int
    tensors: int
    bytes: int
    digest: str


class CheckpointConfig(Strict):
    """Keys common to all families."""

    format_version: Literal[1] = FORMAT_VERSION
    producer: str
    architecture: str
    model_type: str
    dtype: ComputeDType
    logits_dtype: Literal["float32"] = "float32"
    vocab_size: int
    vocab_size_padded: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_size: int
    hidden_act: str
    norm_epsilon: float
    position_embedding_type: str
    max_position_embeddings: int
    rotary_embedding_dim: int
    rotary_base: float
    mapping: Mapping = Field(default_factory=Mapping)
    quantization: Quantization = Field(default_factory=Quantization)
    eos_token_id: list[int]
    bos_token_id: int | None
    pad_token_id: int | None
    source: SourceIdentity


AnyConfig = TypeVar("AnyConfig", bound=CheckpointConfig)


def write_config(directory: Path, config: CheckpointConfig) -> None:
    """Write `config.json` into an existing directory."""
    (directory / CONFIG_FILE).write_text(config.model_dump_json(indent=2) + "\n")


def read_config(directory: Path, kind: type[AnyConfig]) -> AnyConfig:
    """Read `config.json` as the config of one family.

    Raises InputError naming the file and every key that is missing, unknown or of a wrong type.
    """
    path = directory / CONFIG_FILE
    content = read_json_object(path, "checkpoint configuration")
    version = content.get("format_version")
    if version != FORMAT_VERSION:
        raise InputError(
            "the checkpoint has another format version",
            where=f"{path}: format_version",
            expected=str(FORMAT_VERSION),
            found=str(version),
            fix="convert the Hugging Face checkpoint again with this version",
        )
    return parse_config(content, kind, str(path))


def parse_config(content: dict[str, Any], kind: type[AnyConfig], where: str) -> AnyConfig:
    """A configuration that was read from the file `where`. Raises InputError as `read_config`."""
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        problems = [
            f"{'.'.join(str(part) for part in item['loc'])}: {item['msg']}"
            for item in error.errors()
        ]
        raise InputError(
            "the checkpoint configuration is not as it must be",
            where=where,
            found="; ".join(problems),
        ) from error
