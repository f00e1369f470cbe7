"""A fake run of realistic size that calls the hooks of a callback."""

import math

import pytest

from fedcomp.callbacks import Callback, Header, Rejection, RoundRecord, Summary

PARAMETERS, CLIENTS, COHORT = 431_080, 500, 50
DENSE = 4 * PARAMETERS * COHORT


class FakeRun:
    """The header, the records and the summary of a run of `rounds` rounds."""

    def __init__(self, rounds: int, first: int = 1):
        self.header = Header(
            task="mnist-cnn",
            clients=CLIENTS,
            cohort=COHORT,
            parameters=PARAMETERS,
            strategy="average",
            uplink="stc:density=1/100",
            downlink="topk:density=1%,values=fp16@layer",
            memory="residual",
            partition="dirichlet:0.1",
            device="cuda:0",
            engine="batched, 50 clients at once",
            first_round=first,
            rounds=rounds,
            out="runs/mnist-cnn-20260102-030405",
        )
        self.records = [self.record(number) for number in range(first, rounds + 1)]
        self.out = self.header.out

    def record(self, number: int) -> RoundRecord:
        """Return the record of a round. Every third round has no evaluation, and every seventh round two rejected clients."""
        distance = math.exp(-number / 9)
        evaluated = number % 3 != 2
        rejections = (
            tuple(Rejection(client, "decode", "the checksum differs") for client in (7, 9))
            if number % 7 == 0
            else ()
        )
        return RoundRecord(
            round=number,
            accuracy=1 - 0.9 * distance if evaluated else None,
            loss=2.3 * distance if evaluated else None,
            train_loss=2.2,
            cohort=COHORT,
            accepted=COHORT - len(rejections),
            rejected=len(rejections),
            uplink_bytes=DENSE // 350,
            downlink_bytes=DENSE // 100,
            dense_uplink_bytes=DENSE,
            dense_downlink_bytes=DENSE,
            seconds=0.25,
            rejections=rejections,
        )

    @property
    def summary(self) -> Summary:
        n = len(self.records)
        return Summary(
            accuracy=0.9731,
            loss=0.0912,
            uplink_bytes=n * (DENSE // 350),
            downlink_bytes=n * (DENSE // 100),
            dense_uplink_bytes=n * DENSE,
            dense_downlink_bytes=n * DENSE,
            rounds=n,
            clients=CLIENTS,
            client_updates=n * COHORT,
            seconds=72.3,
            client_updates_per_s=691.2,
            device="cuda:0",
            seed=0,
            version="0.1.0",
        )

    def to(self, callback: Callback, end: bool = True) -> None:
        """Call the hooks of the whole run. Without `end`, the run is not finished."""
        callback.on_run_start(self.header)
        for record in self.records:
            callback.on_progress(record.round, record.cohort, record.cohort)
            callback.on_round_end(record)
        if end:
            callback.on_run_end(self.summary, self.out)


@pytest.fixture
def fake_run() -> type[FakeRun]:
    return FakeRun
