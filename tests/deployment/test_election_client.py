"""Clients of a deployed election: repeated assignments, and the data and keys that they need."""

from dataclasses import replace

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from test_process import DATA, invitation, new_config, new_loop, setup_of, up_to_date

from fedcomp import UserError
from fedcomp.deployment.deployed_client import DeployedClient
from fedcomp.keys.keyring import point_of
from fedcomp.messages import UPDATE, Assignment
from fedcomp.privacy.ballots import CARD
from fedcomp.strategies.base import DataPartition
from fedcomp.strategies.codes import ROW, CodeRow
from fedcomp.strategies.sealed_election import KEY_OF, NO_CARD, terms_of


def deployed(text: str, **changes) -> tuple[DeployedClient, Assignment]:
    """Return a client of a run of five clients, and its first assignment."""
    config = new_config(clients=5, strategy=text)
    loop = new_loop(config)
    member = DeployedClient(setup_of(2, **changes), None)
    member.key = ec.generate_private_key(ec.SECP384R1())
    presence = member.join(invitation(config, loop))
    assert not presence.reason, presence.reason
    phase = loop.strategy.client_algorithm.phases[0]
    return member, replace(up_to_date(loop, 2), phase=phase)


def new_point() -> bytes:
    return point_of(ec.generate_private_key(ec.SECP384R1()).public_key())


def test_a_client_answers_again_if_the_inputs_of_its_assignment_changed():
    """A restarted server makes a new attempt of the round, in which the cards (signed keys) of the previous attempt are invalid."""
    member, asked = deployed("election:byzantine=2,form=ballots,sealed=true")
    terms = terms_of(member.session.algorithm.options, asked.fingerprint, 1.0).encode()
    row = CodeRow(2, 0, tuple(DataPartition(j, (j,)) for j in range(5))).pack()
    points = {client: new_point() for client in range(5)} | {2: point_of(member.key.public_key())}

    def attempt(name: bytes) -> Assignment:
        announced = {"attempt": name * 32, "terms": terms, ROW: row}
        announced |= {f"{KEY_OF}{client}": point for client, point in points.items()}
        flat = [part for key, value in announced.items() for part in (key.encode(), value)]
        return replace(asked, announced=flat)

    first = member.answer(attempt(b"1"))
    assert first.kind == UPDATE and member.answer(attempt(b"1")) is first
    second = member.answer(attempt(b"2"))
    assert second.kind == UPDATE and second.frame != first.frame
    assert len(second.frame) == len(first.frame)
    points[3] = new_point()  # differs from the key that the client has pinned
    third = member.answer(attempt(b"3"))
    cards = [third.frame[at : at + CARD] for at in range(0, 5 * CARD, CARD)]
    assert third.kind == UPDATE
    assert [client for client in range(5) if cards[client] == NO_CARD] == [3]


def test_a_client_needs_the_data_of_all_clients_to_train_on_their_partitions():
    advice = "--partition-id K and the data of the whole task, or set form=ballots in the server's --strategy"
    for changes in ({"partition_id": None}, {"partitions": 7}):
        with pytest.raises(UserError, match=advice):
            deployed("election:byzantine=2", **changes)
        deployed("election:byzantine=2,form=ballots", **changes)
    member, _ = deployed("election:byzantine=2")
    assert sorted(np.concatenate(member.session.trainer.all_shards)) == list(range(len(DATA)))
