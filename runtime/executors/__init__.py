"""Who executes the engines: TensorRT on a GPU, or the network interpreter anywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

import torch

from plugins.support.contract import Contract
from runtime.contract import Phase


class Executor(Protocol):
    """Holds caches and states of all slots and runs one call at a time.

    Attributes:
        name: "tensorrt" or "interpreter".
        device: where it computes.
        generation_widths: slot counts that a generation call may have, ascending; the last one is
            the number of slots.
    """

    @property
    def name(self) -> str: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def generation_widths(self) -> Sequence[int]: ...

    def begin(self, slot: int) -> None:
        """Prepare `slot` for a new sequence: states zero."""

    def end(self, slot: int, poisoned: bool = False) -> None:
        """Free `slot`; `poisoned`: also clear what a failed call may have left in it."""

    def step(self, phase: Phase, first: int, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Run one engine over slots first .. first+B-1.

        Args:
            phase: which engine.
            first: first slot of the range.
            inputs: every input of kind token and host, on the CPU; B is their dimension 0.

        Returns:
            logits, float32 [B, L, vocab], on `device`, valid until the next call. Caches and
            states of the range are those after the call.
        """

    def close(self) -> None:
        """Free engines and memory."""


class HearingExecutor(Protocol):
    """The side of an executor that runs an audio engine."""

    def encode(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Run the audio engine once, beside and independent of `step`.

        Args:
            inputs: every input but the weights; states are the caller's.

        Returns:
            Every output, on `device`, the caller's to keep.
        """


class OutputExecutor(Protocol):
    """The side of an executor that shows more than logits, for drafts and embeddings.

    Attributes:
        supports_outputs: that it does; a method alone could be a leftover.
    """

    @property
    def supports_outputs(self) -> Literal[True]: ...

    def output(self, name: str) -> torch.Tensor:
        """A further output of the last `step`, on `device`, valid until the next one."""


EXECUTOR: Contract[Executor] = Contract.of(Executor)
HEARING: Contract[HearingExecutor] = Contract.of(HearingExecutor)
OUTPUTS: Contract[OutputExecutor] = Contract.of(OutputExecutor)
