"""Calls that come again and again with the same shapes and addresses, replayed as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping

import torch

from runtime.executors.stream import WARM_UP_CALLS, Stream

Tensors = Mapping[str, torch.Tensor]


class _Repeated:
    """One form of call: its inputs at fixed addresses and, after a few calls, its graph."""

    def __init__(self, inputs: Tensors, device: torch.device) -> None:
        self.inputs = {name: torch.empty_like(t, device=device) for name, t in inputs.items()}
        self.outputs: Tensors = {}
        self.replay: Callable[[], None] | None = None
        self.calls = 0

    def fill(self, inputs: Tensors) -> None:
        for name, target in self.inputs.items():
            target.copy_(inputs[name], non_blocking=True)


class RepeatedCalls:
    """Runs calls, and replays those of a form that has been seen often enough.

    Args:
        stream: where calls are queued.
        device: of the stream.
    """

    def __init__(self, stream: Stream, device: torch.device) -> None:
        self._stream = stream
        self._device = device
        self._forms: dict[Hashable, _Repeated] = {}

    def run(
        self,
        form: Hashable,
        inputs: Tensors,
        work: Callable[[Tensors], Tensors],
        capturable: Callable[[], bool],
    ) -> Tensors:
        """Queue one call.

        Args:
            form: calls of one form have the same input shapes, and `work` reads and writes the same
                addresses for all of them.
            inputs: on the CPU.
            work: from the inputs on the device to the outputs; must not wait for the device when
                `capturable` says so.
            capturable: asked after `work` has run.

        Returns:
            The outputs, valid until the next call.
        """
        with self._stream.ordered():
            if form not in self._forms:
                self._forms[form] = _Repeated(inputs, self._device)
            call = self._forms[form]
            call.fill(inputs)
            if call.replay is not None:
                call.replay()
                return call.outputs
            outputs = work(call.inputs)
            call.calls += 1
            if call.calls >= WARM_UP_CALLS and capturable():

                def record(_: int) -> None:
                    call.outputs = work(call.inputs)

                call.replay = self._stream.capture(record)
            return outputs
