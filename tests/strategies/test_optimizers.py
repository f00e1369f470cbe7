"""Server optimizers take the steps of the paper, and their state changes only if the model moves."""

import numpy as np
import pytest
import torch
from cases import for_each

from fedcomp import UserError
from fedcomp.strategies.optimizers import FIRST, OPTIMIZERS, SECOND, optimizer

UPDATES = torch.from_numpy(np.random.default_rng(0).normal(0, 0.01, (6, 50)).astype(np.float32))


def run(text: str) -> list[np.ndarray]:
    made, steps = optimizer(text), []
    for update in UPDATES:
        steps.append(made.step(update.clone()).numpy().copy())
        made.commit()
    return steps


def test_plain_sgd_returns_the_update_and_has_no_state():
    made = optimizer("sgd")
    update = UPDATES[0].clone()
    assert made.is_identity and made.step(update) is update
    made.commit()
    assert made.take_changes() == ({}, {})


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_equals_that_of_torch(nesterov):
    """Compare with torch.optim.SGD on gradients −Δ with learning rate 1."""
    x = torch.zeros(50, requires_grad=True)
    torchs, before = (
        torch.optim.SGD([x], lr=1.0, momentum=0.9, nesterov=nesterov),
        np.zeros(50, np.float32),
    )
    for update, step in zip(
        UPDATES, run(f"sgd:momentum=0.9,nesterov={str(nesterov).lower()}"), strict=True
    ):
        x.grad = -update.clone()
        torchs.step()
        now = x.detach().numpy().copy()
        np.testing.assert_allclose(step, now - before, rtol=1e-4, atol=1e-7)
        before = now


@for_each("name", ["adam", "yogi"])
def test_adaptive_steps_equal_those_of_the_paper(name):
    beta1, beta2, tau = 0.8, 0.95, 2e-3
    m, v = np.zeros(50), np.full(50, tau**2)
    for update, step in zip(
        UPDATES.double().numpy(), run(f"{name}:beta1={beta1},beta2={beta2},tau={tau}"), strict=True
    ):
        m, square = beta1 * m + (1 - beta1) * update, update**2
        v = (
            beta2 * v + (1 - beta2) * square
            if name == "adam"
            else v - (1 - beta2) * square * np.sign(v - square)
        )
        np.testing.assert_allclose(step, m / (np.sqrt(v) + tau), rtol=2e-4, atol=1e-7)


@for_each("text", ["sgd:momentum=0.9", "sgd:momentum=0.9,nesterov=true", "adam", "yogi"])
def test_a_round_that_does_not_move_the_model_leaves_the_state(text):
    made, other = optimizer(text), optimizer(text)
    for i, update in enumerate(UPDATES):
        made.step(torch.full((50,), 7.0))  # never committed
        steps = [o.step(update.clone()) for o in (made, other)]
        assert torch.equal(*steps), i
        made.commit()
        other.commit()


@for_each("text", ["sgd:momentum=0.9", "adam", "yogi"])
def test_a_checkpoint_restores_the_whole_state(text):
    made, again = optimizer(text), optimizer(text)
    for update in UPDATES[:3]:
        made.step(update.clone())
        made.commit()
    vectors, values = made.take_changes()
    assert vectors.keys() <= {FIRST, SECOND} and not values
    again.restore(vectors.get, values.get)
    for update in UPDATES[3:]:
        assert torch.equal(made.step(update.clone()), again.step(update.clone()))
        made.commit()
        again.commit()


@for_each(
    "text, fix",
    [
        ("sgd:momentum=1", "less than 1"),
        ("sgd:nesterov=true", "give momentum=0.9"),
        ("adam:beta1=-0.1", "less than 1"),
        ("yogi:beta2=1", "less than 1"),
        ("adam:tau=0", "give 1e-18 to"),
        ("adma", "adam"),
        ("sgd+adam", "name one"),
        ("sgd@layer", "name one"),
    ],
)
def test_invalid_options_are_refused(text, fix):
    with pytest.raises(UserError, match=fix):
        optimizer(text)


def test_optimizers_are_registered_by_name():
    assert list(OPTIMIZERS) == ["sgd", "adam", "yogi"]
