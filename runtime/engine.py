"""An opened engine directory: configuration, executor, host inputs, and the call joining them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from plugins.support.errors import UsageError
from runtime.contract import (
    TOKEN_BLOCK,
    TOKENIZER_DIR,
    EngineConfig,
    Phase,
    check_files,
    read_config,
)
from runtime.executors import EXECUTOR, Executor
from runtime.executors.select import open_executor
from runtime.host_inputs import HostInput, open_host_inputs, preload_tables
from runtime.rows import Row


class Engine:
    """An opened engine directory.

    Args:
        config: its configuration.
        executor: runs the engines.
        host_inputs: compute what stays outside the engines.
        reason: why this executor was picked, one sentence.
        notices: lines that whoever runs the engine should read.
        path: the directory.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        host_inputs: Sequence[HostInput] = (),
        reason: str = "",
        path: Path | None = None,
        notices: Sequence[str] = (),
    ) -> None:
        self.config = config
        self.executor = EXECUTOR.require(executor)
        self.reason = reason
        self.notices = tuple(notices)
        self.path = path
        self._host_inputs = tuple(host_inputs)
        self._in_use = threading.Lock()

    @classmethod
    def load(
        cls,
        engine_dir: str | Path,
        executor: str = "auto",
        device: str = "auto",
        *,
        preload: bool = False,
    ) -> Engine:
        """Open `engine_dir` after comparing it with its files and with this machine.

        Args:
            engine_dir: written by `build-engine build`.
            executor: "auto" (TensorRT where this machine can run the engines), "tensorrt" or
                "interpreter".
            device: "auto", "cpu", "cuda" or "cuda:N".
            preload: whether to bring tables of host inputs into memory where they fit. It takes
                as long as reading them; a notice says what was done. Else rows are read on demand.

        Raises InputError when the directory is not what was built, CapabilityError when the
        machine cannot run it as asked, UsageError for unknown names.
        """
        path = Path(engine_dir)
        config = read_config(path)
        check_files(config, path)
        opened = open_executor(config, path, executor, device)
        hosts = open_host_inputs(config, path)
        notices = (*opened.notices, *(preload_tables(hosts) if preload else ()))
        return cls(config, opened.executor, hosts, opened.reason, path, notices)

    @property
    def slots(self) -> int:
        """Sequences that fit at once."""
        return self.config.build_config.max_batch_size

    @property
    def tokenizer_dir(self) -> Path | None:
        """The tokenizer's files, or None when the engine was built without."""
        path = self.path / TOKENIZER_DIR if self.path else None
        return path if path and path.is_dir() else None

    def step(self, phase: Phase, first: int, rows: Sequence[Row | None]) -> torch.Tensor:
        """Run one call over slots first .. first+len(rows)-1; None is a padding slot.

        Returns:
            logits float32 [len(rows), L, vocab] on the executor's device, L the most logits that
            any row wants (every generation call: tokens per step); rows beyond a slot's own are
            without meaning.

        Raises UsageError for a generation call whose slots bring different numbers of tokens: such
        rows are for the context engine.
        """
        counts = {row.count for row in rows if row is not None}
        if phase == "generation" and len(counts) > 1:
            raise UsageError(
                "a generation call is uniform",
                expected="the same number of tokens from every slot",
                found=", ".join(str(count) for count in sorted(counts)),
                fix="send rows of other lengths through the context engine",
            )
        return self.executor.step(phase, first, self._inputs(phase, rows))

    def _inputs(self, phase: Phase, rows: Sequence[Row | None]) -> dict[str, torch.Tensor]:
        batch = len(rows)
        entry = self.config.engines[phase]
        if phase == "context":
            longest = max((row.count for row in rows if row), default=1)
            columns = max(_round_up(longest), entry.profile["input_ids"].min[1])
            wanted = max((len(row.logits) for row in rows if row), default=1)
            wanted = max(wanted, entry.profile["logits_positions"].min[1])
        else:
            columns = wanted = self.config.step_tokens
        ids = np.zeros((batch, columns), dtype=np.int64)
        past = np.zeros(batch, dtype=np.int32)
        new = np.zeros(batch, dtype=np.int32)
        positions = np.zeros((batch, wanted), dtype=np.int32)
        for index, row in enumerate(rows):
            if row is None:
                continue
            ids[index, : row.count] = row.sequence[row.start : row.start + row.count]
            past[index], new[index] = row.start, row.count
            positions[index, : len(row.logits)] = row.logits
        inputs = {
            "input_ids": torch.from_numpy(ids.astype(np.int32)),
            "past_lengths": torch.from_numpy(past),
            "new_lengths": torch.from_numpy(new),
            "logits_positions": torch.from_numpy(positions),
        }
        if entry.input("rejected_lengths") is not None:
            rejected = [row.rejected if row else 0 for row in rows]
            inputs["rejected_lengths"] = torch.tensor(rejected, dtype=torch.int32)
        span = entry.profile.get("attention_span")
        if span is not None:
            length = max(_round_up(int((past + new).max())), span.min[0])
            inputs["attention_span"] = torch.zeros(length, dtype=torch.int32)
        for host in self._host_inputs:
            context = np.full((batch, host.context_tokens), host.fill, dtype=np.int64)
            for index, row in enumerate(rows):
                if row is not None and row.start > 0:
                    known = row.sequence[max(0, row.start - host.context_tokens) : row.start]
                    context[index, host.context_tokens - len(known) :] = known
            inputs[host.name] = host(ids, context, new.astype(np.int64), rows)
        return inputs

    @contextmanager
    def claim(self) -> Iterator[None]:
        """Use the slots alone. Raises UsageError when a session or another caller has them."""
        if not self._in_use.acquire(blocking=False):
            raise UsageError("the engine is in use", fix="close the session that has it first")
        try:
            yield
        finally:
            self._in_use.release()

    def close(self) -> None:
        """Free engines and memory."""
        self.executor.close()


def _round_up(count: int) -> int:
    return -(-count // TOKEN_BLOCK) * TOKEN_BLOCK
