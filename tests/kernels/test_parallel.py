"""Work divided among threads: everything is done once and in order, also in nested calls, after an error and in a forked process."""

import multiprocessing
import threading

import pytest
from torch_threads import torch_threads

from fedcomp.kernels import parallel


@pytest.fixture(autouse=True)
def two_threads():
    with torch_threads(2):
        yield


def squares(queue=None):
    found = parallel.starmap(lambda i: i * i, [(i,) for i in range(100)])
    return found if queue is None else queue.put(found)


def test_results_come_in_the_order_of_the_calls():
    assert squares() == [i * i for i in range(100)]
    assert parallel.starmap(squares, []) == []


def test_ranges_cover_the_vector_once():
    numel = 9_000_001
    edges = parallel.map_ranges(numel, lambda start, stop: (start, stop))
    assert len(edges) > 1
    assert [start for start, _ in edges] == [0, *(stop for _, stop in edges[:-1])]
    assert edges[-1][1] == numel
    assert all(start % parallel.UNIT == 0 for start, _ in edges)


def test_two_threads_work_at_the_same_time():
    together = threading.Barrier(2, timeout=60)

    def meet():
        together.wait()
        return threading.get_ident()

    assert len(set(parallel.starmap(meet, [(), ()]))) == 2


def test_nested_calls_and_calls_from_many_threads_end():
    def inside(i):
        return sum(parallel.starmap(lambda j: i + j, [(j,) for j in range(10)]))

    found = {}

    def outside(name):
        found[name] = parallel.starmap(inside, [(i,) for i in range(20)])

    threads = [threading.Thread(target=outside, args=(name,)) for name in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {name: [10 * i + 45 for i in range(20)] for name in range(8)}


def test_an_error_is_raised_and_the_remaining_work_is_skipped():
    done = []

    def work(i):
        if i == 3:
            raise ValueError("the fourth")
        done.append(i)

    with pytest.raises(ValueError, match="the fourth"):
        parallel.starmap(work, [(i,) for i in range(100_000)])
    assert len(done) < 99_999
    assert squares() == [i * i for i in range(100)]


@pytest.mark.filterwarnings("ignore:This process")  # this tests forks of processes with threads
def test_a_forked_process_has_its_own_threads():
    squares()
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=squares, args=(queue,))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert queue.get() == [i * i for i in range(100)]
