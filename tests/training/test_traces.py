"""The vectors of local steps: sums of gradients and of their squares, and momentum with momentum masking."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from cases import for_each
from federation import Federation
from small_models import small_task, train_together
from torch import nn
from torch.nn import functional as F

from fedcomp import Data, Layout, Task
from fedcomp.errors import ConfigError
from fedcomp.sim.batched import BatchedEngine
from fedcomp.strategies import Average, StrategyConfig
from fedcomp.strategies.gtopk import GTopK
from fedcomp.training.engine import SerialEngine
from fedcomp.training.local_sgd import LocalSGD, Traces, plan_batches

SGD = LocalSGD(steps=4, batch_size=8, lr=0.1, momentum=0.9, keep_momentum=True)
RULES = StrategyConfig(participation=1.0, uplink="topk:density=10%", downlink="identity", seed=3)


class Coarse(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(12, 9), nn.Linear(9, 4, dtype=torch.bfloat16)

    def forward(self, x):
        return self.two(torch.tanh(self.one(x)).to(torch.bfloat16)).float()


MODELS = {
    "mlp": lambda: nn.Sequential(nn.Linear(12, 9), nn.ReLU(), nn.Linear(9, 4)),
    "coarse": Coarse,
}


def examples() -> Data:
    drawn = torch.Generator().manual_seed(1)
    return Data(torch.randn(60, 12, generator=drawn), torch.randint(0, 4, (60,), generator=drawn))


def parts(make) -> tuple[Task, nn.Module, Layout, torch.Tensor]:
    return small_task(make, examples)


def stepwise(
    model: nn.Module,
    layout: Layout,
    start,
    data: Data,
    batches,
    sgd: LocalSGD,
    momentum: torch.Tensor,
):
    """Return the moments and the momentum of SGD steps that are computed with autograd, for float32 models."""
    layout.scatter(start, model)
    sums, squares = torch.zeros(2, layout.numel)
    for batch in batches:
        gradients = torch.autograd.grad(
            F.cross_entropy(model(data.inputs[batch]), data.targets[batch]),
            list(model.parameters()),
        )
        g = torch.cat([gradient.flatten() for gradient in gradients])
        g = g * min(1.0, sgd.clip / g.norm().item()) if sgd.clip else g
        sums, squares = sums + g, squares + g * g
        momentum = sgd.momentum * momentum + g + sgd.weight_decay * layout.gather(model)
        layout.scatter(layout.gather(model) - sgd.lr * momentum, model)
    return sums, squares, momentum


@for_each("variant", [{}, {"clip": 0.3}, {"weight_decay": 0.1}])
def test_moments_and_momentum_are_those_of_the_steps(variant):
    sgd, data = replace(SGD, **variant), examples()
    task, model, layout, start = parts(MODELS["mlp"])
    momentum = torch.randn(layout.numel, generator=torch.Generator().manual_seed(4))
    batches = plan_batches(sgd, np.arange(40), 0, 1, 2)
    expected = stepwise(MODELS["mlp"](), layout, start, data, batches, sgd, momentum)
    traces = Traces.for_round(sgd, True, start, momentum)
    SerialEngine(task, model, layout, "cpu").train(start, data, batches, sgd, traces=traces)
    for found, by_hand in zip((*traces.moments, traces.momentum), expected, strict=True):
        torch.testing.assert_close(found, by_hand, rtol=1e-4, atol=1e-5)


@for_each("at_once", [0, 2])
@for_each("make", MODELS.values(), ids=MODELS)
def test_the_batched_engine_has_the_same_traces_as_the_serial_engine(make, at_once):
    sgd, data = replace(SGD, clip=0.5), examples()
    # Clients with batches of 8 examples and of 5 examples alternate.
    shards = [np.arange(20), np.arange(5) + 20, np.arange(20) + 25, np.arange(5) + 45]
    plans = [plan_batches(sgd, shard, 0, 1, who) for who, shard in enumerate(shards)]
    task, model, layout, start = parts(make)
    momenta = 0.1 * torch.randn(
        len(plans), layout.numel, generator=torch.Generator().manual_seed(4)
    )
    momenta = momenta.to(torch.bfloat16).to(torch.float32)
    each, own = (
        [Traces.for_round(sgd, True, start, momentum) for momentum in momenta] for _ in range(2)
    )
    engine = SerialEngine(task, model, layout, "cpu")
    updates = [
        engine.train(start, data, plan, sgd, traces=traces).update
        for plan, traces in zip(plans, each, strict=True)
    ]
    task, model, layout, start = parts(make)
    together, _ = train_together(
        BatchedEngine(task, model, layout, "cpu", at_once), start, data, plans, sgd, traces=own
    )
    stack = Traces.stack(own)
    tolerance = 0.05 if make is Coarse else 1e-4
    alike = [
        (torch.stack(updates), together),
        *zip(Traces.stack(each).moments, stack.moments, strict=True),
        (torch.stack([traces.momentum for traces in each]), stack.momentum),
    ]
    for one, other in alike:
        assert ((one - other).norm(dim=1) < tolerance * one.norm(dim=1)).all()
    assert not torch.equal(stack.momentum, momenta)


def test_training_does_not_change_the_stored_momentum():
    task, model, layout, start = parts(MODELS["mlp"])
    kept = torch.ones(layout.numel)
    traces = Traces.for_round(SGD, False, start, kept)
    SerialEngine(task, model, layout, "cpu").train(
        start, examples(), [np.arange(8)], SGD, traces=traces
    )
    assert (
        traces.moments is None
        and torch.equal(kept, torch.ones(layout.numel))
        and not torch.equal(traces.momentum, kept)
    )


def test_momentum_is_zero_exactly_where_the_server_accepted_the_update():
    f = Federation(RULES)
    for member in f.members:
        member.sgd = replace(member.sgd, momentum=0.9, keep_momentum=True)
    f.faults[4, 1] = lambda a, r: replace(r, kind="failed", frame=b"", stage="link", reason="lost")
    (outcome,) = f.loop.rounds((1,))
    for client, member in enumerate(f.members):
        before, sent = member.momentum.clone(), member.memory.sent_positions
        assert bool(before.any()) and sent.size == 4
        member.state.settle(f.loop.tickets.get(client, ""))
        masked = before.index_fill(0, torch.from_numpy(sent), 0)
        assert torch.equal(member.momentum, before if client == 4 else masked)


def test_entries_that_the_server_dropped_keep_their_momentum():
    f = Federation(RULES, strategy=GTopK)
    for member in f.members:
        member.sgd = replace(member.sgd, momentum=0.9, keep_momentum=True)
    list(f.loop.rounds((1,)))
    client, returned = next(iter(f.loop.dropped.items()))
    member = f.members[client]
    before, sent = member.momentum.clone(), set(member.memory.sent_positions.tolist())
    back = set(f.strategy.uplink.open(returned, f.layout.numel).positions.tolist())
    member.state.settle(f.loop.tickets[client], returned)
    assert back and set((before != member.momentum).nonzero().flatten().tolist()) == {
        i for i in sent - back if before[i]
    }


def test_failed_training_does_not_change_the_momentum():
    f = Federation(RULES, strategy=Average)
    member = f.members[0]
    member.sgd = replace(member.sgd, momentum=0.9, keep_momentum=True)
    list(f.loop.rounds((1,)))
    before, sgd = member.momentum.clone(), member.sgd
    sent = member.memory.sent_positions
    member.sgd = replace(sgd, lr=1e38)
    (outcome,) = f.loop.rounds((2,))
    assert [(r.client, r.stage) for r in outcome.rejections] == [(0, "encode")]
    assert torch.equal(member.momentum, before.index_fill(0, torch.from_numpy(sent), 0))


def test_keep_momentum_without_momentum_is_refused():
    with pytest.raises(ConfigError, match="give --momentum 0.9 as well"):
        LocalSGD(keep_momentum=True)
