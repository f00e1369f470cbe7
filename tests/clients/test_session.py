"""A session with one client: frames of its updates, commits and rollbacks, and failures that name their stage."""

from dataclasses import replace

import torch
from cases import for_each
from federation import Federation

from fedcomp.clients import device_state
from fedcomp.messages import FAILED, OVERWRITE, UPDATE, Assignment
from fedcomp.state_folder import packed, unpacked
from fedcomp.strategies import StrategyConfig

RULES = StrategyConfig(participation=1.0, uplink="stc:density=10%", downlink="stc:density=10%")


def assignment(federation: Federation, version: str = "") -> Assignment:
    """Return an assignment for client 0, which has the model `version`; by default the newest one."""
    b = federation.loop.broadcasts
    d = b.download(version or b.version)
    return Assignment(1, "train", 0, d.form, d.base, b.version, b.fingerprint, d.frames, "")


def test_a_report_has_a_frame_of_the_update():
    federation = Federation(RULES)
    member = federation.members[0]
    report = member.answer(assignment(federation))
    assert report.kind == UPDATE and report.examples == len(member.shard)
    update = federation.strategy.uplink.decode(report.frame, numel=federation.layout.numel)
    assert int((update != 0).sum()) == 4


def test_a_session_frees_the_frames_that_it_applied():
    federation = Federation(replace(RULES, downlink="identity"))
    b, member = federation.loop.broadcasts, federation.members[0]
    before = b.version
    b.publish(b.prepare(1, torch.eye(federation.layout.numel)[0], 0))
    kept, freed = assignment(federation, before), assignment(federation, before)
    report = member.answer(freed)
    assert freed.frames == [] and kept.frames
    assert (report.kind, report.version) == (UPDATE, b.version)


def test_an_update_is_rolled_back_if_the_server_does_not_name_its_ticket():
    federation = Federation(RULES)
    member = federation.members[0]
    a = assignment(federation)
    first = member.answer(a)
    waiting = member.memory.state_dict()["residual"].clone()
    member.state.settle("")
    assert torch.equal(member.memory.state_dict()["residual"], waiting)
    taken = Federation(RULES).members[0]
    report = taken.answer(a)
    assert report == first
    taken.state.settle(report.ticket)
    kept = waiting - federation.strategy.uplink.decode(report.frame, numel=federation.layout.numel)
    torch.testing.assert_close(taken.memory.state_dict()["residual"], kept)
    taken.state.settle(report.ticket)  # settling a second time changes nothing
    torch.testing.assert_close(taken.memory.state_dict()["residual"], kept)


@for_each("broken", ["train", "encode"])
def test_a_failure_names_its_stage_and_does_not_change_the_memory(broken):
    federation = Federation(RULES)
    member = federation.members[0]
    if broken == "train":
        member.shard = member.shard[:0]
    else:
        member.sgd = replace(member.sgd, lr=1e38)
    report = member.answer(assignment(federation))
    assert (report.kind, report.stage) == (FAILED, broken) and report.reason
    assert member.memory.pending is None


def test_a_client_that_restarts_after_a_dense_download_continues_from_its_version():
    """The stored state contains the newest model versions, one of which is that of the dense download."""
    federation = Federation(replace(RULES, downlink="topk:density=10%", cache=10.0))
    b, member = federation.loop.broadcasts, federation.members[0]

    def publish() -> str:
        b.publish(b.prepare(1, torch.eye(federation.layout.numel)[0], 0))
        return b.version

    version = b.version
    for _ in range(device_state.MAX_PAST_VERSIONS):
        publish()
        member.download(assignment(federation, version))
        version = b.version
    dense = publish()
    member.download(assignment(federation, "a version that the server does not know"))
    publish()
    member.download(assignment(federation, dense))
    # The server does not receive the report, so the next download starts from `dense` again.
    for _ in range(8):
        publish()
    restarted = Federation(federation.strategy.config).members[0]
    stored = b"".join(packed(device_state.pack(member, 0)))
    device_state.restore(restarted, 0, unpacked(bytearray(stored)))
    assert (missed := assignment(federation, dense)).form == OVERWRITE
    restarted.download(missed)
    assert torch.equal(restarted.replica.weights, b.weights)
