"""Finds a real tritonserver: the one that nvidia-pytriton carries, else one on PATH."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from plugins.support.errors import CapabilityError

# Where NVIDIA's container keeps the backends of the tritonserver on PATH.
CONTAINER_BACKENDS = Path("/opt/tritonserver/backends")


@dataclass(frozen=True)
class Installation:
    """What starting a server needs.

    Attributes:
        binary: the tritonserver executable.
        stub: Python-backend stub of this interpreter's version; None when the installation
            already has one beside its backend (the container).
        backend: directory with `libtriton_python.so`.
        library_path: directories for LD_LIBRARY_PATH, first one first.
    """

    binary: Path
    backend: Path
    stub: Path | None
    library_path: tuple[Path, ...]

    def make_backend_directory(self, root: Path) -> Path:
        """Fill `root` with a backend directory and return it.

        The wheel ships the Python backend without a stub beside it. Links, not copies: the stub
        finds its bundled libraries relative to its real place.
        """
        if self.stub is None:
            return self.backend.parent
        python = root / "python"
        python.mkdir(parents=True)
        for name in ("libtriton_python.so", "triton_python_backend_utils.py"):
            (python / name).symlink_to(self.backend / name)
        (python / "triton_python_backend_stub").symlink_to(self.stub)
        return root

    def environment(self) -> dict[str, str]:
        """The server's environment: this interpreter first on PATH, its libpython findable.

        The stub picks site-packages through the first `python3` on PATH and ignores PYTHONPATH.
        """
        env = dict(os.environ)
        env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", "")])
        libraries = [str(p) for p in self.library_path]
        if env.get("LD_LIBRARY_PATH"):
            libraries.append(env["LD_LIBRARY_PATH"])
        env["LD_LIBRARY_PATH"] = os.pathsep.join(libraries)
        env.pop("PYTHONHOME", None)
        return env


def find_installation() -> Installation:
    """Locate tritonserver. Raises CapabilityError that names what to install."""
    spec = importlib.util.find_spec("pytriton")
    if spec is not None and spec.submodule_search_locations:
        package = Path(next(iter(spec.submodule_search_locations)))
        return _from_pytriton(package)
    on_path = shutil.which("tritonserver")
    if on_path is not None and (CONTAINER_BACKENDS / "python").is_dir():
        return Installation(Path(on_path), CONTAINER_BACKENDS / "python", None, ())
    raise CapabilityError(
        "there is no tritonserver on this machine",
        expected="the package nvidia-pytriton, or a tritonserver on PATH with "
        f"{CONTAINER_BACKENDS}/python",
        fix="pip install 'trtllm-toolchain[serve]'",
    )


def _from_pytriton(package: Path) -> Installation:
    root = package / "tritonserver"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    binary = root / "bin" / "tritonserver"
    stub = root / "python_backend_stubs" / version / "triton_python_backend_stub"
    backend = root / "backends" / "python"
    for path in (binary, stub, backend / "libtriton_python.so"):
        if not path.exists():
            raise CapabilityError(
                "the tritonserver inside nvidia-pytriton is incomplete",
                expected=str(path.relative_to(package.parent)),
                found="no such file",
                fix="pip install --force-reinstall 'nvidia-pytriton>=0.7,<0.8'",
            )
    libraries = [package.parent / "nvidia_pytriton.libs", *_libpython_directories(version)]
    return Installation(binary, backend, stub, tuple(p for p in libraries if p.is_dir()))


def _libpython_directories(version: str) -> list[Path]:
    """Directories that hold this interpreter's shared libpython; empty when it has none.

    The stub is linked to libpython of its version. The one of the interpreter that made the
    virtual environment comes first, so that library and standard library are of one build.
    """
    name = f"libpython{version}.so.1.0"
    candidates = [sysconfig.get_config_var("LIBDIR"), str(Path(sys.base_prefix) / "lib")]
    found = [Path(c) for c in candidates if c and (Path(c) / name).exists()]
    if not found:
        try:
            ctypes.CDLL(name)
        except OSError:
            raise CapabilityError(
                "the shared Python library that the server's Python models need is missing",
                expected=name,
                fix=f"apt-get install libpython{version}",
            ) from None
    return list(dict.fromkeys(found))
