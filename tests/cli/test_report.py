"""The report: one page that needs nothing else, pictures beside it, and every run's figures in it."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image

from fedcomp import RunConfig
from fedcomp.cli import reports
from fedcomp.cli.report.page import write
from fedcomp.errors import UserError
from fedcomp.runs import load
from fedcomp.sim import simulate

TINY = RunConfig(
    task=f"{Path(__file__).parents[1] / 'tiny_task.py'}:task",
    clients=6,
    rounds=4,
    participation=1.0,
    lr=0.1,
)
ALTERNATIVES = {
    "stc": {},
    "stc1": {"seed": 1},
    "dense": {"uplink": "identity", "memory": "none"},
    "lied": {
        "strategy": "vote",
        "uplink": "sign",
        "memory": "none",
        "downlink": "efsign",
        "attack": "inverted:1+malformed:1",
    },
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    for name, changes in ALTERNATIVES.items():
        simulate(replace(TINY, out=str(root / name), **changes))
    return [root / name for name in ALTERNATIVES]


class Text(HTMLParser):
    """The words of a page, its tags in order, and what it would fetch."""

    def __init__(self, page: str):
        super().__init__()
        self.words, self.tags, self.fetched = [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.fetched += [
            value
            for name, value in attributes
            if name in ("src", "href", "xlink:href") and not value.startswith("#")
        ]

    def handle_data(self, data):
        self.words.append(data)


def test_the_page_has_the_figures_of_all_and_fetches_nothing(folders, tmp_path):
    reports.show(folders, tmp_path, "50%", pictures=True)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    text = Text(page)
    words = " ".join(text.words)
    assert (
        text.fetched == [] and "@import" not in page and "url(" not in re.sub(r"url\(#", "", page)
    )
    assert text.tags.count("svg") == 4 and "script" not in text.tags
    for said in (
        "(2 seeds)",
        "identity",
        "rounds to 50 %",
        "Suspected",
        "inverted:1",
        "Turned down",
        "--batch-size",
    ):
        assert said in words, said
    dense = load(folders[2])
    assert f"{100 * dense.accuracy:.2f} %" in words
    for name in ("accuracy-rounds", "accuracy-bytes", "loss-rounds", "loss-bytes"):
        with Image.open(tmp_path / "report" / f"{name}.png") as picture:
            assert picture.width >= 1200 and len(picture.convert("L").getcolors(1 << 24)) > 10


def test_hundreds_of_lines_differ():
    from fedcomp.cli.report import charts

    cycles = [len(charts.COLOURS), len(charts.DASHES), len(charts.MARKERS)]
    assert cycles == [
        len(set(map(str, c))) for c in (charts.COLOURS, charts.DASHES, charts.MARKERS)
    ]
    assert len({tuple(i % c for c in cycles) for i in range(500)}) == 500
    assert len({tuple(i % c for c in cycles[1:]) for i in range(60)}) == 60, "without colours, too"


@pytest.mark.parametrize("name", ["run$\\sqrt$x", "_hidden", "100% $x_1$ \\alpha", "日本"])
def test_any_name_of_a_run_is_shown_as_it_is(folders, tmp_path, name):
    folder = tmp_path / name
    shutil.copytree(folders[0], folder)
    reports.show([folder], tmp_path, None, pictures=True)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    legend = [word for word in Text(page).words if name in word]
    assert len(legend) >= 4 + 1, "in every chart and in the table"


def test_a_long_comparison_stays_small(folders, tmp_path):
    """Eight runs of 1,000 rounds, under 2 MB."""
    made = []
    for i in range(8):
        folder = tmp_path / str(i)
        shutil.copytree(folders[0], folder, ignore=shutil.ignore_patterns("checkpoint"))
        config = (folder / "config.toml").read_text()
        (folder / "config.toml").write_text(config.replace("lr = 0.1", f"lr = 0.{i + 1}"))
        line = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])
        lines = [
            line
            | {
                "round": r + 1,
                "accuracy": (r * 7919 % 1000) / 1000,
                "loss": (r * 104729 % 997) / 99 + i,
            }
            for r in range(1000)
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
        made.append(folder)
    reports.show(made, tmp_path, None, pictures=False)
    assert (tmp_path / "report.html").stat().st_size < 2_000_000
    assert not (tmp_path / "report").exists()


def test_a_run_that_has_not_begun_and_one_that_is_not_over(folders, tmp_path):
    shutil.copytree(folders[0], tmp_path / "a")
    (tmp_path / "a" / "summary.json").unlink()
    (tmp_path / "a" / "metrics.jsonl").write_text("")
    reports.show([tmp_path / "a"], None, None, pictures=True)
    page = (tmp_path / "a" / "report.html").read_text(encoding="utf-8")
    assert "No round is done yet" in page and "not over" in page


def test_names_that_are_html_are_shown_and_not_obeyed(folders, tmp_path):
    folder = tmp_path / "<script>alert(1)</script>&"
    shutil.copytree(folders[0], folder)
    reports.show([folder], tmp_path, None, pictures=False)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<script" not in page and "&lt;script&gt;" in page


@pytest.mark.parametrize("target", ["0", "-1", "1.01", "ninety", "nan", "1/0", "101%"])
def test_a_target_that_is_no_share_is_refused(folders, tmp_path, target):
    with pytest.raises(UserError, match="--target-accuracy"):
        reports.show(folders[:1], tmp_path, target, pictures=False)
    assert not any(tmp_path.iterdir())


def test_the_same_run_twice_is_refused(folders, tmp_path):
    with pytest.raises(UserError, match="twice"):
        reports.show(
            [folders[0], folders[0] / ".." / folders[0].name], tmp_path, None, pictures=False
        )


def test_the_command_says_where_its_files_are(folders, tmp_path):
    command = [
        sys.executable,
        "-m",
        "fedcomp",
        "report",
        *map(str, folders[:2]),
        "--out",
        str(tmp_path / "new" / "place"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert [Path(line).is_file() for line in done.stdout.splitlines()] == [True] * 5
    (tmp_path / "file").write_text("")
    done = subprocess.run([*command[:-1], str(tmp_path / "file")], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1


BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
def test_a_browser_shows_it_without_a_network(folders, tmp_path):
    reports.show(folders, tmp_path, "50%", pictures=False)
    browser = [
        BROWSER,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--host-resolver-rules=MAP * ~NOTFOUND",
        f"--user-data-dir={tmp_path / 'profile'}",
    ]
    page = (tmp_path / "report.html").as_uri()
    dom = subprocess.run(
        [*browser, "--dump-dom", page],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
        env=os.environ,
    ).stdout
    assert dom.count("<svg") == 4 and "Suspected" in dom
    for width in (390, 1200):
        shot = tmp_path / f"{width}.png"
        taken = [*browser, f"--screenshot={shot}", f"--window-size={width},1500", page]
        subprocess.run(taken, capture_output=True, timeout=100, check=True)
        with Image.open(shot) as picture:
            blue = sum(
                n for n, (r, g, b) in picture.convert("RGB").getcolors(1 << 24) if b > r + 80
            )
            assert picture.width >= width and blue > 100  # the first line's colour


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
def test_on_a_telephone_what_went_wrong_is_no_pillar_of_words(folders, tmp_path):
    page, asks = (
        tmp_path / "report.html",
        "<script>document.title = [...document.querySelectorAll('tr')].map(r => r.clientHeight)</script>",
    )
    runs = [load(folder) for folder in folders[2:]]
    write(
        runs,
        page,
        pictures=False,
        failed={
            str(runs[0].folder): "its process was killed by a machine that had no memory left " * 3
        },
    )
    page.write_text(
        page.read_text(encoding="utf-8").replace("</body>", asks + "</body>"), encoding="utf-8"
    )
    browser = [
        BROWSER,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path / 'profile'}",
        "--window-size=390,800",
    ]
    dom = subprocess.run(
        [*browser, "--dump-dom", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    ).stdout
    heights = [int(height) for height in re.search(r"<title>([\d,]+)</title>", dom)[1].split(",")]
    assert 0 < max(heights) < 250


def test_a_tasks_own_metrics_are_columns(tmp_path):
    (tmp_path / "line.py").write_text(
        """
import torch
from torch import nn
from fedcomp import Task

x = torch.linspace(-1, 1, 40)[:, None]
task = Task("line", lambda: nn.Linear(1, 1), (x, 3 * x), (x, 3 * x), loss=nn.functional.mse_loss, accuracy=None,
            metrics={"worst_error": lambda outputs, targets: (outputs - targets).abs().max()})
""",
        encoding="utf-8",
    )
    summary = simulate(
        RunConfig(
            task=f"{tmp_path / 'line.py'}:task",
            clients=2,
            participation=1,
            rounds=2,
            out=str(tmp_path / "run"),
        )
    )
    reports.show([tmp_path / "run"], None, None, False)
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "worst_error" in page and f"{summary.metrics['worst_error']:.4f}" in page
