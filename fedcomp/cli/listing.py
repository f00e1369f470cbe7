"""`fedcomp codecs` and `fedcomp tasks`: tables of the codecs and of the built-in tasks."""

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path

from .. import spec
from ..codecs import available_codecs
from ..errors import FedcompError
from ..formatting import NOTHING, one_line
from ..layout import Layout
from ..tasks import available_tasks, cifar10, initial_model, mnist, shakespeare
from ..tasks.parquet import ImageDataset
from ..tasks.shakespeare import WINDOW, Text
from .bench_codecs import normal
from .tables import print_table

NUMEL = 1 << 16  # length of the random vector that each codec encodes
CODEC_COLUMNS = (
    *("codec", "bits", "unbiased", "contracts", "linear", "portable"),
    *("source", "what it does"),
)
CODEC_LEGEND = f"""bits: bits per parameter, for {NUMEL:,} normally distributed values
C(x): the vector x after encoding and decoding;  E: mean over all seeds
unbiased: ω if E C(x) = x and E‖x−C(x)‖² ≤ ω‖x‖²;  contracts: δ if E‖x−C(x)‖² ≤ (1−δ)‖x‖²
linear: encoded vectors can be summed without decoding;  portable: the same bytes on all CPUs and GPUs;  {NOTHING}: no, or not known"""


def print_codecs() -> None:
    """Print a table of the codecs with their default options and properties."""
    vector = normal(NUMEL)
    rows = []
    for name, cls in available_codecs().items():
        codec = cls()
        frame = codec.encode(vector.values, seed=1, layout=vector.layout)
        factors = (codec.variance(NUMEL), codec.contraction(NUMEL))
        facts = [NOTHING if factor is None else f"{factor:.2g}" for factor in factors]
        facts += ["yes" if fact else NOTHING for fact in (codec.linear, codec.portable)]
        summary = (inspect.getdoc(cls) or "").partition("\n")[0].removeprefix("A codec that ")
        bits = f"{8 * len(frame) / NUMEL:.3g}"
        rows.append([spec.format_spec(name, codec), bits, *facts, cls.source, summary])
    left = set(CODEC_COLUMNS) - {"bits"}
    below = ("what it does", "source")
    print_table(CODEC_COLUMNS, rows, left, legend=CODEC_LEGEND, below=below)


TASK_COLUMNS = ("task", "parameters", "examples", "test examples", "input size", "data")
SOURCES: dict[str, Callable[[Path | None], ImageDataset | Text]] = {
    "mnist": mnist.images,
    "cifar10": cifar10.images,
    "shakespeare": shakespeare.Text,
}
OWN_TASK_LEGEND = (
    "to use your own task, give --task path/file.py:name; fedcomp init writes an example file"
)


def _row(name: str, folder: Path | None) -> Sequence[str]:
    """Return the table cells of a task. Dashes replace the numbers that are unknown because the task or its data cannot be loaded."""
    numel, shape = None, NOTHING
    counts: tuple[int | None, int | None] = None, None
    try:
        task = available_tasks()[name](folder)
        numel = Layout.of(initial_model(task, 0)).numel
        if source := SOURCES.get(name.partition("-")[0]):
            data = source(folder)
            shape = f"{WINDOW} characters" if isinstance(data, Text) else _shape(data.shape)
            counts = data.count("train"), data.count("test")
            place = f"in {data.data_folder()}"
        else:
            train, test = task.train(), task.test()
            shape, counts = _shape(train.inputs.shape[1:]), (len(train), len(test))
            place = "comes with scikit-learn" if name == "digits" else "comes with the task"
    except FedcompError as error:
        place = one_line(str(error))
    return name, *(NOTHING if n is None else f"{n:,}" for n in (numel, *counts)), shape, place


def _shape(sizes: tuple[int, ...]) -> str:
    return "×".join(map(str, sizes))


def print_tasks(folder: Path | None) -> None:
    """Print a table of the built-in tasks, with data in `folder` if it is given."""
    rows = [_row(name, folder) for name in available_tasks()]
    print_table(TASK_COLUMNS, rows, left=("task", "input size", "data"), legend=OWN_TASK_LEGEND)
