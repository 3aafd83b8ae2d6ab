"""Compiled code gathers exactly what numpy does, is checked before use, and can be missing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from plugins.ngram import NgramConstants, row_ids
from plugins.support.errors import CapabilityError, InputError, UsageError
from runtime.contract import NgramEmbedding, TensorSpec
from runtime.host_inputs import compiled as module
from runtime.host_inputs.compiled import OPTIONS, SOURCE, CompiledGather, compile_library
from runtime.host_inputs.ngram import NgramGather
from runtime.host_inputs.table import StoredTable

needs_compiler = pytest.mark.skipif(
    module.find_compiler() is None, reason="no C compiler on this machine"
)
# With the widest instructions of the processor, and with those of every processor.
BOTH = [OPTIONS, ("-O3",)]
EOS = 7
CONSTANTS = NgramConstants((5, 0x4000000000000003, 11), (13, 17, 19, 23), (0, 13, 30, 49), 72)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """What one test compiled, or failed to, is no other's."""
    yield
    compile_library.cache_clear()


def table(
    path: Path, kind: str, rows: int, blocks: int, seed: int = 0, scale: float = 0.013
) -> Path:
    """A table of arbitrary bytes: NaN codes and scales, zeros and subnormals are among them."""
    numbers = np.random.default_rng(seed)

    def codes(width: int) -> torch.Tensor:
        return torch.from_numpy(numbers.integers(0, 256, (rows, width), np.uint8))

    if kind == "nvfp4":
        tensors = {
            "t.weight": codes(8 * blocks),
            "t.weights_scaling_factor": codes(blocks).view(torch.float8_e4m3fn),
            "t.weights_scaling_factor_2": torch.tensor([scale]),
        }
    elif kind == "fp8":
        tensors = {
            "t.weight": codes(blocks).view(torch.float8_e4m3fn),
            "t.weights_scaling_factor": torch.tensor([scale]),
        }
    else:
        stored = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[kind]
        tensors = {"t.weight": codes(blocks * stored.itemsize).view(stored)}
    save_file(tensors, path)
    return path


def side_by_side(parts: list[np.ndarray], gap: int = 0) -> list[np.ndarray]:
    """The same rows, all parts of a row together, `gap` bytes between two rows."""
    rows, widths = len(parts[0]), [part.shape[1] for part in parts]
    whole = np.full((rows, sum(widths) + gap), 0xA5, np.uint8)
    views = np.split(whole, np.cumsum(widths), axis=1)[: len(parts)]
    for view, part in zip(views, parts, strict=True):
        view[:] = part
    return views


def over(
    stored: StoredTable,
    options: tuple[str, ...] = OPTIONS,
    parts: list[np.ndarray] | None = None,
) -> CompiledGather:
    parts = parts or [part.bytes for part in stored.parts]
    return CompiledGather(parts, stored.meanings, CONSTANTS, EOS, compile_library(options))


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """To the last bit, NaN included."""
    return torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def opened(path: Path, dtype: str = "bfloat16") -> NgramGather:
    spec = NgramEmbedding(
        name="ple",
        table="t.weight",
        multipliers=CONSTANTS.multipliers,
        sizes=CONSTANTS.sizes,
        offsets=CONSTANTS.offsets,
        eos_token_id=EOS,
    )
    width = 4 * StoredTable(path, "t.weight", torch.bfloat16).width
    return NgramGather(
        spec, TensorSpec(name="ple", dtype=dtype, shape=(-1, -1, width), kind="host"), path
    )


def call(seed: int = 0, batch: int = 40, columns: int = 3) -> tuple[np.ndarray, ...]:
    numbers = np.random.default_rng(seed)
    tokens = numbers.integers(0, 20, (batch, columns))
    context = numbers.integers(0, 20, (batch, 2))
    return tokens, context, numbers.integers(0, columns + 1, batch)


@needs_compiler
@pytest.mark.parametrize("options", BOTH)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_rows_are_those_of_numpy(
    tmp_path_factory: pytest.TempPathFactory, options: tuple[str, ...], data: st.DataObject
) -> None:
    kind = data.draw(st.sampled_from(["nvfp4", "fp8", "bf16", "fp32"]))
    rows, blocks = data.draw(st.integers(1, 300)), data.draw(st.integers(1, 70))
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float16]))
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}.get(kind, dtype)
    scale = data.draw(st.sampled_from([0.0, 1e-38, 0.013, 7e4]))
    path = tmp_path_factory.mktemp("t") / "weights"
    stored = StoredTable(table(path, kind, rows, blocks, rows, scale), "t.weight", dtype)
    # The same row several times, and rows of padding.
    count = data.draw(st.integers(0, 400))
    wanted = np.random.default_rng(count).integers(-1, rows, count)
    expected = torch.zeros(count, stored.width, dtype=dtype)
    values = torch.empty(int((wanted >= 0).sum()), stored.width, dtype=dtype)
    stored.gather(wanted[wanted >= 0], values)
    # As bytes: torch fills in a single number as a number, so that one NaN becomes another.
    expected.view(torch.uint8)[torch.from_numpy(wanted >= 0)] = values.view(torch.uint8)
    parts = [part.bytes for part in stored.parts]
    gap = data.draw(st.sampled_from([None, 0, 1, 6]))
    parts = parts if gap is None else side_by_side(parts, gap)
    found = torch.full_like(expected, 3)
    assert over(stored, options, parts).gather(wanted, found) == count
    assert same(found, expected)


@needs_compiler
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("options", BOTH)
def test_every_code_with_every_scale(
    tmp_path: Path, options: tuple[str, ...], together: bool
) -> None:
    code = torch.arange(256, dtype=torch.uint8)
    pairs = code.repeat(256, 8, 1).transpose(1, 2).reshape(-1, 256 * 8)
    scales = code[:, None].repeat(1, 256)
    save_file(
        {
            "t.weight": pairs.contiguous(),
            "t.weights_scaling_factor": scales.view(torch.float8_e4m3fn),
            "t.weights_scaling_factor_2": torch.tensor([0.37]),
        },
        tmp_path / "nvfp4",
    )
    fp8 = {"t.weight": code[None].view(torch.float8_e4m3fn)}
    save_file({**fp8, "t.weights_scaling_factor": torch.tensor([0.37])}, tmp_path / "fp8")
    for name in ("nvfp4", "fp8"):
        stored = StoredTable(tmp_path / name, "t.weight", torch.bfloat16)
        expected = torch.empty(stored.rows, stored.width, dtype=torch.bfloat16)
        found = torch.empty_like(expected)
        stored.gather(np.arange(stored.rows), expected)
        parts = [part.bytes.copy() for part in stored.parts]
        bent = side_by_side(parts) if together else parts
        over(stored, options, bent).gather(np.arange(stored.rows), found)
        assert same(found, expected)
        assert expected.isnan().any()
        # One other code or scale is something else.
        row = min(8, stored.rows - 1)
        for part in bent:
            part[row, -1] ^= 9
            over(stored, options, bent).gather(np.arange(stored.rows), found)
            assert not same(found, expected)
            part[row, -1] ^= 9


@needs_compiler
@pytest.mark.parametrize("options", BOTH)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_row_numbers_are_those_of_the_definition(
    tmp_path_factory: pytest.TempPathFactory, options: tuple[str, ...], data: st.DataObject
) -> None:
    """Any ids, also such that products overflow and histories that end; 2 to 4 tokens."""
    before = data.draw(st.integers(1, 3))
    heads = before * data.draw(st.integers(1, 4))
    ids = st.integers(0, 12) | st.integers(-(2**63), 2**63 - 1)
    batch, columns = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6))

    def array(shape: tuple[int, ...], values: st.SearchStrategy[int]) -> np.ndarray:
        count = int(np.prod(shape))
        drawn = data.draw(st.lists(values, min_size=count, max_size=count))
        return np.array(drawn, np.int64).reshape(shape)

    sizes = array((heads,), st.integers(1, 5) | st.integers(1, 2**40))
    multipliers = array((before + 1,), st.integers(1, 2**62))
    offsets = np.cumsum(sizes) - sizes
    constants = NgramConstants(tuple(multipliers), tuple(sizes), tuple(offsets), int(sizes.sum()))
    path = table(tmp_path_factory.mktemp("t") / "weights", "fp8", 2, 4)
    parts = [part.bytes for part in StoredTable(path, "t.weight", torch.bfloat16).parts]
    values = torch.zeros(256, dtype=torch.bfloat16)
    compiled = CompiledGather(parts, values, constants, EOS, compile_library(options))
    tokens, context = array((batch, columns), ids), array((batch, before), ids)
    lengths = array((batch,), st.integers(0, columns))
    expected = row_ids(tokens, constants, EOS, context)
    expected[np.arange(columns) >= lengths[:, None]] = -1
    found = compiled.hash(tokens, context, lengths)
    assert found.tolist() == expected.ravel().tolist()
    # Ids in the other order and of other types.
    turned = np.asfortranarray(tokens), context, lengths.astype(np.int32)
    assert compiled.hash(*turned).tolist() == found.tolist()


@needs_compiler
def test_numbers_that_are_no_rows_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    stored = StoredTable(table(tmp_path / "t", "fp8", 40, 8), "t.weight", torch.bfloat16)
    compiled = over(stored)
    for wrong in (40, -2, 2**62, -(2**63)):
        out = torch.full((300, 8), 3, dtype=torch.bfloat16)
        rows = np.arange(300) % 40
        rows[-1] = wrong
        with pytest.raises(UsageError, match=f"no such row(.|\n)*0 to 39(.|\n)*{wrong}"):
            compiled.gather(rows, out)
        assert (out == 3).all()
    # Heads that reach beyond the table are refused when it is opened.
    short = table(tmp_path / "short", "fp8", CONSTANTS.rows - 1, 8)
    with pytest.raises(InputError, match="too short"):
        opened(short)


@needs_compiler
def test_arrays_of_other_shapes_and_types_are_refused(tmp_path: Path) -> None:
    stored = StoredTable(table(tmp_path / "t", "nvfp4", 40, 2), "t.weight", torch.bfloat16)
    compiled = over(stored)
    rows, out = np.arange(4), torch.zeros(4, 32, dtype=torch.bfloat16)
    for wrong_rows, wrong_out in (
        (rows.astype(np.int32), out),
        (np.arange(8)[::2], out),
        (rows.reshape(2, 2), out),
        (rows, out[:3]),
        (rows, out.float()),
        (rows, torch.zeros(4, 64, dtype=torch.bfloat16)[:, ::2]),
    ):
        with pytest.raises(ValueError, match=r"compiled code takes|do not fit"):
            compiled.gather(wrong_rows, wrong_out)
    tokens, context, lengths = call()
    for wrong in ((tokens, context[:, :1], lengths), (tokens, context, lengths[1:])):
        with pytest.raises(ValueError, match="sequences"):
            compiled.hash(*wrong)
    codes, scales = (part.bytes for part in stored.parts)
    meanings, library = stored.meanings, compile_library()
    assert meanings is not None
    empty = NgramConstants((1, 1), (0,), (0,), 40)
    for parts, values, constants in (
        ([codes[:, :15], scales], meanings, CONSTANTS),
        ([codes, scales[:39]], meanings, CONSTANTS),
        ([codes, scales[::-1]], meanings, CONSTANTS),
        ([codes, np.broadcast_to(scales[0], scales.shape)], meanings, CONSTANTS),
        ([np.asfortranarray(codes), scales], meanings, CONSTANTS),
        ([codes[:, ::2]], meanings[0].repeat(16), CONSTANTS),
        ([codes, scales], None, CONSTANTS),
        ([codes, scales], meanings[:, :8], CONSTANTS),
        ([codes, scales], meanings.float(), CONSTANTS),
        ([codes], meanings, CONSTANTS),
        ([codes, scales], meanings, empty),
    ):
        with pytest.raises(ValueError, match=r"compiled code takes|without rows"):
            CompiledGather(parts, values, constants, EOS, library)


@needs_compiler
@pytest.mark.parametrize("kind", ["nvfp4", "fp8", "bf16"])
def test_a_preloaded_table_is_gathered_by_compiled_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    path = table(tmp_path / "t", kind, CONSTANTS.rows, 6)
    by_numpy, gather = opened(path), opened(path)
    assert "; rows are gathered by compiled code" in gather.preload()
    expected = by_numpy(*call())
    monkeypatch.setattr(StoredTable, "gather", lambda *_: pytest.fail("numpy gathered"))
    assert same(gather(*call()), expected)
    assert not same(gather(*call(1)), expected)


@pytest.mark.parametrize(("kind", "dtype"), [("fp16", "bfloat16"), ("fp8", "float32")])
def test_what_compiled_code_does_not_do_stays_with_numpy(
    tmp_path: Path, kind: str, dtype: str
) -> None:
    path = table(tmp_path / "t", kind, CONSTANTS.rows, 6)
    by_numpy, gather = opened(path, dtype), opened(path, dtype)
    assert gather.preload().endswith("in huge pages")
    assert same(gather(*call()), by_numpy(*call()))


@needs_compiler
def test_evicted_rows_are_requested_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = table(tmp_path / "t", "fp8", CONSTANTS.rows, 6)
    by_numpy, gather = opened(path), opened(path)
    gather.preload()
    requested: list[np.ndarray] = []
    expected = by_numpy(*call())
    monkeypatch.setattr(StoredTable, "request", lambda _, rows: requested.append(rows))
    monkeypatch.setattr("runtime.host_inputs.ngram._WAITED_NS", 10**12)
    assert same(gather(*call()), expected)
    assert requested == []
    monkeypatch.setattr("runtime.host_inputs.ngram._WAITED_NS", -1)
    assert same(gather(*call()), expected)
    tokens, context, lengths = call()
    wanted = row_ids(tokens, CONSTANTS, EOS, context)
    wanted[np.arange(3) >= lengths[:, None]] = -1
    left = wanted.ravel()[128:]
    assert [rows.tolist() for rows in requested] == [left[left >= 0].tolist()]


@needs_compiler
@pytest.mark.parametrize(
    ("kind", "right", "wrong"),
    [
        ("nvfp4", "four(code, 4, values)", "four(code >> 4 | code << 12, 4, values)"),
        ("nvfp4", "BLOCK * scales[block]", "BLOCK * scales[0]"),
        ("fp8", "four(code, 8, values)", "four(code & 0x7fffffff, 8, values)"),
        ("fp8", "out[at] = values[codes[at]]", "out[at] = 0"),
        ("bf16", "t->codes + row * t->code_stride", "t->codes + (row ^ 1) * t->code_stride"),
        ("bf16", "ended |= older == t->eos", "ended = older == t->eos"),
        ("bf16", "ended ? t->eos : older", "older"),
        ("bf16", "rest + t->offsets[of]", "rest"),
        ("bf16", "at >= lengths[b]", "at > lengths[b]"),
    ],
)
def test_code_that_gives_other_values_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, right: str, wrong: str
) -> None:
    """As a compiler's mistake would. Without wide instructions, whose lines these are not."""
    text = SOURCE.read_text()
    assert text.count(right) == 1
    (tmp_path / "gather.c").write_text(text.replace(right, wrong).replace("#define WIDE", ""))
    monkeypatch.setattr(module, "SOURCE", tmp_path / "gather.c")
    path = table(tmp_path / "t", kind, CONSTANTS.rows, 7)
    by_numpy, gather = opened(path), opened(path)
    assert "by numpy, which takes up to twice as long: compiled code gives other values" in (
        gather.preload()
    )
    assert same(gather(*call()), by_numpy(*call()))


def _program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (None, "no C compiler was found; install a C compiler, on Debian: apt-get install gcc"),
        ("echo x.c:1: warning: w >&2; echo 'x.c:2: error: bad' >&2; exit 1", "x.c:2: error: bad"),
        ("exit 3", "cannot compile it; exit code 3"),
        ("exec sleep 20", "took more than 0.2 s"),
        # The last argument but one is the library.
        ('eval "echo junk > \\${$(($# - 1))}"', "cannot be loaded; "),
        ("exit 0", "cannot be loaded; "),
    ],
)
def test_without_a_working_compiler_numpy_gathers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str | None, said: str
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "tmp").mkdir()
    if program:
        _program(tmp_path / "bin/cc", program)
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    else:
        monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(module, "_LONGEST_S", 0.2)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    path = table(tmp_path / "t", "nvfp4", CONSTANTS.rows, 2)
    by_numpy, gather = opened(path), opened(path)
    line = gather.preload()
    assert "rows are gathered by numpy" in line
    assert said in line
    assert "\n" not in line
    assert same(gather(*call()), by_numpy(*call()))
    with pytest.raises(CapabilityError):
        compile_library()
    assert list((tmp_path / "tmp").iterdir()) == []


@needs_compiler
def test_nothing_is_left_of_compiling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    library = compile_library()
    assert compile_library() is library
    assert list(tmp_path.iterdir()) == []
