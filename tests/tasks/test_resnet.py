import numpy as np
import pytest
import torch
from small_models import train_together

from fedcomp.layout import Layout
from fedcomp.sim.batched import BatchedEngine
from fedcomp.tasks import Data, Task, initial_model
from fedcomp.tasks.check import check
from fedcomp.tasks.cifar10 import ResNet18
from fedcomp.training.engine import SerialEngine
from fedcomp.training.evaluation import evaluate
from fedcomp.training.local_sgd import LocalSGD, plan_batches


def photographs(count: int, size: int = 8) -> Data:
    return Data(
        torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(0)),
        torch.arange(count) % 10,
    )


SMALL = Task("small", lambda: ResNet18(4), lambda: photographs(40), lambda: photographs(20))


def test_the_model_has_eighteen_layers_and_halves_the_image_three_times():
    model, reached = ResNet18(4), []
    for block in model.blocks:
        block.register_forward_hook(lambda block, given, made: reached.append(tuple(made.shape)))
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    assert (
        reached
        == [(2, 4, 32, 32)] * 2 + [(2, 8, 16, 16)] * 2 + [(2, 16, 8, 8)] * 2 + [(2, 32, 4, 4)] * 2
    )
    layers = [m for m in model.modules() if isinstance(m, torch.nn.Conv2d | torch.nn.Linear)]
    assert (
        sum(m.kernel_size == (3, 3) for m in layers[:-1]) + 1 == 18 and len(layers) == 21
    )  # three more where the shape changes


def test_the_outputs_of_an_example_do_not_depend_on_other_examples():
    model, inputs = ResNet18(4).train(), photographs(6).inputs
    torch.testing.assert_close(model(inputs)[:2], model(inputs[:2]), rtol=1e-4, atol=1e-5)
    assert not list(model.buffers())


def test_the_model_passes_the_check_of_tasks():
    assert check(SMALL, 4).numel == Layout.of(ResNet18(4)).numel


def test_the_batched_engine_trains_as_the_serial_engine_does(one_thread):
    model = initial_model(SMALL, 0)
    layout, data, sgd = (
        Layout.of(model),
        photographs(40),
        LocalSGD(steps=3, batch_size=4, lr=0.05, momentum=0.9, clip=5.0),
    )
    start, plans = (
        layout.gather(model),
        [plan_batches(sgd, np.arange(10) + 10 * who, 0, 1, who) for who in range(4)],
    )
    updates, losses = train_together(
        BatchedEngine(SMALL, initial_model(SMALL, 0), layout, "cpu", 3), start, data, plans, sgd
    )
    engine = SerialEngine(SMALL, model, layout, "cpu")
    for who, plan in enumerate(plans):
        alone = engine.train(start, data, plan, sgd)
        assert (updates[who] - alone.update).norm() < 1e-3 * alone.update.norm()
        assert losses[who].item() == pytest.approx(alone.result.loss, rel=1e-3)


def test_the_model_can_memorise_a_few_images(one_thread):
    model, data = initial_model(SMALL, 0), photographs(20)
    layout, sgd = Layout.of(model), LocalSGD(steps=30, batch_size=20, lr=0.1)
    before = evaluate(SMALL, model, layout, layout.gather(model), data, "cpu")[0]
    plan = plan_batches(sgd, np.arange(20), 0, 1, 0)
    start = layout.gather(model)
    learned = start + SerialEngine(SMALL, model, layout, "cpu").train(start, data, plan, sgd).update
    assert evaluate(SMALL, model, layout, learned, data, "cpu")[0] < 0.3 * before
