"""The batches of a client in a round depend only on seed, round and client, also if they are drawn for a whole cohort at once."""

import dataclasses

import numpy as np
import pytest
from cases import for_each

from fedcomp.errors import DataError
from fedcomp.training.local_sgd import LocalSGD, plan_all_batches, plan_batches

SGD = LocalSGD(steps=4, batch_size=8, lr=0.1)
STEPS = [(1, 0, 1), (2, 0, 100), (50, 0, 3), (15, 0, 10)]
COHORTS = {
    "alike": [300] * 200,
    "of every size": range(1, 201),
    "in pieces": [70] * 1025,
    "of one example": [1] * 150,
    "of as many as a pass takes": [32] * 100,
    "large": [10_001, 1_600, 20_000] * 70,
    "few": [50] * 3,
}


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


# Every cohort with steps and with epochs, and the cohort with clients of every size with all STEPS.
@for_each(
    "cohort, sgd",
    [
        (cohort, sgd)
        for cohort in COHORTS.values()
        for sgd in (SGD, LocalSGD(steps=1, epochs=2, batch_size=10))
    ]
    + [(COHORTS["of every size"], LocalSGD(*given)) for given in STEPS],
)
def test_the_batches_of_a_cohort_are_those_of_each_client_alone(cohort, sgd):
    shards = [np.arange(length) * 3 + who for who, length in enumerate(cohort)]
    asked = [(2 + who % 2, 7 * who) for who in range(len(shards))]
    check(sgd, shards, asked)


def check(sgd, shards, asked):
    plans = plan_all_batches(sgd, shards, 5, asked)
    assert len(plans) == len(shards)
    for plan, shard, (round, who) in zip(plans, shards, asked, strict=True):
        alone = plan_batches(sgd, shard, 5, round, who)
        assert [b.tolist() for b in plan] == [b.tolist() for b in alone] and {
            b.dtype for b in plan
        } == {np.dtype(np.int64)}


def test_an_empty_shard_in_a_cohort_raises_data_error():
    with pytest.raises(DataError, match="client 60 has no examples"):
        plan_all_batches(
            SGD, [np.arange(40)] * 60 + [np.arange(0)], 0, [(1, who) for who in range(61)]
        )
