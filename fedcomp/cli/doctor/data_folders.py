"""Check a folder of data: each built-in task loads its data as it would in a run."""

from collections.abc import Callable, Iterator
from pathlib import Path

from ...errors import FedcompError, MissingExtraError, UserError
from .asked import Asked
from .check import OK, SKIPPED, Check, refused


def checks(asked: Asked) -> Iterator[Check]:
    if asked.data is not None:
        yield from data_folder(asked.data)


def data_folder(folder: Path) -> Iterator[Check]:
    """Check the data sets in a folder. A missing set is skipped if the folder has another one."""
    from ...tasks import available_tasks, load

    found = {
        name: _read(lambda name=name: load(name, folder))
        for name in available_tasks()
        if name != "digits"
    }
    any_there = any(not isinstance(result, FedcompError) for result in found.values())
    for name, result in found.items():
        if not isinstance(result, FedcompError):
            yield Check(
                "data",
                OK,
                f"{name}: {result[0]:,} examples to learn from, {result[1]:,} to test on",
            )
        elif (folder / name.partition("-")[0]).exists() or not any_there:
            yield refused("data", result, f"{name}: ")
        else:
            yield Check("data", SKIPPED, f"{name}: not in {folder}")


def _read(task: Callable) -> tuple[int, int] | FedcompError:
    try:
        made = task()
        return len(made.train()), len(made.test())
    except (UserError, MissingExtraError) as error:
        return error
