"""The work of `verify`: an engine's networks against transformers, and mistakes against the check.

The definition is compared in float32 (the interpreter computes in float32 whatever the engine's
type), so the bounds can be tight and leave no room for a forgotten term. The type the engine was
built in is then measured beside it. A comparison that does not notice typical conversion mistakes
proves nothing; therefore each of the family's negative controls has to fail it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file
from transformers.utils import logging as transformers_logging

from build_scripts import output
from build_scripts.scores import (
    KL_BOUND,
    LOGITS,
    RELATIVE_BOUND,
    Difference,
    LogitsScore,
    Score,
    difference,
    finite,
    score,
)
from converters.checkpoint.config import parse_config
from converters.registry import family_for
from plugins.support.progress import progress
from runtime.audio import AudioEncoder
from runtime.audio_rows import AudioRows
from runtime.contract import (
    CONFIG_FILE,
    PHASES,
    EngineConfig,
    NgramEmbedding,
    Phase,
    TensorSpec,
    check_files,
    read_config,
)
from runtime.engine import Engine
from runtime.executors.weights import MappedWeights
from runtime.host_inputs import HostInput, open_host_inputs
from runtime.interpreter.execute import Interpreter
from runtime.interpreter.program import Program
from runtime.rows import Row
from runtime.slots import SlotMemory

# Tokens that the comparison gives to the generation engine, after the context engine's.
GENERATION_TOKENS = 12
SAMPLE_TOKENS = 4096

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Control:
    """One mistake made on purpose; `noticed` says that the comparison failed, as it must."""

    name: str
    worst_tap: str
    relative: float
    kl: float
    argmax: float
    noticed: bool


@dataclass(frozen=True)
class Result:
    """What `verify` found."""

    engine_dir: Path
    reference: Path
    tokens: int
    dtype: str
    definition: dict[Phase, Score]
    as_built: dict[Phase, Score]
    controls: list[Control] = field(default_factory=list)
    audio: dict[str, Difference] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether the definition holds and every mistake was noticed."""
        return (
            all(score.within for score in self.definition.values())
            and all(finite(d.relative) <= RELATIVE_BOUND for d in self.audio.values())
            and all(control.noticed for control in self.controls)
        )

    def as_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            "passed": self.passed,
            "engine_dir": str(self.engine_dir),
            "against": str(self.reference),
            "tokens": self.tokens,
            "dtype": self.dtype,
            "bounds": {"relative": RELATIVE_BOUND, "kl": KL_BOUND, "argmax": 1.0},
            "definition": {phase: asdict(score) for phase, score in self.definition.items()},
            "as_built": {phase: asdict(score) for phase, score in self.as_built.items()},
            "audio": {tap: asdict(difference) for tap, difference in self.audio.items()},
            "negative_controls": [asdict(control) for control in self.controls],
        }

    def print(self) -> None:
        """For people, on standard output."""
        output.table(
            f"Layers in float32, {self.tokens} tokens (largest difference / relative to the "
            f"largest value; bound {RELATIVE_BOUND:.0e})",
            ("tap", *(f"{phase} {what}" for phase in PHASES for what in ("max abs", "relative"))),
            list(self._tap_rows()),
        )
        if self.audio:
            output.table(
                f"Audio engine in float32 (bound {RELATIVE_BOUND:.0e})",
                ("tap", "max abs", "relative"),
                [(t, _short(d.max_abs), _short(d.relative)) for t, d in self.audio.items()],
            )
        output.table(
            f"Logits (bounds: divergence {KL_BOUND:.0e}, every argmax equal)",
            ("engine", "max abs", "KL divergence", "same argmax", "verdict"),
            list(self._logits_rows()),
        )
        if self.controls:
            self._print_controls()
        output.say("verification passed" if self.passed else "verification FAILED")

    def _print_controls(self) -> None:
        output.table(
            "Mistakes made on purpose; each must be noticed",
            ("mistake", "worst tap", "relative", "KL divergence", "same argmax", "verdict"),
            [
                (
                    c.name,
                    c.worst_tap,
                    _short(c.relative),
                    _short(c.kl),
                    f"{100 * c.argmax:.1f} %",
                    "noticed" if c.noticed else "NOT NOTICED",
                )
                for c in self.controls
            ],
        )

    def _tap_rows(self) -> Iterator[tuple[str, ...]]:
        for tap in self.definition["context"].taps:
            cells = []
            for phase in PHASES:
                difference = self.definition[phase].taps[tap]
                cells += [_short(difference.max_abs), _short(difference.relative)]
            yield (tap, *cells)

    def _logits_rows(self) -> Iterator[tuple[str, ...]]:
        for phase in PHASES:
            exact, built = self.definition[phase], self.as_built[phase]
            verdict = "within" if exact.within else "OUT OF BOUNDS"
            yield (f"{phase}, float32", *_cells(exact.logits), verdict)
            yield (f"{phase}, {self.dtype} as built", *_cells(built.logits), "for information")


def _cells(logits: LogitsScore) -> tuple[str, str, str]:
    return _short(logits.max_abs), _short(logits.kl), f"{100 * logits.argmax:.1f} %"


def _short(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"


class TapExecutor:
    """`runtime.executors.Executor` for one slot that also keeps the taps of the last call.

    Args:
        config: of the engine directory.
        programs: per phase.
        weights: tensors by checkpoint name.
        promote: compute and store in float32.
    """

    name = "interpreter"
    device = _CPU
    generation_widths: Sequence[int] = (1,)

    def __init__(
        self,
        config: EngineConfig,
        programs: Mapping[Phase, Program],
        weights: Mapping[str, torch.Tensor],
        promote: bool,
    ) -> None:
        self._config, self.programs = config, programs
        self._interpreters = {
            phase: Interpreter(program, weights, promote_floats=promote)
            for phase, program in programs.items()
        }
        self._promote = promote
        self.taps: dict[str, torch.Tensor] = {}
        self.begin(0)

    def begin(self, slot: int) -> None:
        """Forget the sequence: caches and states zero."""
        specs = self._config.engines["context"].of_kind("cache", "state")
        if self._promote:
            specs = [_in_float32(spec) for spec in specs]
        self._memory = SlotMemory(specs, 1, _CPU)
        self._memory.begin(slot)

    def end(self, slot: int, poisoned: bool = False) -> None:
        """See `Executor.end`."""
        self._memory.end(slot, poisoned)

    @torch.inference_mode()
    def step(self, phase: Phase, first: int, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """See `Executor.step`; the taps are in `taps` afterwards, [B, S, ...] each."""
        wanted = [t.name for t in self._config.engines[phase].of_kind("token", "host")]
        bound = {name: inputs[name] for name in wanted}
        if self._promote:
            bound = {n: t.float() if t.is_floating_point() else t for n, t in bound.items()}
        bound |= self._memory.inputs(first, 1)
        taps = tuple(self.programs[phase].taps)
        results = self._interpreters[phase].run(bound, fetch=taps)
        for name, tensor in self._memory.next_states(first, 1).items():
            tensor.copy_(results[f"{name}.next"])
        self._memory.commit(first, 1)
        self.taps = {tap: results[tap] for tap in taps}
        return results[LOGITS]

    def output(self, name: str) -> torch.Tensor:
        """No other engine follows this one."""
        raise KeyError(name)

    @torch.inference_mode()
    def encode(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """See `Executor.encode`; the taps are in `taps` afterwards."""
        taps = tuple(self.programs["audio"].taps)
        results = self._interpreters["audio"].run(inputs, fetch=taps)
        self.taps = {tap: results[tap] for tap in taps}
        return results

    def close(self) -> None:
        """Nothing to free."""


def _in_float32(spec: TensorSpec) -> TensorSpec:
    narrow = spec.dtype in ("float16", "bfloat16")
    return spec.model_copy(update={"dtype": "float32"}) if narrow else spec


def observe(
    engine: Engine,
    ids: Sequence[int],
    split: int,
    canonical: Callable[[str, torch.Tensor], torch.Tensor],
    audio: AudioRows | None = None,
) -> dict[Phase, dict[str, torch.Tensor]]:
    """Run `ids` through an engine over a `TapExecutor` and collect taps and logits per token.

    The first `split` tokens go through the context engine in chunks, the rest through the
    generation engine if the executor has it. Returns per phase every tap and "logits",
    [tokens of the phase, ...], taps in their `canonical` form.
    """
    executor = engine.executor
    assert isinstance(executor, TapExecutor)
    executor.begin(0)
    if audio is not None:
        audio.bind(ids)
    texts = [phase for phase in executor.programs if phase in PHASES]
    parts: dict[Phase, dict[str, list[torch.Tensor]]] = {phase: {} for phase in texts}
    chunk = min(engine.config.chunk_tokens, engine.config.max_logits_rows)
    start, stop = 0, len(ids) if "generation" in parts else split
    while start < stop:
        phase: Phase = "context" if start < split else "generation"
        end = split if phase == "context" else stop
        count = min(end - start, chunk if phase == "context" else engine.config.step_tokens)
        logits = engine.step(phase, 0, [Row(ids, start, count, range(count), audio)])
        for tap, value in {**executor.taps, LOGITS: logits}.items():
            piece = canonical(tap, value[0, :count]).clone()
            parts[phase].setdefault(tap, []).append(piece)
        start += count
    return {
        phase: {tap: torch.cat(values) for tap, values in taps.items()}
        for phase, taps in parts.items()
    }


def verify(engine_dir: Path, hf_dir: Path) -> Result:
    """Compare the networks of `engine_dir` with the checkpoint in `hf_dir`.

    Raises InputError when a directory is not what it must be.
    """
    config = read_config(engine_dir)
    check_files(config, engine_dir)
    pretrained = config.pretrained_config
    where = f"{engine_dir / CONFIG_FILE}: pretrained_config"
    family = family_for(pretrained["model_type"], where)
    checkpoint_config = parse_config(pretrained, family.config_class, where)
    oracle_module = importlib.import_module(f"converters.{family.name}.oracle")
    controls_module = importlib.import_module(f"converters.{family.name}.controls")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    output.say(f"loading the reference from {hf_dir}")
    oracle = oracle_module.Oracle(hf_dir, pretrained["dtype"])
    ids = oracle.sample_ids(min(config.build_config.max_seq_len, SAMPLE_TOKENS))
    split = max(1, min(len(ids) - GENERATION_TOKENS, config.build_config.max_input_len))
    reference = oracle.run(ids)
    spans = {"context": slice(0, split), "generation": slice(split, None)}
    expected = {
        phase: {tap: value[spans[phase]] for tap, value in reference.items()} for phase in PHASES
    }

    heard = oracle.run_audio() if "audio" in config.engines else {}
    programs = {
        phase: Program.load(engine_dir / entry.program)
        for phase, entry in config.engines.items()
        if phase in (*PHASES, "audio")
    }
    weights = MappedWeights(engine_dir / config.weights.file, _CPU)
    hosts = open_host_inputs(config, engine_dir)

    def compare(
        phases: Sequence[Phase],
        bound: Mapping[str, torch.Tensor],
        gathered: Sequence[HostInput],
        promote: bool,
    ) -> tuple[dict[Phase, Score], dict[str, Difference]]:
        chosen = {phase: programs[phase] for phase in programs if phase in (*phases, "audio")}
        executor = TapExecutor(config, chosen, bound, promote)
        engine = Engine(config, executor, gathered)
        rows, differences = _listen(engine, oracle, heard) if heard else (None, {})
        seen = observe(engine, ids, split, oracle_module.canonical, rows)
        scores = {phase: score(values, expected[phase]) for phase, values in seen.items()}
        return scores, differences

    controls = controls_module.negative_controls(checkpoint_config)
    with progress("verify", 2 + len(controls)) as reporter:
        definition, audio = compare(PHASES, weights, hosts, promote=True)
        reporter.advance(1, "definition")
        as_built, _ = compare(PHASES, weights, hosts, promote=False)
        reporter.advance(1, "as built")
        noticed: list[Control] = []
        if not all(s.within for s in definition.values()):
            # A comparison that fails without a mistake tells nothing about mistakes.
            controls = []
        for control in controls:
            changed = control.weights(weights)
            with _mistaken_hosts(config, engine_dir, control, changed) as mistaken:
                bound = dict(weights) | changed
                # Both engines read the same weights: one of them notices what the other would.
                scores, _ = compare(("context",), bound, mistaken, promote=True)
            noticed.append(_control(control.name, scores["context"]))
            reporter.advance(1, control.name)
    dtype = pretrained["dtype"]
    return Result(engine_dir, hf_dir, len(ids), dtype, definition, as_built, noticed, audio)


def _listen(
    engine: Engine, oracle: Any, expected: Mapping[str, torch.Tensor]
) -> tuple[AudioRows | None, dict[str, Difference]]:
    """Rows of the oracle's sample for the text engines, and how far the audio engine's taps are."""
    encoder = AudioEncoder(engine)
    features = oracle.features[0] if encoder.streaming else oracle.features
    rows = encoder.rows(features)
    executor = engine.executor
    assert isinstance(executor, TapExecutor)
    seen = {tap: value.flatten(0, 1) for tap, value in executor.taps.items()}
    seen["audio_rows"] = rows.all()
    differences = {
        tap: difference(tap, value.float(), expected[tap]) for tap, value in seen.items()
    }
    return (rows if oracle.listens else None), differences


@contextmanager
def _mistaken_hosts(
    config: EngineConfig, engine_dir: Path, control: Any, changed: Mapping[str, torch.Tensor]
) -> Iterator[list[HostInput]]:
    """The host inputs as a negative control describes them, over the tables that it changed."""
    described = control.host_inputs([host.model_dump() for host in config.host_inputs])
    mistaken = EngineConfig.model_validate(config.model_dump() | {"host_inputs": described})
    names = [host.table for host in mistaken.host_inputs if isinstance(host, NgramEmbedding)]
    if not any(name in changed for name in names):
        yield open_host_inputs(mistaken, engine_dir)
        return
    tables = {name: changed[name].contiguous() for name in names}
    with TemporaryDirectory(prefix="build-engine-verify-") as directory:
        save_file(tables, Path(directory) / config.weights.file)
        yield open_host_inputs(mistaken, Path(directory))


def _control(name: str, mistaken: Score) -> Control:
    tap, relative = mistaken.worst
    logits = mistaken.logits
    return Control(name, tap, relative, finite(logits.kl), logits.argmax, not mistaken.within)
