"""Audio of generation calls: encoded one after the other, away from the server's own threads."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from plugins.support.errors import ToolchainError, UsageError
from runtime.audio import AudioEncoder
from runtime.audio_rows import AudioRows
from runtime.engine import Engine
from runtime.session import GenerationHandle
from triton_repo.frontend.problems import one_line
from triton_repo.generation.base import Deliver, GenerationCall, GenerationEvent
from triton_repo.generation.feed import AudioFeed, Features
from triton_repo.generation.service import error_kind

LOG = logging.getLogger(__name__)

Start = Callable[[AudioRows], GenerationHandle]


class Hearing:
    """The audio engine behind a queue. Raises what `AudioEncoder` raises."""

    def __init__(self, engine: Engine) -> None:
        self._encoder = AudioEncoder(engine)
        # One thread: encodings do not gain from each other, and streams keep their order.
        self._queue = ThreadPoolExecutor(1, thread_name_prefix="hearing")

    def submit(self, call: GenerationCall, start: Start, deliver: Deliver) -> Callable[[], None]:
        """Encode the audio of a call, then `start` it with the rows; returns what cancels it.

        Failures come through `deliver`, as the last event.
        """
        if call.feed is not None:
            if not self._encoder.streaming:
                raise UsageError("this model hears whole files, no stream", where="audio_samples")
            return self._live(call.feed, start, deliver).cancel
        features = call.features
        assert features is not None
        heard = _Heard(deliver)

        def encode() -> None:
            if not heard.cancelled:
                whole = torch.from_numpy(features)
                rows = self._encoder.rows(whole[0] if self._encoder.streaming else whole)
                heard.begin(lambda: start(rows))
            else:
                deliver(GenerationEvent(finish_reason="cancelled"))

        self._queue.submit(heard.guarded, encode)
        return heard.cancel

    def close(self) -> None:
        """Encode nothing more; waits for the encoding that runs."""
        self._queue.shutdown(cancel_futures=True)

    def _live(self, feed: AudioFeed, start: Start, deliver: Deliver) -> _Heard:
        heard = _Heard(deliver)
        stream, rows = self._encoder.stream(), self._encoder.open_rows()
        heard.begin(lambda: start(rows))

        def hear(frames: Features, last: bool) -> None:
            if heard.cancelled or (frames.shape[1] == 0 and not last):
                return
            rows.append(stream.push(torch.from_numpy(frames)), last=last)

        feed.attach(
            lambda frames, last: heard.post(self._queue, lambda: hear(frames, last)),
        )
        return heard


class _Heard:
    """One call before and after it has a handle; both may be cancelled."""

    def __init__(self, deliver: Deliver) -> None:
        self._deliver = deliver
        self._lock = threading.Lock()
        self._handle: GenerationHandle | None = None
        self.cancelled = False

    def begin(self, start: Callable[[], GenerationHandle]) -> None:
        """Take the handle that `start` returns."""
        handle = start()
        with self._lock:
            self._handle = handle
            cancelled = self.cancelled
        if cancelled:
            handle.cancel()

    def cancel(self) -> None:
        """End the call; without a handle it ends when its turn comes."""
        with self._lock:
            self.cancelled = True
            handle = self._handle
        if handle is not None:
            handle.cancel()

    def post(self, pool: ThreadPoolExecutor, work: Callable[[], None]) -> None:
        """Run `work` on the pool; after the pool has closed nothing is left to do."""
        try:
            pool.submit(self.guarded, work)
        except RuntimeError:
            self.cancel()

    def guarded(self, work: Callable[[], None]) -> None:
        """Run `work`; what it raises becomes the last event of this call alone."""
        try:
            work()
        except ToolchainError as error:
            self._deliver(GenerationEvent(error=(error_kind(error), one_line(error))))
            self.cancel()
        except Exception:
            LOG.exception("the audio of a sequence could not be encoded")
            self._deliver(GenerationEvent(error=("internal", "the audio could not be encoded")))
            self.cancel()
