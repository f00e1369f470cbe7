"""What the Grid of a simulation makes by itself is what Flower would make."""

from dataclasses import replace

import pytest
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict

from fedcomp.clients.flower import (
    MESSAGE,
    METRICS,
    RECORD,
    RECORDS,
    addressed,
    carried,
    from_records,
    identify_process,
    name_messages,
    replied,
    to_records,
)
from fedcomp.errors import ProtocolError
from fedcomp.messages import UPDATE, Assignment, Report
from fedcomp.sim.grid import LocalGrid

REPORT = Report(3, "train", 7, UPDATE, "v2", "abc", b"\x00frame", "t", 20, 0.5, "", "")
TIMES = "_created_at", "_ttl"


def about(message: Message) -> dict:
    """Metadata but for what goes by the clock."""
    return {name: value for name, value in vars(message.metadata).items() if name not in TIMES}


def whole(record) -> dict:
    """All that an object of Flower holds."""
    return {name: value for name, value in vars(record).items() if name != "origin"}


@pytest.fixture
def asked() -> Message:
    identify_process()
    message = Message(RecordDict(), 5, "train", group_id="3", ttl=60.0)
    name_messages([message])
    return message


def test_records_of_a_message_are_those_that_flower_makes():
    made, plain = to_records(REPORT), RecordDict({MESSAGE: ConfigRecord({MESSAGE: REPORT.pack()})})
    assert whole(made) == whole(plain) and whole(made[MESSAGE]) == whole(plain[MESSAGE])
    assert made.object_id == plain.object_id and type(made[MESSAGE]) is ConfigRecord
    with pytest.raises(TypeError):
        made["other"] = 1
    both = RecordDict({MESSAGE: plain[MESSAGE], METRICS: MetricRecord({"num-examples": 20})})
    assert to_records(REPORT, {"num-examples": 20}).object_id == both.object_id
    assert not RECORDS and not RECORD


def test_a_reply_is_the_one_that_flower_makes(asked):
    content = to_records(REPORT)
    mine, plain = replied(asked, content), Message(content, reply_to=asked)
    assert (
        about(mine) == about(plain)
        and mine.content is content
        and mine.has_content()
        and not mine.has_error()
    )
    assert (
        vars(mine).keys() == vars(plain).keys()
        and vars(mine.metadata).keys() == vars(plain.metadata).keys()
    )
    assert mine.metadata.created_at + mine.metadata.ttl == pytest.approx(
        asked.metadata.created_at + 60, abs=1e-3
    )
    name_messages([mine])
    assert mine.metadata.message_id and asked.metadata.message_id != mine.metadata.message_id


def test_a_message_like_another_is_the_one_that_flower_makes():
    identify_process()
    like, content = Message(RecordDict(), 5, "train", group_id="3", ttl=60.0), to_records(REPORT)
    mine, plain = addressed(like, content, 9), Message(content, 9, "train", group_id="3", ttl=60.0)
    assert (
        about(mine) == about(plain) and mine.metadata.ttl == 60 and like.metadata.dst_node_id == 5
    )
    assert mine.metadata.created_at >= like.metadata.created_at


class Nobody:
    clients, at_once = 3, 3

    def handle(self, assignments):
        return []


def test_a_message_that_stays_in_this_process_is_carried_and_one_of_a_kind_and_phase_is_packed():
    grid = LocalGrid(Nobody())
    reports = [
        replace(REPORT, client=client, round=round) for round in (3, 4) for client in range(3)
    ]
    made = [grid.content_of(report) for report in reports]
    assert [bool(content) for content in made] == [True, False, False] * 2
    assert all(
        from_records(content, Report) is report
        for content, report in zip(made, reports, strict=True)
    )
    assert from_records(RecordDict(dict(made[0])), Report) == REPORT.__class__.unpack(
        reports[0].pack()
    )
    assert not RECORDS and grid.content_of(
        Assignment(3, "train", 0, "up-to-date", "", "v", "f", [], "")
    )


def test_a_carried_message_is_of_its_kind_alone():
    with pytest.raises(ProtocolError, match="no record 'fedcomp'"):
        from_records(carried(REPORT), Assignment)


def test_what_cannot_travel_shows_in_a_simulation_too():
    grid, told = LocalGrid(Nobody()), Assignment(3, "train", 0, "up-to-date", "", "v", "f", [], "")
    with pytest.raises(TypeError):
        grid.content_of(replace(REPORT, examples=object()))
    grid.content_of(told)
    with pytest.raises(TypeError):  # whichever client is told it
        grid.content_of(replace(told, client=1, announced=[b"x", "abc"]))


def test_the_grid_makes_each_message_as_it_is_asked_to():
    grid, content = LocalGrid(Nobody()), to_records(REPORT)
    for kind, group, ttl in [
        ("train", "1", None),
        ("train", "2", None),
        ("query.leave", "2", None),
        ("query.leave", "2", 7.0),
    ]:
        for node in (2, 4):
            mine, plain = (
                grid.create_message(content, kind, node, group, ttl),
                Message(content, node, kind, ttl=ttl, group_id=group),
            )
            assert (
                about(mine) == about(plain)
                and mine.metadata.ttl == plain.metadata.ttl
                and mine.content is content
            )
