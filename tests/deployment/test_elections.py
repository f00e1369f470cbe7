"""Deployed elections give the model of a simulation, to the bit, with faults of clients between the phases."""

from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from fedcomp import RunConfig
from fedcomp.keys.keyring import PIN
from fedcomp.keys.signature_log import SignatureLog
from fedcomp.messages import Report
from fedcomp.sim import simulate
from fedcomp.transports.grpc import GrpcTransport

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(300)]
TINY = f"{Path(__file__).parents[1] / 'tiny_task.py'}:task"
CONFIG = RunConfig(
    task=TINY,
    clients=5,
    participation=1.0,
    partition="classes:1",
    local_steps=1,
    batch_size=1,
    seed=5,
    rounds=3,
    lr=0.02,
    weight_decay=0.5,
    engine="serial",
    device="cpu",
)
DATA, SEALED = "election:byzantine=2,f=1", "election:byzantine=2,form=ballots,sealed=true"


def lists(tensors) -> dict[str, list]:
    return {name: tensor.tolist() for name, tensor in tensors.items()}


@pytest.mark.parametrize(("strategy", "faults"), [
    (DATA, [(1, 2, "train", "killed before its reply"), (4, 3, "train", "garbage")]),
    (SEALED, [(0, 1, "ballots", "killed before training"),
              (1, 2, "tally", "killed before its reply"), (2, 3, "cards", "killed after its reply"),  # noqa: E501
              (3, 3, "ballots", "cut before its reply")]),
])  # fmt: skip
def test_a_deployed_election_gives_the_same_model_as_a_simulation(
    network, tmp_path, monkeypatch, strategy, faults
):
    config = replace(CONFIG, strategy=strategy, out=str(tmp_path / "run"))
    simulate(config)
    expected, received = load_file(tmp_path / "run" / "model.safetensors"), []
    receive = GrpcTransport.receive

    def listened(self, timeout_s: float):
        deliveries = receive(self, timeout_s)
        reports = [delivery.answer for delivery in deliveries]
        received.extend(report.pack() for report in reports if isinstance(report, Report))
        return deliveries

    monkeypatch.setattr(GrpcTransport, "receive", listened)
    with network.federation(config) as run:
        for fault in faults:
            run.faults.fail_at(*fault)
        ballots: set[bytes] = set()
        run.on_round = lambda outcome: ballots.update(ballots_of(run))
        outcomes = run.rounds()
        run.send_farewell()
        assert lists(run.layout.views(run.loop.broadcasts.weights)) == lists(expected)
        assert not run.faults.planned and all(outcome.broadcast for outcome in outcomes)
        rejected = sum(len(outcome.rejections) for outcome in outcomes)
        assert rejected == sum(how == "garbage" for *_, how in faults)
        if strategy == SEALED:
            assert all(pinned_keys_on_disk(run, client) == 5 for client in range(5))
            everything = b"\x00".join(received)
            # The server must not receive a readable ballot.
            assert len(ballots) > 5 and not any(packed in everything for packed in ballots)


def pinned_keys_on_disk(run, client: int) -> int:
    member = run.clients.member(client)
    return sum(name.startswith(PIN) for name in SignatureLog(member.folder).entries(member.run))


def ballots_of(run) -> list[bytes]:
    """Return the unencrypted ballots that the clients have in their round states."""
    values = [run.clients.member(client).round_state.values for client in range(5)]
    return [mine["bits"] for mine in values if "bits" in mine]
