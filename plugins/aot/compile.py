"""Compile a kernel to PTX on a machine without a GPU, in the form that TensorRT launches.

Triton appends two pointers (global and profiling scratch) to a kernel's parameters. TensorRT passes
inputs, integers and outputs only, so the two are removed, after proving that neither is used.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from plugins.aot.spec import KernelSpec
from plugins.support.errors import CapabilityError, InputError
from plugins.trt.capability import parse_target

# Compute capability -> first PTX version that knows it (for the plain or the "a" form).
CAPABILITIES = {"8.0": 70, "8.9": 78, "9.0": 80, "10.0": 86, "12.0": 87}
# Newest CUDA driver branch (major) -> newest PTX version it assembles.
DRIVER_PTX = {525: 80, 535: 82, 550: 84, 560: 85, 570: 87, 575: 88, 580: 90}
# Newest CUDA version that a driver knows (`cuDriverGetVersion`) -> its branch.
CUDA_BRANCH = {
    12000: 525, 12020: 535, 12040: 550, 12060: 560, 12080: 570, 12090: 575, 13000: 580,
}  # fmt: skip
DEFAULT_PTX = 87
# Most shared memory per block, with the opt-in that a launcher must make above 48 KiB.
SHARED_BYTES = {"8.0": 163, "8.9": 99, "9.0": 227, "10.0": 227, "12.0": 99}

_TYPES = {
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "fp8e4nv",
    "int32": "i32",
    "uint8": "u8",
    "int8": "i8",
    "int64": "i64",
}
_FP8_CAPABILITY = (8, 9)
_CLUSTER_CAPABILITY = (9, 0)
# What can start a kernel before its predecessor has ended (programmatic dependent launch).
_EARLY_CAPABILITY = (9, 0)


@dataclass(frozen=True)
class CompiledKernel:
    """One kernel for one compute capability.

    Attributes:
        name: entry point in the PTX.
        ptx: PTX text with exactly `parameters` parameters.
        capability: compute capability, e.g. "9.0".
        parameters: names in order: inputs, integers, outputs.
        threads: threads per block.
        shared_bytes: dynamic shared memory per block, as a launch must ask for it.
        digest: SHA-256 of the PTX text, hexadecimal.
    """

    name: str
    ptx: str
    capability: str
    parameters: tuple[str, ...]
    threads: int
    shared_bytes: int
    digest: str

    @cached_property
    def waits(self) -> bool:
        """Whether the kernel may be started early, see `wait_first`."""
        return re.search(r"\.entry[^{]*\{\s*griddepcontrol\.wait;", self.ptx) is not None

    def check(self) -> None:
        """Raise InputError when the PTX is not the one that was compiled."""
        found = hashlib.sha256(self.ptx.encode()).hexdigest()
        if found != self.digest:
            raise InputError(
                "a compiled kernel was changed",
                where=self.name,
                expected=self.digest,
                found=found,
                fix="compile it again",
            )


def runs_on(compiled_for: str, gpu: tuple[int, int]) -> bool:
    """Whether a GPU runs code that was compiled for a compute capability.

    From 9.0 on the code is for exactly that GPU (PTX targets such as sm_90a), older code for newer
    ones too.
    """
    target = parse_target(compiled_for)
    return gpu == target if target >= (9, 0) else gpu >= target


def _divisible(spec: KernelSpec) -> dict[tuple[int], list[list[object]]]:
    """Mark the tensor pointers as 16-byte aligned: without it no load is wider than an element."""
    names = {a.name for a in spec.tensors}
    marks: dict[tuple[int], list[list[object]]] = {}
    for position, name in enumerate(spec.function.arg_names):
        if name in names:
            marks[(position,)] = [["tt.divisibility", 16]]
    return marks


def _source(spec: KernelSpec) -> ASTSource:
    signature = {a.name: "*" + _TYPES[a.dtype] for a in spec.inputs}
    signature |= dict.fromkeys(spec.scalars, "i32")
    signature |= {a.name: "*" + _TYPES[a.dtype] for a in spec.outputs}
    signature |= dict.fromkeys(spec.constants, "constexpr")
    constants: dict[str, Any] = dict(spec.constants)
    # A kernel in Gluon, Triton's explicit level, enters the compiler behind the layout passes.
    source = GluonASTSource if spec.function.is_gluon() else ASTSource
    return source(
        fn=spec.function, signature=signature, constexprs=constants, attrs=_divisible(spec)
    )


def newest_ptx(driver: int) -> int:
    """The newest PTX version (e.g. 87) that a driver branch (e.g. 570) assembles.

    Raises InputError for a branch older than the table.
    """
    known = [version for branch, version in DRIVER_PTX.items() if branch <= driver]
    if not known:
        raise InputError(
            "the driver is too old for these kernels",
            where="driver branch",
            expected=f"{min(DRIVER_PTX)} or newer",
            found=str(driver),
        )
    return max(known)


def installed_ptx(cuda: int) -> int:
    """The PTX version to compile for a driver that knows CUDA up to `cuda`, e.g. 12040 for 12.4:
    the default, or an older one that the driver assembles.

    Raises InputError for a driver older than the table.
    """
    branches = [branch for version, branch in CUDA_BRANCH.items() if version <= cuda]
    return min(DEFAULT_PTX, newest_ptx(max(branches, default=0)))


def compile_kernel(
    spec: KernelSpec, capability: str, ptx_version: int | None = None
) -> CompiledKernel:
    """Compile for one compute capability.

    Args:
        spec: the kernel.
        capability: one of CAPABILITIES.
        ptx_version: newest PTX version the target's driver assembles, e.g. 87 for 8.7; see
            `newest_ptx`. Default: 8.7, or the capability's first version where that is newer.

    Raises:
        CapabilityError: the capability is unknown or lacks an element type or instructions of the
            kernel.
        InputError: the PTX version is too old for the capability, or the kernel uses scratch
            memory or anything else that TensorRT does not launch.
    """
    if triton.knobs.runtime.interpret:
        raise CapabilityError(
            "kernels cannot be compiled in Triton's interpreter",
            where=spec.name,
            fix="unset TRITON_INTERPRET",
        )
    if capability not in CAPABILITIES:
        raise CapabilityError(
            "no kernels are compiled for this compute capability",
            where=spec.name,
            expected=", ".join(CAPABILITIES),
            found=capability,
        )
    major, minor = parse_target(capability)
    spec.check((major, minor))
    if spec.cluster > 1 and (major, minor) < _CLUSTER_CAPABILITY:
        raise CapabilityError(
            "this compute capability has no clusters",
            where=spec.name,
            expected="9.0 or newer",
            found=capability,
        )
    if (major, minor) < _FP8_CAPABILITY and "float8_e4m3fn" in {a.dtype for a in spec.tensors}:
        raise CapabilityError(
            "this compute capability has no float8",
            where=spec.name,
            expected="8.9 or newer",
            found=capability,
            fix="use a bfloat16 cache",
        )
    first = CAPABILITIES[capability]
    version = max(DEFAULT_PTX, first) if ptx_version is None else ptx_version
    if version < first:
        raise InputError(
            "the PTX version is too old for the compute capability",
            where=spec.name,
            expected=f"at least {first / 10} for {capability}",
            found=str(version / 10),
            fix="use a newer driver on the target",
        )
    compiled = triton.compile(
        _source(spec),
        target=GPUTarget("cuda", major * 10 + minor, 32),
        options={
            "num_warps": spec.warps,
            "ptx_version": version,
            "maxnreg": spec.registers,
            "enable_fp_fusion": True,
            **spec.options,
        },
    )
    ptx = strip_scratch(compiled.asm["ptx"], spec.name, len(spec.parameters))
    _refuse_unlaunchable(spec, capability, compiled.metadata, static_shared(ptx))
    ptx = in_clusters(ptx, spec.cluster)
    if (major, minor) >= _EARLY_CAPABILITY:
        ptx = wait_first(ptx)
    return CompiledKernel(
        name=compiled.metadata.name,
        ptx=ptx,
        capability=capability,
        parameters=spec.parameters,
        threads=32 * compiled.metadata.num_warps,
        shared_bytes=compiled.metadata.shared,
        digest=hashlib.sha256(ptx.encode()).hexdigest(),
    )


def static_shared(ptx: str) -> int:
    """Bytes of shared memory that a PTX text declares itself, besides what a launch asks for."""
    declared = re.findall(r"^\s*\.shared\s+\.align\s+\d+\s+\.b8\s+\w+\[(\d+)\]", ptx, re.MULTILINE)
    return sum(int(size) for size in declared)


def in_clusters(ptx: str, programs: int) -> str:
    """Declare that `programs` programs side by side form a cluster; 1 changes nothing."""
    if programs == 1:
        return ptx
    return ptx.replace(".reqntid", f".reqnctapercluster {programs}, 1, 1\n.reqntid", 1)


def wait_first(ptx: str) -> str:
    """Make a kernel wait for all kernels before it and then let the next one start, before it does
    anything else.

    A launcher may then start it while its predecessor still runs, which hides the time that a
    launch takes; launched in the ordinary way, as TensorRT does, the two instructions do nothing.
    What is read or written before the wait would have to be left alone by the predecessor, and that
    is whatever stands in front on the stream: it may produce an input, and its own inputs may lie
    where this kernel's outputs do, in memory that torch's allocator has given out again. What is
    done before the next kernel may start, that one takes for done. So all threads of all programs
    wait first: when a kernel has ended, all before it have, and at any time at most one kernel in
    front of a waiting one still runs.

    Source: PTX ISA, griddepcontrol.
    """
    return re.sub(
        r"(\.entry[^{]*\{\n)",
        r"\1\tgriddepcontrol.wait;\n\tgriddepcontrol.launch_dependents;\n",
        ptx,
        count=1,
    )


def _refuse_unlaunchable(spec: KernelSpec, capability: str, metadata: Any, declared: int) -> None:
    limit = SHARED_BYTES[capability] * 1024
    if metadata.shared + declared > limit:
        raise InputError(
            "a kernel needs more shared memory than the GPU has",
            where=f"{spec.name}, compute capability {capability}",
            expected=f"at most {limit} bytes",
            found=str(metadata.shared + declared),
            fix="use smaller tiles or fewer stages",
        )
    wanted = {
        "global_scratch_size": 0,
        "profile_scratch_size": 0,
        "num_ctas": 1,
        "launch_pdl": False,
        "launch_cooperative_grid": False,
        "tmem_size": 0,
    }
    for name, value in wanted.items():
        found = getattr(metadata, name, value)
        if (found or value) != value:
            raise InputError(
                "TensorRT cannot launch this kernel",
                where=spec.name,
                expected=f"{name} = {value}",
                found=str(found),
            )


def entry_parameters(ptx: str) -> list[str]:
    """Names of the parameters of the one entry point in a PTX text."""
    header = re.search(r"\.entry\s+\w+\s*\((.*?)\)", ptx, re.DOTALL)
    if header is None:
        return []
    return re.findall(r"\.param\s[^,]*?(\w+)\s*(?:,|$)", header[1])


def strip_scratch(ptx: str, where: str, wanted: int) -> str:
    """Remove the parameters behind the first `wanted` ones.

    Raises InputError when one of them is used, when there are fewer, or when more than the two
    scratch pointers would go.
    """
    names = entry_parameters(ptx)
    surplus = names[wanted:]
    if len(names) < wanted or len(surplus) > 2:
        raise InputError(
            "a compiled kernel has an unexpected number of parameters",
            where=where,
            expected=f"{wanted}, then at most two scratch pointers",
            found=str(len(names)),
        )
    for name in surplus:
        if len(re.findall(rf"\b{re.escape(name)}\b", ptx)) != 1:
            raise InputError(
                "a compiled kernel uses scratch memory, which TensorRT does not pass",
                where=where,
                found=name,
            )
        ptx = re.sub(rf",?\s*\.param\s[^,()]*?\b{re.escape(name)}\b", "", ptx, count=1)
    return ptx


def assemble(ptx: str, capability: str) -> str:
    """Assemble PTX with the ptxas of Triton and return its resource report.

    Raises InputError with the assembler's message when it refuses.
    """
    from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability

    major, minor = parse_target(capability)
    number = major * 10 + minor
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        result = subprocess.run(
            [
                get_ptxas(number).path,
                "-v",
                f"--gpu-name={sm_arch_from_capability(number)}",
                str(source),
                "-o",
                str(Path(folder) / "kernel.cubin"),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
    if result.returncode:
        raise InputError("the assembler refuses a kernel", found=result.stderr.strip())
    return result.stderr
