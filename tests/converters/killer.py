"""Kills conversions and exports at any step and takes them up again; a program of its own.

    python -m tests.converters.killer SOURCE TARGET VERB SEEDS [trusting]

Every seed writes the directory `TARGET-SEED`. A step is whatever changes the disk: reserving,
writing or copying bytes, marks, configuration files, renaming. The process of a run dies in the
middle of a random one, with half of it done; the same call follows, is killed at a random step of
its own, and so on four times, until one is left alone. Prints the number of kills.

With "trusting" the journal claims after the first kill that every task is done, as if marks came
before bytes: what comes out must differ.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from converters.checkpoint import convert, export_hf, partial, write

KILLS = 4


def run(verb: str, source: Path, target: Path) -> None:
    """The whole call, in small tasks."""
    if verb == "export":
        export_hf.export_hf(source, target, workers=2)
    else:
        convert.convert(source, target, quantize=None if verb == "copy" else verb, workers=2)


class Steps:
    """Counts steps, and dies in one of them."""

    def __init__(self, last: int) -> None:
        self.count, self._last, self._lock = 0, last, threading.Lock()

    def step(self, half: Callable[[], Any], whole: Callable[[], Any]) -> Any:
        """Do all of a step, or half of it as the last thing of this process."""
        with self._lock:
            self.count += 1
            if self.count == self._last:
                half()
                os.kill(os.getpid(), signal.SIGKILL)
        return whole()

    def install(self) -> None:
        """Let every change of the disk be a step."""
        pwrite, copy, reserve = os.pwrite, os.copy_file_range, os.posix_fallocate
        text, mark = Path.write_text, partial.Partial.mark

        def torn(journal: partial.Partial, task: int) -> None:
            journal._journal.write(str(task))
            journal._journal.flush()

        os.pwrite = lambda file, data, place: self.step(
            lambda: pwrite(file, memoryview(data)[: len(data) // 2], place),
            lambda: pwrite(file, data, place),
        )
        os.copy_file_range = lambda source, target, count, *places: self.step(
            lambda: copy(source, target, count // 2, *places) if count > 1 else None,
            lambda: copy(source, target, count, *places),
        )
        os.posix_fallocate = lambda file, start, size: self.step(
            lambda: reserve(file, start, size // 2), lambda: reserve(file, start, size)
        )
        partial.Partial.mark = lambda own, task: self.step(  # type: ignore[method-assign]
            lambda: torn(own, task), lambda: mark(own, task)
        )
        Path.write_text = (
            lambda path, content, *rest: self.step(  # type: ignore[method-assign]
                lambda: text(path, content[: len(content) // 2], *rest),
                lambda: text(path, content, *rest),
            )
        )
        for name in ("rename", "unlink"):
            setattr(os, name, self._whole(getattr(os, name)))

    def _whole(self, change: Callable[..., None]) -> Callable[..., None]:
        return lambda *arguments, **options: self.step(
            lambda: None, lambda: change(*arguments, **options)
        )


def in_child(work: Callable[[], None]) -> int:
    """Status of a forked process that does it."""
    child = os.fork()
    if child == 0:
        work()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def steps_of(verb: str, source: Path, target: Path) -> int:
    """Steps of a run that nothing disturbs."""
    reader, writer = os.pipe()

    def counted() -> None:
        steps = Steps(0)
        steps.install()
        run(verb, source, target)
        os.write(writer, str(steps.count).encode())

    assert in_child(counted) == 0
    return int(os.read(reader, 20))


def main() -> None:
    """See the module's docstring."""
    source, target, verb, seeds = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4]
    write.CHUNK_BYTES = 4096
    total = steps_of(verb, source, target)
    kills = 0
    for seed in range(int(seeds)):
        chance = random.Random(seed)
        own = target.with_name(f"{target.name}-{seed}")
        for _ in range(KILLS):
            steps = Steps(chance.randint(1, total))

            def killed(steps: Steps = steps, own: Path = own) -> None:
                steps.install()
                run(verb, source, own)

            code = in_child(killed)
            assert code in (0, -signal.SIGKILL), code
            kills += code != 0
            if code == 0:
                break
            if "trusting" in sys.argv:
                with (partial.work_directory(own) / "journal").open("a") as journal:
                    journal.writelines(f"{task}\n" for task in range(total))
        else:
            assert in_child(lambda own=own: run(verb, source, own)) == 0  # type: ignore[misc]
    print(total, kills)


if __name__ == "__main__":
    main()
