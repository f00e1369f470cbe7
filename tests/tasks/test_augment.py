import numpy as np
import pytest
import torch
from small_models import train_together
from torch import nn

from fedcomp.layout import Layout
from fedcomp.sim.batched import BatchedEngine
from fedcomp.tasks import Augmentation, Data, Task, initial_model
from fedcomp.tasks.augment import CROP_AND_FLIP, PADDING
from fedcomp.training.engine import SerialEngine
from fedcomp.training.local_sgd import LocalSGD, plan_augmentation, plan_batches

SGD = LocalSGD(steps=3, batch_size=4, lr=0.05, augment=True)


def images(count: int) -> torch.Tensor:
    return torch.randn(count, 3, 8, 6, generator=torch.Generator().manual_seed(0))


def data() -> Data:
    return Data(images(40), torch.arange(40) % 4)


def model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(96, 4))


TASK = Task("pictures", model, data, data, augment=CROP_AND_FLIP)


def by_hand(image: np.ndarray, row: int, column: int, flip: int) -> np.ndarray:
    """Crop and flip one image with NumPy."""
    height, width = image.shape[1:]
    margined = np.pad(image, ((0, 0), (PADDING, PADDING), (PADDING, PADDING)))
    cut = margined[:, row : row + height, column : column + width]
    return cut[:, :, ::-1] if flip else cut


def test_each_image_is_cropped_and_flipped_by_its_own_random_numbers():
    given = images(50)
    before, drawn = given.clone(), CROP_AND_FLIP.draw_for([np.arange(30), np.arange(20)], 0, 1, 2)
    changed = CROP_AND_FLIP.apply(given, torch.from_numpy(drawn))
    assert changed.dtype == given.dtype and torch.equal(given, before)
    expected = np.stack(
        [by_hand(image, *numbers) for image, numbers in zip(given.numpy(), drawn, strict=True)]
    )
    assert np.array_equal(changed.numpy(), expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_gpu_and_the_cpu_produce_the_same_augmented_images():
    given, drawn = images(50), torch.from_numpy(CROP_AND_FLIP.draw_for([np.arange(50)], 0, 1, 2))
    assert torch.equal(
        CROP_AND_FLIP.apply(given.cuda(), drawn.cuda()).cpu(), CROP_AND_FLIP.apply(given, drawn)
    )


def test_all_crop_positions_and_flips_are_drawn_about_equally_often():
    drawn = CROP_AND_FLIP.draw_for([np.arange(9000)], 0, 1, 0)
    for column, values in ((0, 2 * PADDING + 1), (1, 2 * PADDING + 1), (2, 2)):
        counts = np.bincount(drawn[:, column], minlength=values)
        assert len(counts) == values and counts.min() > 0.8 * 9000 / values


def test_random_numbers_depend_only_on_seed_round_and_client():
    plan = [np.arange(5), np.arange(3)]
    first = CROP_AND_FLIP.draw_for(plan, 3, 4, 5)
    assert first.shape == (8, 3) and np.array_equal(first, CROP_AND_FLIP.draw_for(plan, 3, 4, 5))
    assert not any(
        np.array_equal(first, CROP_AND_FLIP.draw_for(plan, *other))
        for other in ((0, 4, 5), (3, 0, 5), (3, 4, 0))
    )


def test_no_random_numbers_are_drawn_without_augment():
    plan = [np.arange(5)]
    assert plan_augmentation(TASK, LocalSGD(), plan, 0, 1, 2) is None
    assert np.array_equal(
        plan_augmentation(TASK, SGD, plan, 0, 1, 2), CROP_AND_FLIP.draw_for(plan, 0, 1, 2)
    )


def parts(task: Task) -> tuple[Task, nn.Module, Layout]:
    made = initial_model(task, 0)
    return task, made, Layout.of(made)


def test_a_client_trains_on_the_augmented_examples(one_thread):
    task, made, layout = parts(TASK)
    start, plan = layout.gather(made), plan_batches(SGD, np.arange(20), 0, 1, 2)
    trained = SerialEngine(task, made, layout, "cpu").train(
        start, data(), plan, SGD, seed=0, round=1, client=2
    )
    whole = np.concatenate(plan)
    changed = CROP_AND_FLIP.apply(
        data().inputs[whole], torch.from_numpy(CROP_AND_FLIP.draw_for(plan, 0, 1, 2))
    )
    in_order = np.split(np.arange(len(whole)), np.cumsum([len(batch) for batch in plan])[:-1])
    plain = LocalSGD(steps=3, batch_size=4, lr=0.05)
    expected = SerialEngine(*parts(TASK), "cpu").train(
        start, Data(changed, data().targets[whole]), in_order, plain
    )
    assert (
        torch.equal(trained.update, expected.update) and trained.result.loss == expected.result.loss
    )
    unchanged = SerialEngine(*parts(TASK), "cpu").train(start, data(), plan, plain)
    assert not torch.allclose(trained.update, unchanged.update)


@pytest.mark.parametrize("at_once", [0, 1, 2])
def test_the_batched_engine_augments_as_the_serial_engine_does(at_once, one_thread):
    shards = [
        np.arange(20),
        np.arange(3) + 20,
        np.arange(17) + 23,
    ]  # the second has fewer examples than a batch
    plans = [plan_batches(SGD, shard, 0, 7, who) for who, shard in enumerate(shards)]
    task, made, layout = parts(TASK)
    start, serial = layout.gather(made), SerialEngine(*parts(TASK), "cpu")
    updates, losses = train_together(
        BatchedEngine(task, made, layout, "cpu", at_once), start, data(), plans, SGD, round=7
    )
    for who, plan in enumerate(plans):
        alone = serial.train(start, data(), plan, SGD, seed=0, round=7, client=who)
        assert (updates[who] - alone.update).norm() < 1e-4 * alone.update.norm()
        assert losses[who].item() == pytest.approx(alone.result.loss, rel=1e-4)


def test_a_task_may_define_its_own_augmentation(one_thread):
    noisy = Augmentation(
        lambda generator, count: generator.standard_normal((count, 5), np.float32),
        lambda inputs, drawn: inputs + drawn,
    )
    points = Data(torch.zeros(8, 5), torch.arange(8) % 2)
    task, made, layout = parts(
        Task("points", lambda: nn.Linear(5, 2), lambda: points, lambda: points, augment=noisy)
    )
    update = (
        SerialEngine(task, made, layout, "cpu")
        .train(layout.gather(made), points, [np.arange(8)], SGD)
        .update
    )
    assert layout.views(update)[
        "weight"
    ].any()  # without augmentation, the inputs and the gradients of the weights are zero
