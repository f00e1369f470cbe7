"""Each partition is trained once per round, and an error affects only its clients."""

from dataclasses import replace

import pytest
from small_runs import TINY, model_bytes, out

from fedcomp.sim import simulate
from fedcomp.sim.batched import BatchedEngine
from fedcomp.training.engine import SerialEngine

CODED = replace(
    TINY,
    uplink="sign",
    downlink="efsign",
    memory="none",
    lr=0.02,
    participation=1.0,
    clients=9,
    rounds=2,
    batch_size=1,
    strategy="election:byzantine=2",
)


@pytest.mark.parametrize(
    ("attack", "trainings"),
    [(None, 9), ("inverted:2", 9), ("code-aware:2", 9), ("label-flip:1", 18)],
)
def test_each_partition_is_trained_once_per_round(tmp_path, monkeypatch, attack, trainings):
    """Byzantine clients with other data, even with all partitions, train separately and do not change the results of others."""
    count, train_job = [], SerialEngine.train_job

    def counted(self, start, data, job, *rest):
        count.append((job.round, job.client))
        return train_job(self, start, data, job, *rest)

    monkeypatch.setattr(SerialEngine, "train_job", counted)
    simulate(replace(CODED, engine="serial", attack=attack, out=out(tmp_path, "run")))
    for round in (1, 2):
        trained = [client for r, client in count if r == round]
        assert (
            set(trained) == set(range(9))
            and 9 <= len(trained) <= trainings
            and (len(trained) > 9) == (trainings > 9)
        )


def test_the_batched_engine_trains_partitions_together_or_one_by_one_after_an_error(
    tmp_path, monkeypatch
):
    sizes, train = [], BatchedEngine.train_together

    def counted(self, start, data, jobs, *given):
        sizes.append(len(jobs))
        return train(self, start, data, jobs, *given)

    monkeypatch.setattr(BatchedEngine, "train_together", counted)
    simulate(replace(CODED, out=out(tmp_path, "run")))
    assert sizes[-2:] == [9, 9]

    def fails_together(self, start, data, jobs, *given):
        if len(jobs) > 1:
            raise RuntimeError("out of memory")
        return train(self, start, data, jobs, *given)

    monkeypatch.setattr(BatchedEngine, "train_together", fails_together)
    summary = simulate(replace(CODED, out=out(tmp_path, "alone")))
    assert summary.client_updates == 2 * 9 and model_bytes(out(tmp_path, "alone")) == model_bytes(
        out(tmp_path, "run")
    )
