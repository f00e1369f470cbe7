"""Frozen, killed and restarted processes, and full disks, cause at most one missed deadline, and no update is lost."""

import json
import re
import resource
import signal
import time
from pathlib import Path

import pytest
from deployment import WIDE, stage

from fedcomp.server.transport import GRACE_S

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(300)]
FLAGS = [
    "--clients",
    "4",
    "--participation",
    "1",
    "--batch-size",
    "10",
    "--seed",
    "5",
    "--insecure",
]


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def fill_the_disk(command) -> None:
    """Limit the size of files that a process writes, as if the disk were full."""
    number = command.process.pid
    longest = max(
        path.stat().st_size for path in Path(f"/proc/{number}/fd").iterdir() if path.exists()
    )
    resource.prlimit(number, resource.RLIMIT_FSIZE, (longest, resource.RLIM_INFINITY))


def test_frozen_and_killed_clients_miss_one_deadline_and_full_disks_are_reported(tmp_path):
    with stage(tmp_path) as on:
        server = on.server(*FLAGS, *WIDE, "--rounds", "100000", "--deadline", "2")
        clients = [on.client(i, "--insecure", *WIDE, "--state-dir", f"state{i}") for i in range(4)]
        server.wait_for(r"^ +2 .* 4/4 ")

        clients[2].send(signal.SIGSTOP)
        server.wait_for(
            r"^round \d+: client 2 rejected at deadline: no reply within 2 s \(--deadline\)$"
        )
        server.wait_for(r"(?s)rejected at deadline.*^ +\d+ .* 3/3 ")
        # During a round, or between two rounds; then the next round waits for the client.
        clients[3].kill()
        gone = r"(client 3 rejected at deadline|, without clients 2, 3: )"
        server.wait_for(gone)
        server.wait_for(rf"(?s){gone}.*^ +\d+ .* 2/2 ")
        before = len(clients[2].output)
        clients[2].send(signal.SIGCONT)
        server.wait_for(rf"(?s){gone}.*^ +\d+ .* 3/3 ")
        assert re.search(
            r"^\S+ round \d+: \d+ bytes down, \d+ bytes up",
            clients[2].output[before:],
            re.MULTILINE,
        )

        state = (tmp_path / "state1" / "state.bin").stat().st_size
        resource.prlimit(
            clients[1].process.pid, resource.RLIMIT_FSIZE, (state // 2, resource.RLIM_INFINITY)
        )
        assert clients[1].end() == 2
        why = (
            r"--state-dir state1 cannot be written \(File too large\); the previous state is intact: "
            "free disk space, and start the client again"
        )
        assert (
            re.search(f"^fedcomp: {why}$", clients[1].output, re.MULTILINE)
            and "Traceback" not in clients[1].output
        )
        server.wait_for(
            r"^round \d+: client 1 rejected at encode: --state-dir state1 cannot be written"
        )
        for i in (1, 3):
            words = ("--insecure", *WIDE, "--state-dir", f"state{i}")
            clients[i] = on.client(i, *words, name=f"again{i}")
            clients[i].wait_for(r"^\S+ round \d+: ")

        fill_the_disk(server)
        assert server.end() == 6, server.output
        why = "the checkpoint in run.checkpoint could not be written .*; the previous checkpoint is intact; free disk space, .* --resume"
        assert (
            re.search(f"^fedcomp: {why}$", server.output, re.MULTILINE)
            and "Traceback" not in server.output
        )
        done = lines(tmp_path / "run")[-1]["round"]
        server = on.server(*FLAGS, *WIDE, "--rounds", str(done + 2), "--deadline", "60", "--resume")
        assert server.end() == 0, server.output
        assert [client.end() for client in clients] == [0, 0, 0, 0]
    records = lines(tmp_path / "run")
    late = {
        rejection["client"]
        for record in records
        for rejection in record["rejections"]
        if rejection["stage"] == "deadline"
    }
    assert 2 in late  # and perhaps other clients that were slow on a busy machine
    assert [record["round"] for record in records] == list(range(1, done + 3))
    assert all(record["accepted"] + record["rejected"] == record["cohort"] for record in records)
    assert [record["accepted"] for record in records[-2:]] == [4, 4]


@pytest.mark.slow
def test_a_round_that_needs_every_client_waits_for_a_killed_client(tmp_path):
    """The wait is longer than the grace period of other runs, so this test is slow."""
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
    assert [(line["accepted"], line["rejected"]) for line in lines(tmp_path / "run")] == [
        (4, 0)
    ] * 3
