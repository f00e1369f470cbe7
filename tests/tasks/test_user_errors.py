"""Errors of a user's code name the user's file and line, and the exit status is 2."""

import re

import pytest
import torch
from cases import for_each
from torch import nn

from fedcomp.errors import OutOfMemoryError, TaskError
from fedcomp.tasks import load
from fedcomp.tasks.check import check
from fedcomp.tasks.user_errors import TRACEBACK_VARIABLE, client_error, describe

NET = """import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(4, 3), torch.nn.Linear(5, 3)

    def forward(self, x):
        return self.b(self.a(x))
"""
TASK = """import torch
from fedcomp import Task
from {neighbour} import Net

def data():
    return torch.randn(40, 4), torch.zeros(40, dtype=torch.int64)

task = Task("mine", Net, data, data)
"""


def test_an_error_in_a_module_beside_the_task_file_names_its_line(write_task, tmp_path):
    (tmp_path / "net_of_this_test.py").write_text(NET)
    task = load(write_task(TASK.format(neighbour="net_of_this_test")))
    with pytest.raises(TaskError) as error:
        check(task, 20)
    assert re.fullmatch(
        r"task 'mine': model\(\)\(inputs float32 \[2, 4\]\) failed: net_of_this_test.py, line 9, in forward: RuntimeError: "
        r"mat1 and mat2 .*; correct the task, or set FEDCOMP_TRACEBACK=1 to see the full traceback",
        str(error.value),
    )


def test_two_task_files_may_not_import_different_modules_of_the_same_name(write_task, tmp_path):
    for folder in ("first", "second"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "neighbour_of_two.py").write_text(NET)
    text = TASK.format(neighbour="neighbour_of_two")
    load(write_task(text, file="first/mine.py"))
    load(write_task(text, file="first/another.py"))
    with pytest.raises(TaskError, match="has imported 'neighbour_of_two' from .*first.*rename"):
        load(write_task(text, file="second/mine.py"))


def test_the_traceback_is_printed_on_request(capsys, monkeypatch):
    try:
        nn.Linear(2, 3)(torch.ones(4, 4))
    except RuntimeError as error:
        assert (
            describe(error).startswith("test_user_errors.py, line ") and not capsys.readouterr().err
        )
        monkeypatch.setenv(TRACEBACK_VARIABLE, "1")
        describe(error)
        assert "Traceback (most recent call last)" in capsys.readouterr().err


@for_each(
    "error, device",
    [
        (MemoryError(), "CPU"),
        (torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), "GPU"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), "GPU"),
    ],
)
def test_running_out_of_memory_is_not_an_error_of_the_task(error, device):
    found = client_error(error)
    assert isinstance(found, OutOfMemoryError) and found.exit_status == 2
    assert f"ran out on the {device}" in str(found)
    assert "--batch-size" in str(found) and "--engine serial" in str(found)


def test_an_allocation_that_fails_in_a_task_names_the_flags(write_task):
    text = TASK.replace("from {neighbour} import Net", "Net = lambda: torch.empty(1 << 60)")
    with pytest.raises(OutOfMemoryError, match="^memory ran out on the CPU .*--batch-size"):
        check(load(write_task(text)), 20)
