"""Golden tables of the n-gram hash, and its behaviour across chunks and at end tokens."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.ngram import NgramConstants, layer_constants, next_context, row_ids

EOS = 2


def released(layer_number: int = 0, seed: int = 1234) -> NgramConstants:
    return layer_constants(
        vocab_size=248320,
        ngram_size=3,
        heads_per_ngram=8,
        ngram_vocab_size_base=20_000_000,
        divisor=128,
        seed=seed,
        layer_number=layer_number,
    )


def tiny(layer_number: int = 0) -> NgramConstants:
    return layer_constants(
        vocab_size=512,
        ngram_size=3,
        heads_per_ngram=2,
        ngram_vocab_size_base=1000,
        divisor=8,
        seed=1234,
        layer_number=layer_number,
    )


def test_constants_of_the_released_model():
    constants = released()
    assert constants.multipliers == (23703573157769, 20109073645365, 8052911324071)
    assert constants.sizes[:3] == (20000003, 20000023, 20000033)
    assert constants.sizes[-2:] == (20000161, 20000171)
    assert constants.offsets[:3] == (0, 20000003, 40000026)
    assert constants.offsets[-1] == 300001275
    assert sum(constants.sizes) == 320_001_446
    assert constants.rows == 320_001_536


def test_seed_and_layer_change_the_constants():
    assert released(seed=0).multipliers == (4788054244585, 5075510189727, 24189832309785)
    second = released(layer_number=1)
    assert second.multipliers == (3352040966061, 19752442147475, 10742103100073)
    assert second.sizes[:3] == (20000213, 20000221, 20000243)


def test_constants_of_the_tiny_model():
    constants = tiny()
    assert constants.multipliers == (4295158889763781, 17440218147737327, 1270917961434445)
    assert constants.sizes == (1009, 1013, 1019, 1021)
    assert constants.offsets == (0, 1009, 2022, 3041)
    assert constants.rows == 4064
    second = tiny(layer_number=1)
    assert second.multipliers == (17237745666423273, 2619768721783435, 15090836525362811)
    assert second.sizes == (1031, 1033, 1039, 1049)
    assert second.rows == 4152


def test_rows_of_the_released_model():
    rows = row_ids([9707, 11, 1879], released(), eos=248044)
    # fmt: off
    expected = [
        [16410909, 39682429, 55103279, 60931720, 87006904, 116506179, 131512017, 152932897,
         169641436, 182022480, 209277433, 237891023, 256841529, 277007269, 290665954, 300984276],
        [18158303, 36390029, 45652312, 70783524, 98191154, 114024957, 127804916, 159566246,
         175132467, 192583600, 217919476, 237199054, 259336807, 261799367, 289359313, 307699687],
        [6380558, 26411572, 56460672, 78566983, 94693008, 106742196, 124822692, 148942556,
         164226950, 190352573, 210933682, 238908951, 242182004, 265475238, 299910982, 312121804],
    ]
    # fmt: on
    assert rows.tolist() == expected


def test_rows_across_an_end_token():
    expected = [
        [915, 1404, 2417, 3340],
        [364, 1785, 2855, 3180],
        [991, 1873, 2149, 3180],
        [733, 1764, 2550, 3834],
        [594, 1786, 2709, 3320],
    ]
    assert row_ids([5, 6, EOS, 7, 8], tiny(), EOS).tolist() == expected
    # Without the barrier the last two rows differ: the golden table does test it.
    assert row_ids([5, 6, EOS, 7, 8], tiny(), eos=511)[3:].tolist() != expected[3:]


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 511), min_size=12, max_size=12), min_size=1, max_size=3),
    st.lists(st.integers(0, 12), max_size=4),
)
def test_chunks_give_the_rows_of_one_pass(batch, cuts):
    tokens = np.array(batch)
    tokens[tokens < 64] = EOS  # plenty of end tokens
    whole = row_ids(tokens, tiny(), EOS)
    context = np.full((len(batch), 2), EOS)
    pieces = []
    for start, stop in zip([0, *sorted(cuts)], [*sorted(cuts), 12], strict=True):
        chunk = tokens[:, start:stop]
        pieces.append(row_ids(chunk, tiny(), EOS, context))
        context = next_context(chunk, 3, context)
    assert np.array_equal(np.concatenate(pieces, axis=1), whole)
    offsets, sizes = np.array(tiny().offsets), np.array(tiny().sizes)
    assert np.all((whole >= offsets) & (whole < offsets + sizes))


@pytest.mark.parametrize("base", [1, 2, 3, 9, 20_000_000])
def test_head_sizes_are_primes(base):
    sizes = layer_constants(
        vocab_size=512,
        ngram_size=2,
        heads_per_ngram=4,
        ngram_vocab_size_base=base,
        divisor=1,
        seed=1,
        layer_number=0,
    ).sizes
    assert len(set(sizes)) == 4
    for size in sizes:
        assert size >= base
        assert all(size % divisor for divisor in range(2, int(size**0.5) + 1))
