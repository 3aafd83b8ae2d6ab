"""The causal convolution with state against torch, in pieces and with padding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from converters.layers.conv import causal_conv
from tests.converters.layers.evaluate import evaluate

CHANNELS, TAPS = 5, 4


def _run(x: Tensor, state: Tensor, kernel: Tensor, new: list[int], dilation: int):
    def build(net, x, state, kernel, new):
        out, following = causal_conv(net, x, state, kernel, new, dilation=dilation)
        return {"out": out, "following": following}

    inputs = {"x": x, "state": state, "kernel": kernel, "new": torch.tensor(new).int()}
    result = evaluate(build, inputs, dynamic={"x": (0, 1), "state": (0,), "new": (0,)})
    return result["out"], result["following"]


@pytest.mark.parametrize("dilation", [1, 3])
def test_pieces_and_padding_equal_one_pass(dilation: int) -> None:
    g = torch.Generator().manual_seed(dilation)
    tokens = torch.randn(2, 20, CHANNELS, generator=g)
    kernel = torch.randn(CHANNELS, 1, TAPS, generator=g)
    past = (TAPS - 1) * dilation
    padded = torch.nn.functional.pad(tokens.transpose(1, 2), (past, 0))
    expected = torch.nn.functional.conv1d(
        padded, kernel, groups=CHANNELS, dilation=dilation
    ).transpose(1, 2)

    state = torch.zeros(2, CHANNELS, past)
    # Slot 1 is always two tokens behind slot 0, and every call has padding of garbage.
    done = [0, 0]
    for lengths in ([4, 2], [0, 1], [13, 11], [3, 6]):
        x = torch.full((2, 15, CHANNELS), 1e9)
        for slot, count in enumerate(lengths):
            x[slot, :count] = tokens[slot, done[slot] : done[slot] + count]
        before = state
        out, state = _run(x, state, kernel, lengths, dilation)
        for slot, count in enumerate(lengths):
            span = slice(done[slot], done[slot] + count)
            torch.testing.assert_close(out[slot, :count], expected[slot, span])
            done[slot] += count
            if count == 0:
                assert torch.equal(state[slot], before[slot])
    assert done == [20, 20]


def test_reversed_taps_are_seen() -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(1, 6, CHANNELS, generator=g)
    kernel = torch.randn(CHANNELS, 1, TAPS, generator=g)
    state = torch.zeros(1, CHANNELS, TAPS - 1)
    right, _ = _run(x, state, kernel, [6], 1)
    wrong, _ = _run(x, state, kernel.flip(-1), [6], 1)
    assert (right - wrong).abs().max() > 0.1
