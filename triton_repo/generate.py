"""Writes a model repository: complete configs, thin models, tokenizer; whole or not at all."""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from google.protobuf import text_format
from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from tritonclient.grpc import model_config_pb2

from plugins.support.atomic import atomic_directory
from plugins.support.errors import InputError, UsageError
from runtime.contract import TOKENIZER_DIR, EngineConfig, read_config
from triton_repo.frontend.audio.settings import audio_settings
from triton_repo.frontend.tokenizer import (
    BYTES,
    ByteTokenizer,
    FastTokenizer,
    Tokenizer,
    load_tokenizer,
)
from triton_repo.parameters import REPOSITORY_FORMAT, check_defaults, reason
from triton_repo.tensors import (
    GENERATED,
    GENERATION_INPUTS,
    PASSED_THROUGH,
    POSTPROCESSING_INPUTS,
    PREPROCESSED,
    RESPONSE,
    TEXT_OUTPUTS,
    Tensor,
    request_fields,
    select_echo,
)

SOURCE = Path(__file__).parent
MODELS = ("preprocessing", "tensorrt_llm", "postprocessing", "ensemble", "tensorrt_llm_bls")
MANIFEST_FILE = "repository.json"
ECHO_CONTEXT = 32768
ECHO_BATCH_SIZE = 64
TOKENIZER_SUFFIXES = frozenset({".json", ".jinja", ".txt", ".model", ".tiktoken"})
HEADER = "# Written by `build-engine repo`; write it again instead of editing this file.\n"


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class RepositoryOptions:
    """What can be chosen for a repository; the parameter classes explain each one."""

    decoupled: bool = True
    max_batch_size: int | None = Field(default=None, ge=1)
    max_context: int | None = Field(default=None, ge=1)
    executor: Literal["auto", "interpreter", "tensorrt"] = "auto"
    device: str = "auto"
    max_queue: int = Field(default=1024, ge=1)
    exclude_input_in_output: bool = False
    request_defaults: Annotated[Mapping[str, Any], AfterValidator(check_defaults)] = field(
        default_factory=dict
    )
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    mm_processor_kwargs: Mapping[str, Any] = field(default_factory=dict)
    placeholders: Mapping[str, str] = field(default_factory=dict)
    trust_request_mm_kwargs: bool = True
    allow_private_media: bool = False
    allowed_media_hosts: tuple[str, ...] = ()
    local_media_root: Path | None = None
    max_media_bytes: int = 32 << 20


def parse_options(settings: Iterable[str]) -> RepositoryOptions:
    """Options from `name=value` texts; a value is JSON, or text as it stands.

    Raises UsageError naming the setting that is unknown or has a value of the wrong type.
    """
    values: dict[str, Any] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals:
            raise UsageError("a setting has no value", expected="name=value", found=setting)
        try:
            values[name] = json.loads(text)
        except ValueError:
            values[name] = text
    try:
        return TypeAdapter(RepositoryOptions).validate_python(values)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        known = [f.name for f in fields(RepositoryOptions)]
        unknown = name not in known
        raise UsageError(
            "unknown setting" if unknown else "the value of a setting is not valid",
            where=name,
            expected=", ".join(known) if unknown else reason(first),
            found=None if unknown else repr(first["input"]),
        ) from None


@dataclasses.dataclass(frozen=True)
class _Facts:
    """What the configs are filled with."""

    echo: bool
    engine: EngineConfig | None
    tokenizer: Tokenizer
    tokenizer_source: str
    options: RepositoryOptions

    @property
    def audio(self) -> dict[str, Any]:
        """What the front end has to know of a model that hears; empty for others."""
        return audio_settings(self.engine.pretrained_config) if self.engine else {}

    @property
    def max_batch_size(self) -> int:
        if self.options.max_batch_size is not None:
            return self.options.max_batch_size
        return self.engine.build_config.max_batch_size if self.engine else ECHO_BATCH_SIZE

    @property
    def max_context(self) -> int:
        if self.options.max_context is not None:
            return self.options.max_context
        return self.engine.build_config.max_seq_len if self.engine else ECHO_CONTEXT

    @property
    def max_prompt(self) -> int:
        longest = self.engine.build_config.max_input_len if self.engine else self.max_context
        return min(longest, self.max_context)

    @property
    def vocab_size(self) -> int:
        return self.engine.vocab_size if self.engine else self.tokenizer.vocab_size

    @property
    def end_ids(self) -> list[int]:
        """The model's end ids (from its generation config), else the tokenizer's."""
        value = self.engine.pretrained_config.get("eos_token_id") if self.engine else None
        if value is not None:
            return list(value) if isinstance(value, (list, tuple)) else [value]
        return list(self.tokenizer.eos_ids)


def write_repository(
    engine_dir: Path | None,
    repo_dir: Path,
    *,
    tokenizer: str | Path | None = None,
    generation: Literal["engine", "echo"] = "engine",
    options: RepositoryOptions | None = None,
) -> Path:
    """Write a model repository for an engine directory, or one that echoes; returns `repo_dir`.

    Args:
        engine_dir: written by `build-engine build`; None for an echo.
        repo_dir: must not exist.
        tokenizer: "bytes" or a directory; None takes the engine directory's.
        generation: where tokens come from.
        options: None for the defaults.

    Raises UsageError (repo_dir exists, no tokenizer, no engine), InputError (engine directory or
    tokenizer cannot be read, or they do not fit together).
    """
    if generation not in ("engine", "echo"):
        raise UsageError("unknown generation", expected="engine or echo", found=generation)
    if (engine_dir is None) != (generation == "echo"):
        raise UsageError(
            "an engine directory is needed exactly when tokens come from an engine",
            found=f"generation {generation}, engine directory {engine_dir}",
        )
    engine = read_config(engine_dir) if engine_dir is not None else None
    source = _tokenizer_source(engine_dir, tokenizer)
    facts = _Facts(
        echo=generation == "echo",
        engine=engine,
        tokenizer=load_tokenizer(source),
        tokenizer_source=source,
        options=options or RepositoryOptions(),
    )
    if facts.tokenizer.vocab_size > facts.vocab_size:
        raise InputError(
            "the tokenizer has more ids than the model",
            where=source,
            expected=f"at most {facts.vocab_size}",
            found=str(facts.tokenizer.vocab_size),
        )
    repository_id = secrets.token_hex(8)
    with atomic_directory(repo_dir, "model repository") as work:
        for name, config in _configs(facts, engine_dir, repo_dir, repository_id).items():
            version = work / name / "1"
            version.mkdir(parents=True)
            (work / name / "config.pbtxt").write_text(HEADER + text_format.MessageToString(config))
            model = SOURCE / name / "1" / "model.py"
            if model.exists():
                shutil.copyfile(model, version / "model.py")
            else:
                # Triton wants a version directory even where nothing is in it.
                (version / ".keep").touch()
        if source != BYTES:
            _write_tokenizer(facts, work / "preprocessing" / "1" / TOKENIZER_DIR)
        manifest = {
            "repository_format": REPOSITORY_FORMAT,
            "repository_id": repository_id,
            "generation": generation,
            "decoupled": facts.options.decoupled,
            "models": list(MODELS),
            "input": _input_kind(facts.audio),
        }
        (work / MANIFEST_FILE).write_text(json.dumps(manifest, indent=2) + "\n")
    return repo_dir


def _absolute(root: Path | None) -> str:
    """A directory as a parameter; empty for none."""
    if root is None:
        return ""
    if not root.is_dir():
        raise UsageError("not a directory", where="local_media_root", found=str(root))
    return str(root.resolve())


def _input_kind(audio: Mapping[str, Any]) -> Literal["text", "audio", "stream"]:
    """What a request must bring at least."""
    if not audio:
        return "text"
    return "stream" if audio["voxtral"]["realtime"] else "audio"


def read_template(name: str) -> Any:
    """The committed part of a model's config, as a protobuf message."""
    config = model_config_pb2.ModelConfig()
    return text_format.Parse((SOURCE / name / "config.pbtxt").read_text(), config)


def _configs(
    facts: _Facts, engine_dir: Path | None, repo_dir: Path, repository_id: str
) -> dict[str, Any]:
    options = facts.options
    cores = os.cpu_count() or 1
    common = {
        "repository_format": REPOSITORY_FORMAT,
        "repository_id": repository_id,
        "threads": 1,
    }
    front_end = {
        "max_context": facts.max_context,
        "max_prompt": facts.max_prompt,
        "vocab_size": facts.vocab_size,
        "end_ids": facts.end_ids,
        "exclude_input_in_output": options.exclude_input_in_output,
        "request_defaults": dict(options.request_defaults),
        "chat_template_kwargs": dict(options.chat_template_kwargs),
        "mm_processor_kwargs": dict(options.mm_processor_kwargs),
        "placeholders": dict(options.placeholders) or _byte_placeholders(facts),
        "trust_request_mm_kwargs": options.trust_request_mm_kwargs,
        "allow_private_media": options.allow_private_media,
        "allowed_media_hosts": list(options.allowed_media_hosts),
        "local_media_root": _absolute(options.local_media_root),
        "max_media_bytes": options.max_media_bytes,
        "audio": facts.audio,
    }
    generation = {
        "generation": "echo" if facts.echo else "engine",
        "engine_dir": _reference(engine_dir, repo_dir),
        "executor": options.executor,
        "device": options.device,
        "max_queue": options.max_queue,
        "exclude_input_in_output": options.exclude_input_in_output,
        "request_defaults": dict(options.request_defaults),
        "vocab_size": facts.vocab_size,
        # The interpreter's steps are small: a second thread on a core that the server needs made
        # tokens 2.5 times as slow.
        "threads": max(1, cores // 2),
    }
    requests = request_fields(facts.echo)
    public_inputs = [Tensor(f.name, f.dtype, f.dims, optional=True) for f in requests]
    configs = {name: read_template(name) for name in MODELS}
    for name, config in configs.items():
        config.max_batch_size = facts.max_batch_size
        if name in ("tensorrt_llm", "tensorrt_llm_bls"):
            config.model_transaction_policy.decoupled = options.decoupled

    pre = configs["preprocessing"]
    _add_inputs(
        pre,
        [
            Tensor(f.preprocessing, f.dtype, f.dims, optional=True)
            for f in requests
            if f.preprocessing is not None
        ],
    )
    _add_outputs(pre, [t for t, _ in PREPROCESSED])
    _add_parameters(pre, common | front_end | {"tokenizer_dir": _tokenizer_dir(facts, "")})
    # A front end with many cores needs several; each has its own tokenizer.
    pre.instance_group[0].count = max(1, cores // 4)

    llm = configs["tensorrt_llm"]
    _add_inputs(llm, select_echo(GENERATION_INPUTS, facts.echo))
    _add_outputs(llm, GENERATED + select_echo(PASSED_THROUGH, facts.echo))
    elsewhere = {"tokenizer_dir": _tokenizer_dir(facts, "../../preprocessing/1/")}
    _add_parameters(llm, common | elsewhere | generation)

    post = configs["postprocessing"]
    _add_inputs(post, [t for t, _ in POSTPROCESSING_INPUTS])
    _add_outputs(post, [t for t, _ in TEXT_OUTPUTS])
    _add_parameters(post, common | elsewhere)

    bls = configs["tensorrt_llm_bls"]
    _add_inputs(bls, public_inputs)
    _add_outputs(bls, select_echo(RESPONSE, facts.echo))
    _add_parameters(bls, common | elsewhere | front_end)

    ensemble = configs["ensemble"]
    _add_inputs(ensemble, public_inputs)
    _add_outputs(ensemble, select_echo(RESPONSE, facts.echo))
    _add_steps(ensemble, facts.echo)
    return configs


def _add_steps(config: Any, echo: bool) -> None:
    """The three steps of the ensemble; internal tensors begin with an underscore."""
    pre = config.ensemble_scheduling.step.add(model_name="preprocessing", model_version=-1)
    llm = config.ensemble_scheduling.step.add(model_name="tensorrt_llm", model_version=-1)
    post = config.ensemble_scheduling.step.add(model_name="postprocessing", model_version=-1)
    for request_field in request_fields(echo):
        if request_field.preprocessing is not None:
            pre.input_map[request_field.preprocessing] = request_field.name
        if request_field.tensorrt_llm is not None:
            llm.input_map[request_field.tensorrt_llm] = request_field.name
    for tensor, target in PREPROCESSED:
        pre.output_map[tensor.name] = f"_{tensor.name}"
        llm.input_map[target] = f"_{tensor.name}"
    # Also what preprocessing knows leaves through tensorrt_llm: outputs of an ensemble may not
    # come from a decoupled model and from another one.
    for tensor in select_echo(PASSED_THROUGH, echo):
        llm.output_map[tensor.name] = tensor.name
    for tensor, source in POSTPROCESSING_INPUTS:
        llm.output_map[source] = f"_{tensor.name}"
        post.input_map[tensor.name] = f"_{tensor.name}"
    for tensor, public in TEXT_OUTPUTS:
        post.output_map[tensor.name] = public


def _add_inputs(config: Any, tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        config.input.add(
            name=tensor.name,
            data_type=model_config_pb2.DataType.Value(f"TYPE_{tensor.dtype}"),
            dims=tensor.dims,
            optional=tensor.optional,
        )


def _add_outputs(config: Any, tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        config.output.add(
            name=tensor.name,
            data_type=model_config_pb2.DataType.Value(f"TYPE_{tensor.dtype}"),
            dims=tensor.dims,
        )


def _add_parameters(config: Any, values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        text = value if isinstance(value, str) else json.dumps(value)
        config.parameters[key].string_value = text


def _byte_placeholders(facts: _Facts) -> dict[str, str]:
    if isinstance(facts.tokenizer, ByteTokenizer):
        return {m: f"<{m}>" for m in ("image", "video", "audio")}
    return {}


def _tokenizer_source(engine_dir: Path | None, tokenizer: str | Path | None) -> str:
    if tokenizer is not None:
        return str(tokenizer)
    if engine_dir is not None and (engine_dir / TOKENIZER_DIR).is_dir():
        return str(engine_dir / TOKENIZER_DIR)
    raise UsageError(
        "there is no tokenizer",
        where=None if engine_dir is None else str(engine_dir),
        fix="give a directory with --tokenizer DIR, or --tokenizer bytes for tests",
    )


def _tokenizer_dir(facts: _Facts, base: str) -> str:
    return BYTES if facts.tokenizer_source == BYTES else f"{base}{TOKENIZER_DIR}"


def _write_tokenizer(facts: _Facts, target: Path) -> None:
    """The tokenizer in the form that needs no transformers; other kinds as the files they are."""
    target.mkdir()
    if isinstance(facts.tokenizer, FastTokenizer):
        facts.tokenizer.save(target)
        return
    for path in sorted(Path(facts.tokenizer_source).iterdir()):
        is_index = path.name.endswith(".safetensors.index.json")
        if path.is_file() and path.suffix in TOKENIZER_SUFFIXES and not is_index:
            shutil.copyfile(path, target / path.name)


def _reference(engine_dir: Path | None, repo_dir: Path) -> str:
    """The engine directory as the model finds it: relative when both lie in one directory, so that
    they can be moved together.
    """
    if engine_dir is None:
        return ""
    engine, repository = engine_dir.resolve(), repo_dir.resolve()
    if engine.is_relative_to(repository.parent):
        return os.path.relpath(engine, repository / "tensorrt_llm" / "1")
    return str(engine)
