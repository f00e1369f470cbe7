"""Local training with a torch optimizer gives the same updates as a plain PyTorch loop."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedcomp import Data, Task, local_optimizer, simulate
from fedcomp.errors import ConfigError, SpecError, UserError
from fedcomp.layout import Layout
from fedcomp.tasks import initial_model
from fedcomp.training.local_sgd import LocalSGD, Traces
from fedcomp.training.optimizers import check_optimizer
from fedcomp.training.own_loop import client_engine

INPUTS = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
DATA = Data(INPUTS, (INPUTS.sum(1) > 0).long())
BATCHES = [np.arange(first, first + 8) for first in (0, 8, 16, 24)]


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))


def trained(options: LocalSGD, state=None, **task_fields):
    """Return the engine's result, the model with the weights before training, and its layout."""
    task = Task("tiny", network, DATA, DATA, **task_fields)
    model = initial_model(task, 0)
    layout = Layout.of(model)
    start = layout.gather(model)
    engine = client_engine(task, initial_model(task, 0), layout, "cpu")
    return engine.train(start, DATA, BATCHES, options, state=state), model, layout


def torch_loop(model, optimizer, change=lambda step: None, clip=0.0, pieces=1):
    """Train as in the tutorials of PyTorch. Return the mean loss."""
    losses = []
    for step, rows in enumerate(BATCHES, 1):
        change(step)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(INPUTS[rows]), DATA.targets[rows])
        for piece in np.split(rows, pieces):
            part = F.cross_entropy(model(INPUTS[piece]), DATA.targets[piece])
            (part / pieces).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
    return np.mean(losses)


def same(result, layout, before, after) -> None:
    wanted = layout.gather(after) - before
    assert torch.allclose(result.update, wanted, atol=1e-6)
    assert result.update.abs().max() > 1e-4


@pytest.mark.parametrize(
    ("spec", "made"),
    [
        ("adamw:lr=0.01,weight_decay=0.1", lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1)),
        ("adam:lr=0.01,beta1=0.8,beta2=0.9", lambda p: torch.optim.Adam(p, 0.01, betas=(0.8, 0.9))),
        ("rmsprop:lr=0.01,alpha=0.9", lambda p: torch.optim.RMSprop(p, 0.01, alpha=0.9)),
        ("adagrad", lambda p: torch.optim.Adagrad(p, 0.05)),
        (
            "sgd:momentum=0.9,nesterov=true",
            lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True),
        ),
    ],
)
def test_updates_are_those_of_the_torch_optimizer(spec, made):
    chosen = local_optimizer.read(spec)
    options = LocalSGD(lr=chosen.lr or 0.05, optimizer=spec)
    result, model, layout = trained(options)
    before = layout.gather(model)
    loss = torch_loop(model, made(model.parameters()))
    same(result, layout, before, model)
    assert result.result.loss == pytest.approx(loss, rel=1e-5)


def test_clipping_accumulation_and_a_schedule_within_the_round():
    options = LocalSGD(lr=0.1, optimizer="adamw", clip=0.05, accumulate=4, step_schedule="0.1,1@3")
    result, model, layout = trained(options)
    before, optimizer = layout.gather(model), torch.optim.AdamW(model.parameters(), 0.1)

    def change(step):
        optimizer.param_groups[0]["lr"] = 0.1 * (0.1 if step < 3 else 1.0)

    torch_loop(model, optimizer, change, clip=0.05, pieces=4)
    same(result, layout, before, model)


def test_kept_state_continues_from_the_last_round():
    options = LocalSGD(lr=0.01, optimizer="adam", optimizer_state="kept")
    first, model, layout = trained(options)
    second, _, _ = trained(options, state=first.result.state)
    fresh, _, _ = trained(options)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    torch_loop(model, optimizer)
    again = initial_model(Task("tiny", network, DATA, DATA), 0)
    before = layout.gather(again)
    continued = torch.optim.Adam(again.parameters(), 0.01)
    continued.load_state_dict(optimizer.state_dict())
    torch_loop(again, continued)
    same(second, layout, before, again)
    assert not torch.allclose(second.update, fresh.update, atol=1e-4)


def test_fresh_state_is_not_returned():
    assert trained(LocalSGD(lr=0.01, optimizer="adam"))[0].result.state is None


def test_the_server_scales_the_learning_rate_of_the_tasks_own_optimizer():
    def made(parameters):
        return torch.optim.AdamW(parameters, 0.02)

    result, model, layout = trained(LocalSGD(lr=0.05).for_round(0.5), optimizer=made)
    before = layout.gather(model)
    torch_loop(model, torch.optim.AdamW(model.parameters(), 0.01))
    same(result, layout, before, model)


def test_the_proximal_term_and_the_correction_of_a_strategy_are_added_to_the_gradient():
    correction = torch.linspace(-1, 1, 47)
    options = LocalSGD(lr=0.01, optimizer="adam", proximal=0.5)
    task = Task("tiny", network, DATA, DATA)
    model = initial_model(task, 0)
    layout = Layout.of(model)
    start = layout.gather(model)
    engine = client_engine(task, initial_model(task, 0), layout, "cpu")
    result = engine.train(start, DATA, BATCHES, options, traces=Traces(correction=correction))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for rows in BATCHES:
        optimizer.zero_grad()
        F.cross_entropy(model(INPUTS[rows]), DATA.targets[rows]).backward()
        away = layout.gather(model) - start
        for parameter, own, distance in zip(
            model.parameters(),
            layout.views(correction).values(),
            layout.views(away).values(),
            strict=True,
        ):
            parameter.grad += own + 0.5 * distance
        optimizer.step()
    same(result, layout, start, model)


def test_float16_with_loss_scaling_agrees_with_float32():
    result, model, layout = trained(LocalSGD(lr=0.01, optimizer="adamw", precision="float16"))
    before = layout.gather(model)
    torch_loop(model, torch.optim.AdamW(model.parameters(), 0.01))
    assert torch.allclose(result.update, layout.gather(model) - before, atol=5e-3)


class WithLogits(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = network()

    def forward(self, inputs):
        return SimpleNamespace(logits=self.layers(inputs))


@pytest.mark.parametrize("model", [network, WithLogits])
def test_the_loss_of_a_task_receives_float32_outputs_under_autocast(model):
    seen = []

    def loss(outputs, targets):
        seen.append(outputs.dtype)
        return F.cross_entropy(outputs, targets)

    task = Task("tiny", model, DATA, DATA, loss=loss)
    made = initial_model(task, 0)
    layout = Layout.of(made)
    engine = client_engine(task, made, layout, "cpu")
    engine.train(layout.gather(made), DATA, BATCHES[:1], LocalSGD(precision="bfloat16"))
    assert seen == [torch.float32]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("adamv", r"unknown optimizer 'adamv'"),
        ("AdamW", "did you mean 'adamw'?"),
        ("adamw:rate=1", "has no option 'rate'"),
        ("adamw:betas=0.9", "has no option 'betas'; did you mean 'beta2'?"),
        ("adamw:differentiable=true", "has no option 'differentiable'"),
        ("adamw:lr=0", "lr is 0; give more than 0"),
        ("adamw:lr=1e-3,lr=1e-4", "lr is given twice"),
        ("lbfgs", "lbfgs is not supported, because it evaluates the loss several times a step"),
        ("adamw@layer", "an optimizer has no scope"),
    ],
)
def test_an_invalid_spec_string_is_one_error_message(text, said):
    with pytest.raises(SpecError, match=said):
        local_optimizer.read(text)


@pytest.mark.parametrize(
    ("options", "own", "said"),
    [
        ({"optimizer": "adamw:weight_decay=-1"}, None, "--optimizer adamw:.*Invalid weight_decay"),
        ({"optimizer": "adamw:beta1=1.5"}, None, "--optimizer adamw:beta1=1.5: Invalid beta"),
        ({"optimizer": "sgd:nesterov=true"}, None, "Nesterov momentum requires a momentum"),
        ({"optimizer_state": "kept"}, None, "give --momentum 0.9 --keep-momentum instead"),
        ({}, lambda parameters: 5, r"optimizer\(parameters\): got int; expected a torch"),
        ({}, lambda parameters: 1 / 0, "test_torch_optimizers.py, line .*division by zero"),
    ],
)
def test_an_optimizer_that_cannot_be_constructed_is_an_error_before_the_first_round(
    options, own, said
):
    task = Task("tiny", network, DATA, DATA, optimizer=own)
    with pytest.raises(UserError, match=said):
        check_optimizer(task, network(), LocalSGD(**options))
    with pytest.raises(UserError, match=said):
        simulate(task, clients=2, progress=False, **options)


@pytest.mark.parametrize("name", sorted(local_optimizer._classes()))
def test_every_optimizer_of_torch_trains(name):
    class Bare(nn.Module):  # muon takes matrices only
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, 6))

        def forward(self, x):
            return x @ self.weight.T

    task, options = Task("bare", Bare, DATA, DATA), LocalSGD(lr=0.01, optimizer=name)
    layout = Layout.of(Bare())
    engine = client_engine(task, Bare(), layout, "cpu")
    check_optimizer(task, Bare(), options)
    assert engine.train(torch.ones(layout.numel), DATA, BATCHES, options).update.any()


def test_simulate_takes_a_function_as_the_optimizer(tmp_path):
    task, wanted = (
        Task("tiny", network, DATA, DATA),
        {"clients": 2, "rounds": 3, "progress": False},
    )
    own = simulate(task, optimizer=torch.optim.Adagrad, out=tmp_path / "own", **wanted)
    spec = simulate(task, optimizer="adagrad", out=tmp_path / "spec", **wanted)
    assert np.array_equal(own.metrics["loss"], spec.metrics["loss"])
    with pytest.raises(ConfigError, match="optimizer is a function, but task is not a Task"):
        simulate("digits", optimizer=torch.optim.Adagrad)


def untrained(model, data, local_round):
    return {"loss": 1.0}


OWN_OPTIMIZER = {"optimizer": torch.optim.Adagrad}, "its own optimizer"
OWN_LOOP = {"train_fn": untrained}, "its own train_fn"


@pytest.mark.parametrize(
    ("own", "options", "given"),
    [
        (OWN_OPTIMIZER, {"lr": 0.3}, "--lr 0.3"),
        (OWN_OPTIMIZER, {"optimizer": "adamw:lr=0.1"}, "--optimizer adamw:lr=0.1"),
        (OWN_OPTIMIZER, {"momentum": 0.5}, "--momentum 0.5"),
        (OWN_OPTIMIZER, {"weight_decay": 0.5}, "--weight-decay 0.5"),
        (OWN_LOOP, {"optimizer": "adamw"}, "--optimizer adamw"),
        (OWN_LOOP, {"clip": 2.0}, "--clip 2.0"),
        (OWN_LOOP, {"accumulate": 2}, "--accumulate 2"),
        (OWN_LOOP, {"momentum": 0.5, "keep_momentum": True}, "--momentum 0.5"),
    ],
)
def test_an_option_that_the_task_replaces_is_refused(own, options, given):
    fields, reason = own
    task = Task("tiny", network, DATA, DATA, **fields)
    said = f"^{given} has no effect, because task 'tiny' has {reason}; leave {given.split()[0]} out"
    with pytest.raises(ConfigError, match=said):
        simulate(task, clients=2, progress=False, **options)


@pytest.mark.parametrize(
    ("own", "options"),
    [
        (OWN_OPTIMIZER, {"clip": 2.0, "accumulate": 2}),
        (OWN_OPTIMIZER, {"lr": 0.3, "lr_schedule": "0.3,0.1@2"}),
        (OWN_OPTIMIZER, {"lr": 0.3, "weight_decay": 0.1, "strategy": "vote"}),
        (OWN_LOOP, {"lr": 0.3, "batch_size": 2, "local_epochs": 2}),
    ],
)
def test_options_that_the_task_does_not_replace_are_accepted(own, options, tmp_path):
    task = Task("tiny", network, DATA, DATA, **own[0])
    run = simulate(
        task, clients=3, rounds=1, participation=1, progress=False, out=tmp_path / "run", **options
    )
    assert run.summary.client_updates == 3


def test_the_default_learning_rate_is_that_of_torch_except_for_sgd():
    assert local_optimizer.read("adamw").default_lr == 1e-3
    assert local_optimizer.read("sgd").default_lr == 0.05
    assert local_optimizer.read("adamw:3e-4").default_lr == 3e-4
