"""A client that does not reach its server says why, goes on trying, and does not fill the screen with it."""

import pytest
import torch
from deployment import free_port
from tiny_task import task

from fedcomp.deployment import client_process as process
from fedcomp.deployment.client_process import Process, Target
from fedcomp.deployment.handshake import Own
from fedcomp.deployment.member import Member
from fedcomp.errors import UnreachableError


@pytest.fixture
def client(monkeypatch):
    """A client whose attempts follow each other at once, and what it says."""
    said = []
    monkeypatch.setattr(process, "RETRY_S", (0.01, 0.02, 0.03, 0.04, 0.05))

    def made(patience_s):
        member = Member(Own(task, task.train(), torch.device("cpu"), 0, 0), None)
        return Process(
            Target("127.0.0.1", free_port(), None, None),
            member,
            lambda sentence: said.append(str(sentence)),
            patience_s=patience_s,
        ), said

    return made


def test_a_server_that_stays_away_is_told_five_times_and_the_fifth_says_what_it_may_mean(client):
    waiting, said = client(1.0)
    with pytest.raises(UnreachableError, match="nothing listens on"):
        waiting.run()
    assert [sentence.rpartition("; ")[2] for sentence in said] == [
        "trying again in 0.01 s",
        "trying again in 0.02 s",
        "trying again in 0.03 s",
        "trying again in 0.04 s",
        "trying every 0.05 s from now on, for 1 s in all: the server may be away, or the run over",
    ]


def test_a_new_cause_is_told_and_the_same_one_is_not(client, monkeypatch):
    causes = iter(["closed"] * 8 + ["silent"] * 3 + ["closed"] * 2)

    def check(*where):
        try:
            cause = next(causes)
        except StopIteration:
            raise UnreachableError("it is another server", "ca") from None
        raise UnreachableError(f"it is {cause}", cause)

    monkeypatch.setattr(process.connection, "check_server", check)
    waiting, said = client(None)
    with pytest.raises(UnreachableError, match="another server"):
        waiting.run()
    assert [sentence.partition(";")[0] for sentence in said] == ["it is closed"] * 5 + [
        "it is silent",
        "it is closed",
    ]
    assert all(
        "until it is stopped: the server may be away, or the run over" in sentence
        for sentence in said[4:]
    )


def test_a_client_that_nobody_asks_for_anything_says_so_once(client, monkeypatch):
    """Its id may be beyond the clients of the run."""

    class Nobody:
        looks = 0

        def receive(self):
            self.looks += 1
            if self.looks == 50:
                raise UnreachableError("cut off", "network")

    monkeypatch.setattr(process, "UNASKED_S", 0.05)
    monkeypatch.setattr(process, "wait_s", lambda *idle: 0.01)
    waiting, said = client(None)
    with pytest.raises(UnreachableError, match="cut off"):
        waiting._attend(Nobody())
    assert said == [process.UNASKED]
