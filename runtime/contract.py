"""The engine directory: every file name in it and the schema of its `config.json`.

`build` writes it, `verify`, `inspect`, `run` and the Triton model read it. Whatever can be compared
with the machine is compared here and in `runtime.check`, before anything is deserialized.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from plugins.attention import Allowlist
from plugins.support.dtypes import BY_NAME
from plugins.support.errors import InputError
from plugins.trt.types import FLOAT4, Flavor, readable_as, stored_form
from runtime.cache_plan import CachePlan
from runtime.identity import WeightsIdentity, check_identity, read_header

FORMAT_VERSION: Literal[1] = 1

CONFIG_FILE = "config.json"
LAYER_REPORT_FILE = "layer_report.json"
TOKENIZER_DIR = "tokenizer"

Phase = Literal["context", "generation", "draft", "audio"]
# The text engines, which every engine directory has; the others depend on family and options.
PHASES: tuple[Phase, ...] = ("context", "generation")
Pooling = Literal["mean", "last"]

# The output with the hidden states of all tokens, for drafts and poolings.
HIDDEN = "hidden_states"

# Rows of the caches and tokens of a context call come in multiples of this.
TOKEN_BLOCK = 64


def engine_file(phase: Phase, rank: int = 0) -> str:
    """Name of the serialized engine of one phase and rank."""
    return f"rank{rank}.{phase}.engine"


def program_file(phase: Phase, rank: int = 0) -> str:
    """Name of the interpreter program of one phase and rank."""
    return f"rank{rank}.{phase}.program"


def weights_file(rank: int = 0) -> str:
    """Name of the weights of one rank."""
    return f"rank{rank}.safetensors"


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TensorSpec(_Model):
    """One input or output of an engine.

    Attributes:
        name: tensor name.
        dtype: our dtype name.
        shape: dimensions, -1 where the caller decides.
        kind: inputs: token (ids, lengths, positions: bound per call), host (computed per call by a
            host input), cache (bound in place), state (ping-pong), weight (bound once).
            Outputs: logits, cache (`X.updated`, same address as `X`), state (`X.next`), output
            (anything else).
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    kind: Literal["token", "host", "cache", "state", "weight", "logits", "output"]

    @model_validator(mode="after")
    def _known_dtype(self) -> TensorSpec:
        if self.dtype not in BY_NAME and self.dtype != FLOAT4:
            raise ValueError(f"{self.name}: unknown dtype {self.dtype}")
        return self


class Range(_Model):
    """Optimization profile of one input: smallest, best and largest dimensions."""

    min: tuple[int, ...]
    opt: tuple[int, ...]
    max: tuple[int, ...]


class EngineEntry(_Model):
    """One serialized engine and the program that the interpreter runs in its place.

    Attributes:
        file, file_bytes: the serialized engine.
        program, program_bytes: the interpreter program.
        sha256: of the engine file; for `inspect`, not checked at load.
        fingerprint: of the definition the engine was built from.
        inputs, outputs: every tensor that has to be bound.
        profile: per dynamic input.
        decisions: what the build decided once for this engine, by name.
        plugin_caches: caches that plugin layers update; TensorRT does not tell that they do so in
            place.
    """

    file: str
    file_bytes: int
    program: str
    program_bytes: int
    sha256: str | None = None
    fingerprint: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    profile: dict[str, Range]
    decisions: dict[str, bool] = Field(default_factory=dict)
    plugin_caches: tuple[str, ...] = ()

    def of_kind(self, *kinds: str) -> list[TensorSpec]:
        """Inputs of the given kinds, in engine order."""
        return [tensor for tensor in self.inputs if tensor.kind in kinds]

    def input(self, name: str) -> TensorSpec | None:
        """The input of that name, or None."""
        return next((tensor for tensor in self.inputs if tensor.name == name), None)


class PluginEntry(_Model):
    """A custom operation in the engines: its name and the digest of how it is called."""

    name: str
    digest: str


class WeightsEntry(_Model):
    """Where the weights are and which they are.

    Attributes:
        mode: "inputs" (bound from `file`), "embedded" (in the engines), "auto" (large ones bound).
        file: safetensors file; also holds the tables that host inputs gather from.
        identity: of `file` when the engines were built.
    """

    mode: Literal["auto", "inputs", "embedded"]
    file: str
    identity: WeightsIdentity


class NgramEmbedding(_Model):
    """Host input: rows of a hashed n-gram table, gathered per token and joined head by head.

    Attributes:
        name: engine input, [B, S, heads * row width].
        table: tensor in the weights file, [rows, row width].
        multipliers: one per position of the n-gram, newest token first.
        sizes, offsets: per hash head: rows, and first row in the table.
        eos_token_id: the id that ends an n-gram's history (not a stop id of generation).
    """

    kind: Literal["ngram_embedding"] = "ngram_embedding"
    name: str
    table: str
    multipliers: tuple[int, ...]
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    eos_token_id: int


class AudioEmbedding(_Model):
    """Host input: rows of the audio engine, [B, S, H], each at the token it belongs to.

    Attributes:
        name: engine input.
        placeholder_id: the id that stands for a row in a prompt, rows and placeholders in the same
            order; None where every position has a row of its own (a stream).
    """

    kind: Literal["audio_embedding"] = "audio_embedding"
    name: str
    placeholder_id: int | None


HostInput = Annotated[NgramEmbedding | AudioEmbedding, Field(discriminator="kind")]


class BuildConfig(_Model):
    """What the engines were built for, in TensorRT-LLM's key names.

    Attributes:
        max_batch_size: slots, the most sequences at once.
        max_seq_len: prompt and generated tokens of one sequence together.
        max_input_len: prompt tokens of one sequence.
        max_num_tokens: tokens of one context call, padding included (slots times tokens per slot).
        max_draft_len: draft tokens that a generation step verifies.
        max_beam_width: always 1.
        pooling: what an embedding is made of, see `runtime.pooling`; None = there are none.
        gather_context_logits: whether a context call can return more than one logit row per slot.
    """

    max_batch_size: int = Field(ge=1)
    max_seq_len: int = Field(ge=1)
    max_input_len: int = Field(ge=1)
    max_num_tokens: int = Field(ge=1)
    max_draft_len: int = Field(default=0, ge=0)
    max_beam_width: Literal[1] = 1
    pooling: Pooling | None = None
    gather_context_logits: bool = True


class EngineConfig(_Model):
    """`config.json` of an engine directory.

    Attributes:
        format_version: of this schema.
        producer: program and version that built the engines.
        flavor, tensorrt_version: library that built them; the same one has to run them.
        targets: compute capabilities such as "8.9"; empty where the library was told none.
        attention: what may compute the model's attention, for networks of this flavour.
        plugins: custom operations in the engines.
        engines: one entry per phase.
        weights: weights file and its identity.
        cache_plan: memory of caches and states.
        host_inputs: inputs computed outside the engine.
        pretrained_config: the checkpoint's `config.json`.
        build_config: limits.
    """

    format_version: Literal[1] = FORMAT_VERSION
    producer: str
    flavor: Flavor
    tensorrt_version: str
    targets: tuple[Annotated[str, Field(pattern=r"^\d{1,2}\.\d$")], ...]
    attention: Allowlist
    plugins: tuple[PluginEntry, ...] = ()
    engines: dict[Phase, EngineEntry]
    weights: WeightsEntry
    cache_plan: CachePlan
    host_inputs: tuple[HostInput, ...] = ()
    pretrained_config: dict[str, Any]
    build_config: BuildConfig

    @model_validator(mode="after")
    def _consistent(self) -> EngineConfig:
        missing = [phase for phase in PHASES if phase not in self.engines]
        if missing:
            raise ValueError(f"engines: no entry for {', '.join(missing)}")
        _same_slot_tensors(self.engines["context"], self.engines["generation"])
        produced = {host.name for host in self.host_inputs}
        for phase, entry in self.engines.items():
            wanted = {tensor.name for tensor in entry.of_kind("host")}
            if phase in PHASES and wanted != produced:
                names = ", ".join(sorted(wanted ^ produced))
                raise ValueError(f"engines.{phase}: host inputs do not match host_inputs: {names}")
            unprofiled = [
                tensor.name
                for tensor in entry.inputs
                if -1 in tensor.shape and tensor.name not in entry.profile
            ]
            if unprofiled:
                raise ValueError(f"engines.{phase}.profile: missing {', '.join(unprofiled)}")
            strange = set(entry.plugin_caches) - {tensor.name for tensor in entry.of_kind("cache")}
            if strange:
                names = ", ".join(sorted(strange))
                raise ValueError(f"engines.{phase}.plugin_caches: no cache is called {names}")
        return self

    @property
    def vocab_size(self) -> int:
        """Ids that a prompt may contain and that are ever sampled; logits may be wider."""
        return int(self.pretrained_config["vocab_size"])

    @property
    def chunk_tokens(self) -> int:
        """Most tokens per slot in one context call."""
        return self.engines["context"].profile["input_ids"].max[1]

    @property
    def context_slots(self) -> int:
        """Most slots in one context call."""
        return self.engines["context"].profile["input_ids"].max[0]

    @property
    def max_logits_rows(self) -> int:
        """Most logit rows per slot in one context call."""
        return self.engines["context"].profile["logits_positions"].max[1]

    @property
    def step_tokens(self) -> int:
        """Tokens per slot in one generation call: 1 + max_draft_len."""
        return 1 + self.build_config.max_draft_len


def _same_slot_tensors(context: EngineEntry, generation: EngineEntry) -> None:
    """Both engines work on the same memory: their cache and state inputs must be equal."""

    def described(entry: EngineEntry) -> dict[str, tuple[str, str, tuple[int, ...]]]:
        slot_tensors = entry.of_kind("cache", "state")
        return {t.name: (t.kind, t.dtype, t.shape[1:]) for t in slot_tensors}

    first, second = described(context), described(generation)
    for name in sorted(first.keys() | second.keys()):
        if first.get(name) != second.get(name):
            raise ValueError(
                f"engines: {name} differs between context {first.get(name)} "
                f"and generation {second.get(name)}"
            )


def read_config(engine_dir: Path) -> EngineConfig:
    """Read and validate `config.json`. Raises InputError listing every wrong key."""
    path = engine_dir / CONFIG_FILE
    if not path.is_file():
        raise InputError(
            "not an engine directory",
            where=str(engine_dir),
            expected=f"a directory with {CONFIG_FILE} and {engine_file('context')}",
            found="no such directory" if not engine_dir.is_dir() else f"no {CONFIG_FILE}",
            fix="build one: build-engine build CKPT_DIR ENGINE_DIR",
        )
    try:
        raw = json.loads(path.read_text())
    except (ValueError, OSError, RecursionError) as error:
        raise InputError("not readable JSON", where=str(path), found=str(error)) from error
    version = raw.get("format_version") if isinstance(raw, dict) else None
    if version != FORMAT_VERSION:
        raise InputError(
            "this engine directory has another format",
            where=f"{path}: format_version",
            expected=str(FORMAT_VERSION),
            found=str(version),
            fix=_rebuild(engine_dir),
        )
    try:
        return EngineConfig.model_validate(raw)
    except ValidationError as error:
        raise InputError(
            "the engine configuration is not as it must be",
            where=str(path),
            found="; ".join(_readable(error)),
            fix=_rebuild(engine_dir),
        ) from None


def write_config(config: EngineConfig, engine_dir: Path) -> None:
    """Write `config.json` into `engine_dir`."""
    text = json.dumps(config.model_dump(mode="json"), indent=2) + "\n"
    (engine_dir / CONFIG_FILE).write_text(text)


def check_files(config: EngineConfig, engine_dir: Path, weights: bool = True) -> None:
    """Compare the directory with its configuration: files, sizes, weights identity, tables.

    Args:
        weights: whether to check the weights file too (its header and samples are read).

    Raises InputError with the first file that is missing or is another one.
    """
    fix = _rebuild(engine_dir)
    for entry in config.engines.values():
        for name, size in ((entry.file, entry.file_bytes), (entry.program, entry.program_bytes)):
            _check_file(engine_dir / name, size, fix)
    if not weights:
        return
    path = engine_dir / config.weights.file
    _check_file(path, config.weights.identity.bytes, fix)
    check_identity(path, config.weights.identity, fix)
    _check_bound_tensors(config, path, fix)


def _check_file(path: Path, size: int, fix: str) -> None:
    if not path.is_file():
        raise InputError(
            "a file of the engine directory is missing", where=str(path), found="nothing", fix=fix
        )
    found = path.stat().st_size
    if found != size:
        raise InputError(
            "a file of the engine directory is not the one that was built",
            where=str(path),
            expected=f"{size} bytes",
            found=f"{found} bytes",
            fix=fix,
        )


def _check_bound_tensors(config: EngineConfig, path: Path, fix: str) -> None:
    stored = read_header(path)
    bound = [spec for entry in config.engines.values() for spec in entry.of_kind("weight")]
    for spec in bound:
        tensor = stored.get(spec.name)
        found = f"{tensor.dtype} {list(tensor.shape)}" if tensor else "no such tensor"
        dtype, shape = stored_form(spec.dtype, spec.shape)
        expected = f"{dtype} {list(shape)}"
        if not tensor or not readable_as(tensor.dtype, dtype) or tuple(tensor.shape) != shape:
            raise InputError(
                "the engine binds a weight that the weights file does not have",
                where=f"{path}: {spec.name}",
                expected=expected,
                found=found,
                fix=fix,
            )
    for host in config.host_inputs:
        if not isinstance(host, NgramEmbedding):
            continue
        table = stored.get(host.table)
        rows = max(o + s for o, s in zip(host.offsets, host.sizes, strict=True))
        if table is None or len(table.shape) != 2 or table.shape[0] < rows:
            raise InputError(
                f"the table of {host.name} is not in the weights file as it must be",
                where=f"{path}: {host.table}",
                expected=f"at least {rows} rows",
                found=str(list(table.shape)) if table else "no such tensor",
                fix=fix,
            )


def _rebuild(engine_dir: Path) -> str:
    return f"rebuild it: build-engine build CKPT_DIR {engine_dir}"


def _readable(error: ValidationError) -> Iterable[str]:
    for problem in error.errors():
        place = ".".join(str(part) for part in problem["loc"])
        yield f"{place}: {problem['msg']}" if place else problem["msg"]
