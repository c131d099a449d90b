"""One thread runs the engine; the event loop sends it commands and receives what each step produced."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from trimtab.engine.request import RequestOutput
from trimtab.engine.sampling_params import SamplingParams
from trimtab.engine.stats import EngineStats

if TYPE_CHECKING:
    from trimtab.engine.engine import Engine

logger = logging.getLogger("trimtab.serving")

STALL_SECONDS = 120.0  # a step of the slowest prefill takes well under this; longer means that the engine hangs


MAX_FAILED_STEPS = 5  # in a row; more means that the failure is the engine's, not a request's


class EngineDeadError(RuntimeError):
    """The engine stopped; nothing can be served any more."""


class StepFailedError(RuntimeError):
    """The step that a request was in failed; the engine goes on without it."""


@dataclass(slots=True, eq=False)
class _Stream:
    """What one request is owed on the event loop's side."""

    num_unfinished: int  # sequences the engine still works on, as far as the event loop knows
    num_unread: int  # sequences whose end the reader has not seen
    outputs: asyncio.Queue[list[RequestOutput] | Exception] = field(default_factory=asyncio.Queue)


class EngineThread:
    """Runs an engine until `stop`; every public method is for the event loop's thread.

    Attributes:
        error: what ended the engine, if it died.
    """

    def __init__(self, engine: Engine, on_death: Callable[[], object] | None = None) -> None:
        self.engine = engine
        self.error: BaseException | None = None
        self._on_death = on_death
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._streams: dict[str, _Stream] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = False
        self._num_failed_steps = 0
        self._last_sign_of_life = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="trimtab-engine", daemon=True)

    def start(self) -> None:
        """Start the thread; outputs are delivered to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self.error is None and self._thread.is_alive()

    @property
    def stalled(self) -> bool:
        """Whether requests wait while no step has ended for `STALL_SECONDS`."""
        return self.num_sequences > 0 and time.monotonic() - self._last_sign_of_life > STALL_SECONDS

    @property
    def num_sequences(self) -> int:
        """Sequences that were submitted and have not finished."""
        return sum(stream.num_unfinished for stream in self._streams.values())

    async def generate(
        self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams, deadline: float
    ) -> AsyncGenerator[list[RequestOutput], None]:
        """Outputs of one request, those of one step together; first an empty list, when the engine has accepted it.

        Leaving the iteration early aborts the request.

        Args:
            deadline: on the event loop's clock.

        Raises:
            TimeoutError: if the deadline passes first.
            ValueError: if the engine refuses the request.
            StepFailedError: if a step it was in failed.
            EngineDeadError: if the engine stopped.
        """
        if not self.alive:
            raise EngineDeadError("the engine is not running")
        if self.num_sequences == 0:
            self._last_sign_of_life = time.monotonic()  # it was idle, not stalled
        stream = _Stream(params.n, params.n)
        self._streams[request_id] = stream
        self._commands.put(lambda: self._add(request_id, list(prompt_token_ids), params))
        try:
            while stream.num_unread > 0:
                async with asyncio.timeout_at(deadline):
                    outputs = await stream.outputs.get()
                if isinstance(outputs, Exception):
                    stream.num_unfinished = 0
                    raise outputs
                stream.num_unread -= sum(output.finished for output in outputs)
                yield outputs
        finally:
            del self._streams[request_id]
            if stream.num_unfinished > 0:
                self._commands.put(lambda: self.engine.abort(request_id))

    async def stats(self) -> EngineStats:
        """A snapshot of the engine's counters, taken between two steps.

        Raises:
            EngineDeadError: if the engine stopped.
        """
        if not self.alive:
            raise EngineDeadError("the engine is not running")
        assert self._loop is not None
        future: asyncio.Future[EngineStats] = self._loop.create_future()

        def resolve(stats: EngineStats) -> None:
            if not future.done():
                future.set_result(stats)

        def snapshot() -> None:
            stats = self.engine.stats()
            self._to_loop(lambda: resolve(stats))

        self._commands.put(snapshot)
        while True:  # the engine may die before it comes to the command
            done, _ = await asyncio.wait({future}, timeout=1.0)
            if done:
                return future.result()
            if not self.alive:
                raise EngineDeadError("the engine is not running")

    async def drain(self, timeout: float) -> bool:
        """Wait until nothing runs; whether that came true within ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        while self._streams and self.alive:
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.02)
        return True

    def drop_all(self) -> None:
        """End every request that still runs; for when the time to drain is over."""
        self._end_streams(EngineDeadError("the server is shutting down"))

    async def stop(self, timeout: float = 30.0) -> None:
        """End the thread after the current step; what still runs is dropped and the engine saves its state."""
        self._commands.put(self._request_stop)
        await asyncio.to_thread(self._thread.join, timeout)

    # ---- the engine's thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._do_commands()
                if not self._stopping and self.engine.has_unfinished:
                    outputs = self._step()
                    self._last_sign_of_life = time.monotonic()
                    if outputs:
                        self._to_loop(lambda outputs=outputs: self._deliver(outputs))  # type: ignore[misc]
            self.engine.close()
        except BaseException as error:
            logger.critical("the engine stopped", exc_info=error)
            self.error = error
            self._to_loop(self._die)

    def _step(self) -> list[RequestOutput]:
        """One step; if it fails, the requests that took part in it end and the others go on."""
        try:
            outputs = self.engine.step()
        except Exception:
            self._num_failed_steps += 1
            if self._num_failed_steps >= MAX_FAILED_STEPS:
                raise
            victims = {request.request_id for request in self.engine.scheduler.running}
            logger.exception("a step failed; %d requests end with it", len(victims))
            for request_id in victims:
                self.engine.abort(request_id)
            error = StepFailedError("generation failed; the server's log has the reason")
            self._to_loop(lambda: self._end_streams(error, victims))
            return []
        if any(output.token_ids for output in outputs):  # else it may only have reported what was aborted
            self._num_failed_steps = 0
        return outputs

    def _do_commands(self) -> None:
        """All waiting commands; when the engine is idle, waits for one."""
        while True:
            try:
                command = self._commands.get(block=not self.engine.has_unfinished and not self._stopping)
            except queue.Empty:
                return
            self._last_sign_of_life = time.monotonic()
            command()

    def _add(self, request_id: str, prompt_token_ids: list[int], params: SamplingParams) -> None:
        try:
            self.engine.add_request(request_id, prompt_token_ids, params)
        except ValueError as refusal:
            answer: Exception | list[RequestOutput] = refusal
        else:
            answer = []
        self._to_loop(lambda: self._answer(request_id, answer))

    def _request_stop(self) -> None:
        self._stopping = True

    def _to_loop(self, call: Callable[[], object]) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:  # the loop is closed: nobody is left to tell
            logger.debug("event loop closed before the engine's output arrived")

    # ---- back on the event loop ----------------------------------------------------------------------------------

    def _deliver(self, outputs: Sequence[RequestOutput]) -> None:
        by_request: dict[str, list[RequestOutput]] = {}
        for output in outputs:
            by_request.setdefault(output.request_id, []).append(output)
        for request_id, own in by_request.items():
            if (stream := self._streams.get(request_id)) is not None:
                stream.num_unfinished -= sum(output.finished for output in own)
                stream.outputs.put_nowait(own)

    def _answer(self, request_id: str, answer: list[RequestOutput] | Exception) -> None:
        if (stream := self._streams.get(request_id)) is not None:
            stream.outputs.put_nowait(answer)

    def _die(self) -> None:
        self._end_streams(EngineDeadError("the engine stopped"))
        if self._on_death is not None:
            self._on_death()

    def _end_streams(self, error: Exception, request_ids: Iterable[str] | None = None) -> None:
        """Let requests, by default all, end with an error."""
        for request_id in list(self._streams if request_ids is None else request_ids):
            self._answer(request_id, error)
