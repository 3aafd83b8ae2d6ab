"""Every TensorRT name the code uses exists in the RTX flavour and is listed for TensorRT 11."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import plugins.trt
from plugins.trt.backend import load_backend
from plugins.trt.types import _MEMBERS
from tests.plugins.trt.surface import FROM_11, NEW, ONLY_FULL, ONLY_RTX

_FOLDER = Path(plugins.trt.__file__).parent

# Enumerations whose member the code chooses at run time: the methods that name it.
_BY_NAME = {
    "_binary": "ElementWiseOperation",
    "_unary": "UnaryOperation",
    "_activation": "ActivationType",
    "_reduce": "ReduceOperation",
}


def _chain(node: ast.AST) -> list[str]:
    """a.b.c as ["a", "b", "c"]; empty when it is something else."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [node.id, *reversed(names)] if isinstance(node, ast.Name) else []


def _used() -> Iterator[tuple[str, str | None]]:
    """(class or constant, member) pairs that appear in the package's source."""
    for path in _FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            chain = _chain(node) if isinstance(node, ast.Attribute) else []
            if "raw" in chain[:2] and chain[chain.index("raw") + 1 :]:
                yield "INetworkDefinition", chain[chain.index("raw") + 1]
            if "trt" in chain[:3] and chain[0] != "plugins":
                rest = chain[chain.index("trt") + 1 :]
                if rest and rest[0][0].isupper():
                    yield rest[0], rest[1] if len(rest) > 1 else None
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                enum = _BY_NAME.get(node.func.attr)
                for argument in node.args if enum else ():
                    if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                        yield str(enum), argument.value


def _table(*tables: dict[str, tuple[str, ...]]) -> dict[str, set[str]]:
    joined: dict[str, set[str]] = {}
    for table in tables:
        for name, members in table.items():
            joined.setdefault(name, set()).update(members)
    return joined


def test_the_scan_finds_what_is_used() -> None:
    used = set(_used())
    assert ("INetworkDefinition", "add_kv_cache_update") in used
    assert ("ElementWiseOperation", "FLOOR_DIV") in used and ("BuilderFlag", "TF32") in used
    assert len({member for name, member in used if name == "INetworkDefinition"}) > 35


def test_every_name_in_use_is_in_the_tables() -> None:
    known = _table(FROM_11, ONLY_RTX, ONLY_FULL)
    plain = {"Weights", "INetworkDefinition", "DataType"}
    missing = [
        (name, member)
        for name, member in _used()
        if name not in plain | known.keys()
        or (member is not None and not member.startswith("__") and member not in known[name])
    ]
    assert not missing
    assert set(_MEMBERS.values()) <= known["DataType"]


def test_the_rtx_flavour_has_every_name() -> None:
    trt = load_backend("tensorrt_rtx").trt
    for name, members in _table(FROM_11, ONLY_RTX).items():
        owner = getattr(trt, name)
        for member in members:
            assert hasattr(owner, member), f"{name}.{member}"


def test_what_only_full_tensorrt_has_is_absent_from_the_rtx_flavour() -> None:
    trt = load_backend("tensorrt_rtx").trt
    for name, members in ONLY_FULL.items():
        for member in members:
            assert not hasattr(getattr(trt, name), member)


@pytest.mark.parametrize(
    ("missing", "field"),
    [
        ("add_attention_v2", "has_attention_causal"),
        ("add_kv_cache_update", "has_kv_cache"),
        ("add_rotary_embedding", "has_rotary"),
        ("add_attention", "has_attention"),
    ],
)
def test_the_capability_record_follows_the_library(missing: str, field: str, monkeypatch) -> None:
    backend = load_backend("tensorrt_rtx")
    names = {n for n in dir(backend.trt.INetworkDefinition) if n != missing}
    network = type("INetworkDefinition", (), dict.fromkeys(names))
    library = {"INetworkDefinition": network, "IBuilderConfig": backend.trt.IBuilderConfig}
    older = type(backend)("tensorrt_rtx", "1.7.0", type("trt", (), library))
    assert getattr(backend.capability(), field) and not getattr(older.capability(), field)
    assert any(missing in added for added in NEW.values())


def test_only_the_capability_record_asks_which_flavour_it_is() -> None:
    """No `if rtx` anywhere else, and no probing of the library outside the record."""
    for path in _FOLDER.glob("*.py"):
        text = path.read_text()
        if path.name not in ("backend.py", "capability.py"):
            assert "hasattr(" not in text, path.name
            # The type of flavours lists them.
            named = 1 if path.name in ("builder.py", "types.py") else 0
            assert text.count('"tensorrt_rtx"') <= named, path.name
