"""The house of docs/architecture.md: imports go one way, between folders and between files."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Folder -> the folders that it may import from.
MAY_IMPORT = {
    "plugins": set(),
    "converters": {"plugins"},
    "runtime": {"plugins"},
    "triton_repo": {"plugins", "runtime"},
    "build_scripts": {"plugins", "converters", "runtime", "triton_repo"},
}


def modules() -> dict[str, Path]:
    """Files by module name."""
    found = {}
    for folder in MAY_IMPORT:
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


def imports(source: str, known: set[str]) -> set[str]:
    """Modules of this project that a file imports, at its top or inside functions."""
    named = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module:
            inside = [f"{node.module}.{alias.name}" for alias in node.names]
            named |= {name if name in known else node.module for name in inside}
        elif isinstance(node, ast.Import):
            named |= {alias.name for alias in node.names}
    return named & known


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    files = modules()
    return {name: imports(path.read_text(), set(files)) - {name} for name, path in files.items()}


def test_folders_import_one_way(graph: dict[str, set[str]]) -> None:
    wrong = [
        f"{name} imports {other}"
        for name, others in graph.items()
        for other in others
        if (top := name.split(".")[0]) != (below := other.split(".")[0])
        and below not in MAY_IMPORT[top]
    ]
    assert not wrong


def test_files_import_one_way(graph: dict[str, set[str]]) -> None:
    assert any(graph.values())
    list(TopologicalSorter(graph).static_order())


def test_a_circle_is_found() -> None:
    known = {"plugins.a", "plugins.b"}
    circle = {
        "plugins.a": imports("from plugins import b", known),
        "plugins.b": imports("def f():\n    from plugins.a import g", known),
    }
    assert circle == {"plugins.a": {"plugins.b"}, "plugins.b": {"plugins.a"}}
    with pytest.raises(CycleError):
        list(TopologicalSorter(circle).static_order())
