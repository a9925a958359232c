"""`Worker`: runs an engine in a thread of its own, for requests from an event loop."""

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import jax

from ..engine import Engine
from ..requests import Event, RequestError


class Worker:
    """Runs an engine in a thread. Requests come from one event loop at a time, and their events go back to it.

    **Arguments:**

    - `engine`: an `ejx.serving.Engine`. Nothing else may call it while the thread runs.
    """

    def __init__(self, engine: Engine):
        self.engine, self.active = engine, 0
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._outputs: dict[int, asyncio.Queue[Event | Exception]] = {}  # by the number of the request
        self._failed: RuntimeError | None = None

    @contextlib.asynccontextmanager
    async def running(self, _: Any = None) -> AsyncIterator[None]:
        """The thread runs meanwhile."""
        self._failed, self._loop = None, asyncio.get_running_loop()
        thread = threading.Thread(target=self._run, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._calls.put(None)
            await asyncio.to_thread(thread.join)

    async def generate(self, *request: Any, **options: Any) -> AsyncIterator[Event]:
        """The events of a request, whose arguments are those of `Engine.submit`. If it is left early, the request is cancelled.

        **Raises:** what `submit` raises, and what ended the step that the request was in.
        """
        output: asyncio.Queue[Event | Exception] = asyncio.Queue()
        number: list[int] = []

        def submit() -> None:
            try:
                if self._failed is not None:
                    raise self._failed
                number.append(self.engine.submit(*request, **options))
                self._outputs[number[0]] = output
            except (RequestError, RuntimeError) as error:
                self._send([(output, error)])

        def cancel() -> None:
            if number and self._outputs.pop(number[0], None) is not None:
                self.engine.cancel(number[0])

        self.active += 1
        self._calls.put(submit)
        try:
            if self._failed is not None:
                raise self._failed
            while True:
                event = await output.get()
                if isinstance(event, Exception):
                    raise event
                yield event
                if event.finish is not None:
                    return
        finally:
            self.active -= 1
            self._calls.put(cancel)

    def _run(self) -> None:
        failure = RuntimeError("the server was stopped")
        try:
            while True:
                idle = not (self.engine.num_running or self.engine.num_waiting)
                while idle or not self._calls.empty():
                    if (call := self._calls.get()) is None:
                        return
                    call()
                    idle = False
                try:
                    events = self.engine.step()
                except (
                    jax.errors.JaxRuntimeError
                ) as error:  # such as too little memory: requests end, the engine goes on
                    self._end(error)
                    continue
                self._send([(self._outputs[event.request], event) for event in events])
                for event in events:
                    if event.finish is not None:
                        del self._outputs[event.request]
        except BaseException as error:  # a mistake in the engine: nobody waits for ever
            failure = RuntimeError(f"the engine ended: {error}")
            raise
        finally:
            self._failed = failure
            self._end(failure)
            while not self._calls.empty():
                if (call := self._calls.get()) is not None:
                    call()

    def _end(self, error: Exception) -> None:
        """Ends all requests with an error."""
        self._send([(output, error) for output in self._outputs.values()])
        for number in self._outputs:
            self.engine.cancel(number)
        self._outputs.clear()

    def _send(self, events: list[tuple[Any, Any]]) -> None:
        """Passes events to the loop, all in one call."""

        def put() -> None:
            for output, event in events:
                output.put_nowait(event)

        if events and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(put)
