"""The displays of `fedcomp.simulate`: one line on a terminal, a line for each tenth of the run in a log, an updated cell in a notebook."""

import io
import re
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import numpy as np
import pytest
from rich.console import Console
from torch import nn
from torch.nn import functional as F

import fedcomp
from fedcomp.errors import DataError
from fedcomp.interactive import displays
from fedcomp.interactive.displays import (
    MAX_POINTS,
    LogDisplay,
    NotebookDisplay,
    ProgressDisplay,
    TerminalDisplay,
    default_display,
)

X = np.random.default_rng(0).normal(size=(80, 4))
TASK = fedcomp.Task(
    "<mine>",
    lambda: nn.Linear(4, 2),
    train=(X, (X.sum(1) > 0).astype(int)),
    test=(X, (X.sum(1) > 0).astype(int)),
)
REGRESSION = fedcomp.Task(
    "line",
    lambda: nn.Linear(4, 1),
    train=(X, X[:, :1]),
    test=(X, X[:, :1]),
    loss=F.mse_loss,
    accuracy=None,
    metrics={"error": lambda o, t: (o - t).abs().mean()},
)


def simulate(display, task=TASK, folder=None, **options):
    return fedcomp.simulate(
        task, clients=4, participation=0.5, progress=display, out=folder / "run", **options
    )


class Cells:
    """A replacement of IPython.display.display that records its arguments in order."""

    def __init__(self):
        self.bundles, self.displays = [], 0

    def __call__(self, bundle, *, raw, display_id):
        assert raw is display_id is True
        self.displays += 1
        self.bundles.append(bundle)
        return SimpleNamespace(update=lambda bundle, raw: self.bundles.append(bundle))


def test_a_log_gets_a_line_for_each_tenth(tmp_path):
    stream = io.StringIO()
    simulate(LogDisplay(stream), folder=tmp_path, rounds=25)
    lines = stream.getvalue().splitlines()
    assert (
        lines[0].startswith("<mine>, 4 clients, stc:density=0.01")
        and str(tmp_path / "run") in lines[0]
    )
    assert [
        int(found)
        for found in re.findall(r"^round (\d+)/25, accuracy ", stream.getvalue(), re.MULTILINE)
    ] == [3, 5, 8, 10, 13, 15, 18, 20, 23, 25]


def test_a_terminal_keeps_one_line(tmp_path):
    console = Console(file=io.StringIO(), force_terminal=True, width=110)
    simulate(TerminalDisplay(console), folder=tmp_path, rounds=3)
    last = (
        re.sub(r"\x1b\[[?\d;]*\w", "", console.file.getvalue())
        .replace("\r", "\n")
        .strip()
        .splitlines()[-1]
    )
    assert "round 3/3, accuracy" in last and "━" in last


def test_a_notebook_has_one_cell_that_ends_with_the_verdict(tmp_path):
    cells = Cells()
    run = simulate(NotebookDisplay(cells), folder=tmp_path, rounds=5)
    assert cells.displays == 1 and cells.bundles[0]["text/plain"] == "preparing the run"
    html = cells.bundles[-1]["text/html"]
    ElementTree.fromstring(html)
    assert "&lt;mine&gt;" in html and "<mine>" not in html
    assert (
        f"{100 * run.accuracy:.2f} %" in html
        and "<svg" in html
        and "<progress" not in html
        and str(run.folder) in html
    )
    assert "round 5/5, accuracy" in cells.bundles[-1]["text/plain"]


def test_a_notebook_is_updated_at_most_four_times_a_second(tmp_path):
    cells = Cells()
    page = NotebookDisplay(cells, clock=lambda: 0.0)
    simulate(page, folder=tmp_path, rounds=6)
    assert len(cells.bundles) == 3, (
        "updates when the display opens, when the run starts and when it ends"
    )


def test_the_cell_of_a_long_run_stays_small():
    page = NotebookDisplay(Cells())
    page.header = SimpleNamespace(judged="accuracy")
    page.points = [(i, i / 10_000) for i in range(1, 10_001)]
    points = re.search(r'points="([^"]+)"', page._curve()).group(1).split()
    assert len(points) <= MAX_POINTS + 1


@pytest.mark.slow
def test_a_regression_is_shown_by_its_loss(tmp_path):
    cells, stream = Cells(), io.StringIO()
    run = simulate(NotebookDisplay(cells), REGRESSION, tmp_path, rounds=3)
    html = cells.bundles[-1]["text/html"]
    assert (
        "loss, round 3" in html
        and "accuracy" not in html
        and '<td style="text-align:left">error</td>' in html
    )
    assert run.accuracy is None and run.metrics["error"].shape == (3,)
    simulate(LogDisplay(stream), REGRESSION, tmp_path / "again", rounds=1)
    assert re.search(r"round 1/1, loss [\d.]+, error [\d.]+, up", stream.getvalue())


def test_the_reason_for_the_end_of_a_run_is_shown_last(tmp_path):
    def broken():
        raise DataError("the disk is empty; fill it")

    class Interrupting(NotebookDisplay):
        def on_round_end(self, record):
            super().on_round_end(record)
            raise KeyboardInterrupt

    cells = Cells()
    with pytest.raises(DataError):
        simulate(NotebookDisplay(cells), fedcomp.Task("mine", TASK.model, broken, broken), tmp_path)
    assert cells.bundles[-1]["text/plain"] == "failed: the disk is empty; fill it"
    with pytest.raises(KeyboardInterrupt):
        simulate(Interrupting(cells), folder=tmp_path)
    assert cells.bundles[-1]["text/plain"].startswith(
        "interrupted after round 1 of 50; continue with: fedcomp.simulate(task, out="
    )
    assert "interrupted after round 1" in cells.bundles[-1]["text/html"]


def test_warnings_are_shown_once(tmp_path):
    for display, read in (
        (page := NotebookDisplay(Cells()), lambda: page.html()),
        (lines := LogDisplay(io.StringIO()), lambda: lines.stream.getvalue()),
    ):
        simulate(display, folder=tmp_path / type(display).__name__, rounds=1)
        display.on_warning("<b>\x1b[31m")
        assert read().count("[31m") == 1 and "\x1b" not in read()
    assert "! &lt;b&gt; [31m" in page.html()


def test_the_display_depends_on_the_environment(monkeypatch):
    monkeypatch.setattr(
        displays.sys, "stderr", SimpleNamespace(isatty=lambda: True, write=len, flush=lambda: None)
    )
    monkeypatch.setenv("TERM", "xterm")
    assert type(default_display()) is TerminalDisplay
    monkeypatch.setenv("TERM", "dumb")
    assert type(default_display()) is LogDisplay
    monkeypatch.setattr(displays.sys, "stderr", io.StringIO())
    assert type(default_display()) is LogDisplay
    monkeypatch.setitem(
        displays.sys.modules,
        "IPython",
        SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=None)),
    )
    assert type(default_display()) is LogDisplay, "IPython in a terminal is not a notebook"


def test_without_progress_nothing_is_shown(tmp_path, capfd):
    simulate(False, folder=tmp_path, rounds=2)
    assert capfd.readouterr() == ("", "")
    assert (
        ProgressDisplay().progress_text() == "preparing the run"
        and Path(tmp_path / "run" / "summary.json").is_file()
    )


def test_the_first_rejection_is_shown_with_its_reason(tmp_path):
    def fails(model, data, local_round):
        raise KeyError("spam")

    task = fedcomp.Task("fails", lambda: nn.Linear(4, 2), TASK.train, TASK.test, train_fn=fails)
    stream = io.StringIO()
    run = simulate(LogDisplay(stream), task, tmp_path, rounds=3)
    shown = [line for line in stream.getvalue().splitlines() if "rejected" in line]
    assert len(shown) == 1
    assert "round 1: clients " in shown[0] and "in fails: KeyError: 'spam'; metrics" in shown[0]
    assert repr(run).startswith("Run run, task fails\n")
