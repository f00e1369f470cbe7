"""The batches of a client in a round depend only on seed, round and client."""

import dataclasses

import numpy as np
import pytest

from fedcomp.errors import DataError
from fedcomp.training.local_sgd import LocalSGD, plan_batches

SGD = LocalSGD(steps=4, batch_size=8, lr=0.1)


def test_with_steps_all_batches_have_the_same_size_and_a_pass_repeats_no_example():
    shard = np.arange(100, 150)
    batches = plan_batches(dataclasses.replace(SGD, steps=7, batch_size=20), shard, 0, 1, 2)
    assert [len(b) for b in batches] == [20] * 7
    for first in (0, 2, 4):
        assert len(set(np.concatenate(batches[first : first + 2]))) == 40
    assert set(np.concatenate(batches)) <= set(shard) and batches[0].dtype == np.int64


def test_with_epochs_the_batches_of_a_pass_contain_every_example_once():
    shard = np.arange(100, 150)
    batches = plan_batches(dataclasses.replace(SGD, epochs=2, batch_size=20), shard, 0, 1, 2)
    assert [len(b) for b in batches] == [20, 20, 10] * 2
    passes = np.concatenate(batches[:3]), np.concatenate(batches[3:])
    assert all(sorted(p) == list(shard) for p in passes) and list(passes[0]) != list(passes[1])


def test_if_the_batch_size_exceeds_the_shard_a_batch_is_the_whole_shard():
    for sgd in (dataclasses.replace(SGD, steps=3), dataclasses.replace(SGD, epochs=3)):
        assert [sorted(b) for b in plan_batches(sgd, np.arange(5), 0, 1, 2)] == [list(range(5))] * 3


def test_batches_depend_on_seed_round_and_client():
    def drawn(seed, round, who):
        return tuple(np.concatenate(plan_batches(SGD, np.arange(50), seed, round, who)))

    assert drawn(0, 1, 2) == drawn(0, 1, 2)
    assert len({drawn(0, 1, 2), drawn(1, 1, 2), drawn(0, 2, 2), drawn(0, 1, 3)}) == 4


def test_all_examples_are_drawn_about_equally_often():
    counts = np.zeros(30)
    for who in range(600):
        for batch in plan_batches(
            dataclasses.replace(SGD, steps=1, batch_size=10), np.arange(30), 0, 1, who
        ):
            counts[batch] += 1
    assert abs(counts - 200).max() < 60  # five standard deviations


def test_an_empty_shard_raises_data_error():
    with pytest.raises(DataError, match="client 7 has no examples.*--clients"):
        plan_batches(SGD, np.arange(0), 0, 1, 7)
