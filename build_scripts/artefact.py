"""Tells the four artefacts of the chain apart and describes each from its configs and headers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from build_scripts import output
from converters.checkpoint.collector import collector_paused
from converters.checkpoint.config import QUANT_FILE
from converters.checkpoint.header import TensorEntry
from converters.checkpoint.header import read_header as read_source_header
from converters.checkpoint.json_files import read_json_object
from plugins.support.errors import InputError
from plugins.support.units import size
from runtime import contract
from runtime.identity import StoredTensor, read_header

REPOSITORY_MODELS = ("tensorrt_llm", "ensemble")


@dataclass(frozen=True)
class Table:
    """Rows under column names."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]


@dataclass(frozen=True)
class Description:
    """What `inspect` says: the kind of artefact, plain facts, and tables."""

    kind: str
    path: Path
    facts: dict[str, Any]
    tables: list[Table] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """As plain JSON values; a table is a list of objects."""
        tables = {
            table.title: [dict(zip(table.columns, row, strict=True)) for row in table.rows]
            for table in self.tables
        }
        return {"kind": self.kind, "path": str(self.path), **self.facts, "tables": tables}

    def print(self) -> None:
        """For people, on standard output."""
        facts = [(key, _plain(value)) for key, value in self.facts.items()]
        output.table(f"{self.path}: {self.kind}", ("fact", "value"), facts)
        for table in self.tables:
            output.table(table.title, table.columns, table.rows)


def describe(path: Path) -> Description:
    """Describe the artefact in directory `path`. Raises InputError when it is none of the four."""
    if not path.is_dir():
        raise InputError("no such directory", where=str(path))
    if any((path / model / "config.pbtxt").is_file() for model in REPOSITORY_MODELS):
        return _repository(path)
    if not (path / contract.CONFIG_FILE).exists():
        from converters.checkpoint.source import MISTRAL_CONFIG

        if (path / MISTRAL_CONFIG).is_file():
            return _hugging_face(path, {})
    raw = _config(path)
    if "engines" in raw and "build_config" in raw:
        return _engine(path)
    if "producer" in raw and "architecture" in raw:
        return _checkpoint(path, raw)
    if "model_type" in raw:
        return _hugging_face(path, raw)
    raise InputError(
        "not an artefact of the chain",
        where=str(path / contract.CONFIG_FILE),
        expected="a Hugging Face checkpoint, or the output of convert, build or repo",
        found="keys " + (", ".join(list(raw)[:8]) or "none"),
    )


def _config(path: Path, name: str = contract.CONFIG_FILE) -> dict[str, Any]:
    file = path / name
    if not file.exists():
        raise InputError(
            "not an artefact of the chain",
            where=str(path),
            expected=f"{contract.CONFIG_FILE}, or a Triton model repository",
            found=", ".join(sorted(p.name for p in path.iterdir())[:8]) or "an empty directory",
        )
    return read_json_object(file, "configuration")


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_plain(item)}" for key, item in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(map(_plain, value)) or "none"
    return "none" if value is None else str(value)


def _pattern(name: str) -> str:
    """Tensor name with every number replaced, so that equal tensors of layers fall together."""
    return re.sub(r"(?<=[._])\d+(?=\.)", "*", name)


def _tensor_table(tensors: Mapping[str, StoredTensor]) -> Table:
    groups: dict[tuple[str, str, tuple[int, ...]], list[int]] = {}
    for name, tensor in tensors.items():
        key = (_pattern(name), tensor.dtype, tensor.shape)
        groups.setdefault(key, []).append(tensor.end - tensor.begin)
    rows = [
        (pattern, dtype, " x ".join(map(str, shape)), len(sizes), size(sum(sizes)))
        for (pattern, dtype, shape), sizes in sorted(groups.items())
    ]
    return Table("Tensors", ("name", "dtype", "shape", "count", "bytes"), rows)


def _format_table(path: Path, raw: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> Table:
    """How each matrix is stored: with scales beside it as declared, otherwise plain.

    `quant_cfg.json` names the algorithm of each module where there are several.
    """
    block = raw.get("quantization") or {}
    mixed = _config(path, QUANT_FILE) if (path / QUANT_FILE).is_file() else {}
    layers = mixed.get("quantized_layers", {})
    counts: Counter[tuple[str, str, int | None]] = Counter()
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        if kind != "weight" or len(tensor.shape) < 2:
            continue
        entry: Mapping[str, Any] = {}
        if f"{module}.weights_scaling_factor" in tensors:
            entry = layers.get(module, {"quant_algo": "not declared"}) if layers else block
        algorithm = entry.get("quant_algo") or "plain"
        counts[_pattern(f"{module}."), algorithm, entry.get("group_size")] += 1
    return _formats(counts)


def _formats(counts: Mapping[tuple[str, str, int | None], int]) -> Table:
    """Rows by pattern of module names, which end in a dot, algorithm and group size."""
    rows = sorted(
        (pattern.rstrip("."), algorithm, "" if group is None else str(group), count)
        for (pattern, algorithm, group), count in counts.items()
    )
    return Table("Formats", ("module", "algorithm", "group size", "count"), rows)


def _tensor_facts(tensors: Mapping[str, StoredTensor]) -> dict[str, Any]:
    dtypes: Counter[str] = Counter()
    for tensor in tensors.values():
        dtypes[tensor.dtype] += prod(tensor.shape)
    return {
        "tensors": len(tensors),
        "weight_bytes": sum(t.end - t.begin for t in tensors.values()),
        "elements": dict(dtypes.most_common()),
    }


def _tokenizer(path: Path) -> list[str]:
    wanted = ("tokenizer*", "chat_template*", "generation_config.json", "vocab.json", "merges.txt")
    return sorted({p.name for pattern in wanted for p in path.glob(pattern) if p.is_file()})


@collector_paused()
def _hugging_face(path: Path, raw: Mapping[str, Any]) -> Description:
    """Formats and findings are those of a conversion, decided by the same code."""
    from converters.checkpoint.examine import Examination, examine
    from converters.checkpoint.source import SourceCheckpoint
    from converters.registry import FAMILIES, model_type_of

    found = Examination()
    kind = raw.get("model_type")
    tensors: dict[str, StoredTensor] = {}
    try:
        source = SourceCheckpoint.open(path)
        kind = model_type_of(source)
        tensors = _stored(source.tensors)
        found = examine(source)
    except InputError as error:
        found.errors.append(error.one_line())
        tensors = tensors or _readable(path, found.errors)
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    facts: dict[str, Any] = {
        "model_type": kind,
        "architectures": raw.get("architectures", []),
        "family": family.name if family else "not supported",
        "files": len(list(path.glob("*.safetensors"))),
        **_tensor_facts(tensors),
        "left_out": found.left_out,
        "tokenizer": _tokenizer(path),
    }
    tables = [_tensor_table(tensors)]
    if found.stored:
        facts["quantization"] = found.quantization.model_dump(exclude={"exclude_modules"})
        counts = Counter(
            (_pattern(f"{s.module}."), s.algorithm, s.group_size) for s in found.stored
        )
        tables.insert(0, _formats(counts))
    findings = [("error", line) for line in found.errors] + [("note", line) for line in found.notes]
    if findings:
        tables.insert(0, Table("Findings", ("kind", "finding"), findings))
    return Description("Hugging Face checkpoint", path, facts, tables)


def _readable(path: Path, errors: list[str]) -> dict[str, StoredTensor]:
    """Tensors of the files that can be read; what is wrong with the others goes to `errors`."""
    tensors: dict[str, StoredTensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        try:
            tensors |= _stored(read_source_header(file))
        except InputError as error:
            # One file may have stopped the reading of all.
            if error.one_line() not in errors:
                errors.append(error.one_line())
    return tensors


def _stored(entries: Mapping[str, TensorEntry]) -> dict[str, StoredTensor]:
    return {
        name: StoredTensor(e.dtype.name, e.shape, e.offset, e.offset + e.nbytes)
        for name, e in entries.items()
    }


def _checkpoint(path: Path, raw: Mapping[str, Any]) -> Description:
    tensors = read_header(path / contract.weights_file())
    shown = (
        "producer",
        "architecture",
        "dtype",
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "max_position_embeddings",
        "mapping",
        "quantization",
        "eos_token_id",
    )
    facts = {key: raw[key] for key in shown if key in raw}
    facts |= _tensor_facts(tensors) | {"tokenizer": _tokenizer(path / contract.TOKENIZER_DIR)}
    tables = [_tensor_table(tensors)]
    if (raw.get("quantization") or {}).get("quant_algo"):
        tables.insert(0, _format_table(path, raw, tensors))
    return Description("TensorRT-LLM checkpoint", path, facts, tables)


def _engine(path: Path) -> Description:
    config = contract.read_config(path)
    facts = {
        "producer": config.producer,
        "flavor": f"{config.flavor} {config.tensorrt_version}",
        "targets": list(config.targets),
        "plugins": [plugin.name for plugin in config.plugins],
        "architecture": config.pretrained_config["architecture"],
        "dtype": config.pretrained_config["dtype"],
        "limits": config.build_config.model_dump(),
        "chunk_size": config.chunk_tokens,
        "weights": f"{config.weights.mode}: {config.weights.file}",
        "weight_bytes": config.weights.identity.bytes,
        "decisions": [
            f"{phase} {name}: {'yes' if decided else 'no'}"
            for phase, entry in config.engines.items()
            for name, decided in entry.decisions.items()
        ],
        "host_inputs": [f"{host.name} ({host.kind})" for host in config.host_inputs],
        "tokenizer": _tokenizer(path / contract.TOKENIZER_DIR),
    }
    engines = [
        (phase, entry.file, size(entry.file_bytes), entry.fingerprint[:12])
        for phase, entry in config.engines.items()
    ]
    inputs = [
        (phase, tensor.name, tensor.kind, tensor.dtype, " x ".join(map(str, tensor.shape)))
        for phase, entry in config.engines.items()
        for tensor in entry.inputs
        if tensor.kind != "weight"
    ]
    attention = [
        (row.component, row.implementation, row.device, row.recent or "in use")
        for row in config.attention.rows
    ]
    columns, *rows = config.cache_plan.rows()
    tables = [
        Table("Engines", ("phase", "file", "bytes", "fingerprint"), engines),
        Table("Attention", ("component", "implementation", "device", "state"), attention),
        Table("Inputs", ("phase", "name", "kind", "dtype", "shape"), inputs),
        Table("Cache plan", columns, list(rows)),
    ]
    return Description("engine directory", path, facts, tables)


def _repository(path: Path) -> Description:
    from triton_repo.validate import validate_repository

    summary = validate_repository(path)
    models = sorted(config.parent.name for config in path.glob("*/config.pbtxt"))
    facts = {"models": models, **asdict(summary)}
    return Description("Triton model repository", path, facts)
