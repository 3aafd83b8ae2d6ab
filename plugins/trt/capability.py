"""What a TensorRT flavour can build, for which GPUs, and the refusals that follow from it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from plugins.support.errors import CapabilityError, UsageError
from plugins.trt.types import FLOAT4

RTX_TARGETS = ("7.5", "8.0", "8.6", "8.9", "12.0", "12.1")
RTX_DEFAULT_TARGETS = ("8.0", "8.6", "8.9", "12.0")

# First compute capability whose compiler accepts a dtype. The builder itself checks this only
# for listed targets, and with a message that names neither tensor nor GPU.
_FIRST_TARGET = {
    "bfloat16": (8, 0),
    "float8_e4m3fn": (8, 9),
    "float8_e8m0fnu": (8, 9),
    FLOAT4: (12, 0),
}


def parse_target(target: str) -> tuple[int, int]:
    """Split a compute capability such as "8.6". Raises UsageError when it is not one."""
    match = re.fullmatch(r"(\d{1,2})\.(\d)", target)
    if match is None:
        raise UsageError(
            "not a compute capability", expected="major.minor such as 8.9", found=target
        )
    return int(match[1]), int(match[2])


def supports(target: str, dtype: str) -> bool:
    """Whether networks with tensors of `dtype` build for compute capability `target`."""
    return parse_target(target) >= _FIRST_TARGET.get(dtype, (0, 0))


@dataclass(frozen=True)
class Capability:
    """Abilities of one flavour for a list of targets.

    Attributes:
        flavor: "tensorrt" or "tensorrt_rtx".
        version: version of the library.
        targets: compute capabilities to build for; empty means "the GPU of this machine",
            which is the only thing full TensorRT builds for.
        has_plugins: plugin layers can be added.
        has_attention: fused attention with a mask.
        has_attention_causal: causal kinds and key/value lengths of fused attention.
        has_kv_cache: in-place cache update.
        has_rotary: rotary embedding layer.
        lists_targets: the build takes a list of compute capabilities.
    """

    flavor: str
    version: str
    targets: tuple[str, ...]
    has_plugins: bool
    has_attention: bool
    has_attention_causal: bool
    has_kv_cache: bool
    has_rotary: bool
    lists_targets: bool

    def check_dtypes(self, dtypes: Iterable[str]) -> None:
        """Raise CapabilityError naming the first target that cannot hold one of `dtypes`."""
        for target in self.targets:
            for dtype in sorted(set(dtypes)):
                if not supports(target, dtype):
                    major, minor = _FIRST_TARGET[dtype]
                    raise CapabilityError(
                        f"compute capability {target} has no {dtype}",
                        expected=f"compute capability {major}.{minor} or newer",
                        found=f"targets {', '.join(self.targets)}",
                        fix=f"leave {target} out of the targets or convert to another format",
                    )

    def require(self, feature: str, what: str, fix: str | None = None) -> None:
        """Raise CapabilityError unless the attribute `feature` is true."""
        if not getattr(self, feature):
            raise CapabilityError(
                f"{self.flavor} {self.version} has no {what}",
                expected="a TensorRT flavour that has it",
                found=f"{self.flavor} {self.version}",
                fix=fix,
            )


def choose_rtx_targets(targets: Sequence[str] | None, dtypes: Iterable[str]) -> tuple[str, ...]:
    """The compute capabilities to list: the given ones, or all default ones the dtypes allow.

    Raises UsageError for a target that TensorRT for RTX does not know.
    """
    if targets is None:
        used = set(dtypes)
        return tuple(t for t in RTX_DEFAULT_TARGETS if all(supports(t, d) for d in used))
    for target in targets:
        parse_target(target)
        if target not in RTX_TARGETS:
            raise UsageError(
                f"tensorrt_rtx does not build for compute capability {target}",
                expected=", ".join(RTX_TARGETS),
                found=target,
                fix="GPUs of data centres need the flavour tensorrt",
            )
    return tuple(dict.fromkeys(targets))
