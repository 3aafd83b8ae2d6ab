"""The TensorRT executor binds every tensor where it belongs, call after call.

A stand-in of the TensorRT module computes through the bound addresses, so that a wrong address,
shape or state set gives a wrong answer. A second test compares the names that are used with the
bindings that are installed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from plugins.support.errors import CapabilityError, InputError
from runtime.contract import EngineConfig
from runtime.engine import Engine
from runtime.executors.stream import graph_widths
from runtime.executors.tensorrt import TensorRTExecutor
from runtime.host_inputs import open_host_inputs
from runtime.requests import GenerationRequest
from runtime.session import Session, prompt_logits
from tests.runtime import fake_trt
from tests.runtime.conftest import Answer, Embed
from tests.runtime.fake_trt import FakeStream, fake_backend
from tests.runtime.language import logits_of
from tests.runtime.test_session import _prompt

CPU = torch.device("cpu")


def _open(config: EngineConfig, engine_dir: Path, **options: Any) -> tuple[Engine, Any, FakeStream]:
    backend, seen = fake_backend(config, **options)
    stream = FakeStream()
    executor = TensorRTExecutor(config, engine_dir, CPU, backend, stream)
    return Engine(config, executor, open_host_inputs(config, engine_dir)), seen, stream


def test_sessions_get_the_right_answers_through_bound_addresses(
    engine_dir: Path, config: EngineConfig, answer: Answer
) -> None:
    engine, _, stream = _open(config, engine_dir)
    prompts = [_prompt(length) for length in (5, 70, 1, 130, 20, 64, 33)]
    with Session(engine, threaded=False) as session:
        handles = [session.submit(GenerationRequest(prompt, 30)) for prompt in prompts]
        for prompt, handle in zip(prompts, handles, strict=True):
            assert handle.result()[0] == answer(prompt, 30)
    assert stream.captures > 0
    assert stream.replays > stream.captures
    engine.close()


def test_prompt_logits_grow_the_output_buffer(
    engine_dir: Path, config: EngineConfig, embed: Embed
) -> None:
    engine, _, _ = _open(config, engine_dir)
    prompt = _prompt(150)
    right = torch.from_numpy(logits_of(prompt, embed))
    assert torch.equal(prompt_logits(engine, prompt), right)
    assert torch.equal(prompt_logits(engine, prompt, 13), right)
    assert torch.equal(prompt_logits(engine, prompt, phase="generation"), right)


def test_generation_contexts_are_few_and_share_scratch(
    engine_dir: Path, config: EngineConfig
) -> None:
    engine, seen, _ = _open(config, engine_dir)
    with Session(engine, threaded=False) as session:
        for length in range(1, 9):
            session.submit(GenerationRequest(_prompt(length), 3 * length))
        while session.step():
            pass
    # One for prompts; for generation widths 1, 2 and 4, two state sets each.
    assert len(seen.contexts) <= 1 + 3 * 2
    assert len({context.scratch for context in seen.contexts}) == 1


def test_widths_cover_every_slot_count() -> None:
    assert [graph_widths(slots) for slots in (1, 2, 3, 4, 6, 8, 64)] == [
        [1],
        [1, 2],
        [1, 2, 3],
        [1, 2, 4],
        [1, 2, 4, 6],
        [1, 2, 4, 8],
        [1, 2, 4, 8, 16, 32, 64],
    ]


def test_failed_execution_carries_the_logs_words_and_spares_later_requests(
    engine_dir: Path, config: EngineConfig, answer: Answer
) -> None:
    engine, seen, _ = _open(config, engine_dir)
    with Session(engine, threaded=False) as session:
        handle = session.submit(GenerationRequest(_prompt(5), 5))
        session.step()
        seen.fail_next = True
        _, last = handle.result()
        assert last.finish_reason == "error"
        assert "illegal memory access" in str(last.error)
        again = session.submit(GenerationRequest(_prompt(5), 5))
        assert again.result()[0] == answer(_prompt(5), 5)


def test_call_outside_the_profile_is_an_error_not_a_wrong_answer(
    engine_dir: Path, config: EngineConfig
) -> None:
    engine, _, _ = _open(config, engine_dir)
    inputs = {
        "input_ids": torch.zeros(1, 128, dtype=torch.int32),
        "past_lengths": torch.zeros(1, dtype=torch.int32),
        "new_lengths": torch.ones(1, dtype=torch.int32),
        "logits_positions": torch.zeros(1, 1, dtype=torch.int32),
        "attention_span": torch.zeros(64, dtype=torch.int32),
        "ple_embeddings.1": torch.zeros(1, 128, 24),
    }
    with pytest.raises(CapabilityError, match="failed to run") as caught:
        engine.executor.step("context", 0, inputs)
    assert "outside the profile" in str(caught.value.found)


def test_refused_plan_is_told_with_the_logs_words(engine_dir: Path, config: EngineConfig) -> None:
    backend, seen = fake_backend(config)
    seen.refuse = True
    with pytest.raises(CapabilityError, match="refuses the engine") as caught:
        TensorRTExecutor(config, engine_dir, CPU, backend, FakeStream())
    assert caught.value.found == "the plan is of another version"


def _other_dtype(engine: fake_trt.Engine) -> None:
    spec = engine.inputs["key_cache.0"]
    engine.tensors["key_cache.0"] = spec.model_copy(update={"dtype": "int32"})


def _missing_input(engine: fake_trt.Engine) -> None:
    del engine.tensors["past_lengths"]
    engine.num_io_tensors -= 1


def _not_in_place(engine: fake_trt.Engine) -> None:
    engine.aliases.clear()


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (_other_dtype, "key_cache.0"),
        (_missing_input, "past_lengths"),
        (_not_in_place, "key_cache.0.updated"),
    ],
)
def test_engine_that_is_not_the_configured_one_is_refused(
    engine_dir: Path, config: EngineConfig, change: Any, where: str
) -> None:
    with pytest.raises(InputError) as caught:
        _open(config, engine_dir, change=change)
    assert str(caught.value.where).endswith(where)


def _by_plugins(config: EngineConfig, names: Sequence[str]) -> EngineConfig:
    """The same engines, with caches that plugin layers update."""
    values = config.model_dump()
    for entry in values["engines"].values():
        entry["plugin_caches"] = names
    return EngineConfig.model_validate(values)


def test_caches_that_plugin_layers_update_are_bound_in_place_without_being_named(
    engine_dir: Path, config: EngineConfig, answer: Answer
) -> None:
    names = [tensor.name for tensor in config.engines["context"].of_kind("cache")]
    engine, seen, _ = _open(_by_plugins(config, names), engine_dir)
    assert names
    with Session(engine, threaded=False) as session:
        assert session.submit(GenerationRequest(_prompt(70), 9)).result()[0] == answer(
            _prompt(70), 9
        )
    for context in seen.contexts:
        told = [context.engine.get_aliased_input_tensor(f"{name}.updated") for name in names]
        assert told == [None] * len(names)
    with pytest.raises(ValueError, match="no cache is called past_lengths"):
        _by_plugins(config, ["past_lengths"])


def test_names_exist_in_the_installed_bindings() -> None:
    trt = pytest.importorskip("tensorrt_rtx")
    expected = {
        trt.Runtime: ["deserialize_cuda_engine"],
        trt.ICudaEngine: [
            "create_execution_context",
            "device_memory_size_v2",
            "get_aliased_input_tensor",
            "get_tensor_dtype",
            "get_tensor_mode",
            "get_tensor_name",
            "get_tensor_shape",
            "num_io_tensors",
        ],
        trt.IExecutionContext: [
            "execute_async_v3",
            "infer_shapes",
            "is_stream_capturable",
            "set_device_memory",
            "set_input_shape",
            "set_tensor_address",
        ],
        trt.ExecutionContextAllocationStrategy: ["USER_MANAGED"],
        trt.TensorIOMode: ["INPUT", "OUTPUT"],
    }
    missing = [
        f"{cls.__name__}.{n}"
        for cls, names in expected.items()
        for n in names
        if not hasattr(cls, n)
    ]
    assert missing == []
