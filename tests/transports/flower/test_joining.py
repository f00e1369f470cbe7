"""Clients of a Flower deployment join by answering an invitation; only the newest assignment of a client counts."""

import pytest
from flower_grid import AppGrid
from flwr.app import Message
from flwr.clientapp import ClientApp

from fedcomp.messages import UP_TO_DATE, Assignment, Invitation, Presence, failure
from fedcomp.transports.flower import joining
from fedcomp.transports.flower.grid_transport import GridTransport
from fedcomp.transports.flower.joining import JoiningTransport
from fedcomp.transports.flower.records import from_records, to_records

INVITATION = Invitation("run", -1, "{}", "layout", "version")


def app_of(claims: list[Presence]) -> ClientApp:
    """Return an app that answers the invitation with `claims[partition]`, and every assignment with a failure."""
    app = ClientApp()

    @app.query("join")
    def join(message: Message, context) -> Message:
        presence = claims[context.node_config["partition-id"]]
        return Message(to_records(presence), reply_to=message)

    @app.train()
    def train(message: Message, context) -> Message:
        asked = from_records(message.content, Assignment)
        return Message(to_records(failure(asked, "train", "it failed")), reply_to=message)

    return app


def assignment(round: int, client: int = 0) -> Assignment:
    return Assignment(round, "train", client, UP_TO_DATE, "v", "v", "f", [], "")


@pytest.fixture
def no_pause(monkeypatch):
    monkeypatch.setattr(joining, "REFRESH_S", 0.0)


def test_only_nodes_with_valid_ids_of_this_run_join(no_pause):
    claims = [
        Presence("run", 1, "version", ""),
        Presence("run", 2, "version", ""),
        Presence("another run", 0, "version", ""),
        Presence("run", 0, "version", "it has another model"),
    ]
    joined, warnings = [], []
    transport = JoiningTransport(
        AppGrid(lambda: app_of(claims), nodes=4),
        0,
        None,
        INVITATION,
        2,
        on_joined=lambda client, presence: joined.append(client),
        on_left=lambda client: None,
        on_late_answer=lambda client: None,
        warn=warnings.append,
    )
    for _ in range(3):
        here = transport.clients()
    assert here == joined == [1]
    assert [
        sentence.removeprefix("a node that was invited cannot take part: ") for sentence in warnings
    ] == [
        "the node asks to be client 2; the id must be from 0 to 1, and a node with an enrolment must use the id in its enrolment; "
        "correct --client-id or --partition-id",
        "client 0: the client answered the invitation of another run",
        "client 0: it has another model",
    ]


def test_the_answer_to_a_replaced_assignment_is_not_delivered():
    grid = AppGrid(lambda: app_of([]), nodes=1)
    transport = GridTransport(grid, lambda grid: {0: grid.nodes[0]})
    assert transport.clients() == [0]
    transport.send([assignment(1)])
    transport.send([assignment(2)])
    (delivery,) = transport.receive(0.0)
    assert (delivery.client, delivery.answer.round) == (0, 2)
    assert transport.receive(0.0) == []
