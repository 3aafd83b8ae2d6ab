"""Checks a model repository without starting a server."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from plugins.support.errors import InputError, ToolchainError
from runtime.contract import read_config
from triton_repo.frontend.problems import one_line
from triton_repo.generate import MANIFEST_FILE, MODELS
from triton_repo.parameters import (
    CommonParameters,
    FrontEndParameters,
    GenerationParameters,
    open_tokenizer,
    parse_parameters,
)

PARAMETERS: Mapping[str, type[CommonParameters]] = {
    "preprocessing": FrontEndParameters,
    "tensorrt_llm": GenerationParameters,
    "postprocessing": CommonParameters,
    "tensorrt_llm_bls": FrontEndParameters,
}
# Models whose responses stream must agree.
STREAMING = ("tensorrt_llm", "tensorrt_llm_bls")


@dataclass(frozen=True)
class RepositorySummary:
    """A valid repository in a few words."""

    generation: str
    decoupled: bool
    max_batch_size: int
    tokenizer: str
    engine_dir: str


def validate_repository(repo_dir: Path) -> RepositorySummary:
    """Check configs, parameters, tensor maps, tokenizer and engine of a repository.

    Raises InputError that lists everything that is wrong, one line each.
    """
    if not any((repo_dir / name).is_dir() for name in MODELS):
        # One thing is wrong, not one per model.
        exists = repo_dir.is_dir()
        raise InputError(
            "there is no model repository",
            where=str(repo_dir),
            expected=f"a directory with the models {', '.join(MODELS)}",
            found="a directory without any of them" if exists else "no such directory",
            fix="write one with `build-engine repo`",
        )
    problems: list[str] = []
    configs = {}
    for name in MODELS:
        try:
            configs[name] = _read(repo_dir, name)
        except InputError as error:
            problems.append(one_line(error))
    if problems:
        raise _invalid(repo_dir, problems)
    parameters: dict[str, CommonParameters] = {}
    for name, kind in PARAMETERS.items():
        values = {k: v.string_value for k, v in configs[name].parameters.items()}
        problems += [f"{name}: {k} is a place-holder" for k, v in values.items() if "${" in v]
        try:
            parameters[name] = parse_parameters(kind, name, values)
        except InputError as error:
            problems.append(one_line(error))
    problems += _disagreements(configs, parameters)
    problems += _broken_maps(configs)
    problems += _missing_files(repo_dir, parameters)
    if problems:
        raise _invalid(repo_dir, problems)
    generation = parameters["tensorrt_llm"]
    assert isinstance(generation, GenerationParameters)
    return RepositorySummary(
        generation=generation.generation,
        decoupled=configs["tensorrt_llm"].model_transaction_policy.decoupled,
        max_batch_size=configs["ensemble"].max_batch_size,
        tokenizer=parameters["preprocessing"].tokenizer_dir,
        engine_dir=generation.engine_dir,
    )


def _invalid(repo_dir: Path, problems: list[str]) -> InputError:
    return InputError(
        "the model repository is not valid",
        where=str(repo_dir),
        found="\n            ".join(problems),
        fix="write it again with `build-engine repo`",
    )


def _read(repo_dir: Path, name: str) -> Any:
    path = repo_dir / name / "config.pbtxt"
    try:
        config = text_format.Parse(path.read_text(), model_config_pb2.ModelConfig())
    except OSError as error:
        raise InputError("cannot be read", where=f"{name}/config.pbtxt",
                         found=error.strerror) from None  # fmt: skip
    except text_format.ParseError as error:
        raise InputError("cannot be parsed", where=f"{name}/config.pbtxt",
                         found=str(error)) from None  # fmt: skip
    if config.name != name:
        raise InputError("has another name", where=f"{name}/config.pbtxt", found=config.name)
    return config


def _disagreements(
    configs: Mapping[str, Any], parameters: Mapping[str, CommonParameters]
) -> list[str]:
    problems = []
    decoupled = {n: configs[n].model_transaction_policy.decoupled for n in STREAMING}
    if len(set(decoupled.values())) > 1:
        problems.append(f"decoupled differs: {decoupled}")
    batch = {n: c.max_batch_size for n, c in configs.items()}
    if len(set(batch.values())) > 1:
        problems.append(f"max_batch_size differs: {batch}")
    ids = {p.repository_id for p in parameters.values()}
    if len(ids) > 1:
        problems.append("the models were written at different times")
    for name in ("tensorrt_llm", "postprocessing"):
        count = sum(group.count for group in configs[name].instance_group)
        if count != 1:
            problems.append(f"{name}: must have exactly one instance, has {count}")
    return problems


def _broken_maps(configs: Mapping[str, Any]) -> list[str]:
    """Ensemble tensors without a source, with two, or with types that do not fit."""
    problems = []
    ensemble = configs["ensemble"]
    known = {t.name: (t.data_type, tuple(t.dims)) for t in ensemble.input}
    for step in ensemble.ensemble_scheduling.step:
        model = configs.get(step.model_name)
        if model is None:
            return [f"ensemble: unknown model {step.model_name}"]
        inputs = {t.name: t for t in model.input}
        outputs = {t.name: t for t in model.output}
        for name, tensor in step.input_map.items():
            if name not in inputs:
                problems.append(f"ensemble: {step.model_name} has no input {name}")
            elif tensor not in known:
                problems.append(f"ensemble: nothing makes {tensor} for {step.model_name}.{name}")
            elif known[tensor] != (inputs[name].data_type, tuple(inputs[name].dims)):
                problems.append(f"ensemble: {tensor} does not fit {step.model_name}.{name}")
        needed = {t.name for t in model.input if not t.optional}
        problems += [
            f"ensemble: {step.model_name} gets no {name}" for name in needed - set(step.input_map)
        ]
        for name, tensor in step.output_map.items():
            if name not in outputs:
                problems.append(f"ensemble: {step.model_name} has no output {name}")
            elif tensor in known:
                problems.append(f"ensemble: {tensor} is made twice")
            else:
                known[tensor] = (outputs[name].data_type, tuple(outputs[name].dims))
    for output in ensemble.output:
        if known.get(output.name) != (output.data_type, tuple(output.dims)):
            problems.append(f"ensemble: no step makes output {output.name}")
    return problems


def _missing_files(repo_dir: Path, parameters: Mapping[str, CommonParameters]) -> list[str]:
    problems = []
    if not (repo_dir / MANIFEST_FILE).is_file():
        problems.append(f"{MANIFEST_FILE} is missing")
    else:
        try:
            json.loads((repo_dir / MANIFEST_FILE).read_text())
        except ValueError:
            problems.append(f"{MANIFEST_FILE} is not valid JSON")
    for name in MODELS:
        version = repo_dir / name / "1"
        if not version.is_dir():
            problems.append(f"{name}/1 is missing")
        elif name in PARAMETERS and not (version / "model.py").is_file():
            problems.append(f"{name}/1/model.py is missing")
    for name, values in parameters.items():
        directory = repo_dir / name / "1"
        try:
            open_tokenizer(values, directory)
            if isinstance(values, GenerationParameters) and values.generation == "engine":
                read_config((directory / values.engine_dir).resolve())
        except ToolchainError as error:
            problems.append(f"{name}: {one_line(error)}")
    return problems
