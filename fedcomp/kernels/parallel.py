"""Batches of vectors, and functions that use several threads for large vectors on the CPU.

A batch is either a tensor [m, n] or a sequence of m tensors [n] of the same dtype on the same device.
"""

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

LARGE = 100_000  # vectors on the CPU of at least this size are each processed on their own thread
PIECE = 1 << 17  # number of elements that are converted to float32 at a time
# Ranges start at multiples of UNIT, and therefore at whole bytes of packed bits and whole blocks of random words.
UNIT = 128

Rows = Tensor | Sequence[Tensor]
Result = TypeVar("Result")


def stacked(rows: Rows) -> Tensor:
    """Return a batch of m ≥ 1 vectors as a tensor [m, n]. A tensor and a single vector are not copied."""
    if isinstance(rows, Tensor):
        return rows
    return torch.stack(tuple(rows)) if len(rows) > 1 else rows[0][None]


def are_large(rows: Rows) -> bool:
    """Return whether each vector of a batch should be processed on its own thread."""
    return rows[0].device.type == "cpu" and rows[0].numel() >= LARGE


def split_runs(values: np.ndarray, counts: np.ndarray) -> list[np.ndarray]:
    """Split an array into m consecutive views, called runs, of lengths `counts` [m]. Several times as fast as np.split."""
    return [values[start:stop] for start, stop in pairwise([0, *counts.cumsum().tolist()])]


def map_ranges(numel: int, work: Callable[[int, int], Result], unit: int = UNIT) -> list[Result]:
    """Call work(start, stop) for ranges that cover 0..numel-1, on as many threads as torch uses. Return the results in order.

    Ranges begin at multiples of `unit`.
    """
    # Several ranges per thread, so that a thread on a busy core can process fewer ranges.
    parts = min(4 * torch.get_num_threads(), numel >> 20)
    if parts <= 1:
        return [work(0, numel)]
    edges = [*(numel * i // parts // unit * unit for i in range(parts)), numel]
    return starmap(work, list(pairwise(edges)))


def starmap(work: Callable[..., Result], calls: Sequence[tuple[Any, ...]]) -> list[Result]:
    """Return [work(*call) for call in calls], computed on as many threads as torch uses, including the calling thread."""
    results: list[Any] = [None] * len(calls)
    waiting = iter(list(enumerate(calls)))  # each thread that is free takes the next call

    def run_calls() -> None:
        try:
            for i, call in waiting:
                results[i] = work(*call)
        except BaseException:
            list(waiting)  # discard all remaining calls, so that no thread starts another call
            raise

    n_others = min(len(calls), torch.get_num_threads()) - 1
    others = [_pool().submit(run_calls) for _ in range(n_others)]
    try:
        run_calls()
    finally:
        for other in others:
            if not other.cancel():  # it has started
                other.result()
    return results


@functools.cache
def _pool() -> ThreadPoolExecutor:
    """Return the one pool of all calls. Starting a thread takes as long as processing millions of coordinates."""
    return ThreadPoolExecutor(os.cpu_count(), "fedcomp-kernels")


# A forked process does not have the threads of its parent.
os.register_at_fork(after_in_child=_pool.cache_clear)


def pieces(x: Tensor, start: int, stop: int) -> Iterator[np.ndarray]:
    """Yield the elements start..stop-1 of a CPU tensor as consecutive float32 arrays: one, not copied, if x is contiguous float32."""
    length = max(stop - start, 1) if x.dtype is torch.float32 else PIECE
    for a in range(start, stop, length):
        yield x[a : min(a + length, stop)].to(torch.float32).contiguous().numpy()
