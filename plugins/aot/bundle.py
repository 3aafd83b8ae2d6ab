"""A directory of compiled kernels: `kernels.json` and one PTX file per kernel."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path

from plugins.aot.compile import CompiledKernel
from plugins.support.atomic import atomic_directory
from plugins.support.errors import InputError

MANIFEST = "kernels.json"
FORMAT_VERSION = 1


def write_bundle(path: Path, kernels: Mapping[str, CompiledKernel]) -> None:
    """Write kernels under their keys; the directory must not exist.

    Raises UsageError when it does.
    """
    with atomic_directory(path, "kernel directory") as work:
        entries = {}
        for key, kernel in kernels.items():
            file = f"{key}.ptx"
            (work / file).write_text(kernel.ptx)
            fields = asdict(kernel)
            del fields["ptx"]
            entries[key] = {"file": file, **fields}
        manifest = {"format_version": FORMAT_VERSION, "kernels": entries}
        (work / MANIFEST).write_text(json.dumps(manifest, indent=1))


def read_bundle(path: Path, keys: Iterable[str] | None = None) -> dict[str, CompiledKernel]:
    """Read kernels (all, or those under `keys`) and check their digests.

    Raises InputError when the directory is not a bundle, a key is missing or a digest differs.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise InputError(
            "not a directory of compiled kernels", where=str(path / MANIFEST), found=str(error)
        ) from error
    if manifest.get("format_version") != FORMAT_VERSION:
        raise InputError(
            "unknown format version",
            where=str(path / MANIFEST),
            expected=str(FORMAT_VERSION),
            found=str(manifest.get("format_version")),
        )
    entries = manifest["kernels"]
    result = {}
    for key in entries if keys is None else keys:
        if key not in entries:
            raise InputError(
                "no such kernel", where=str(path), expected=", ".join(entries), found=key
            )
        fields = dict(entries[key])
        kernel = CompiledKernel(
            name=fields["name"],
            ptx=(path / fields["file"]).read_text(),
            capability=fields["capability"],
            parameters=tuple(fields["parameters"]),
            threads=fields["threads"],
            shared_bytes=fields["shared_bytes"],
            digest=fields["digest"],
        )
        kernel.check()
        result[key] = kernel
    return result
