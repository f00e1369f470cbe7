"""The event loop that all gRPC streams of a process share. The loop runs in a daemon thread, so that the main thread can compute.

There is only one event loop per process, because gRPC's asyncio API does not support several event loops. If one event loop stopped, it
would disturb the others.
"""

import asyncio
import functools
import threading
from collections.abc import Coroutine, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

STOP_S = 5.0  # time limit for connections to close


@functools.cache
def io_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of all gRPC streams. The first call starts the loop."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="fedcomp-io", daemon=True).start()
    return loop


@contextmanager
def io_tasks(coroutines: Iterable[Coroutine[Any, Any, None]]) -> Iterator[None]:
    """Run coroutines in the event loop of all gRPC streams. On exit, cancel the coroutines that have not ended."""

    async def start() -> list[asyncio.Task[None]]:
        return [asyncio.create_task(coroutine) for coroutine in coroutines]

    async def cancel() -> None:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=STOP_S)

    tasks = asyncio.run_coroutine_threadsafe(start(), io_loop()).result()
    try:
        yield
    finally:
        asyncio.run_coroutine_threadsafe(cancel(), io_loop()).result(2 * STOP_S)
