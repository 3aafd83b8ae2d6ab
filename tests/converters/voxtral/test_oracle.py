"""Every row of both tiny Voxtrals against transformers, and what typical mistakes would change.

The changes were recorded with transformers itself (largest change of a logit, and rows whose most
likely token is another one): that ours are the same shows that each mistake is the known one, and
how far outside the tolerance it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from converters.definition import EngineLimits
from converters.voxtral.config import VoxtralCheckpointConfig
from converters.voxtral.oracle import Oracle
from plugins.trt.network import Network
from tests.converters.voxtral.conftest import AUDIO, LAYOUTS
from tests.converters.voxtral.driver import Driver
from tests.fixtures.tekken import write_tekken
from triton_repo.frontend.audio.decode import decode_audio
from triton_repo.frontend.audio.mel import log_mel_chunks
from triton_repo.frontend.audio.prompts import AudioPrompt, AudioPrompts

LONG = EngineLimits(
    max_batch_size=1, max_seq_len=1216, chunk_size=448, max_logits_tokens=448, hidden_states=True
)
# Both compute in float32; sums differ in their order.
TOLERANCE = 1e-4
each_layout = pytest.mark.parametrize("layout", LAYOUTS)


def oracle(source: Path, mel: Tensor) -> Oracle:
    """transformers, listening to this spectrogram."""
    found = Oracle(source, "float32")
    found.features, found.listens = mel, True
    return found


def listened(driver: Driver, mel: Tensor, ids: Sequence[int]) -> dict[str, Tensor]:
    driver.reset()
    heard = driver.hear(mel)
    rows = heard["audio_rows"].flatten(0, 1)
    read = driver.read(ids, rows)["logits"]
    return {"logits": read, "audio_rows": rows, "audio.encoded": heard["audio.encoded"]}


def largest(found: dict[str, Tensor], reference: Oracle, ids: Sequence[int]) -> float:
    """The largest difference of any value of any row."""
    audio = reference.run_audio()
    differences = [
        (found["logits"] - reference.run(ids)["logits"]).abs().max(),
        (found["audio_rows"] - audio["audio_rows"]).abs().max(),
        # The hook of the encoder keeps the first chunk.
        (found["audio.encoded"][0] - audio["audio.encoded"]).abs().max(),
    ]
    return max(map(float, differences))


@each_layout
def test_every_row_of_a_chunk(
    sources: dict[str, Path],
    drivers: dict[str, Driver],
    chat: AudioPrompt,
    mel: Tensor,
    layout: str,
) -> None:
    found = listened(drivers[layout], mel, chat.ids)
    assert found["logits"].shape == (385, 300)
    assert largest(found, oracle(sources[layout], mel), chat.ids) <= TOLERANCE


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[int], Tensor]:
    """45 seconds, text, another audio: 3 chunks in one prompt."""
    speech = decode_audio((AUDIO / "austen-0870.wav").read_bytes())
    other = decode_audio((AUDIO / "austen-0930.wav").read_bytes())
    parts = [
        {"type": "text", "text": "a"},
        {"type": "audio", "index": 1},
        {"type": "text", "text": "b"},
        {"type": "audio", "index": 0},
    ]
    # The second chunk is much quieter than the first, whose maximum holds for both.
    first = np.concatenate([speech, 0.02 * speech.repeat(5)])[: 45 * 16000]
    prompts = AudioPrompts(write_tekken(tmp_path_factory.mktemp("long")))
    prompt = prompts.chat([{"role": "user", "content": parts}], [other, first])
    features = [log_mel_chunks(audio, 480000) for audio in prompt.audios]
    return prompt.ids, torch.from_numpy(np.concatenate(features))


@each_layout
def test_every_row_of_several_chunks(
    sources: dict[str, Path],
    drivers: dict[str, Driver],
    long: tuple[list[int], Tensor],
    layout: str,
) -> None:
    ids, mel = long
    assert mel.shape[0] == 3 and ids.count(24) == 3 * 375
    driver = Driver(drivers[layout].config, drivers[layout].weights, LONG)
    reference = oracle(sources[layout], mel)
    found = listened(driver, mel, ids)
    assert largest(found, reference, ids) <= TOLERANCE
    # The negative control: the chunks in another order.
    turned = listened(driver, mel.roll(1, 0), ids)
    assert largest(turned, reference, ids) > 1.0


@each_layout
def test_every_row_of_a_stream(
    realtime_sources: dict[str, Path],
    realtime_drivers: dict[str, Driver],
    stream: AudioPrompt,
    stream_mel: Tensor,
    layout: str,
) -> None:
    ids = [*stream.ids, *[(7 * i) % 290 + 3 for i in range(87 - len(stream.ids))]]
    reference = oracle(realtime_sources[layout], stream_mel)
    found = listened(realtime_drivers[layout], stream_mel, ids)
    assert found["logits"].shape == (87, 300)
    assert largest(found, reference, ids) <= TOLERANCE
    early = listened(realtime_drivers[layout], stream_mel.roll(8, 2), ids)
    assert largest(early, reference, ids) > 1.0


# -- mistakes -------------------------------------------------------------------------------------

Weights = dict[str, Tensor]
TABLE = "audio.position_embedding.weight"
JOIN = "projector.linear_1.weight"


def _no_positions(weights: Weights) -> Weights:
    return {TABLE: torch.zeros_like(weights[TABLE])}


def _interleaved_table(weights: Weights) -> Weights:
    table = weights[TABLE]
    return {TABLE: torch.stack([table[:, :16], table[:, 16:]], -1).flatten(1)}


def _wrong_divisor(weights: Weights) -> Weights:
    rates = torch.exp(-torch.arange(16) * math.log(10000.0) / 16)
    angles = torch.arange(1500)[:, None] * rates[None]
    return {TABLE: torch.cat([angles.sin(), angles.cos()], 1)}


def _every_fourth_frame(weights: Weights) -> Weights:
    frames = weights[JOIN].unflatten(1, (4, 32))
    only = torch.zeros_like(frames)
    only[:, 0] = frames.sum(1)
    return {JOIN: only.flatten(1)}


def _averaged_frames(weights: Weights) -> Weights:
    mean = weights[JOIN].unflatten(1, (4, 32)).sum(1) / 4
    return {JOIN: mean.repeat(1, 4)}


def _feature_major(weights: Weights) -> Weights:
    columns = torch.arange(128).reshape(32, 4).T.reshape(-1)
    return {JOIN: weights[JOIN][:, columns].contiguous()}


def _half_split_of_interleaved(weights: Weights) -> Weights:
    changed = {}
    for layer in range(2):
        name = f"transformer.layers.{layer}.attention.qkv.weight"
        rotated = weights[name][:96].reshape(6, 2, 8, 48).transpose(1, 2).reshape(96, 48)
        changed[name] = torch.cat([rotated, weights[name][96:]])
    return changed


def _tied(weights: Weights) -> Weights:
    return {"lm_head.weight": weights["transformer.vocab_embedding.weight"]}


def outside(found: Tensor, right: Tensor, change: float, rows: int) -> None:
    """The recorded change, and never within the tolerance."""
    assert float((found - right).abs().max()) == pytest.approx(change, rel=0.02, abs=0.0001)
    assert int((found.argmax(-1) != right.argmax(-1)).sum()) == rows
    assert float((found - right).abs().max()) > TOLERANCE


@pytest.fixture(scope="module")
def right(sources: dict[str, Path], chat: AudioPrompt, mel: Tensor) -> Tensor:
    return oracle(sources["huggingface"], mel).run(chat.ids)["logits"]


@pytest.mark.parametrize(
    ("mistake", "change", "rows"),
    [
        (_no_positions, 17.0, 382),
        (_interleaved_table, 17.0, 339),
        (_wrong_divisor, 10.5, 262),
        (_every_fourth_frame, 11.8, 159),
        (_averaged_frames, 6.4, 106),
        (_feature_major, 23.4, 382),
        (_half_split_of_interleaved, 6.9, 110),
        (_tied, 19.3, 385),
    ],
)
def test_mistakes_of_the_conversion(
    drivers: dict[str, Driver],
    chat: AudioPrompt,
    mel: Tensor,
    right: Tensor,
    mistake: Callable[[Weights], Weights],
    change: float,
    rows: int,
) -> None:
    driver = drivers["huggingface"]
    weights = dict(driver.weights)
    try:
        driver.bind(weights | mistake(weights))
        outside(listened(driver, mel, chat.ids)["logits"], right, change, rows)
    finally:
        driver.bind(weights)


Attention = Callable[..., Any]


def _heard_before(net: Network, query: Any) -> Any:
    frames = net.iota(net.dim(query, 2))
    before = net.less_equal(net.unsqueeze(frames, [0]), net.unsqueeze(frames, [1]))
    return net.unsqueeze(before, [0, 1])


def _sound_only(net: Network, query: Any) -> Any:
    # 47840 samples are 299 mel frames, two of which make one of the encoder.
    return net.unsqueeze(net.less(net.iota(net.dim(query, 2)), 150), [0, 1, 2])


def _masked(mask_of: Callable[[Network, Any], Any]) -> Attention:
    """Attention whose encoder has a mask."""
    fused = Network.attention

    def attention(net: Network, q: Any, k: Any, v: Any, mask: Any = None, **rest: Any) -> Any:
        if net.scope_name.startswith("audio"):
            mask = mask_of(net, q)
        return fused(net, q, k, v, mask, **rest)

    return attention


def _added(net: Network, condition: Any, x: Any, y: Any) -> Any:
    """Audio rows added to the placeholders' embeddings."""
    if getattr(x, "name", None) == "audio_embeddings":
        return net.add(x, y)
    return SELECT(net, condition, x, y)


SELECT = Network.select


@pytest.mark.parametrize(
    ("method", "replacement", "change", "rows"),
    [
        ("gelu_erf", Network.gelu_tanh, 0.0147, 0),
        ("attention", _masked(_heard_before), 16.9, 363),
        ("attention", _masked(_sound_only), 18.6, 382),
        ("select", _added, 13.8, 377),
    ],
    ids=["tanh GELU", "causal encoder", "padding masked", "rows added"],
)
def test_mistakes_of_the_network(
    drivers: dict[str, Driver],
    chat: AudioPrompt,
    mel: Tensor,
    right: Tensor,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    replacement: Any,
    change: float,
    rows: int,
) -> None:
    own = drivers["huggingface"]
    monkeypatch.setattr(Network, method, replacement)
    driver = Driver(own.config, own.weights, phases=("audio", "context"))
    outside(listened(driver, mel, chat.ids)["logits"], right, change, rows)


@pytest.mark.parametrize(
    ("key", "value", "change", "rows"),
    [
        ("norm_epsilon", 1e-6, 0.0003, 0),
        ("rotary_base", 1e4, 7.2, 97),
        ("rotary_base", 1e6, 5.4, 77),
        ("position_embedding_type", "rope_gptj", 6.2, None),
    ],
)
def test_mistakes_of_the_configuration(
    drivers: dict[str, Driver],
    chat: AudioPrompt,
    mel: Tensor,
    right: Tensor,
    key: str,
    value: Any,
    change: float,
    rows: int | None,
) -> None:
    own = drivers["huggingface"]
    config: VoxtralCheckpointConfig = own.config.model_copy(update={key: value})
    driver = Driver(config, own.weights, phases=("audio", "context"))
    found = listened(driver, mel, chat.ids)["logits"]
    if rows is None:
        rows = int((found.argmax(-1) != right.argmax(-1)).sum())
        assert 80 <= rows <= 110
    outside(found, right, change, rows)
