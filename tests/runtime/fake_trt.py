"""A stand-in of the TensorRT module that computes through the addresses it was given.

It keeps the parts of the API that the executor uses, refuses what TensorRT refuses (unbound
tensors, shapes outside the profile, cache input and output at different addresses) and runs the
tests' language on the memory behind the bound addresses.
"""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from types import SimpleNamespace
from typing import Any

import numpy as np

from plugins.trt.backend import Backend
from runtime.contract import EngineConfig, EngineEntry
from tests.runtime.language import compute

DataType = enum.Enum("DataType", "FLOAT HALF BF16 INT32 INT64 BOOL")
_TRT = {"float32": DataType.FLOAT, "int32": DataType.INT32}
_NUMPY: dict[str, np.dtype] = {"float32": np.dtype("f4"), "int32": np.dtype("i4")}


class TensorIOMode(enum.Enum):
    INPUT = 1
    OUTPUT = 2


class Strategy(enum.Enum):
    STATIC = 0
    USER_MANAGED = 2


class ILogger:
    ERROR, INTERNAL_ERROR, WARNING, INFO = range(4)


class Engine:
    """A deserialized engine; `entry` plays the part of the plan's contents."""

    device_memory_size_v2 = 512

    def __init__(self, entry: EngineEntry, log: Callable[[int, str], None], seen: Any) -> None:
        self.entry = entry
        self.log = log
        self.seen = seen
        self.inputs = {tensor.name: tensor for tensor in entry.inputs}
        self.outputs = {tensor.name: tensor for tensor in entry.outputs}
        self.tensors = self.inputs | self.outputs
        self.in_place = {f"{t.name}.updated": t.name for t in entry.of_kind("cache")}
        # What it tells of them, which excludes what plugin layers update.
        self.aliases = {
            output: name
            for output, name in self.in_place.items()
            if name not in entry.plugin_caches
        }
        self.num_io_tensors = len(self.tensors)

    def get_tensor_name(self, index: int) -> str:
        return list(self.tensors)[index]

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        return TensorIOMode.INPUT if name in self.inputs else TensorIOMode.OUTPUT

    def get_tensor_dtype(self, name: str) -> DataType:
        return _TRT[self.tensors[name].dtype]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name].shape

    def get_aliased_input_tensor(self, name: str) -> str | None:
        return self.aliases.get(name)

    def create_execution_context(self, strategy: Strategy) -> Context:
        assert strategy is Strategy.USER_MANAGED
        context: Context = self.seen.context_type(self)
        self.seen.contexts.append(context)
        return context


class Context:
    """An execution context that checks and computes."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.scratch = (0, 0)
        self.executions = 0

    def set_device_memory(self, address: int, size: int) -> None:
        self.scratch = (address, size)

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        spec = self.engine.inputs[name]
        limits = self.engine.entry.profile.get(name)
        fine = len(shape) == len(spec.shape) and all(
            want in (-1, have) for want, have in zip(spec.shape, shape, strict=True)
        )
        if limits is not None:
            fine = fine and all(
                low <= have <= high
                for low, have, high in zip(limits.min, shape, limits.max, strict=True)
            )
        if not fine:
            self.engine.log(ILogger.ERROR, f"{name}: {shape} is outside the profile")
        self.shapes[name] = shape
        return fine

    def set_tensor_address(self, name: str, address: int) -> bool:
        assert name in self.engine.tensors
        self.addresses[name] = address
        return True

    def infer_shapes(self) -> list[str]:
        return [
            name
            for name, spec in self.engine.inputs.items()
            if -1 in spec.shape and name not in self.shapes
        ]

    def execute_async_v3(self, handle: int) -> bool:
        self.executions += 1
        entry = self.engine.entry
        if self.engine.seen.fail_next:
            self.engine.seen.fail_next = False
            self.engine.log(ILogger.ERROR, "an illegal memory access was encountered")
            return False
        assert self.scratch[1] >= self.engine.device_memory_size_v2
        assert set(self.addresses) == set(self.engine.tensors)
        for output, source in self.engine.in_place.items():
            assert self.addresses[output] == self.addresses[source]
        for spec in entry.of_kind("state"):
            assert self.addresses[f"{spec.name}.next"] != self.addresses[spec.name]
        shapes = {name: self.shapes.get(name, t.shape) for name, t in self.engine.inputs.items()}
        positions = self.shapes["logits_positions"]
        results = {"logits": (*positions, self.engine.outputs["logits"].shape[-1])}
        results |= {f"{t.name}.next": shapes[t.name] for t in entry.of_kind("state")}
        self.compute(handle, shapes, results)
        return True

    def compute(
        self, handle: int, inputs: dict[str, tuple[int, ...]], outputs: dict[str, tuple[int, ...]]
    ) -> None:
        """Run the language on the bound memory, whose shapes are given."""
        assert handle == FakeStream.handle
        compute(
            {name: self._array(name, shape) for name, shape in inputs.items()},
            {name: self._array(name, shape) for name, shape in outputs.items()},
        )

    def _array(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        dtype = _NUMPY[self.engine.tensors[name].dtype]
        size = prod(shape) * dtype.itemsize
        memory = (ctypes.c_char * size).from_address(self.addresses[name])
        return np.ndarray(shape, dtype=dtype, buffer=memoryview(memory))


class FakeStream:
    """A `runtime.executors.stream.Stream` whose graphs are recorded calls."""

    handle = 4711

    def __init__(self) -> None:
        self.captures = 0
        self.replays = 0
        self.inside = False

    @contextmanager
    def ordered(self) -> Iterator[None]:
        self.inside = True
        yield
        self.inside = False

    def capture(self, work: Callable[[int], None]) -> Callable[[], None]:
        self.captures += 1
        assert self.inside

        def replay() -> None:
            self.replays += 1
            work(self.handle)

        return replay


def fake_backend(
    config: EngineConfig,
    change: Callable[[Engine], None] | None = None,
    context_type: type[Context] = Context,
) -> Any:
    """A backend for the engines of `config`, and a record of what was done with it.

    Args:
        config: of the engine directory.
        change: alters every engine after it was deserialized.
        context_type: class of the execution contexts.
    """
    seen = SimpleNamespace(contexts=[], fail_next=False, refuse=False, context_type=context_type)

    class Runtime:
        def __init__(self, logger: Any) -> None:
            self._logger = logger
            self._entries = iter([config.engines["context"], config.engines["generation"]])

        def deserialize_cuda_engine(self, plan: Any) -> Engine | None:
            assert bytes(plan[:4]) == b"vtrt"
            if seen.refuse:
                self._logger.log(ILogger.ERROR, "the plan is of another version")
                return None
            engine = Engine(next(self._entries), self._logger.log, seen)
            if change is not None:
                change(engine)
            return engine

    module = SimpleNamespace(
        Runtime=Runtime,
        TensorIOMode=TensorIOMode,
        ExecutionContextAllocationStrategy=Strategy,
        ILogger=ILogger,
    )
    return Backend(config.flavor, config.tensorrt_version, module), seen
