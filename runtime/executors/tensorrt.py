"""Executes the engines with TensorRT or TensorRT for RTX on a CUDA device.

This module has been run against a stand-in of the TensorRT module that checks every binding and
computes through the bound addresses, on the CPU and, with real streams and CUDA graphs, on an H200.
It has not executed a serialized engine on hardware.

Weights are bound once and shared by both engines, as is the scratch memory, since calls follow
each other on one stream. Caches have the same address as input and output; states alternate
between two sets. A generation call has few distinct forms (slot count, state set); each has its own
execution context, because a captured CUDA graph holds the shapes and addresses of its context.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch

from plugins.support.dtypes import BY_NAME
from plugins.support.errors import CapabilityError, InputError
from plugins.trt.backend import Backend, load_backend
from plugins.trt.types import from_trt
from runtime.contract import EngineConfig, EngineEntry, Phase
from runtime.executors.stream import WARM_UP_CALLS, CudaStream, Stream, graph_widths
from runtime.executors.weights import MappedWeights
from runtime.slots import open_memory


class TensorRTExecutor:
    """`runtime.executors.Executor` over two serialized engines.

    Args:
        config: of the engine directory, already compared with the machine.
        engine_dir: has the engines and the weights.
        device: CUDA device.
        backend: the TensorRT module; None = the flavour that built the engines.
        stream: where calls are queued; None = a new CUDA stream.

    Raises CapabilityError when TensorRT refuses an engine or memory runs out, InputError when an
    engine's tensors are not those of the configuration.
    """

    supports_outputs: Literal[True] = True
    name = "tensorrt"

    def __init__(
        self,
        config: EngineConfig,
        engine_dir: Path,
        device: torch.device,
        backend: Backend | None = None,
        stream: Stream | None = None,
    ) -> None:
        self.device = device
        backend = backend or load_backend(config.flavor)
        self._trt = backend.trt
        self._logger = backend.logger()
        self._stream = stream or CudaStream(device)
        slots = config.build_config.max_batch_size
        self.generation_widths: Sequence[int] = graph_widths(slots)
        self._entries: dict[Phase, EngineEntry] = {
            phase: entry for phase, entry in config.engines.items() if phase != "audio"
        }
        self._weights = MappedWeights(engine_dir / config.weights.file, device)
        self._generation_calls: dict[tuple[int, bool], _Call] = {}
        # Inside, the stream's device is the current one, which is the one TensorRT works on.
        with self._stream.ordered():
            self._memory = open_memory(config, device)
            self._runtime = self._trt.Runtime(self._logger)
            self._engines = {
                phase: self._deserialize(engine_dir, entry)
                for phase, entry in self._entries.items()
            }
            sizes = [int(engine.device_memory_size_v2) for engine in self._engines.values()]
            self._scratch = torch.empty(max(1, *sizes), dtype=torch.uint8, device=device)
            self._buffers = {p: _Buffers(entry, device) for p, entry in self._entries.items()}
            # Calls of any number of tokens; those of uniform decode have contexts of their own.
            self._calls: dict[Phase, _Call] = {
                phase: self._new_call(phase) for phase in self._entries if phase != "generation"
            }
            self._outputs: dict[str, torch.Tensor] = {}
        self._audio = self._open_audio(config, engine_dir)

    def begin(self, slot: int) -> None:
        """See `Executor.begin`."""
        for memory in self._memory.values():
            memory.begin(slot)

    def end(self, slot: int, poisoned: bool = False) -> None:
        """See `Executor.end`."""
        for memory in self._memory.values():
            memory.end(slot, poisoned)

    def step(self, phase: Phase, first: int, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """See `Executor.step`. Raises CapabilityError with TensorRT's words when a call fails."""
        count = inputs["input_ids"].shape[0]
        with self._stream.ordered():
            bound = self._buffers[phase].fill(inputs)
            memory = self._memory["draft" if phase == "draft" else "context"]
            bound |= memory.inputs(first, count)
            logits = self._buffers[phase].logits(inputs["logits_positions"].shape)
            self._outputs = self._buffers[phase].outputs(inputs["input_ids"].shape)
            outputs = {"logits": logits, **self._outputs}
            for name, tensor in memory.caches(first, count).items():
                outputs[f"{name}.updated"] = tensor
            for name, tensor in memory.next_states(first, count).items():
                outputs[f"{name}.next"] = tensor
            if phase != "generation":
                self._calls[phase].run(bound, outputs)
            else:
                # A range that does not start at slot 0 has other addresses, hence no graph.
                key = (count, memory.swapped)
                if first == 0 and key not in self._generation_calls:
                    self._generation_calls[key] = self._new_call(phase)
                call = self._generation_calls[key] if first == 0 else self._new_call(phase)
                call.run(bound, outputs, repeats=first == 0)
            memory.commit(first, count)
        return logits

    def output(self, name: str) -> torch.Tensor:
        """See `OutputExecutor.output`."""
        return self._outputs[name]

    def encode(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """See `HearingExecutor.encode`."""
        if self._audio is None:
            raise CapabilityError("the engine directory has no audio engine")
        return self._audio.run(inputs)

    def _open_audio(self, config: EngineConfig, engine_dir: Path) -> _AudioEngine | None:
        entry = config.engines.get("audio")
        if entry is None:
            return None
        with self._stream.ordered():
            engine = self._deserialize(engine_dir, entry)
            return _AudioEngine(
                engine, entry, self._weights, self.device, CudaStream(self.device), self._logger
            )

    def close(self) -> None:
        """Free contexts, engines and memory, in that order."""
        self._generation_calls.clear()
        self._audio = None
        self._calls.clear()
        self._engines.clear()
        del self._runtime
        del self._scratch, self._weights, self._buffers
        self._memory.clear()

    def _deserialize(self, engine_dir: Path, entry: EngineEntry) -> Any:
        path = engine_dir / entry.file
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as plan:
            engine = self._runtime.deserialize_cuda_engine(plan)
        if engine is None:
            raise CapabilityError(
                "TensorRT refuses the engine",
                where=str(path),
                found="; ".join(self._logger.take_errors()) or "no reason given",
                fix=f"rebuild it: build-engine build CKPT_DIR {engine_dir}",
            )
        _compare(self._trt, engine, entry, path)
        return engine

    def _new_call(self, phase: Phase) -> _Call:
        strategy = self._trt.ExecutionContextAllocationStrategy.USER_MANAGED
        context = self._engines[phase].create_execution_context(strategy)
        if context is None:
            raise CapabilityError(
                "TensorRT cannot create an execution context",
                found="; ".join(self._logger.take_errors()) or "no reason given",
                fix="free GPU memory, or build with a smaller --max-batch-size",
            )
        context.set_device_memory(self._scratch.data_ptr(), self._scratch.numel())
        weights = {
            spec.name: self._weights[spec.name] for spec in self._entries[phase].of_kind("weight")
        }
        return _Call(context, weights, self._stream, self._logger)


def _compare(trt: Any, engine: Any, entry: EngineEntry, path: Path) -> None:
    """Compare an engine's tensors with its configuration."""
    found = {}
    for index in range(engine.num_io_tensors):
        name = engine.get_tensor_name(index)
        direction = "input" if engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT else "output"
        shape = tuple(int(size) for size in engine.get_tensor_shape(name))
        found[name] = f"{direction} {from_trt(engine.get_tensor_dtype(name))} {list(shape)}"
    expected = {t.name: f"input {t.dtype} {list(t.shape)}" for t in entry.inputs}
    expected |= {t.name: f"output {t.dtype} {list(t.shape)}" for t in entry.outputs}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise InputError(
                "the engine's tensors are not those of its configuration",
                where=f"{path}: {name}",
                expected=expected.get(name, "no such tensor"),
                found=found.get(name, "no such tensor"),
                fix=f"rebuild it: build-engine build CKPT_DIR {path.parent}",
            )
    for cache in entry.of_kind("cache"):
        aliased = engine.get_aliased_input_tensor(f"{cache.name}.updated")
        # It names what its own layers update; of plugin layers it tells nothing.
        untold = not aliased and cache.name in entry.plugin_caches
        if aliased != cache.name and not untold:
            raise InputError(
                "the engine does not update a cache in place",
                where=f"{path}: {cache.name}.updated",
                expected=cache.name,
                found=str(aliased),
            )


class _Buffers:
    """Device memory for the inputs of every call and for the logits, at fixed addresses.

    Args:
        entry: of the engine; the profile gives the sizes.
        device: CUDA device.
    """

    def __init__(self, entry: EngineEntry, device: torch.device) -> None:
        self._flat = {}
        for spec in entry.of_kind("token", "host"):
            largest = entry.profile[spec.name].max if spec.name in entry.profile else spec.shape
            self._flat[spec.name] = torch.zeros(
                prod(largest), dtype=BY_NAME[spec.dtype].torch, device=device
            )
        logits = next(spec for spec in entry.outputs if spec.kind == "logits")
        self._vocab = logits.shape[-1]
        # The most logits a prompt call can return are rarely asked for: start with one per slot.
        most = entry.profile["logits_positions"].max
        rows = prod(most) if logits.shape[1] != -1 else most[0]
        self._logits = torch.zeros(
            rows * self._vocab, dtype=BY_NAME[logits.dtype].torch, device=device
        )

        # Values per token that other engines take: [B, S, width] for as many tokens as a call has.
        tokens = prod(entry.profile["input_ids"].max)
        self._further = {
            spec.name: torch.zeros(
                tokens, spec.shape[-1], dtype=BY_NAME[spec.dtype].torch, device=device
            )
            for spec in entry.outputs
            if spec.kind == "output"
        }

    def outputs(self, shape: Sequence[int]) -> dict[str, torch.Tensor]:
        """Where outputs per token of a call with ids of this shape go, [B, S, width]."""
        return {n: t[: prod(shape)].view(*shape, -1) for n, t in self._further.items()}

    def fill(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copy the inputs to the device; returns the bound views."""
        bound = {}
        for name, flat in self._flat.items():
            source = inputs[name]
            target = flat[: source.numel()].view(source.shape)
            target.copy_(source, non_blocking=True)
            bound[name] = target
        return bound

    def logits(self, positions: Sequence[int]) -> torch.Tensor:
        """Where logits of shape [*positions, vocab] go; grows for long prompt calls."""
        elements = prod(positions) * self._vocab
        if elements > self._logits.numel():
            self._logits = self._logits.new_zeros(elements)
        return self._logits[:elements].view(*positions, self._vocab)


class _AudioEngine:
    """The audio engine with a context, memory and stream of its own, for any thread.

    Args:
        engine: deserialized.
        entry: its configuration.
        weights: of the engine directory.
        device: CUDA device.
        stream: not used by anything else.
        logger: recording logger of the TensorRT module.
    """

    def __init__(
        self,
        engine: Any,
        entry: EngineEntry,
        weights: Mapping[str, torch.Tensor],
        device: torch.device,
        stream: Stream,
        logger: Any,
    ) -> None:
        self._engine, self._entry, self._device, self._stream = engine, entry, device, stream
        self._lock = threading.Lock()
        self._context = engine.create_execution_context()
        if self._context is None:
            raise CapabilityError(
                "TensorRT cannot create an execution context",
                found="; ".join(logger.take_errors()) or "no reason given",
                fix="free GPU memory",
            )
        bound = {spec.name: weights[spec.name] for spec in entry.of_kind("weight")}
        self._call = _Call(self._context, bound, stream, logger)

    def run(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """One call; waits until its outputs are there."""
        with self._lock, self._stream.ordered():
            bound = {name: tensor.to(self._device) for name, tensor in inputs.items()}
            for name, tensor in bound.items():
                self._context.set_input_shape(name, tuple(tensor.shape))
            outputs = {
                spec.name: torch.empty(
                    tuple(self._context.get_tensor_shape(spec.name)),
                    dtype=BY_NAME[spec.dtype].torch,
                    device=self._device,
                )
                for spec in self._entry.outputs
            }
            self._call.run(bound, outputs)
        return outputs


class _Call:
    """One execution context, and the CUDA graph of its call where shapes and addresses repeat.

    Args:
        context: execution context.
        weights: bound once.
        stream: where calls are queued.
        logger: recording logger of the TensorRT module.
    """

    def __init__(
        self, context: Any, weights: Mapping[str, torch.Tensor], stream: Stream, logger: Any
    ) -> None:
        self._context = context
        self._stream = stream
        self._logger = logger
        self._calls = 0
        self._graph: Any = None
        self._bound: dict[str, int] = {}
        # Addresses do not keep memory alive.
        self._weights = weights
        for name, tensor in weights.items():
            self._check(context.set_tensor_address(name, tensor.data_ptr()), f"binding {name}")

    def run(
        self,
        inputs: Mapping[str, torch.Tensor],
        outputs: Mapping[str, torch.Tensor],
        repeats: bool = False,
    ) -> None:
        """Queue one call.

        Args:
            inputs: by name; shapes are set from them.
            outputs: by name, of the right size.
            repeats: the same shapes and addresses come every time, so a graph can replace the
                call after the first few.
        """
        addresses = {name: t.data_ptr() for name, t in (*inputs.items(), *outputs.items())}
        if self._graph is not None and addresses == self._bound:
            self._graph()
            return
        for name, tensor in inputs.items():
            done = self._context.set_input_shape(name, tuple(tensor.shape))
            self._check(done, f"shape {list(tensor.shape)} of {name}")
        for name, address in addresses.items():
            self._check(self._context.set_tensor_address(name, address), f"binding {name}")
        missing = self._context.infer_shapes()
        self._check(not missing, f"unbound: {', '.join(missing)}")
        self._graph = None
        self._calls = self._calls + 1 if addresses == self._bound else 1
        self._bound = addresses
        self._enqueue(self._stream.handle)
        if repeats and self._calls >= WARM_UP_CALLS and self._capturable():
            self._graph = self._stream.capture(self._enqueue)

    def _enqueue(self, handle: int) -> None:
        self._check(self._context.execute_async_v3(handle), "execution")

    def _capturable(self) -> bool:
        # Only TensorRT for RTX has the question; full TensorRT captures after the first call.
        ask = getattr(self._context, "is_stream_capturable", None)
        return True if ask is None else bool(ask(self._stream.handle))

    def _check(self, done: bool, what: str) -> None:
        errors = self._logger.take_errors()
        if not done or errors:
            raise CapabilityError(
                "TensorRT failed to run the engine",
                where=what,
                found="; ".join(errors) or "no reason given",
            )
