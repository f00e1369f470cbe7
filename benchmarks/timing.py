"""Timing for the other benchmarks. Each repeat calls every compared function once, so that other load affects all functions alike."""

import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from typing import NamedTuple, TypeVar

Key = TypeVar("Key", bound=Hashable)


class Times(NamedTuple):
    """Median times of a function, in seconds."""

    wall_s: float
    processor_s: float  # processor time of all threads together


def medians(
    functions: Mapping[Key, Callable[[], object]],
    repeats: int,
    before: Callable[[], object] = lambda: None,
) -> dict[Key, Times]:
    """Return the median times of each function over `repeats` repeats, each of which calls every function once.

    An additional first call of each function, which may compile, is not counted. `before` is called before each call; its time is not
    counted.
    """
    wall_s: dict[Key, list[float]] = {key: [] for key in functions}
    processor_s: dict[Key, list[float]] = {key: [] for key in functions}
    for _ in range(repeats + 1):
        for key, function in functions.items():
            before()
            begin, processor_begin = time.perf_counter(), time.process_time()
            function()
            wall_s[key].append(time.perf_counter() - begin)
            processor_s[key].append(time.process_time() - processor_begin)
    return {
        key: Times(statistics.median(wall_s[key][1:]), statistics.median(processor_s[key][1:]))
        for key in functions
    }
