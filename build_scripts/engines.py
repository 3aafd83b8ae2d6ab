"""The work of `build`: limits, checks, both networks, their programs and engines, one directory.

Everything that can be refused is refused before the first layer: the limits against the model and
against each other, the targets against the element types, the weights file against the config. The
directory appears under its name only when it is whole.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from build_scripts import output
from converters.definition import TOKEN_BLOCK, Definition, EngineLimits
from converters.registry import family_of, read_checkpoint_config
from plugins.support.atomic import atomic_directory, link_or_copy, refuse_existing
from plugins.support.errors import UsageError
from plugins.support.progress import progress
from plugins.trt.backend import load_backend
from plugins.trt.builder import LayerReport, build_serialized, fingerprint
from plugins.trt.network import Network
from plugins.trt.weights import SafetensorsSource, WeightPolicy
from runtime import contract
from runtime.cache_plan import CachePlan
from runtime.identity import WeightsIdentity, weights_identity
from runtime.interpreter.trace import trace

WeightMode = Literal["auto", "inputs", "embedded"]


@dataclass(frozen=True)
class Request:
    """What the command line asks for; None means: derive it from the model."""

    max_batch_size: int
    max_seq_len: int | None
    max_input_len: int | None
    max_draft_len: int
    chunk_size: int
    flavor: str
    targets: tuple[str, ...] | None
    weights: WeightMode


@dataclass(frozen=True)
class Limits:
    """The effective limits, as printed before the build and written into the engine directory."""

    max_batch_size: int
    max_seq_len: int
    max_input_len: int
    max_num_tokens: int
    max_draft_len: int
    chunk_size: int

    def engine_limits(self) -> EngineLimits:
        """The limits as a family's network definition takes them."""
        return EngineLimits(
            max_batch_size=self.max_batch_size,
            max_seq_len=self.max_seq_len,
            chunk_size=self.chunk_size,
            max_draft_len=self.max_draft_len,
        )


def effective_limits(request: Request, max_position_embeddings: int) -> Limits:
    """Complete and check the limits. Raises UsageError naming the option that cannot be."""
    if request.chunk_size % TOKEN_BLOCK:
        raise UsageError(
            f"the chunk size is not a multiple of {TOKEN_BLOCK}",
            where="--chunk-size",
            found=str(request.chunk_size),
            fix=f"--chunk-size {-(-request.chunk_size // TOKEN_BLOCK) * TOKEN_BLOCK}",
        )
    max_seq_len = request.max_seq_len or max_position_embeddings
    if max_seq_len > max_position_embeddings:
        raise UsageError(
            "the model does not have that many positions",
            where="--max-seq-len",
            expected=f"at most {max_position_embeddings} (max_position_embeddings)",
            found=str(max_seq_len),
        )
    max_input_len = request.max_input_len or max(1, max_seq_len - 1)
    if max_input_len > max_seq_len:
        raise UsageError(
            "a prompt cannot be longer than its sequence",
            where="--max-input-len",
            expected=f"at most {max_seq_len} (--max-seq-len)",
            found=str(max_input_len),
        )
    # A chunk longer than the longest prompt would only make every cache larger.
    longest = -(-max_input_len // TOKEN_BLOCK) * TOKEN_BLOCK
    chunk_size = min(request.chunk_size, longest)
    if request.max_draft_len >= chunk_size:
        raise UsageError(
            "a generation step cannot be longer than a context chunk",
            where="--max-draft-len",
            expected=f"less than {chunk_size}",
            found=str(request.max_draft_len),
        )
    return Limits(
        max_batch_size=request.max_batch_size,
        max_seq_len=max_seq_len,
        max_input_len=max_input_len,
        max_num_tokens=request.max_batch_size * chunk_size,
        max_draft_len=request.max_draft_len,
        chunk_size=chunk_size,
    )


@dataclass(frozen=True)
class Result:
    """What `build` made."""

    engine_dir: Path
    config: contract.EngineConfig
    limits: Limits
    reports: dict[str, LayerReport]
    seconds: dict[str, float]

    def as_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            "engine_dir": str(self.engine_dir),
            "flavor": self.config.flavor,
            "tensorrt_version": self.config.tensorrt_version,
            "targets": list(self.config.targets),
            "weights": self.config.weights.mode,
            "limits": asdict(self.limits),
            "engines": {
                phase: {
                    "file": entry.file,
                    "bytes": entry.file_bytes,
                    "fingerprint": entry.fingerprint,
                    "seconds": round(self.seconds[phase], 2),
                    "report": self.reports[phase].summary(),
                }
                for phase, entry in self.config.engines.items()
            },
            "cache_bytes_per_token": self.config.cache_plan.bytes_per_token,
            "cache_bytes_per_sequence": self.config.cache_plan.bytes_per_sequence,
        }

    def print(self) -> None:
        """For people, on standard output."""
        rows = []
        for phase, entry in self.config.engines.items():
            report = self.reports[phase].summary()
            built = (phase, output.size(entry.file_bytes), f"{self.seconds[phase]:.1f} s")
            rows.append((*built, *map(str, report.values())))
        columns = (
            "engine",
            "file",
            "bytes",
            "built in",
            *next(iter(self.reports.values())).summary(),
        )
        output.table(f"{self.engine_dir}", columns, rows)
        columns, *lines = self.config.cache_plan.rows()
        output.table("Cache plan (bytes)", columns, lines)


def build(ckpt_dir: Path, engine_dir: Path, request: Request) -> Result:
    """Build both engines of `ckpt_dir` into the new directory `engine_dir`.

    Raises UsageError for limits and paths, InputError for a checkpoint that is not as it must be,
    CapabilityError where the machine cannot build, BuildError from TensorRT.
    """
    refuse_existing(engine_dir, "engine directory")
    config = read_checkpoint_config(ckpt_dir)
    family = family_of(config)
    limits = effective_limits(request, config.max_position_embeddings)
    backend = load_backend(request.flavor)
    capability = backend.capability(request.targets, (config.dtype, "float32"))
    weights = ckpt_dir / contract.weights_file()
    source = SafetensorsSource(weights)
    identity = weights_identity(weights)
    with atomic_directory(engine_dir, "engine directory") as work:
        link_or_copy(weights, work / contract.weights_file())
        tokenizer = ckpt_dir / contract.TOKENIZER_DIR
        if tokenizer.is_dir():
            shutil.copytree(tokenizer, work / contract.TOKENIZER_DIR)
        else:
            output.say("the checkpoint has no tokenizer: run and repo need ids or --tokenizer DIR")
        policy = WeightPolicy(request.weights)
        networks = {}
        for phase in contract.PHASES:
            net = Network(backend, capability, source, policy)
            networks[phase] = net, family.define(net, config, phase, limits.engine_limits())
        built = {
            phase: _build_phase(net, definition, phase, work, identity)
            for phase, (net, definition) in networks.items()
        }
