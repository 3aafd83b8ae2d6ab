"""The door between the launcher and the models: a directory that only they can reach.

Ending generations before the server is told to stop keeps the unload clean: Triton does not count
decoupled requests as running. The launcher creates `drain`; every model that runs generations
notices it, refuses new work, ends what runs, and reports by creating `<name>.idle`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

ENVIRONMENT_VARIABLE = "TRITON_REPO_CONTROL_DIRECTORY"
POLL_INTERVAL_S = 0.1
DRAIN_FILE = "drain"


class DrainWatcher:
    """Model side. Calls `on_drain(grace_s)` once, when the launcher asks for the drain.

    `on_drain` must return when no generation runs any more; the watcher then reports it.
    Without a launcher (the variable is not set) the watcher does nothing.
    """

    def __init__(self, name: str, on_drain: Callable[[float], None]) -> None:
        self._name, self._on_drain = name, on_drain
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        directory = os.environ.get(ENVIRONMENT_VARIABLE)
        if directory:
            self._directory = Path(directory)
            (self._directory / f"{name}.model").touch()
            self._thread = threading.Thread(target=self._run, name="drain-watcher", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop watching; called from the model's finalize."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=1.0)
            (self._directory / f"{self._name}.model").unlink(missing_ok=True)

    def _run(self) -> None:
        request = self._directory / DRAIN_FILE
        while not self._stop.wait(POLL_INTERVAL_S):
            if request.exists():
                self._on_drain(float(request.read_text() or "0"))
                (self._directory / f"{self._name}.idle").touch()
                return


def request_drain(directory: Path, grace_s: float, timeout_s: float) -> bool:
    """Launcher side: ask every registered model to end its work.

    Running requests may take `grace_s` seconds to finish by themselves. Returns whether all models
    reported within `timeout_s`.
    """
    temporary = directory / f".{DRAIN_FILE}"
    temporary.write_text(str(grace_s))
    temporary.rename(directory / DRAIN_FILE)
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        models = {p.stem for p in directory.glob("*.model")}
        if models <= {p.stem for p in directory.glob("*.idle")}:
            return True
        time.sleep(POLL_INTERVAL_S)
    return False
