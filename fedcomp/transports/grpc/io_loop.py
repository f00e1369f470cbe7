"""The event loop that all gRPC streams of a process share. The loop runs in a daemon thread, so that the main thread can compute.

There is one loop per process, because gRPC's asyncio API does not support several: a loop that stops disturbs the others.
"""

import asyncio
import functools
import threading
from collections.abc import Coroutine
from typing import Any, Self

STOP_S = 5.0  # time for connections to close


@functools.cache
def io_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop, which the first call starts."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="fedcomp-io", daemon=True).start()
    return loop


class IoTasks:
    """A context manager that runs coroutines in the event loop. On exit, the manager cancels the coroutines that have not ended."""

    def __enter__(self) -> Self:
        self._tasks: set[asyncio.Task[None]] = set()
        return self

    def __exit__(self, *error: object) -> None:
        asyncio.run_coroutine_threadsafe(self._cancel(), io_loop()).result(2 * STOP_S)

    def start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine. Call `start` from another thread than that of the event loop."""

        def create_task() -> None:
            task = io_loop().create_task(coroutine)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        io_loop().call_soon_threadsafe(create_task)

    async def _cancel(self) -> None:
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=STOP_S)
