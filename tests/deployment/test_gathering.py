"""Who left without an answer is waited for a moment, asked again when it is back, and answered for when it is not."""

import threading

import pytest
from flwr.app import Error, Message, RecordDict

from fedcomp.callbacks import Callback
from fedcomp.clients.flower import AWAY, Place, identify_process, readdress, to_records
from fedcomp.deployment.client_process import JOIN, LEAVE, TRAIN
from fedcomp.deployment.superlink_grid import GRACE_S, LOOK_S, Gathering
from fedcomp.messages import Invitation, Presence
from fedcomp.server.availability import Quota

RUN = "a run"
KEYS = {b"key 0": 0, b"key 1": 1}


class Link:
    """What a SuperLink holds, moved by hand: who is there, what was asked, and what is to be pulled."""

    def __init__(self) -> None:
        self.there: list[Place] = []
        self.sent: dict[str, Message] = {}
        self.ready: dict[str, Message] = {}

    def places(self) -> list[Place]:
        return self.there

    def push(self, messages) -> list[str]:
        names = [f"m{len(self.sent) + i}" for i in range(len(messages))]
        self.sent |= dict(zip(names, messages, strict=True))
        return names

    def pull(self, names) -> list[Message]:
        return [self.ready.pop(name) for name in sorted(names) if name in self.ready]

    # By the test.

    def asked(self, node: int, kind: str = TRAIN) -> list[str]:
        heads = {name: message.metadata for name, message in self.sent.items()}
        return [
            name
            for name, head in heads.items()
            if (head.dst_node_id, head.message_type) == (node, kind)
        ]

    def answer(self, name: str, content: RecordDict | Error) -> None:
        self.ready[name] = readdress(Message(content, reply_to=self.sent[name]), name)

    def leaves(self, place: Place) -> None:
        """Flower answers for it what it had taken away."""
        self.there.remove(place)
        for name in self.asked(place.node):
            self.answer(name, Error(AWAY, "Node Unavailable"))


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Running(Clock):
    """A second passes whenever somebody looks."""

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s


@pytest.fixture
def hall():
    """A gathering with clients 0 and 1, which are here, each on a node of ten times its id plus one."""
    identify_process()
    link, clock, keys = Link(), Clock(), dict(KEYS)
    grid = Gathering(
        link,
        Invitation(RUN, -1, "", "", "v"),
        2,
        Callback(),
        lambda: None,
        keys.get,
        lambda presence: None,
        clock,
    )
    grid.link, grid.time, grid.keys = link, clock, keys
    for client in (0, 1):
        comes(grid, client)
    assert grid.here() == {0: 1, 1: 11}
    return grid


def comes(grid: Gathering, client: int) -> Place:
    """It connects, is invited, and takes part."""
    place = Place(10 * client + 1, b"key %d" % client, grid.time.now_s)
    grid.link.there.append(place)
    grid.time.now_s += LOOK_S
    grid.look()
    grid.link.answer(
        grid.link.asked(place.node, JOIN)[-1], to_records(Presence(RUN, client, "v", ""))
    )
    grid._pull()
    return place


def ask(grid: Gathering) -> list[str]:
    return grid.push_messages(
        [grid.create_message(RecordDict(), TRAIN, node, "") for node in grid.here().values()]
    )


def pulled(grid: Gathering, names: list[str], after_s: float = 0.0) -> dict[str, bool]:
    """What is pulled so much later: for each name, whether it is an error."""
    grid.time.now_s += after_s
    return {
        reply.metadata.reply_to_message_id: reply.has_error() for reply in grid.pull_messages(names)
    }


def test_who_left_is_waited_for_until_its_grace_is_over_and_no_longer(hall):
    names = ask(hall)
    hall.link.leaves(hall.link.there[1])
    assert pulled(hall, names) == {}
    assert pulled(hall, names, GRACE_S - 0.01) == {}
    assert pulled(hall, names, 0.02) == {names[1]: True}
    assert pulled(hall, [names[0]], 1000) == {}, "who is here has all the time in the world"
    hall.link.answer(names[0], RecordDict())
    assert pulled(hall, [names[0]]) == {names[0]: False}


def test_who_is_back_within_its_grace_is_asked_again_and_its_answer_is_the_first_ones(hall):
    names = ask(hall)
    hall.link.leaves(hall.link.there[1])
    assert pulled(hall, names) == {}
    comes(hall, 1)
    first, again = hall.link.asked(11)
    assert first == names[1] and hall.link.sent[again].content is hall.link.sent[first].content
    assert pulled(hall, names, 10 * GRACE_S) == {}, "it has the question, and is here"
    hall.link.answer(again, RecordDict())
    assert pulled(hall, names) == {names[1]: False}


def test_each_absence_has_its_own_grace(hall):
    names = ask(hall)
    for _ in range(3):
        hall.link.leaves(hall.link.there[1])
        assert pulled(hall, names, GRACE_S - 1) == {}
        comes(hall, 1)
        assert pulled(hall, names, GRACE_S) == {}
    hall.link.leaves(hall.link.there[1])
    assert pulled(hall, names) == {}
    assert pulled(hall, names, GRACE_S + 0.01) == {names[1]: True}


def test_who_comes_back_unasked_is_asked_again_and_the_first_of_both_answers_counts(hall):
    """A client that was killed, and its node was never missed: Flower saw it come a second time."""
    names = ask(hall)
    hall.link.there.pop()
    comes(hall, 1)
    first, again = hall.link.asked(11)
    hall.link.answer(again, RecordDict())
    hall.link.answer(first, Error(AWAY, "Node Unavailable"))
    assert pulled(hall, names) == {names[1]: False}
    hall.link.answer(first, RecordDict())
    assert pulled(hall, [names[0]], 1.0) == {}


def test_who_is_revoked_is_answered_for_at_once_and_not_drawn_again(hall):
    names = ask(hall)
    del hall.keys[b"key 1"]
    (reply,) = hall.pull_messages(names)
    assert (
        reply.metadata.reply_to_message_id == names[1]
        and "not let in any more" in reply.error.reason
    )
    assert hall.here() == {0: 1}


def test_a_wait_for_clients_is_told_while_it_lasts_and_when_it_ends(hall):
    told, quota = [], Quota(2, 2)
    hall.callback = type(
        "Told",
        (Callback,),
        {"waiting": lambda self, here, wanted: told.append((list(here), wanted))},
    )()
    assert hall.gather(quota) == {0: 1, 1: 11} and told == [], "nobody was waited for"
    hall.link.there.pop()
    hall.time.now_s += LOOK_S
    back = threading.Timer(
        0.2, lambda: hall.link.there.append(Place(11, b"key 1", hall.time.now_s))
    )
    back.start()
    hall.clock = running = Running()
    assert hall.gather(quota) == {0: 1, 1: 11}
    back.join()
    assert told == [([0], 2), ([0, 1], 2)] and hall.waited_s <= running.now_s


def test_an_enrolled_session_for_whom_there_is_no_place_is_named_once(hall):
    said = []
    hall.callback = type(
        "Told", (Callback,), {"warning": lambda self, sentence: said.append(sentence)}
    )()
    hall.keys |= {b"key 2": 2, b"key 7": 7}
    for _ in range(2):
        hall.time.now_s += 1.0
        hall.link.there = [place for place in hall.link.there if place.node < 20]
        hall.link.there += [
            Place(21, b"key 2", hall.time.now_s),
            Place(71, b"key 7", hall.time.now_s),
        ]
        hall.look()
    assert [sentence.partition(";")[0] for sentence in said] == [
        f"client {who} is here and has no part in this run of 2 clients, 0 to 1" for who in (2, 7)
    ]
    assert said[1].endswith("a new run with --clients 8 has a place for it")
    assert hall.link.asked(21, JOIN) == hall.link.asked(71, JOIN) == []


def test_everybody_here_is_told_of_the_end_and_who_does_not_hear_it_holds_nobody_up(hall):
    hall.clock = Running()
    hall.dismiss(7)
    assert len(hall.link.asked(1, LEAVE)) == len(hall.link.asked(11, LEAVE)) == 1


def test_it_is_said_once_that_rounds_go_on_without_somebody(hall):
    said, quota = [], Quota(2, 1, 5.0)
    hall.callback = type(
        "Told", (Callback,), {"warning": lambda self, sentence: said.append(sentence)}
    )()
    assert hall.gather(quota) == {0: 1, 1: 11} and said == []
    hall.miss([1])
    assert [hall.gather(quota) for _ in range(3)] == [{0: 1}] * 3
    assert len(said) == 1 and "with 1 clients in place of 2, without client 1:" in said[0]
    hall._attendance.hear(1)
    assert hall.gather(quota) == {0: 1, 1: 11}
    hall.miss([1])
    hall.gather(quota)
    assert len(said) == 2
