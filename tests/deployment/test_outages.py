"""Frozen, killed and restarted processes, and full disks, cause at most one missed deadline, and no update is lost."""

import re
import resource
import signal
import time
from pathlib import Path

import pytest
from deployment import WIDE, stage
from run_files import records

from fedcomp.server.transport import GRACE_S

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(300)]
FLAGS = "--clients 4 --participation 1 --batch-size 10 --seed 5 --insecure".split()


def fill_the_disk(command) -> None:
    """Let no file of a process grow beyond its largest open file, as if the disk were full."""
    files = Path(f"/proc/{command.process.pid}/fd").iterdir()
    limit_files(command, max(path.stat().st_size for path in files if path.exists()))


def limit_files(command, size: int) -> None:
    limits = (size, resource.RLIM_INFINITY)
    resource.prlimit(command.process.pid, resource.RLIMIT_FSIZE, limits)


def ended_with(command, sentence: str) -> bool:
    """Return whether a process has printed an error message and no traceback."""
    found = re.search(f"^fedcomp: {sentence}$", command.output, re.MULTILINE)
    return bool(found) and "Traceback" not in command.output


def test_frozen_and_killed_clients_miss_one_deadline_and_full_disks_are_reported(tmp_path):
    with stage(tmp_path) as on:
        server = on.server(*FLAGS, *WIDE, "--rounds", "100000", "--deadline", "2")
        clients = [on.client(i, "--insecure", *WIDE, "--state-dir", f"state{i}") for i in range(4)]
        server.wait_for(r"^ +2 .* 4/4 ")

        clients[2].send(signal.SIGSTOP)
        late = r"no reply within 2 s \(--deadline\)"
        server.wait_for(rf"^round \d+: client 2 rejected at deadline: {late}$")
        server.wait_for(r"(?s)rejected at deadline.*^ +\d+ .* 3/3 ")
        # During a round, or between two rounds; then the next round waits for the client.
        clients[3].kill()
        gone = r"(client 3 rejected at deadline|, without clients 2, 3 \()"
        server.wait_for(gone)
        server.wait_for(rf"(?s){gone}.*^ +\d+ .* 2/2 ")
        before = len(clients[2].output)
        clients[2].send(signal.SIGCONT)
        server.wait_for(rf"(?s){gone}.*^ +\d+ .* 3/3 ")
        answered = r"^\S+ round \d+: \d+ bytes down, \d+ bytes up"
        assert re.search(answered, clients[2].output[before:], re.MULTILINE)

        limit_files(clients[1], (tmp_path / "state1" / "state.bin").stat().st_size // 2)
        assert clients[1].end() == 2
        why = (
            r"--state-dir state1 cannot be written \(File too large\); "
            "free disk space, and start the client again, which continues from its previous state"
        )
        assert ended_with(clients[1], why)
        unsaved = "--state-dir state1 cannot be written"
        server.wait_for(rf"^round \d+: client 1 rejected at encode: {unsaved}")
        for i in (1, 3):
            words = ("--insecure", *WIDE, "--state-dir", f"state{i}")
            clients[i] = on.client(i, *words, name=f"again{i}")
            clients[i].wait_for(r"^\S+ round \d+: ")

        fill_the_disk(server)
        assert server.end() == 6, server.output
        why = "the checkpoint in run.checkpoint could not be written .*; the previous checkpoint is intact; free disk space .* --resume"
        assert ended_with(server, why)
        done = records(tmp_path / "run")[-1]["round"]
        server = on.server(*FLAGS, *WIDE, "--rounds", str(done + 2), "--deadline", "60", "--resume")
        assert server.end() == 0, server.output
        assert [client.end() for client in clients] == [0, 0, 0, 0]
    rounds = records(tmp_path / "run")
    rejections = [rejection for record in rounds for rejection in record["rejections"]]
    assert any((r["client"], r["stage"]) == (2, "deadline") for r in rejections)
    assert [record["round"] for record in rounds] == list(range(1, done + 3))
    assert all(record["accepted"] + record["rejected"] == record["cohort"] for record in rounds)
    assert [record["accepted"] for record in rounds[-2:]] == [4, 4]


@pytest.mark.slow
def test_a_round_that_needs_every_client_waits_for_a_killed_client(tmp_path):
    """The killed client stays away for longer than the default time limit for reconnecting."""
    with stage(tmp_path) as on:
        server = on.server(*FLAGS, "--rounds", "3")
        clients = [on.client(i, "--insecure") for i in range(3)]
        # Killed in the second round; a round has five steps.
        killed = on.client(3, "--insecure", kill_at=7)
        assert killed.end() != 0
        server.wait_for("^3 of 4 clients are connected: 0, 1, 2$")
        time.sleep(GRACE_S + 1)
        again = on.client(3, "--insecure", name="again")
        assert server.end() == 0, server.output
        assert [client.end() for client in [*clients, again]] == [0, 0, 0, 0]
    accepted = [(line["accepted"], line["rejected"]) for line in records(tmp_path / "run")]
    assert accepted == [(4, 0)] * 3
