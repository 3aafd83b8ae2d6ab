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
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file
from transformers.utils import logging as transformers_logging

from build_scripts import output
from build_scripts.reference_weights import is_plain, open_reference
from build_scripts.scores import (
    LOGITS,
    Difference,
    Score,
    difference,
    finite,
    logits_score,
    score,
)
from build_scripts.taps import TapExecutor
from build_scripts.verdict import Control, Result
from converters.checkpoint.config import parse_config
from converters.controls import storage_controls
from converters.reference import (
    DRAFT_REFERENCE,
    HEARING_REFERENCE,
    REFERENCE,
    HearingReference,
)
from converters.registry import family_for
from plugins.attention import Choice
from plugins.support.progress import progress
from runtime.audio import AudioEncoder
from runtime.audio_rows import AudioRows
from runtime.contract import (
    CONFIG_FILE,
    PHASES,
    EngineConfig,
    NgramEmbedding,
    Phase,
    check_files,
    read_config,
)
from runtime.engine import Engine
from runtime.executors.weights import MappedWeights
from runtime.host_inputs import HostInput, open_host_inputs
from runtime.interpreter.program import Program
from runtime.rows import Row
from runtime.speculative import NEXT_HIDDEN, read_along

# Tokens that the comparison gives to the generation engine, after the context engine's.
GENERATION_TOKENS = 12
SAMPLE_TOKENS = 4096

_CPU = torch.device("cpu")


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
    config.attention.require(config.engines, Choice("interpreter", "cpu", config.flavor))
    pretrained = config.pretrained_config
    where = f"{engine_dir / CONFIG_FILE}: pretrained_config"
    family = family_for(pretrained["model_type"], where)
    checkpoint_config = parse_config(pretrained, family.config_class, where)
    oracle_module = importlib.import_module(f"converters.{family.name}.oracle")
    controls_module = importlib.import_module(f"converters.{family.name}.controls")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    # Plugin layers decide between equal block scores; the reference leaves that open.
    decided = any(plugin.name.startswith("qsa::select") for plugin in config.plugins)
    ties = {"lowest_id_wins": True} if decided else {}
    output.say(f"loading the reference from {hf_dir}")
    with open_reference(engine_dir, config, checkpoint_config, hf_dir) as source:
        opened = oracle_module.Oracle(source.directory, source.dtype, **ties)
        drafting = (
            DRAFT_REFERENCE.require(
                oracle_module.DraftOracle(source.directory, opened, source.dtype)
            )
            if "draft" in config.engines
            else None
        )
    oracle = REFERENCE.require(opened)
    hearing = HEARING_REFERENCE.require(opened) if "audio" in config.engines else None
    ids = oracle.sample_ids(min(config.build_config.max_seq_len, SAMPLE_TOKENS))
    quantised = None
    if source.decoded and is_plain(hf_dir):
        original = oracle_module.Oracle(hf_dir, pretrained["dtype"], **ties).run(ids)
        quantised = logits_score(oracle.run(ids)[LOGITS], original[LOGITS])
    split = max(1, min(len(ids) - GENERATION_TOKENS, config.build_config.max_input_len))
    reference = oracle.run(ids)
    spans = {"context": slice(0, split), "generation": slice(split, None)}
    expected: dict[Phase, dict[str, torch.Tensor]] = {
        phase: {tap: value[spans[phase]] for tap, value in reference.items()} for phase in PHASES
    }

    if drafting and split > 1:
        logits, following = drafting.run(ids[1:split], reference["final_hidden"][: split - 1])
        expected["draft"] = {NEXT_HIDDEN: following, LOGITS: logits}
    heard = hearing.run_audio() if hearing else {}
    programs = {
        phase: Program.load(engine_dir / entry.program)
        for phase, entry in config.engines.items()
        if phase in (*PHASES, "audio", "draft")
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
        rows, differences = _listen(engine, hearing, heard) if hearing else (None, {})
        seen = observe(engine, ids, split, oracle_module.canonical, rows)
        if "draft" in chosen:
            logits, following = read_along(engine, ids[:split])
            seen["draft"] = {NEXT_HIDDEN: following, LOGITS: logits}
        scores = {phase: score(values, expected[phase]) for phase, values in seen.items()}
        return scores, differences

    phases: tuple[Phase, ...] = (*PHASES, "draft") if "draft" in expected else PHASES
    controls = controls_module.negative_controls(checkpoint_config) + storage_controls(weights)
    controls = [c for c in controls if c.phase in phases]
    with progress("verify", 2 + len(controls)) as reporter:
        definition, audio = compare(phases, weights, hosts, promote=True)
        reporter.advance(1, "definition")
        as_built, _ = compare(phases, weights, hosts, promote=False)
        reporter.advance(1, "as built")
        noticed: list[Control] = []
        if not all(s.within for s in definition.values()):
            # A comparison that fails without a mistake tells nothing about mistakes.
            controls = []
        for control in controls:
            changed = control.weights(weights)
            if changed and all(torch.equal(weights[n], t) for n, t in changed.items()):
                # As with biases that are all zero: with these values it is no mistake.
                output.say(f"left out, it changes no value of this checkpoint: {control.name}")
                reporter.advance(1, control.name)
                continue
            bound = dict(weights) | changed
            with _mistaken_hosts(config, engine_dir, control, bound, changed) as mistaken:
                # Both text engines read the same weights: one notices what the other would.
                affected: tuple[Phase, ...] = ("context",)
                if control.phase == "draft":
                    affected = ("context", "draft")
                scores, _ = compare(affected, bound, mistaken, promote=True)
            noticed.append(_control(control.name, scores[control.phase]))
            reporter.advance(1, control.name)
    dtype = pretrained["dtype"]
    return Result(
        engine_dir, hf_dir, len(ids), dtype, definition, as_built, noticed, audio, quantised
    )


def _listen(
    engine: Engine, oracle: HearingReference, expected: Mapping[str, torch.Tensor]
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
    config: EngineConfig,
    engine_dir: Path,
    control: Any,
    weights: Mapping[str, torch.Tensor],
    changed: Mapping[str, torch.Tensor],
) -> Iterator[list[HostInput]]:
    """The host inputs as a negative control describes them, over the tables that it changed."""
    described = control.host_inputs([host.model_dump() for host in config.host_inputs])
    mistaken = EngineConfig.model_validate(config.model_dump() | {"host_inputs": described})
    names = [host.table for host in mistaken.host_inputs if isinstance(host, NgramEmbedding)]
    # A quantised table has its scales beside it.
    modules = tuple(name.rpartition(".")[0] + "." for name in names)
    if not any(name.startswith(modules) for name in changed):
        yield open_host_inputs(mistaken, engine_dir)
        return
    tables = {n: tensor.contiguous() for n, tensor in weights.items() if n.startswith(modules)}
    with TemporaryDirectory(prefix="build-engine-verify-") as directory:
        save_file(tables, Path(directory) / config.weights.file)
        yield open_host_inputs(mistaken, Path(directory))


def _control(name: str, mistaken: Score) -> Control:
    tap, relative = mistaken.worst
    logits = mistaken.logits
    return Control(name, tap, relative, finite(logits.kl), logits.argmax, not mistaken.within)
