"""The work of `build`: limits, checks, both networks, their programs and engines, one directory.

Everything that can be refused is refused before the first layer: the limits against the model and
against each other, the targets against the element types, the weights file against the config. The
directory appears under its name only when it is whole.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from build_scripts import output
from converters.checkpoint.config import CheckpointConfig
from converters.definition import TOKEN_BLOCK, Definition, EngineLimits
from converters.quantization import kv_cache
from converters.registry import family_of, read_checkpoint_config
from plugins.attention import Allowlist, Choice
from plugins.support.atomic import atomic_directory, link_or_copy, refuse_existing
from plugins.support.errors import CapabilityError, UsageError
from plugins.support.progress import progress
from plugins.support.units import size
from plugins.trt.backend import Backend, load_backend
from plugins.trt.builder import Plan, build_serialized, fingerprint
from plugins.trt.capability import Capability, supports
from plugins.trt.network import Network
from plugins.trt.progress import BUILD_STEPS
from plugins.trt.weights import SafetensorsSource, WeightPolicy
from runtime import contract
from runtime.cache_plan import CachePlan
from runtime.contract import TensorSpec
from runtime.identity import WeightsIdentity, weights_identity
from runtime.interpreter.program import Program
from runtime.interpreter.trace import trace

WeightMode = Literal["auto", "inputs", "embedded"]

# What the library and the definition of a large network take before any weight is counted.
BUILDER_BYTES = 1_500_000_000


@dataclass(frozen=True)
class Request:
    """What the command line asks for; None means: derive it from the model."""

    max_batch_size: int
    max_seq_len: int | None
    max_input_len: int | None
    max_draft_len: int
    chunk_size: int
    max_num_tokens: int
    flavor: str
    targets: tuple[str, ...] | None
    weights: WeightMode
    pooling: contract.Pooling | None = None


@dataclass(frozen=True)
class Limits:
    """The effective limits, as printed before the build and written into the engine directory."""

    max_batch_size: int
    max_seq_len: int
    max_input_len: int
    max_num_tokens: int
    max_draft_len: int
    chunk_size: int
    pooling: contract.Pooling | None = None

    def engine_limits(self) -> EngineLimits:
        """The limits as a family's network definition takes them."""
        return EngineLimits(
            max_batch_size=self.max_batch_size,
            max_seq_len=self.max_seq_len,
            chunk_size=self.chunk_size,
            max_draft_len=self.max_draft_len,
            max_num_tokens=self.max_num_tokens,
            hidden_states=self.pooling is not None,
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
    if request.max_num_tokens < chunk_size:
        raise UsageError(
            "a context call must hold at least one chunk",
            where="--max-num-tokens",
            expected=f"at least {chunk_size} (--chunk-size)",
            found=str(request.max_num_tokens),
        )
    return Limits(
        max_batch_size=request.max_batch_size,
        max_seq_len=max_seq_len,
        max_input_len=max_input_len,
        max_num_tokens=min(request.max_num_tokens, request.max_batch_size * chunk_size),
        max_draft_len=request.max_draft_len,
        chunk_size=chunk_size,
        pooling=request.pooling,
    )


@dataclass(frozen=True)
class Checked:
    """A request that fits the model and the machine; made before anything is converted or built."""

    limits: Limits
    backend: Backend
    capability: Capability
    phases: tuple[contract.Phase, ...]
    attention: Allowlist
    choice: Choice


def check(config: CheckpointConfig, request: Request) -> Checked:
    """Everything about a build that needs no weights.

    Raises UsageError for limits, CapabilityError where the machine cannot build such a model.
    """
    family = family_of(config)
    limits = effective_limits(request, config.max_position_embeddings)
    backend = load_backend(request.flavor)
    phases = family.phases(config, limits.max_draft_len)
    attention = family.attention(config)
    choice = Choice("tensorrt", "cuda", backend.flavor)
    attention.require(phases, choice)
    capability = backend.capability(request.targets, (config.dtype, "float32"))
    obstacle = _fp8_caches_obstacle(capability)
    if config.quantization.kv_cache_quant_algo is not None and obstacle is not None:
        raise kv_cache.refusal(obstacle)
    return Checked(limits, backend, capability, phases, attention, choice)


def takes_fp8_caches(request: Request) -> bool:
    """Whether engines of the flavor and targets can have FP8 caches of keys and values.

    Raises CapabilityError and UsageError for a flavor and targets that cannot be built at all.
    """
    capability = load_backend(request.flavor).capability(request.targets)
    return _fp8_caches_obstacle(capability) is None


@dataclass(frozen=True)
class Result:
    """What `build` made."""

    engine_dir: Path
    config: contract.EngineConfig
    limits: Limits
    plans: dict[contract.Phase, Plan]

    def as_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        cache = self.config.cache_plan
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
                    "seconds": round(self.plans[phase].seconds, 2),
                    "report": self.plans[phase].report.summary(),
                }
                for phase, entry in self.config.engines.items()
            },
            "cache_bytes_per_token": cache.bytes_per_token,
            "cache_bytes_per_sequence": cache.bytes_per_sequence,
        }

    def print(self) -> None:
        """For people, on standard output."""
        facts: dict[str, list[object]] = {}
        for plan in self.plans.values():
            shown = {"plan bytes": plan.nbytes, "built in": f"{plan.seconds:.1f} s"}
            for name, value in (shown | plan.report.summary()).items():
                facts.setdefault(name, []).append(value)
        rows = [(name, *values) for name, values in facts.items()]
        output.table(f"{self.engine_dir}: engines", ("fact", *self.plans), rows)


def build(ckpt_dir: Path, engine_dir: Path, request: Request) -> Result:
    """Build both engines of `ckpt_dir` into the new directory `engine_dir`.

    Raises UsageError for limits and paths, InputError for a checkpoint that is not as it must be,
    CapabilityError where the machine cannot build, BuildError from TensorRT.
    """
    refuse_existing(engine_dir, "engine directory")
    config = read_checkpoint_config(ckpt_dir)
    family, checked = family_of(config), check(config, request)
    limits, backend, capability = checked.limits, checked.backend, checked.capability
    weights = ckpt_dir / contract.weights_file()
    source, identity = SafetensorsSource(weights), weights_identity(weights)
    output.say(
        f"{backend.flavor} {backend.version} for compute capability "
        f"{', '.join(capability.targets) or 'of this machine'}; weights {request.weights}"
    )
    for line in checked.attention.notices(checked.phases, checked.choice):
        output.say(line)
    shown = {k: v for k, v in asdict(limits).items() if v is not None}
    output.say("limits: " + ", ".join(f"{k} {v}" for k, v in shown.items()))

    defined: dict[contract.Phase, tuple[Network, Definition]] = {}
    for phase in checked.phases:
        net = Network(backend, capability, source, WeightPolicy(request.weights))
        defined[phase] = net, family.define(net, config, phase, limits.engine_limits())
    # The generation engine works on the same slots as the context engine, a draft engine on more.
    slot_tensors = [
        spec
        for phase in defined
        if phase in ("context", "draft")
        for spec in _inputs(*defined[phase])
    ]
    cache_plan = CachePlan.from_tensors(slot_tensors, limits.max_batch_size, limits.max_seq_len)
    _announce_memory([net for net, _ in defined.values()], cache_plan, identity)

    with atomic_directory(engine_dir, "engine directory") as work:
        link_or_copy(weights, work / contract.weights_file())
        _copy_tokenizer(ckpt_dir, work)
        entries: dict[contract.Phase, contract.EngineEntry] = {}
        plans: dict[contract.Phase, Plan] = {}
        for phase, (net, definition) in defined.items():
            entries[phase], plans[phase] = _build_phase(net, definition, phase, work, identity)
        operations = sorted({c.op for net, _ in defined.values() for c in net.plugins.values()})
        reports = {phase: plan.report.as_dict() for phase, plan in plans.items()}
        (work / contract.LAYER_REPORT_FILE).write_text(json.dumps(reports, indent=1) + "\n")
        engine_config = contract.EngineConfig.model_validate(
            {
                "producer": f"trtllm-toolchain {version('trtllm-toolchain')}",
                "flavor": backend.flavor,
                "tensorrt_version": backend.version,
                "targets": capability.targets,
                "attention": checked.attention.of_flavor(backend.flavor),
                "plugins": _plugins(operations),
                "engines": entries,
                "weights": {
                    "mode": request.weights,
                    "file": contract.weights_file(),
                    "identity": identity,
                },
                "cache_plan": cache_plan,
                "host_inputs": family.host_inputs(config),
                "pretrained_config": config.model_dump(mode="json"),
                "build_config": _build_config(limits),
            }
        )
        contract.write_config(engine_config, work)
        # What is published must be what `run` and `serve` accept.
        contract.check_files(contract.read_config(work), work)
    return Result(engine_dir, engine_config, limits, plans)


def _fp8_caches_obstacle(capability: Capability) -> str | None:
    if not capability.has_plugins:
        return (
            "TensorRT updates a cache in place only in float32, float16 and bfloat16, and "
            f"{capability.flavor} has no plugin layers that would"
        )
    for target in capability.targets:
        if not supports(target, "float8_e4m3fn"):
            return f"compute capability {target} has no float8_e4m3fn"
    return None


def _plugins(names: list[str]) -> tuple[contract.PluginEntry, ...]:
    if not names:
        return ()
    # Only engines with plugins need the kernels and their compiler.
    from plugins.operations import digests

    return tuple(contract.PluginEntry(name=name, digest=digests()[name]) for name in names)


def _build_config(limits: Limits) -> contract.BuildConfig:
    sizes = asdict(limits)
    del sizes["chunk_size"]
    return contract.BuildConfig(**sizes)


def _copy_tokenizer(ckpt_dir: Path, work: Path) -> None:
    tokenizer = ckpt_dir / contract.TOKENIZER_DIR
    if tokenizer.is_dir():
        shutil.copytree(tokenizer, work / contract.TOKENIZER_DIR)
    else:
        output.say("the checkpoint has no tokenizer: run takes ids, repo asks for --tokenizer")


def _build_phase(
    net: Network,
    definition: Definition,
    phase: contract.Phase,
    work: Path,
    identity: WeightsIdentity,
) -> tuple[contract.EngineEntry, Plan]:
    """Write the program and the engine of one phase into `work`."""
    program = trace(net)
    program_path = work / contract.program_file(phase)
    program.save(program_path)
    engine_path = work / contract.engine_file(phase)
    with progress(f"{phase} engine", BUILD_STEPS) as reporter:
        plan = build_serialized(net, definition.profile, engine_path, reporter)
    entry = contract.EngineEntry(
        file=engine_path.name,
        file_bytes=plan.nbytes,
        program=program_path.name,
        program_bytes=program_path.stat().st_size,
        sha256=plan.sha256,
        fingerprint=fingerprint(
            program,
            identity.header,
            definition.profile,
            plan.targets,
            f"{net.capability.flavor} {net.capability.version}",
        ),
        inputs=_inputs(net, definition),
        outputs=_outputs(net),
        profile={
            name: contract.Range(min=least, opt=best, max=most)
            for name, (least, best, most) in definition.profile.items()
        },
        decisions=definition.decisions,
        plugin_caches=_plugin_caches(program),
    )
    return entry, plan


def _plugin_caches(program: Program) -> tuple[str, ...]:
    """Caches that plugin layers update: nothing else reads one before that."""
    read = {name for node in program.nodes if node.kind == "plugin" for name in node.inputs}
    return tuple(cache for cache in program.aliases.values() if cache in read)


def _inputs(net: Network, definition: Definition) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(
            name=name,
            dtype=net.dtype(tensor),
            shape=net.shape(tensor),
            kind=definition.kinds.get(name, "weight"),
        )
        for name, tensor in net.inputs.items()
    )


def _outputs(net: Network) -> tuple[TensorSpec, ...]:
    def kind(name: str) -> Literal["cache", "state", "logits", "output"]:
        if name in net.aliases:
            return "cache"
        if name.endswith(".next"):
            return "state"
        return "logits" if name == "logits" else "output"

    return tuple(
        TensorSpec(name=name, dtype=net.dtype(t), shape=net.shape(t), kind=kind(name))
        for name, t in net.outputs.items()
    )


def _announce_memory(
    networks: list[Network], cache_plan: CachePlan, identity: WeightsIdentity
) -> None:
    """Say what building and serving will take; refuse a build that cannot fit this machine."""
    embedded = max(sum(c.array.nbytes for c in net.constants.values()) for net in networks)
    output.say(
        f"to serve: weights {size(identity.bytes)}, caches and states "
        f"{size(cache_plan.total_bytes)} "
        f"({size(cache_plan.bytes_per_sequence)} per sequence; "
        "--max-batch-size and --max-seq-len lower it)"
    )
    needed, free = embedded + BUILDER_BYTES, _free_memory()
    output.say(f"to build: about {size(needed)} of memory, {size(free)} free")
    if needed > free:
        raise CapabilityError(
            "this machine has too little free memory for the build",
            expected=f"about {size(needed)}, of which {size(embedded)} are weights",
            found=f"{size(free)} free",
            fix="--weights inputs keeps the weights out of the engines",
        )


def _free_memory() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise CapabilityError("the system does not tell its free memory", where="/proc/meminfo")
