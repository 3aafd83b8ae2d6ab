"""From a defined network to a serialized engine, with every failure noticed."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from plugins.support.errors import BuildError, CapabilityError
from plugins.support.progress import Reporter, Silent
from plugins.trt.logger import no_collection
from plugins.trt.messages import translate
from plugins.trt.network import Network
from plugins.trt.progress import make_monitor, run_cancellable
from plugins.trt.report import LayerReport, parse_report

__all__ = ["LayerReport", "Plan", "Profile", "build_serialized", "fingerprint"]

# (min, opt, max) shape of every input with a dynamic dimension.
Profile = Mapping[str, tuple[Sequence[int], Sequence[int], Sequence[int]]]

_PLAN_MAGIC = b"vtrt"


class Definition(Protocol):
    """A traced network, as far as its identity needs it (the runtime's `Program`)."""

    @property
    def literals(self) -> Mapping[str, torch.Tensor]:
        """Constants that belong to the definition."""

    def model_dump(self, *, mode: str) -> dict[str, Any]:
        """Everything but the literals as JSON values."""


@dataclass(frozen=True)
class Plan:
    """A serialized engine.

    Attributes:
        nbytes: size of the plan.
        sha256: of the plan; plans are not reproducible, so it identifies this file only.
        report: what is inside.
        targets: compute capabilities it was built for; empty: the GPU of the machine.
        seconds: wall time of the build.
    """

    nbytes: int
    sha256: str
    report: LayerReport
    targets: tuple[str, ...]
    seconds: float


def build_serialized(
    net: Network, profile: Profile, path: Path, reporter: Reporter | None = None
) -> Plan:
    """Build `net` for the targets of its capability and stream the plan into the file `path`.

    The file is written as the builder produces it, so that no second copy of the weights is held;
    on any failure it is removed.

    Args:
        net: the network, all outputs marked.
        profile: shapes of the dynamic inputs.
        path: file to create.
        reporter: takes BUILD_STEPS (plugins.trt.progress) steps.

    Raises:
        CapabilityError: a target lacks a dtype.
        BuildError: the profile does not fit the inputs, TensorRT refused or cancelled the build,
            or the plan was not written whole.
        KeyboardInterrupt: at once after Ctrl-C.
    """
    start = time.monotonic()
    trt, capability = net.trt, net.capability
    if not net.outputs:
        raise BuildError("the network has no outputs")
    net.finish()
    capability.check_dtypes(net.dtypes)
    net._check_log("the network")
    net.logger.report.clear()
    config = _config(net)
    _add_profile(net, config, profile)
    weight_bytes = sum(c.array.nbytes for c in net.constants.values())
    monitor = make_monitor(trt, reporter or Silent(), weight_bytes)
    config.progress_monitor = monitor
    try:
        with path.open("wb") as file:
            writer = _make_writer(trt, file, monitor)
            stream = net.builder.build_serialized_network_to_stream
            with no_collection():
                done = run_cancellable(lambda: stream(net.raw, config, writer), monitor)
        _check_written(net, done, writer, path)
        report = parse_report(net.logger.report, net.aliases)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise BuildError(
            "the plan cannot be written", where=str(path), found=error.strerror or str(error)
        ) from error
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    monitor.finish()
    return Plan(
        nbytes=writer.nbytes,
        sha256=writer.digest.hexdigest(),
        report=report,
        targets=capability.targets,
        seconds=time.monotonic() - start,
    )


def _config(net: Network) -> Any:
    trt, targets = net.trt, net.capability.targets
    config = net.builder.create_builder_config()
    # Products declared float32 are meant as such.
    config.clear_flag(trt.BuilderFlag.TF32)
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    if net.plugins:
        # Some plugins write their results into one of their inputs.
        config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
    if net.capability.lists_targets:
        if not targets:
            raise CapabilityError(
                "no compute capability can hold the network's element types",
                found=", ".join(sorted(net.dtypes)),
            )
        config.num_compute_capabilities = len(targets)
        for index, target in enumerate(targets):
            member = "SM" + target.replace(".", "")
            config.set_compute_capability(getattr(trt.ComputeCapability, member), index)
    net._check_log("the builder configuration")
    return config


def _add_profile(net: Network, config: Any, profile: Profile) -> None:
    """Check a profile against the inputs; TensorRT ignores most contradictions."""
    dynamic = {name for name, t in net.inputs.items() if -1 in net.shape(t)}
    for name in profile.keys() - dynamic:
        raise BuildError("the profile names no dynamic input", where=name)
    for name in dynamic - profile.keys():
        raise BuildError("the profile lacks a dynamic input", where=name)
    if not dynamic:
        return
    result = net.builder.create_optimization_profile()
    for name, (low, best, high) in profile.items():
        declared = net.shape(net.inputs[name])
        fits = len(declared) == len(low) == len(best) == len(high) and all(
            0 <= a <= b <= c and d in (-1, a, c) and (d == -1 or a == c)
            for d, a, b, c in zip(declared, low, best, high, strict=True)
        )
        if not fits:
            raise BuildError(
                "the profile of an input is impossible (min <= opt <= max, static sizes kept)",
                where=name,
                expected=f"shapes of {list(declared)}",
                found=f"{list(low)} <= {list(best)} <= {list(high)}",
            )
        result.set_shape(name, tuple(low), tuple(best), tuple(high))
        net._check_log(name)
    index = config.add_optimization_profile(result)
    net._check_log("the profile")
    if index < 0:
        raise BuildError("TensorRT ignored the profile and gave no reason")


def _make_writer(trt: Any, file: Any, monitor: Any) -> Any:
    class Writer(trt.IStreamWriter):
        """Remembers its own failure: TensorRT ignores what `write` returns or raises."""

        def __init__(self) -> None:
            trt.IStreamWriter.__init__(self)
            self.nbytes = 0
            self.failure: Exception | None = None
            self.digest = hashlib.sha256()

        def write(self, data: Any) -> int:
            if self.failure is not None:
                return 0
            try:
                view = memoryview(data)
                file.write(view)
                self.digest.update(view)
                self.nbytes += view.nbytes
                monitor.written(view.nbytes)
            except Exception as error:  # any failure must reach the caller, not TensorRT
                self.failure = error
                return 0
            return view.nbytes

    return Writer()


def _check_written(net: Network, done: Any, writer: Any, path: Path) -> None:
    errors = net.logger.take_errors()
    if errors or not done:
        raise BuildError(
            f"the engine was not built: {translate(errors) if errors else 'no reason was given'}",
            where=f"{net.capability.flavor} {net.capability.version}, "
            f"targets {', '.join(net.capability.targets) or 'of this machine'}",
            found=errors[0].strip() if errors else None,
        )
    if writer.failure is not None:
        raise BuildError(
            "the plan cannot be written", where=str(path), found=str(writer.failure)
        ) from writer.failure
    size = path.stat().st_size
    with path.open("rb") as file:
        magic = file.read(len(_PLAN_MAGIC))
    if size != writer.nbytes or not magic == _PLAN_MAGIC:
        raise BuildError(
            "the plan on disk is not the one that was built",
            where=str(path),
            expected=f"{writer.nbytes} bytes beginning with {_PLAN_MAGIC!r}",
            found=f"{size} bytes beginning with {magic!r}",
        )


def fingerprint(
    program: Definition,
    weights_identity: str,
    profile: Profile,
    targets: Sequence[str],
    version: str,
) -> str:
    """Identity of what an engine was built from, stable between builds (plan bytes are not).

    Args:
        program: the traced network.
        weights_identity: identity of the checkpoint's tensors.
        profile, targets, version: what else goes into the build.

    Returns a hexadecimal SHA-256.
    """
    digest = hashlib.sha256()
    shapes = {k: [list(part) for part in v] for k, v in sorted(profile.items())}
    record = {
        "definition": program.model_dump(mode="json"),
        "weights": weights_identity,
        "profile": shapes,
        "targets": list(targets),
        "version": version,
    }
    digest.update(json.dumps(record, sort_keys=True, separators=(",", ":")).encode())
    for name in sorted(program.literals):
        value = program.literals[name].contiguous().cpu()
        digest.update(f"\0{name}\0{value.dtype}\0{tuple(value.shape)}\0".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
