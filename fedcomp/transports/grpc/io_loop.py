"""The event loop that all gRPC streams of a process share. It runs in a daemon thread, beside programs whose main thread computes.

gRPC's asyncio API serves one loop per process well: with several, the end of one disturbs the others.
"""

import asyncio
import functools
import threading
from collections.abc import Coroutine
from typing import Any, Self

STOP_S = 5.0  # for connections to close


@functools.cache
def io_loop() -> asyncio.AbstractEventLoop:
    """Return the loop, which is started by the first call."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="fedcomp-io", daemon=True).start()
    return loop


class IoTasks:
    """While entered, runs coroutines in the event loop. Leaving it cancels those that have not ended."""

    def __enter__(self) -> Self:
        self._tasks: set[asyncio.Task[None]] = set()
        return self

    def __exit__(self, *error: object) -> None:
        asyncio.run_coroutine_threadsafe(self._cancel(), io_loop()).result(2 * STOP_S)

    def start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine. Called from another thread than the loop's."""

        def begin() -> None:
            task = io_loop().create_task(coroutine)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        io_loop().call_soon_threadsafe(begin)

    async def _cancel(self) -> None:
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=STOP_S)
