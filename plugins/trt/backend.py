"""The one place that picks a TensorRT module."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from plugins.support.errors import CapabilityError, UsageError
from plugins.trt.capability import Capability, choose_rtx_targets, parse_target
from plugins.trt.logger import make_logger
from plugins.trt.types import FLAVORS, Flavor

_PACKAGES = {"tensorrt": "tensorrt", "tensorrt_rtx": "tensorrt_rtx"}
MINIMUM_VERSION = {"tensorrt": (10, 15), "tensorrt_rtx": (1, 7)}


@dataclass(frozen=True)
class Backend:
    """A loaded TensorRT module.

    Attributes:
        flavor: "tensorrt" or "tensorrt_rtx", also the module's import name.
        version: the module's version.
        trt: the module.
    """

    flavor: Flavor
    version: str
    trt: Any

    def capability(
        self, targets: Sequence[str] | None = None, dtypes: Iterable[str] = ()
    ) -> Capability:
        """What this backend can build for `targets` (None: all that `dtypes` allow).

        Raises UsageError for unknown targets, CapabilityError for a target that lacks one of
        `dtypes` or that full TensorRT would need another GPU for.
        """
        used = tuple(dtypes)
        if self.flavor == "tensorrt_rtx":
            chosen = choose_rtx_targets(targets, used)
        else:
            chosen = _machine_target(targets)
        network = self.trt.INetworkDefinition
        capability = Capability(
            flavor=self.flavor,
            version=self.version,
            targets=chosen,
            has_plugins=hasattr(network, "add_plugin"),
            has_attention=hasattr(network, "add_attention"),
            has_attention_causal=hasattr(network, "add_attention_v2"),
            has_kv_cache=hasattr(network, "add_kv_cache_update"),
            has_rotary=hasattr(network, "add_rotary_embedding"),
            lists_targets=hasattr(self.trt.IBuilderConfig, "num_compute_capabilities"),
        )
        capability.check_dtypes(used)
        return capability

    def plugin_module(self) -> Any:
        """The module `tensorrt.plugin`; only where the capability record has plugins."""
        name = f"{self.trt.__name__}.plugin"
        module = importlib.import_module(name)
        if not hasattr(module, "trt"):
            module.trt = self.trt  # type: ignore[attr-defined]
        return module

    def logger(self) -> Any:
        """A new recording logger (see `plugins.trt.logger`)."""
        return make_logger(self.trt)


def _machine_target(targets: Sequence[str] | None) -> tuple[str, ...]:
    """Full TensorRT times kernels on the GPU it builds for; compare the wish with the machine."""
    present = None
    if torch.cuda.is_available():
        present = "{}.{}".format(*torch.cuda.get_device_capability())
    if targets is None:
        return () if present is None else (present,)
    for target in targets:
        parse_target(target)
        if target != present:
            raise CapabilityError(
                f"full TensorRT builds for compute capability {target} only on such a GPU",
                expected=target,
                found=present or "no GPU",
                fix="build on the target machine, or choose the flavour tensorrt_rtx",
            )
    return tuple(targets)


def load_backend(flavor: str = "auto") -> Backend:
    """Import a TensorRT flavour.

    Args:
        flavor: "tensorrt", "tensorrt_rtx", or "auto" (full TensorRT if it is installed).

    Raises:
        UsageError: unknown flavour.
        CapabilityError: not installed, or older than the oldest version the facade knows.
    """
    if flavor != "auto" and flavor not in FLAVORS:
        raise UsageError(
            "unknown TensorRT flavour", expected="auto, " + ", ".join(FLAVORS), found=flavor
        )
    wanted = [name for name in FLAVORS if flavor in ("auto", name)]
    problems = []
    for name in wanted:
        try:
            module = importlib.import_module(name)
        except (ImportError, OSError) as error:
            problems.append(f"{name}: {error}")
            continue
        version = str(module.__version__)
        minimum = MINIMUM_VERSION[name]
        if tuple(int(part) for part in version.split(".")[:2]) < minimum:
            problems.append(f"{name}: version {version}")
            continue
        return Backend(name, version, module)
    raise CapabilityError(
        "no usable TensorRT is installed",
        expected=" or ".join(
            f"{name} {'.'.join(map(str, MINIMUM_VERSION[name]))} or newer" for name in wanted
        ),
        found="; ".join(problems),
        fix=f"pip install {_PACKAGES[wanted[-1]]}",
    )
