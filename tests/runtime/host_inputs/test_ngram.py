"""N-gram rows are those of the whole sequence, however it is cut, padded and batched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from plugins.ngram import layer_constants, row_ids
from plugins.support.errors import InputError
from runtime.contract import NgramEmbedding, TensorSpec
from runtime.host_inputs.ngram import NgramGather
from runtime.host_inputs.table import MappedTable, StoredTable
from runtime.rows import Row

EOS = 2
# Sizes, offsets and rows of a small model whose ids were computed with the reference model.
GOLDEN = layer_constants(
    vocab_size=512,
    ngram_size=3,
    heads_per_ngram=2,
    ngram_vocab_size_base=1000,
    divisor=8,
    seed=1234,
    layer_number=0,
)
GOLDEN_ROWS = {
    5: [915, 1404, 2417, 3340],
    6: [364, 1785, 2855, 3180],
    2: [991, 1873, 2149, 3180],
    7: [733, 1764, 2550, 3834],
    8: [594, 1786, 2709, 3320],
}


def _gather(path: Path, dtype: str = "float32", width: int = 4) -> NgramGather:
    spec = NgramEmbedding(
        name="ple_embeddings.1",
        table="table",
        multipliers=GOLDEN.multipliers,
        sizes=GOLDEN.sizes,
        offsets=GOLDEN.offsets,
        eos_token_id=EOS,
    )
    tensor = TensorSpec(name=spec.name, dtype=dtype, shape=(-1, -1, 4 * width), kind="host")
    return NgramGather(spec, tensor, path)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Row r of the table holds r, r + 0.25, r + 0.5, r + 0.75."""
    path = tmp_path_factory.mktemp("table") / "rank0.safetensors"
    rows = torch.arange(GOLDEN.rows, dtype=torch.float32).unsqueeze(-1)
    table = rows + torch.arange(4) / 4
    save_file({"before": torch.ones(3, dtype=torch.uint8), "table": table}, path)
    return path


def _whole(gather: NgramGather, tokens: list[int]) -> torch.Tensor:
    start = np.full((1, 2), EOS)
    return gather(np.array([tokens]), start, np.array([len(tokens)]))[0]


def test_rows_are_the_golden_ones(weights: Path) -> None:
    tokens = list(GOLDEN_ROWS)
    result = _whole(_gather(weights), tokens).view(len(tokens), 4, 4)
    assert result[:, :, 0].tolist() == list(GOLDEN_ROWS.values())
    assert result[0, 0].tolist() == [915, 915.25, 915.5, 915.75]


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 9), min_size=1, max_size=30),
    cuts=st.lists(st.integers(1, 5), min_size=30, max_size=30),
)
def test_chunks_with_their_context_equal_the_whole(
    weights: Path, tokens: list[int], cuts: list[int]
) -> None:
    gather = _gather(weights)
    whole = _whole(gather, tokens)
    parts, start = [], 0
    for length in cuts:
        chunk = tokens[start : start + length]
        if not chunk:
            break
        before = [EOS, EOS, *tokens[:start]][-2:]
        padded = np.array([chunk + [0] * (8 - len(chunk))])
        result = gather(padded, np.array([before]), np.array([len(chunk)]))
        assert not result[0, len(chunk) :].any()
        parts.append(result[0, : len(chunk)])
        start += length
    assert torch.equal(torch.cat(parts), whole)


def test_sequences_of_one_call_do_not_see_each_other(weights: Path) -> None:
    gather = _gather(weights)
    sequences = [[5, 6, 7], [8, 8], [6, 6, 6, 6]]
    batch = np.zeros((4, 4), dtype=np.int64)
    for row, sequence in enumerate(sequences):
        batch[row, : len(sequence)] = sequence
    result = gather(batch, np.full((4, 2), EOS), np.array([3, 2, 4, 0]))
    for row, sequence in enumerate(sequences):
        assert torch.equal(result[row, : len(sequence)], _whole(gather, sequence))
    assert not result[3].any()


def test_lost_context_changes_the_rows(weights: Path) -> None:
    gather = _gather(weights)
    right = gather(np.array([[7]]), np.array([[5, 6]]), np.array([1]))
    wrong = gather(np.array([[7]]), np.array([[EOS, EOS]]), np.array([1]))
    assert not torch.equal(right, wrong)


def test_equal_rows_are_read_once(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gather = _gather(weights)
    read: list[int] = []
    original = MappedTable.gather

    def counting(table: MappedTable, rows: np.ndarray, *rest: Any, **options: Any) -> bool:
        read.append(len(rows))
        return original(table, rows, *rest, **options)

    monkeypatch.setattr(MappedTable, "gather", counting)
    gather(np.full((2, 50), 7), np.full((2, 2), 7), np.array([50, 50]))
    assert read == [4]


def test_table_dtype_is_converted_to_the_engines(tmp_path: Path) -> None:
    table = torch.randn(GOLDEN.rows, 4).to(torch.float16)
    save_file({"table": table}, tmp_path / "weights")
    result = _whole(_gather(tmp_path / "weights", "bfloat16"), [5]).view(4, 4)
    assert result.dtype == torch.bfloat16
    assert torch.equal(result, table[GOLDEN_ROWS[5]].to(torch.bfloat16))


def test_rows_beyond_two_gigabytes_are_found(tmp_path: Path) -> None:
    """Offsets are 64-bit: a sparse file of more than 4 GiB costs no disk and little memory."""
    path = tmp_path / "weights"
    rows, width = 2_200_000, 512
    header = (
        f'{{"table":{{"dtype":"F32","shape":[{rows},{width}],'
        f'"data_offsets":[0,{rows * width * 4}]}}}}'
    ).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + rows * width * 4)
        file.seek(-width * 4, 2)
        file.write(np.arange(width, dtype=np.float32).tobytes())
    before = _anonymous_bytes()
    table = MappedTable(path, "table")
    data = np.empty((2, table.row_bytes), np.uint8)
    table.gather(np.array([0, rows - 1]), data)
    result = data.view(np.float32)
    assert not result[0].any()
    assert result[1].tolist() == list(range(width))
    # The table stays in its file.
    assert _anonymous_bytes() - before < 64 * 2**20


def _anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024


def test_next_chunk_of_a_prompt_is_read_meanwhile(
    weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gather = _gather(weights)
    read: list[np.ndarray] = []
    monkeypatch.setattr(StoredTable, "prefetch", lambda _, rows: read.append(rows))
    prompt = list(np.random.default_rng(3).integers(3, 500, 200))
    tokens = np.array([prompt[64:128], prompt[:64]])
    context = np.array([prompt[62:64], [EOS, EOS]])
    rows = [Row(prompt, 64, 64), Row(prompt[:70], 0, 64)]
    gather(tokens, context, np.array([64, 64]), rows)
    assert gather._reading is not None
    gather._reading.result()
    of_prompt = row_ids(np.array(prompt), GOLDEN, EOS)
    expected = np.unique(np.concatenate([of_prompt[128:192].ravel(), of_prompt[64:70].ravel()]))
    assert [found.tolist() for found in read] == [expected.tolist()]
    # The end of a prompt and steps of one token have nothing to read in advance.
    gather(tokens[:1], context[:1], np.array([64]), [Row(prompt[:128], 64, 64)])
    gather(np.array([[7]]), np.array([[5, 6]]), np.array([1]), [Row([5, 6, 7, 8], 2, 1)])
    assert len(read) == 1


def test_prefetch_reads_every_row(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = StoredTable(weights, "table", torch.float32)
    read: list[int] = []
    original = MappedTable.gather

    def noting(part: MappedTable, rows: np.ndarray, *rest: Any, **options: Any) -> bool:
        read.extend(rows.tolist())
        return original(part, rows, *rest, **options)

    monkeypatch.setattr(MappedTable, "gather", noting)
    table.prefetch(np.arange(0, GOLDEN.rows, 3))
    assert read == list(range(0, GOLDEN.rows, 3))


def test_table_that_does_not_fit_the_engine_is_refused(weights: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not fit the engine"):
        _gather(weights, width=5)
    save_file({"table": torch.ones(GOLDEN.rows - 8, 4)}, tmp_path / "weights")
    with pytest.raises(InputError, match="too short"):
        _gather(tmp_path / "weights")
    save_file({"other": torch.ones(2, 2)}, tmp_path / "weights")
    with pytest.raises(InputError, match="n-gram table"):
        _gather(tmp_path / "weights")
