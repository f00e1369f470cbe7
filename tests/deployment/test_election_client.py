"""Clients of a deployed election: repeated assignments, and the data and keys that they need."""

from dataclasses import replace

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from test_process import DATA, a_loop, invitation, own

from fedcomp import RunConfig, UserError
from fedcomp.deployment.deployed_client import DeployedClient
from fedcomp.keys.keyring import point_of
from fedcomp.messages import UPDATE, Assignment
from fedcomp.privacy.ballots import CARD
from fedcomp.strategies import resolved
from fedcomp.strategies.base import DataPartition
from fedcomp.strategies.codes import ROW, CodeRow
from fedcomp.strategies.sealed_election import KEY_OF, NO_CARD, terms_of


def deployed(text: str, **changes) -> tuple[DeployedClient, Assignment]:
    """Return a client of a run of five clients, and its first assignment."""
    config = resolved(RunConfig(clients=5, participation=1.0, batch_size=10, strategy=text))
    made = a_loop(config)
    member = DeployedClient(own(2, **changes), None)
    member.key = ec.generate_private_key(ec.SECP384R1())
    presence = member.join(invitation(config, made))
    assert not presence.reason, presence.reason
    b = made.broadcasts
    return member, Assignment(
        1,
        made.strategy.client_algorithm.phases[0],
        2,
        "up-to-date",
        b.version,
        b.version,
        b.fingerprint,
        [],
        "",
    )


def test_a_client_answers_again_if_the_inputs_of_its_assignment_changed():
    """A restarted server makes a new attempt of the round, in which the cards (signed keys) of the previous attempt are invalid."""
    member, asked = deployed("election:byzantine=2,form=ballots,sealed=true")
    told_options = member.session.algorithm.options
    point = point_of(member.key.public_key())
    others = {
        client: point_of(ec.generate_private_key(ec.SECP384R1()).public_key())
        for client in range(5)
    } | {2: point}

    def attempt(name: bytes) -> Assignment:
        announced = {
            "attempt": name * 32,
            "terms": terms_of(told_options, asked.fingerprint, 1.0).encode(),
        }
        announced |= {ROW: CodeRow(2, 0, tuple(DataPartition(j, (j,)) for j in range(5))).pack()}
        announced |= {f"{KEY_OF}{client}": key for client, key in others.items()}
        return replace(
            asked,
            announced=[part for key, value in announced.items() for part in (key.encode(), value)],
        )

    first = member.answer(attempt(b"1"))
    assert first.kind == UPDATE and member.answer(attempt(b"1")) is first
    second = member.answer(attempt(b"2"))
    assert (
        second.kind == UPDATE
        and len(second.frame) == len(first.frame)
        and second.frame != first.frame
    )
    others[3] = point_of(ec.generate_private_key(ec.SECP384R1()).public_key())
    changed = member.answer(attempt(b"3"))
    cards = [changed.frame[at : at + CARD] for at in range(0, 5 * CARD, CARD)]
    assert changed.kind == UPDATE and [card == NO_CARD for card in cards] == [
        client == 3 for client in range(5)
    ], "client 0 has pinned another key of client 3"


def test_a_client_needs_the_data_of_all_clients_to_train_on_their_partitions():
    for changes in ({"partition_id": None}, {"partitions": 7}):
        with pytest.raises(
            UserError,
            match="--partition-id K and the data of the whole task, or set form=ballots in the server's --strategy",
        ):
            deployed("election:byzantine=2", **changes)
        deployed("election:byzantine=2,form=ballots", **changes)
    member, _ = deployed("election:byzantine=2")
    assert sorted(np.concatenate(member.session.trainer.all_shards)) == list(range(len(DATA)))
