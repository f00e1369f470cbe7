"""`fedcomp tasks`: the tasks that have names, how large they are, and where each looks for its data."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ..errors import FedcompError
from ..formatting import NOTHING, one_line
from ..layout import Layout
from ..tasks import Task, available_tasks, cifar10, initial_model, mnist, shakespeare
from ..tasks.parquet import Images
from ..tasks.shakespeare import WINDOW, Text

COLUMNS = ("task", "parameters", "examples", "to test on", "an input", "data")
SOURCES: dict[str, Callable[[Path | None], Images | Text]] = {
    "mnist": mnist.images,
    "cifar10": cifar10.images,
    "shakespeare": shakespeare.Text,
}
OWN = "your own: path/file.py:name, begun by fedcomp init"


@dataclass(frozen=True)
class Line:
    """A task. Counts are None where the data is not here, or the task cannot be loaded."""

    name: str
    parameters: int | None
    train: int | None
    test: int | None
    input: str
    data: str


def lines(folder: Path | None) -> list[Line]:
    """Return a line for each task that has a name; `folder` is where data is looked for, None for nowhere."""
    return [_line(name, folder) for name in available_tasks()]


def _line(name: str, folder: Path | None) -> Line:
    try:
        task = available_tasks()[name](folder)
    except FedcompError as error:
        return Line(name, None, None, None, NOTHING, one_line(str(error)))
    parameters = Layout.of(initial_model(task, 0)).numel
    source = SOURCES.get(name.partition("-")[0])
    if source is None:
        return _counted(name, parameters, task)
    found = source(folder)
    kind = f"{WINDOW} characters" if isinstance(found, Text) else _shape(found.shape)
    try:
        train, test = (found.count(split) for split in ("train", "test"))
        return Line(name, parameters, train, test, kind, f"in {found.place()}")
    except FedcompError as error:
        return Line(name, parameters, None, None, kind, one_line(str(error)))


def _counted(name: str, parameters: int, task: Task) -> Line:
    """Return the line of a task whose examples are counted by loading them."""
    try:
        train, test = task.train(), task.test()
    except FedcompError as error:
        return Line(name, parameters, None, None, NOTHING, one_line(str(error)))
    place = "comes with scikit-learn" if name == "digits" else "comes with the task"
    return Line(name, parameters, len(train), len(test), _shape(train.inputs.shape[1:]), place)


def _shape(sizes: tuple[int, ...]) -> str:
    return "×".join(map(str, sizes))


def show(folder: Path | None) -> None:
    """A table on a terminal, lines with tabs elsewhere."""
    rows = [_cells(line) for line in lines(folder)]
    if not sys.stdout.isatty():
        print("\n".join("\t".join(row) for row in [COLUMNS, *rows]))
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for title in COLUMNS:
        figure = title in COLUMNS[1:4]
        table.add_column(
            title,
            justify="right" if figure else "left",
            style="bold" if title == "task" else "",
            no_wrap=title != "data",
            overflow="fold",
        )
    for row in rows:
        table.add_row(*row)
    console = Console(highlight=False, markup=False)
    console.print(table)
    console.print(OWN, style="dim")


def _cells(line: Line) -> tuple[str, ...]:
    counts = [NOTHING if n is None else f"{n:,}" for n in (line.parameters, line.train, line.test)]
    return line.name, *counts, line.input, line.data
