"""A session with one client: frames of its updates, settled proposals, failures that name their stage."""

from dataclasses import replace

import torch
from cases import for_each
from federation import Federation

from fedcomp.clients.session import settle
from fedcomp.messages import FAILED, UP_TO_DATE, UPDATE, Assignment
from fedcomp.strategies import StrategyConfig

RULES = StrategyConfig(participation=1.0, uplink="stc:density=10%", downlink="stc:density=10%")


def first_assignment(federation: Federation, client: int = 0) -> Assignment:
    b = federation.loop.broadcasts
    return Assignment(1, "train", client, UP_TO_DATE, b.version, b.version, b.fingerprint, [], "")


def test_a_report_has_a_frame_of_the_update():
    federation = Federation(RULES)
    member = federation.members[0]
    report = member.answer(first_assignment(federation))
    assert report.kind == UPDATE and report.examples == len(member.shard)
    update = federation.strategy.uplink.decode(report.frame, numel=federation.layout.numel)
    assert int((update != 0).sum()) == 4


def test_an_unsettled_proposal_is_put_back_when_the_server_does_not_name_it():
    federation = Federation(RULES)
    member = federation.members[0]
    a = first_assignment(federation)
    first = member.answer(a)
    waiting = member.memory.state_dict()["residual"].clone()
    settle(member.memory, member.ticket, "")
    assert torch.equal(member.memory.state_dict()["residual"], waiting)
    taken = Federation(RULES).members[0]
    report = taken.answer(a)
    assert report == first
    settle(taken.memory, taken.ticket, report.ticket)
    kept = waiting - federation.strategy.uplink.decode(report.frame, numel=federation.layout.numel)
    torch.testing.assert_close(taken.memory.state_dict()["residual"], kept)
    settle(taken.memory, taken.ticket, report.ticket)  # the news comes twice
    torch.testing.assert_close(taken.memory.state_dict()["residual"], kept)


@for_each("broken", ["train", "encode"])
def test_a_failure_names_its_stage_and_leaves_the_memory_as_it_was(broken):
    federation = Federation(RULES)
    member = federation.members[0]
    if broken == "train":
        member.shard = member.shard[:0]
    else:
        member.sgd = replace(member.sgd, lr=1e38)
    report = member.answer(first_assignment(federation))
    assert (report.kind, report.stage) == (FAILED, broken) and report.reason
    assert member.memory.pending is None
