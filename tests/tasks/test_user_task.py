import pytest
from cases import for_each

from fedcomp.errors import ConfigError, TaskError
from fedcomp.tasks import load
from fedcomp.tasks.check import data_of

TASK = """
from dataclasses import dataclass
import torch
from fedcomp.tasks import Data, Task

@dataclass
class Width:
    hidden: int = 3

def data():
    return Data(torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64))

task = Task("mine", lambda: torch.nn.Linear(2, Width().hidden), data, data)
"""


def test_a_task_object_in_a_file_is_loaded(write_task):
    task = load(write_task(TASK))
    assert task.name == "mine" and len(task.train()) == 4


@pytest.mark.parametrize(
    "make",
    [
        "def make(): return task",
        "def make(folder):\n    assert folder.name == 'here'\n    return task",
        "def make(folder=None):\n    assert folder.name == 'here'\n    return task",
        "class make:\n    def __new__(cls): return task",
    ],
)
def test_a_callable_is_called_with_the_data_folder_if_it_takes_an_argument(
    write_task, tmp_path, make
):
    assert load(write_task(f"{TASK}\n{make}", "make"), tmp_path / "here").name == "mine"


def test_a_changed_file_is_executed_again_and_files_of_the_same_name_are_separate(
    write_task, tmp_path
):
    (tmp_path / "other").mkdir()
    first = load(write_task(TASK))
    other = load(write_task(TASK.replace('"mine"', '"another"'), file="other/mine.py"))
    again = load(write_task(TASK.replace('"mine"', '"longer name"')))
    assert (first.name, other.name, again.name) == ("mine", "another", "longer name")


def test_a_path_may_be_relative_or_begin_with_a_tilde(write_task, tmp_path, monkeypatch):
    write_task(TASK)
    monkeypatch.chdir(tmp_path)
    assert load("mine.py:task").name == "mine"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load("~/mine.py:task").name == "mine"


@for_each(
    "text, says",
    [
        ("mine.py", "the file .*mine.py does not exist; give path/file.py:name"),
        ("mine.py:", "does not name a task in the file; give path/file.py:name"),
        (":task", "does not name a task in the file"),
        ("mine.py:not a name", "does not name a task in the file"),
        ("absent.py:task", "the file .*absent.py does not exist"),
    ],
)
def test_a_name_without_a_task_is_refused(text, says):
    with pytest.raises(TaskError, match=f"--task {text}.*{says}"):
        load(text)


@for_each(
    "content, names",
    [
        (TASK.replace("task = ", "first = second = "), ["first", "second"]),
        ("def make_task(): pass\n", ["make_task"]),
        ("x = 1\n", ["name"]),
    ],
)
def test_the_error_for_a_file_without_a_name_lists_its_tasks(content, names, write_task, tmp_path):
    write_task(content)
    file = str(tmp_path / "mine.py")
    wanted = " or ".join(f"{file}:{name}" for name in names)
    with pytest.raises(TaskError) as caught:
        load(file)
    assert str(caught.value) == f"--task {file} does not name a task in the file; give {wanted}"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (
            "x = 1\ny = 1 / 0\n",
            "the import failed: mine.py, line 2: ZeroDivisionError: division by zero; correct it",
        ),
        ("def f():\n    return missing\nf()\n", "mine.py, line 2, in f: NameError"),
        ("x = 1\ntask = (\n", r"mine.py, line 2: SyntaxError: '\(' was never closed"),
        (
            "import no_such_package\n",
            "line 1: ModuleNotFoundError: No module named 'no_such_package'",
        ),
        ("import json\njson.loads('{')\n", "line 2: JSONDecodeError"),
        ("raise ValueError('first\\nsecond')\n", "line 1: ValueError: first; correct"),
        ("import sys\nsys.exit(3)\n", "line 2: SystemExit"),
        ("def task(): raise SystemExit\n", "the call failed: mine.py, line 1, in task: SystemExit"),
        ("class Own(BaseException): pass\nraise Own\n", "line 2: Own"),
        ("class Own(BaseException): pass\ndef task(): raise Own\n", "line 2, in task: Own"),
        (
            "tsak = 1\ndef make_task(): pass\n",
            "the file does not define 'task'; did you mean 'make_task'",
        ),
        ("x = 1\n", "the file does not define 'task'; define it there"),
        ("task = 5\n", "is of type int; it must be a fedcomp Task or a function that returns one"),
        ("def task(): pass\n", "is of type NoneType; it must be"),
        ("def task(a, b): pass\n", "define it with one parameter or none"),
        ("def task(*, a): pass\n", "define it with one parameter or none"),
        ("def task():\n    x = 1\n    return {}['key']\n", "line 3, in task: KeyError: 'key'"),
    ],
)
def test_the_error_for_a_broken_file_names_the_file_and_the_line(write_task, content, says):
    text = write_task(content)
    with pytest.raises(TaskError, match=f"--task .*mine.py:task.*{says}") as caught:
        load(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("lines", ["    x = folder / 'a'\n", ""])
def test_the_error_of_a_task_without_its_data_folder_names_the_flag(write_task, tmp_path, lines):
    content = (
        "from torch import nn\nfrom fedcomp import Task\n"
        f"def task(folder):\n{lines}    return Task('mine', lambda: nn.Linear(2, 2), train=lambda: open(folder / 'absent'))\n"
    )
    text = write_task(content)
    with pytest.raises(
        TaskError,
        match="TypeError: .*; if the task reads a data folder, give the folder with --data DIR",
    ):
        data_of(load(text), "train")
    with pytest.raises(TaskError, match="FileNotFoundError: .*; correct the task, or set"):
        data_of(load(text, tmp_path), "train")


def test_a_file_that_is_not_python_is_refused(write_task):
    with pytest.raises(TaskError, match="is not a Python file; give a file whose name ends in .py"):
        load(write_task("", file="mine.txt"))


@pytest.mark.parametrize(
    "content", ["raise ConfigError('own')", "def task(): raise ConfigError('own')"]
)
def test_fedcomp_errors_in_a_task_file_are_raised_unchanged(write_task, content):
    with pytest.raises(ConfigError, match="^own$"):
        load(write_task(f"from fedcomp.errors import ConfigError\n{content}\n"))


@pytest.mark.parametrize(
    "content", ["raise KeyboardInterrupt", "def task(): raise KeyboardInterrupt"]
)
def test_an_interruption_in_a_task_file_is_not_reported_as_its_error(write_task, content):
    with pytest.raises(KeyboardInterrupt):
        load(write_task(f"{content}\n"))


@pytest.mark.parametrize("closed", ["inner", "inner/mine.py"])
def test_a_file_without_read_permission_is_refused(unprivileged, closed):
    (unprivileged / "inner").mkdir()
    (unprivileged / "inner" / "mine.py").write_text(TASK)
    (unprivileged / closed).chmod(0)
    try:
        with pytest.raises(
            TaskError, match="--task .*mine.py.*(PermissionError|change its permissions)"
        ) as caught:
            load(f"{unprivileged}/inner/mine.py:task")
        assert "\n" not in str(caught.value)
    finally:
        (unprivileged / closed).chmod(0o700)
