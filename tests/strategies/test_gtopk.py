"""Global top-k: the model moves by k coordinates, and each client gets its other values back."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from cases import for_each
from federation import Federation, sum_updates

from fedcomp import UserError, codec
from fedcomp.messages import Assignment
from fedcomp.strategies import StrategyConfig
from fedcomp.strategies.gtopk import GTopK

RULES = StrategyConfig(participation=1.0, uplink="topk:density=10%", downlink="identity", seed=3)
UPLINKS = [
    "topk:density=10%",
    "topk:density=10%,values=fp16",
    "stc:density=10%",
    "sbc:density=10%",
    "stc:density=10%@layer",
]


def federation(**changes) -> Federation:
    return Federation(replace(RULES, **changes), strategy=GTopK)


def lose(a, r):
    return replace(r, kind="failed", frame=b"", stage="link", reason="lost")


@for_each("uplink", UPLINKS)
def test_the_model_moves_by_the_k_largest_coordinates_of_the_mean(uplink):
    f = federation(uplink=uplink)
    for outcome in f.loop.rounds((1, 2)):
        mean = torch.stack([a.update.dense() for a in outcome.accepted]).mean(0)
        step = f.strategy.downlink.decode(outcome.broadcast.frame, numel=mean.numel())
        spans = [e.span for e in f.layout] if "@" in uplink else [slice(0, mean.numel())]
        for span in spans:
            k = min(max(1, round(0.1 * (span.stop - span.start))), int((mean[span] != 0).sum()))
            kept = step[span].nonzero().flatten()
            assert kept.numel() == k
            torch.testing.assert_close(step[span][kept], mean[span][kept])
            assert mean[span].abs().sort(descending=True).values[:k].sum() == pytest.approx(
                mean[span][kept].abs().sum().item()
            )


@for_each("uplink", UPLINKS)
def test_dropped_values_are_returned_without_loss(uplink):
    f = federation(uplink=uplink)
    for outcome in f.loop.rounds((1, 2)):
        kept = f.strategy.downlink.decode(outcome.broadcast.frame, numel=f.layout.numel) != 0
        for a in outcome.accepted:
            sent, back = a.update.dense(), f.loop.dropped.get(a.client)
            expected = sent.where(~kept, 0)
            assert (back is None) == (not expected.any())
            if back:
                assert torch.equal(
                    f.strategy.uplink.decode(back, numel=f.layout.numel, layout=f.layout), expected
                )


@pytest.mark.parametrize(
    ("uplink", "downlink"),
    [
        ("topk:density=10%,values=fp16", "identity"),
        ("stc:density=10%", "stc:density=10%"),
        ("sbc:density=10%", "identity"),
        ("stc:density=10%@layer", "stc:density=10%"),
    ],
)
def test_no_part_of_an_update_is_lost(uplink, downlink):
    """The sum of all inputs is in the model, in the clients' residuals and in the server's residual."""
    f = federation(uplink=uplink, downlink=downlink, participation=0.5)
    inputs, applied = (
        torch.zeros(f.layout.numel, dtype=torch.float64),
        torch.zeros(f.layout.numel, dtype=torch.float64),
    )
    for member in f.members:
        sum_updates(member, inputs)
    for client in range(6):
        f.faults[client, 3] = f.faults[client, 5 + client] = lose
    where, lost = state(f), 0
    for outcome in f.loop.rounds(range(1, 11)):
        # The step is a mean; times the number of clients, it is their sum.
        applied += len(outcome.accepted) * (state(f) - where)
        where, lost = state(f), lost + len(outcome.rejections)
    assert lost > 3 and f.loop.dropped
    for client, member in enumerate(f.members):
        if member.memory.pending is not None:
            taken = member.ticket == f.loop.tickets.get(client, "")
            member.memory.commit(
                returned=f.loop.dropped.get(client)
            ) if taken else member.memory.rollback()
    residuals = sum(member.memory.state_dict()["residual"].double() for member in f.members)
    torch.testing.assert_close(applied + residuals, inputs, rtol=1e-5, atol=1e-5)


def state(f: Federation) -> torch.Tensor:
    """Return the weights plus the server's residual."""
    b = f.loop.broadcasts
    return (b.weights + b.memory.state_dict().get("residual", 0)).double()


def test_returned_frames_are_counted_and_sent_until_a_client_confirms_them():
    f, sent = federation(), {}
    handle = f.handle

    def listening(assignments: list[Assignment]):
        for a in assignments:
            sent[a.round, a.client] = a
        return handle(assignments)

    f.handle = listening
    f.faults[2, 3] = lose
    for outcome in f.loop.rounds(range(1, 6)):
        for client, size in outcome.traffic.downlink.items():
            a = sent[outcome.round, client]
            assert size == sum(map(len, a.frames)) + len(a.returned)
    assert any(sent[2, client].returned for client in range(6))
    # The lost report did not confirm the returned frame, so the server sends it again.
    assert (sent[4, 2].accepted, sent[4, 2].returned) == (sent[3, 2].accepted, sent[3, 2].returned)


def test_a_client_that_lost_its_model_receives_the_returned_frame_once():
    f, sent = federation(downlink="stc:density=10%"), []
    list(f.loop.rounds((1,)))
    client = next(iter(f.loop.dropped))
    f.members[client].replica.restore(torch.zeros(f.layout.numel), "")
    handle = f.handle
    f.handle = lambda assignments: (
        sent.extend(a for a in assignments if a.client == client) or handle(assignments)
    )
    (outcome,) = f.loop.rounds((2,))
    assert not outcome.rejections and [bool(a.returned) for a in sent] == [True, False]
    assert outcome.traffic.downlink[client] == sum(
        sum(map(len, a.frames)) + len(a.returned) for a in sent
    )


def test_a_damaged_returned_frame_fails_the_client_but_loses_no_update():
    f = federation()
    list(f.loop.rounds((1,)))
    client = next(iter(f.loop.dropped))
    whole, waiting = f.loop.dropped[client], f.members[client].memory.pending
    f.loop.dropped[client] = whole[:-1]
    (outcome,) = f.loop.rounds((2,))
    assert [(r.client, r.stage) for r in outcome.rejections] == [(client, "download")]
    assert f.members[client].memory.pending == waiting
    f.loop.dropped[client] = whole
    (outcome,) = f.loop.rounds((3,))
    assert not outcome.rejections and f.members[client].memory.pending != waiting


def test_denser_frames_of_a_schedule_make_denser_steps():
    f = federation(uplink="topk:density=1/42", density_warmup=2)
    steps = [
        np.count_nonzero(codec("identity").decode(o.broadcast.frame, numel=42))
        for o in f.loop.rounds((1, 2, 3))
    ]
    assert steps[0] == 11 and steps[0] > steps[1] > steps[2] == 1


@for_each(
    "changes",
    [{"uplink": "identity"}, {"uplink": "fp16@layer"}, {"memory": "none"}, {"memory": "ef21"}],
)
def test_the_error_for_an_unsuitable_option_names_a_suitable_one(changes):
    with pytest.raises(
        UserError, match="leave --(uplink|memory) out|use --memory residual"
    ) as refused:
        federation(**changes)
    assert "\n" not in str(refused.value)
