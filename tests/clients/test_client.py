"""A client behind a real Flower ClientApp."""

from dataclasses import replace

import torch
from cases import for_each
from federation import Federation
from flwr.app import Context, Message, RecordDict

from fedcomp.clients.client import client_app, settle
from fedcomp.clients.flower import from_records, identify_process, name_messages, to_records
from fedcomp.messages import FAILED, UP_TO_DATE, UPDATE, Assignment, Report
from fedcomp.strategies import Rules

RULES = Rules(participation=1.0, uplink="stc:density=10%", downlink="stc:density=10%")


def first_assignment(federation: Federation, client: int = 0) -> Assignment:
    b = federation.strategy.broadcasts
    return Assignment(1, "train", client, UP_TO_DATE, b.version, b.version, b.fingerprint, [], "")


def answer(app, assignment: Assignment) -> Message:
    identify_process()
    message = Message(to_records(assignment), 2, "train")
    name_messages([message])
    context = Context(run_id=1, node_id=2, node_config={}, state=RecordDict(), run_config={})
    return app(message, context)


def test_a_client_app_answers_with_a_frame_of_its_update():
    federation = Federation(RULES)
    reply = answer(client_app(federation.members[0]), first_assignment(federation))
    report = from_records(reply.content, Report)
    assert report.kind == UPDATE and reply.content["metrics"][
        "num-examples"
    ] == report.examples == len(federation.members[0].shard)
    update = federation.strategy.uplink.decode(report.frame, numel=federation.layout.numel)
    assert int((update != 0).sum()) == 4


def test_two_clients_in_one_process_do_not_mix():
    federation = Federation(RULES)
    apps = [client_app(member) for member in federation.members[:2]]
    frames = [
        from_records(answer(app, first_assignment(federation, i)).content, Report).frame
        for i, app in enumerate(apps)
    ]
    again = [
        from_records(answer(app, first_assignment(Federation(RULES), i)).content, Report).frame
        for i, app in enumerate(apps)
    ]
    assert frames[0] != frames[1] and len(again) == 2


def test_an_unsettled_proposal_is_put_back_when_the_server_does_not_name_it():
    federation = Federation(RULES)
    member = federation.members[0]
    a = first_assignment(federation)
    first = member.handle(a)
    waiting = member.memory.state_dict()["residual"].clone()
    settle(member.memory, member.ticket, "")
    assert torch.equal(member.memory.state_dict()["residual"], waiting)
    taken = Federation(RULES).members[0]
    report = taken.handle(a)
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
    report = member.handle(first_assignment(federation))
    assert (report.kind, report.stage) == (FAILED, broken) and report.reason
    assert member.memory.pending is None
