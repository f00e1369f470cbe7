"""Divide work on large CPU vectors among threads."""

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

PIECE = 1 << 17  # elements converted to float32 at a time
UNIT = 128  # ranges start at multiples: whole bytes of bits, whole blocks of random words

Result = TypeVar("Result")


def map_ranges(numel: int, work: Callable[[int, int], Result], unit: int = UNIT) -> list[Result]:
    """Call work(start, stop) for ranges that cover 0..numel-1, on as many threads as torch uses; return the results in order.

    Ranges begin at multiples of `unit`. There are four for each thread, so that a thread on a busy core delays the others little.
    """
    parts = min(4 * torch.get_num_threads(), numel >> 20)
    if parts <= 1:
        return [work(0, numel)]
    edges = [*(numel * i // parts // unit * unit for i in range(parts)), numel]
    return starmap(work, list(zip(edges, edges[1:])))


def starmap(work: Callable[..., Result], calls: Sequence[tuple[Any, ...]]) -> list[Result]:
    """Call work(*call) for every call, on as many threads as torch uses, the calling thread among them; return the results in order."""
    results: list[Any] = [None] * len(calls)
    waiting = iter(list(enumerate(calls)))  # each call goes to the next free thread

    def run_calls() -> None:
        try:
            for i, call in waiting:
                results[i] = work(*call)
        except BaseException:
            list(waiting)  # no thread starts another call
            raise

    n_others = min(len(calls), torch.get_num_threads()) - 1
    others = [_pool().submit(run_calls) for _ in range(n_others)]
    try:
        run_calls()
    finally:
        for other in others:
            if not other.cancel():  # the thread has started
                other.result()
    return results


@functools.cache
def _pool() -> ThreadPoolExecutor:
    """Return a thread pool for all calls. Starting a thread takes as long as processing millions of coordinates."""
    return ThreadPoolExecutor(os.cpu_count(), "fedcomp-kernels")


os.register_at_fork(after_in_child=_pool.cache_clear)  # threads do not survive a fork


def pieces(x: Tensor, start: int, stop: int) -> Iterator[np.ndarray]:
    """Yield x[start:stop] of a CPU tensor as float32, in one piece if x is float32. Contiguous float32 is not copied."""
    length = max(stop - start, 1) if x.dtype is torch.float32 else PIECE
    for a in range(start, stop, length):
        yield x[a : min(a + length, stop)].to(torch.float32).contiguous().numpy()
