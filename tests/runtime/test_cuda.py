"""Streams, CUDA graphs and addresses of the TensorRT executor on a real CUDA device.

Runs where torch has one. TensorRT itself is a stand-in that queues torch kernels on the memory it
was bound to, so ordering between streams, capture and replay are real.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.contract import EngineConfig
from runtime.engine import Engine
from runtime.executors.stream import CudaStream
from runtime.executors.tensorrt import TensorRTExecutor
from runtime.host_inputs import open_host_inputs
from runtime.requests import GenerationRequest
from runtime.sampling import SamplingParams
from runtime.session import Session, prompt_logits
from tests.runtime.conftest import Answer, Embed
from tests.runtime.engines import VOCAB, WIDTH
from tests.runtime.fake_trt import Context, fake_backend
from tests.runtime.language import GARBAGE, POISON, logits_of
from tests.runtime.test_session import _prompt

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class _Memory:
    """Device memory as numba and torch exchange it."""

    def __init__(self, address: int, shape: tuple[int, ...], code: str) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": shape,
            "typestr": code,
            "version": 3,
        }


class CudaContext(Context):
    """Queues the language as torch kernels, without looking at a single value on the host."""

    def compute(
        self, handle: int, inputs: dict[str, tuple[int, ...]], outputs: dict[str, tuple[int, ...]]
    ) -> None:
        assert handle == torch.cuda.current_stream().cuda_stream
        t = {name: self._tensor(name, shape) for name, shape in (inputs | outputs).items()}
        ids, past, new = t["input_ids"], t["past_lengths"].long(), t["new_lengths"]
        cache, rolled = t["key_cache.0"], t["recurrent_state.1"][:, 0, 0].clone()
        slots, rows = torch.arange(ids.shape[0], device=ids.device), cache.shape[2]
        results = []
        for s in range(ids.shape[1]):
            valid, token = s < new, ids[:, s].float()
            place = torch.where(valid, past + s, rows - 1)
            written = torch.where(valid, token, GARBAGE)
            written = torch.where(valid & (token == POISON), torch.nan, written)
            cache[slots, :, place] = written[:, None, None]
            moved = (rolled * 31 + token + 1) % 97
            moved = torch.where(token == POISON, torch.nan, moved)
            rolled = torch.where(valid, moved, rolled)
            mask = torch.arange(rows, device=ids.device) < (past + s + 1)[:, None]
            attended = (cache[:, 0, :, 0] * mask).sum(-1)
            embedded = (t["ple_embeddings.1"][:, s, 2 * WIDTH].abs() * 1000).floor()
            results.append(self._scores(attended * 3 + rolled * 5 + embedded))
        following = t["recurrent_state.1.next"]
        following.copy_(t["recurrent_state.1"])
        following[:, 0, 0] = rolled
        stacked = torch.stack(results, dim=1)
        wanted = t["logits_positions"].long()[..., None].expand(-1, -1, VOCAB)
        t["logits"].copy_(stacked.gather(1, wanted))

    def _scores(self, total: torch.Tensor) -> torch.Tensor:
        winner = total.nan_to_num().long() % VOCAB
        winner = torch.where(winner == POISON, winner + 1, winner)
        ids = torch.arange(VOCAB, device=total.device)
        distance = ((ids - winner[:, None] + VOCAB // 2) % VOCAB - VOCAB // 2).abs()
        return torch.where(total.isnan()[:, None], torch.nan, -0.5 * distance)

    def _tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        code = {"float32": "<f4", "int32": "<i4"}[self.engine.tensors[name].dtype]
        memory = _Memory(self.addresses[name], shape, code)
        return torch.as_tensor(memory, device="cuda")


class Counting(CudaStream):
    """Counts graphs."""

    captures = 0

    def capture(self, work: Any) -> Any:
        self.captures += 1
        return super().capture(work)


def _open(config: EngineConfig, engine_dir: Path) -> tuple[Engine, Counting]:
    backend, _ = fake_backend(config, context_type=CudaContext)
    device = torch.device("cuda", 0)
    stream = Counting(device)
    executor = TensorRTExecutor(config, engine_dir, device, backend, stream)
    return Engine(config, executor, open_host_inputs(config, engine_dir)), stream


def test_sessions_get_the_right_answers(
    engine_dir: Path, config: EngineConfig, answer: Answer
) -> None:
    engine, stream = _open(config, engine_dir)
    prompts = [_prompt(length) for length in (5, 70, 1, 130, 20, 64, 33)]
    with Session(engine) as session:
        handles = [session.submit(GenerationRequest(prompt, 40)) for prompt in prompts]
        bad = session.submit(GenerationRequest([*_prompt(9), POISON], 5))
        for prompt, handle in zip(prompts, handles, strict=True):
            assert handle.result()[0] == answer(prompt, 40)
        assert bad.result()[1].finish_reason == "error"
        again = [session.submit(GenerationRequest(p, 20)) for p in prompts]
        assert [h.result()[0] for h in again] == [answer(p, 20) for p in prompts]
    assert stream.captures > 0
    engine.close()


def test_sampling_on_the_device_is_seeded(engine_dir: Path, config: EngineConfig) -> None:
    engine, _ = _open(config, engine_dir)
    sampling = SamplingParams(temperature=1.5, top_p=0.95, seed=5, repetition_penalty=1.1)
    request = GenerationRequest(_prompt(12), 25, sampling)
    with Session(engine) as session:
        alone = session.submit(request).result()[0]
        crowd = [session.submit(GenerationRequest(_prompt(n + 3), 15)) for n in range(2)]
        assert session.submit(request).result()[0] == alone
        assert all(handle.result()[1].finish_reason == "length" for handle in crowd)


def test_prompt_logits(engine_dir: Path, config: EngineConfig, embed: Embed) -> None:
    engine, _ = _open(config, engine_dir)
    right = torch.from_numpy(logits_of(_prompt(150), embed))
    assert torch.equal(prompt_logits(engine, _prompt(150)), right)
    assert torch.equal(prompt_logits(engine, _prompt(150), phase="generation"), right)
