"""The caller's side of a request: wait for it, stream it, abort it, from any thread or event loop. Free of torch.

The engine's thread appends to the sequence and then looks for a listener; a reader installs its listener and then
looks at the sequence. Whichever comes second sees the other, so no wake-up is lost and no lock is needed.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from glm5.engine.requests import Chunk, Completion, DeadlineError, Sequence

DEADLINE_S = 3600.0
"""Longest wait for one answer unless the caller says otherwise."""


class Generation:
    """Handle of one submitted request. At most one task may wait on or stream it."""

    def __init__(self, sequence: Sequence, abort: Callable[[int], None]) -> None:
        self.sequence = sequence
        self._abort = abort
        self._done = threading.Event()
        self._listener: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
        self._wants_every_token = False

    def result(self, timeout_s: float = DEADLINE_S) -> Completion:
        """Block until the answer is complete. Raises the request's EngineError; past the deadline it aborts, too."""
        if not self._done.wait(timeout_s):
            self.abort()
            raise self._too_late(timeout_s)
        return self._completion()

    async def wait(self, timeout_s: float = DEADLINE_S) -> Completion:
        """``result`` for an event loop. Cancelling the wait aborts the request."""
        async for _ in self._growth(timeout_s, every_token=False):
            continue
        return self._completion()

    async def stream(self, timeout_s: float = DEADLINE_S) -> AsyncGenerator[Chunk, None]:
        """Chunks as they are sampled; the last carries the finish reason. Closing the iterator aborts the request."""
        sequence, sent = self.sequence, 0
        async with aclosing(self._growth(timeout_s, every_token=True)) as growth:
            async for is_finished in growth:
                if sequence.error is not None:
                    raise sequence.error
                known = len(sequence.versions)
                if known > sent or is_finished:
                    yield Chunk(
                        output_ids=sequence.output_ids[sent:known],
                        logprobs=sequence.logprobs[sent:known],
                        weight_versions=sequence.versions[sent:known],
                        finish_reason=sequence.finish_reason if is_finished else None,
                        top_logprobs=sequence.top_logprobs[sent:known],
                    )
                    sent = known

    async def _growth(self, timeout_s: float, every_token: bool) -> AsyncGenerator[bool, None]:
        """Whether the sequence is finished, now and after every wake-up, until it is. Leaving early aborts it."""
        loop, event = asyncio.get_running_loop(), asyncio.Event()
        self._wants_every_token = every_token
        self._listener = (loop, event)
        deadline = loop.time() + timeout_s
        alarm = loop.call_later(timeout_s, event.set)
        try:
            while True:
                is_finished = self.sequence.is_finished  # read before the tokens: once true, nothing more is appended
                yield is_finished
                if is_finished:
                    return
                await event.wait()
                event.clear()
                if loop.time() >= deadline:
                    raise self._too_late(timeout_s)
        finally:
            alarm.cancel()
            self.abort()

    def abort(self) -> None:
        """Stop the request, keeping what it has; no effect once finished."""
        if not self.sequence.is_finished:
            self._abort(self.sequence.request_id)

    def notify(self, wakeups: dict[asyncio.AbstractEventLoop, list[asyncio.Event]]) -> None:
        """Engine thread: the sequence grew or finished. Adds the reader's event to ``wakeups`` if it wants to know."""
        is_finished = self.sequence.is_finished
        if is_finished:
            self._done.set()
        listener = self._listener
        if listener is not None and (is_finished or self._wants_every_token):
            wakeups.setdefault(listener[0], []).append(listener[1])

    def _too_late(self, timeout_s: float) -> DeadlineError:
        return DeadlineError(
            f"request {self.sequence.request_id}: not finished after {timeout_s:.0f} s; "
            "allow more time or lower the load"
        )

    def _completion(self) -> Completion:
        sequence = self.sequence
        if sequence.error is not None:
            raise sequence.error
        assert sequence.finish_reason is not None, "waited for the end"
        return Completion(
            output_ids=sequence.output_ids,
            logprobs=sequence.logprobs,
            weight_versions=sequence.versions,
            finish_reason=sequence.finish_reason,
            prompt_tokens=len(sequence.prompt),
            cached_tokens=sequence.cached_tokens,
            prompt_logprobs=sequence.prompt_logprobs,
        )


def wake(wakeups: dict[asyncio.AbstractEventLoop, list[asyncio.Event]]) -> None:
    """Set the events of each loop in one call of that loop; loops that have closed are left out."""
    for loop, events in wakeups.items():
        try:
            loop.call_soon_threadsafe(_set_all, events)
        except RuntimeError:  # the loop closed while its reader was being cancelled
            continue


def _set_all(events: list[asyncio.Event]) -> None:
    for event in events:
        event.set()
