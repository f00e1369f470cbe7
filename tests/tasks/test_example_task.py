from pathlib import Path

import torch
from torch import nn

import fedcomp.tasks
from fedcomp.tasks import initial_model, load
from fedcomp.tasks.check import check

FILE = Path(fedcomp.tasks.__file__).with_name("example_task.py")


def test_a_copy_of_the_example_is_a_task_that_passes_the_check(tmp_path):
    copy = tmp_path / "my_task.py"
    copy.write_text(FILE.read_text())
    task = load(f"{copy}:task")
    assert check(task, 20).numel > 1000
    assert "fedcomp sim --task my_task.py:task" in copy.read_text()


def learned(task, model: nn.Module) -> float:
    train, test = task.train(), task.test()
    optimizer, rows = torch.optim.SGD(model.parameters(), 0.1), torch.Generator().manual_seed(0)
    for _ in range(700):
        batch = torch.randint(len(train), (20,), generator=rows)
        optimizer.zero_grad()
        task.criterion(model(train.inputs[batch]), train.targets[batch]).backward()
        optimizer.step()
    return float(task.accuracy(model(test.inputs), test.targets))


def test_the_model_of_the_example_learns_more_than_a_linear_model(one_thread):
    task = load(f"{FILE}:task")
    assert learned(task, initial_model(task, 0)) > 0.95
    torch.manual_seed(0)
    assert learned(task, nn.Linear(2, 3)) < 0.8
