"""What `doctor` looks at: installed packages, GPUs, shared memory, and what follows for each verb.

A package counts as working only when it can be imported: half-installed packages are the usual
reason for a report that "it is installed but does not work".
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from build_scripts.packages import PACKAGES, Package
from runtime.host_inputs.compiled import INSTALL, find_compiler


@dataclass(frozen=True)
class Dependency:
    """One package as found on this machine; `state` is "ok", "missing" or "broken: why"."""

    name: str
    version: str | None
    state: str
    needed_by: str
    install: str
    required: bool


@dataclass(frozen=True)
class Survey:
    """Everything `doctor` reports."""

    dependencies: list[Dependency]
    facts: dict[str, str]
    verbs: dict[str, str]
    gpus: list[dict[str, str]] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether every dependency that all verbs share works."""
        return all(d.state == "ok" for d in self.dependencies if d.required)

    def as_dict(self) -> dict[str, Any]:
        """The survey as plain JSON values."""
        return asdict(self) | {"complete": self.complete}


def _look(package: Package) -> Dependency:
    try:
        version: str | None = importlib.metadata.version(package.name)
    except importlib.metadata.PackageNotFoundError:
        version = None
    state = "ok"
    if version is None:
        state = "missing"
    else:
        try:
            importlib.import_module(package.module)
        except Exception as error:
            state = f"broken: {' '.join(str(error).split())[:120]}"
    install = "" if state == "ok" else package.install
    return Dependency(
        package.name, version, state, package.needed_by, install, package.extra is None
    )


def _gpus() -> list[dict[str, str]]:
    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        found.append(
            {
                "name": about.name,
                "compute_capability": f"{about.major}.{about.minor}",
                "memory_gb": f"{about.total_memory / 1e9:.1f}",
            }
        )
    return found


def _memory_gb() -> str:
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return f"{pages / 1e9:.1f} GB"


def _shared_memory() -> str:
    shm = Path("/dev/shm")
    if not shm.is_dir():
        return "none: serve needs it"
    # The Python backend takes at least 1 MB per model instance; a repository has five.
    free = shutil.disk_usage(shm).free
    return f"{free / 1e6:.0f} MB free" + ("" if free >= 64e6 else ", too little for serve")


def survey() -> Survey:
    """Look at this machine. Imports every dependency that is installed."""
    dependencies = [_look(package) for package in PACKAGES]
    ok = {d.name for d in dependencies if d.state == "ok"}
    gpus = _gpus()
    flavors: list[str] = [name for name in ("tensorrt", "tensorrt_rtx") if name in ok]
    facts = {
        "python": platform.python_version(),
        "processor": f"{os.cpu_count()} cores, {platform.machine()}",
        "memory": _memory_gb(),
        "shared memory": _shared_memory(),
        "C compiler": find_compiler() or f"none: n-gram tables are read more slowly; {INSTALL}",
        "gpu": "; ".join(f"{g['name']} (compute {g['compute_capability']})" for g in gpus)
        or "none",
    }
    return Survey(dependencies, facts, _verbs(ok, flavors, gpus), gpus)


def _verbs(ok: set[str], flavors: list[str], gpus: list[dict[str, str]]) -> dict[str, str]:
    missing_builder = "no: pip install 'trtllm-toolchain[rtx]'"
    build = ", ".join(flavors) if flavors else missing_builder
    if flavors == ["tensorrt"] and not gpus:
        build = "no: tensorrt builds need a GPU; pip install 'trtllm-toolchain[rtx]'"
    # The interpreter executes the engine's network anywhere; TensorRT itself needs the GPU.
    run = f"{', '.join(flavors)} on the GPU, or the interpreter" if gpus and flavors else None
    run = run or ("the interpreter on the GPU" if gpus else "the interpreter on the CPU")
    server = "tritonserver" if shutil.which("tritonserver") else "nvidia-pytriton's tritonserver"
    can_serve = "nvidia-pytriton" in ok or shutil.which("tritonserver") is not None
    return {
        "convert": "yes",
        "build": build,
        "verify": "yes, on the interpreter" if "transformers" in ok else "no: transformers",
        "run": run,
        "repo": "yes" if "tritonclient" in ok else "no: pip install 'trtllm-toolchain[serve]'",
        "serve": server if can_serve else "no: pip install 'trtllm-toolchain[serve]'",
    }
