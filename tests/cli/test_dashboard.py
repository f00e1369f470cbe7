"""The dashboard fits every terminal at any time of a run, and shows the important values."""

import fcntl
import io
import os
import pty
import select
import struct
import subprocess
import sys
import termios
from dataclasses import replace
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from fedcomp.callbacks import Rejection
from fedcomp.cli.dashboard import Dashboard
from fedcomp.run_display import COLUMNS, columns_for

ROOT = Path(__file__).resolve().parents[2]


def console(width: int = 100, height: int = 40) -> Console:
    return Console(
        width=width,
        height=height,
        file=io.StringIO(),
        force_terminal=True,
        color_system=None,
        highlight=False,
        _environ={"TERM": "xterm"},
    )


def shown(renderable, width: int = 100, height: int = 40) -> str:
    c = console(width, height)
    c.print(renderable)
    return c.file.getvalue()


def dashboard_of(fake_run, end: bool = False, width: int = 100, height: int = 40) -> Dashboard:
    dashboard = Dashboard(console(width, height))
    fake_run.to(dashboard, end)
    return dashboard


@pytest.mark.parametrize("rounds", [0, 1, 3, 400])
@pytest.mark.parametrize("width", [30, 39, 40, 75, 76, 80, 100, 120, 149, 150, 200])
def test_the_dashboard_is_not_wider_or_higher_than_the_terminal(fake_run, rounds, width):
    run = fake_run(max(rounds, 1))
    run.records = run.records[:rounds]
    dashboard = dashboard_of(run)
    dashboard.on_warning(
        "the data of clients 3 and 12 hold fewer examples than a batch; they use all they have, which is said at some length"
    )
    for height in (10, 12, 15, 16, 19, 20, 24, 30, 36, 40, 60):
        lines = shown(dashboard.picture(width, height), width, height).rstrip("\n").split("\n")
        assert len(lines) <= height, (width, height)
        assert max(map(cell_len, lines)) <= width, (width, height)


@pytest.mark.parametrize("height", [15, 20, 24, 30, 36, 60])
def test_the_notice_of_a_run_has_its_own_line(fake_run, height):
    run = fake_run(3)
    promise = "up to 4 Byzantine clients in a round change nothing: voters train on all partitions of their row, and know all data"
    run.header = replace(run.header, notice=promise)
    lines = shown(dashboard_of(run).picture(130, height), 130, height).rstrip("\n").split("\n")
    assert any(promise in line for line in lines) == (height >= 20)
    assert len(lines) <= height


@pytest.mark.parametrize(
    ("width", "height"), [(80, 40), (100, 30), (100, 40), (140, 40), (200, 40)]
)
def test_long_values_in_the_header_do_not_overlap(fake_run, width, height):
    run = fake_run(3)
    run.header = replace(
        run.header,
        byzantine=6,
        attack="inverted 4/12, low-margin 11, alie:z=1.5 3/7, malformed 9",
        strategy="election:byzantine=4,form=ballots,sealed=true",
        notice="the tally is protected against 4 Byzantine clients in a round, the ballots are not: a Byzantine client's own counts as "
        "one of all, and the server reads none of them",
    )
    text = " ".join(
        shown(dashboard_of(run).picture(width, height), width, height).replace("│", " ").split()
    )
    assert run.header.strategy in text and run.header.uplink in text or height < 36
    assert "a Byzantine client's own" in text and (width < 100 or "reads none of them" in text)


@pytest.mark.parametrize(("width", "height"), [(1, 1), (10, 3), (29, 9), (30, 4), (500, 200)])
def test_extreme_terminal_sizes_raise_no_error(fake_run, width, height):
    assert shown(dashboard_of(fake_run(20)).picture(width, height), width, height)


def test_a_text_is_shown_before_the_run_starts():
    assert shown(Dashboard(console()).picture(80, 24)).strip() == "preparing the run"


@pytest.mark.parametrize(("width", "height"), [(30, 10), (39, 12), (80, 24), (120, 40), (200, 60)])
def test_waiting_for_clients_is_shown_until_a_round_begins(fake_run, width, height):
    before_round_1 = fake_run(1)
    before_round_1.records = []
    for dashboard in (dashboard_of(before_round_1), dashboard_of(fake_run(5))):
        assert "waiting: " not in shown(dashboard.picture(width, height), width, height)
        dashboard.on_waiting([], 3)
        dashboard.on_waiting([0, 2], 3)
        text = shown(dashboard.picture(width, height), width, height)
        assert text.count("waiting: ") == 1 and "waiting: 2 of 3 clients are" in text
        assert (
            max(map(cell_len, text.split("\n"))) <= width
            and len(text.rstrip("\n").split("\n")) <= height
        )
        dashboard.on_waiting(range(100_000), 200_000)
        assert (
            max(map(cell_len, shown(dashboard.picture(width, height), width, height).split("\n")))
            <= width
        )
        dashboard.on_waiting([0, 1, 2], 3)
        assert "waiting: " not in shown(dashboard.picture(width, height), width, height)
        dashboard.on_waiting([0], 3)
        dashboard.on_progress(6, 0, 3)
        assert "waiting: " not in shown(dashboard.picture(width, height), width, height)


def test_the_header_names_task_codecs_strategy_and_device(fake_run):
    text = shown(dashboard_of(fake_run(3)).picture(100, 40))
    for output in (
        "mnist-cnn, 431,080 parameters",
        "500, 50 a round, dirichlet:0.1",
        "stc:density=1/100",
        "topk:density=1%,values=fp16@layer",
        "residual",
        "average",
        "cuda:0",
        "batched, 50 clients at once",
        "runs/mnist-cnn-20260102-030405",
    ):
        assert output in text


def test_the_last_rounds_are_in_the_table(fake_run):
    lines = shown(dashboard_of(fake_run(400)).picture(120, 40), 120).split("\n")
    row = next(line for line in lines if line.split()[:1] == ["400"])
    expected = "400 100.00 % 0.0000 2.2000 246 kB ×350 862 kB ×100 ×156 50/50 0.25 s"
    assert row.split() == expected.split()
    not_evaluated = next(line for line in lines if line.split()[:1] == ["398"])
    assert not_evaluated.split()[1:3] == ["–", "–"]
    assert "round 400/400" in "\n".join(lines) and "100 %" in "\n".join(lines)


def test_narrow_terminals_have_fewer_columns():
    titles = [[column.title for column in columns_for(width)] for width in range(30, 201)]
    assert titles[0] == ["round", "accuracy", "up"]
    assert titles[10] == ["round", "accuracy", "up", "down"]
    assert titles[-1] == [column.title for column in COLUMNS]
    assert all(set(fewer) <= set(more) for fewer, more in zip(titles, titles[1:], strict=False))


@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_a_rejected_client_is_named_with_its_stage_and_reason(fake_run, width):
    run = fake_run(7)
    text = shown(dashboard_of(run).picture(width, 30), width, 30)
    assert "× round 7: clients 7, 9 rejected at" in text
    if width >= 80:
        assert "× round 7: clients 7, 9 rejected at decode: the checksum differs" in text
        assert "2 rejected" in text


def test_texts_of_clients_cannot_control_the_terminal(fake_run):
    run = fake_run(1)
    run.records = [
        replace(
            run.records[0],
            rejections=(Rejection(1, "reply", "bad\x1b[2J\r\nfake line"),),
            rejected=1,
        )
    ]
    dashboard = dashboard_of(run)
    dashboard.on_warning("two\nlines\x07")
    text = shown(dashboard.picture(100, 30))
    assert "client 1 rejected at reply: bad [2J  fake line" in text and "! two lines" in text
    assert "\x1b" not in text and "\x07" not in text


def test_rejected_clients_have_one_line_for_each_reason(fake_run):
    run = fake_run(1)
    rejections = [Rejection(i, "decode", "the checksum differs") for i in range(100)] + [
        Rejection(100, "train", "NaN in the update")
    ]
    run.records = [replace(run.records[0], rejections=rejections, rejected=101)]
    text = shown(dashboard_of(run).picture(100, 40))
    assert (
        "round 1: clients 0, 1, 2, 3, 4, 5, 6, 7 and 92 more rejected at decode: the checksum differs"
        in text
    )
    assert "round 1: client 100 rejected at train: NaN in the update" in text


def test_progress_is_shown_within_a_slow_round(fake_run):
    run, ticks = fake_run(4), iter(range(0, 1000, 60))
    run.records = run.records[:2]
    dashboard = Dashboard(console(), clock=lambda: next(ticks))
    run.to(dashboard, end=False)
    dashboard.on_progress(3, 25, 50)
    text = shown(dashboard.picture(100, 24))
    assert "round 2/4 + 25/50 clients" in text
    assert "62 %, 1 min 30 s left" in text and "1 min 00 s a round" in text


def test_a_resumed_run_shows_sums_since_its_first_round(fake_run):
    text = shown(dashboard_of(fake_run(30, first=21)).picture(120, 40), 120)
    assert "since round 20: up 2.46 MB" in text and "round 30/30" in text


def test_the_verdict_has_the_results_of_the_run(fake_run):
    dashboard = dashboard_of(fake_run(50), end=True)
    text = shown(dashboard.verdict())
    for output in (
        "50 rounds done",
        "97.31 %",
        "0.0912",
        "12.3 MB, ×350 against 4.31 GB in float32",
        "43.1 MB, ×100 against 4.31 GB in float32",
        "55.4 MB, ×156 against 8.62 GB in float32",
        "1 min 12 s, 691 client updates per second",
        "14 updates",
        "runs/mnist-cnn-20260102-030405/model.safetensors",
    ):
        assert output in text


@pytest.mark.parametrize("width", [30, 40, 80, 200])
def test_the_verdict_fits_the_terminal(fake_run, width):
    lines = shown(dashboard_of(fake_run(3), end=True).verdict(), width).split("\n")
    assert max(map(cell_len, lines)) <= width


def test_the_results_stay_on_the_screen_after_the_run(fake_run):
    dashboard = Dashboard(console())
    with dashboard:
        fake_run(20).to(dashboard)
        print("said by a task")
    to_main_screen = "\x1b[?1049l"
    before, after = dashboard.console.file.getvalue().split(to_main_screen)
    assert "\x1b[?1049h" in before and "\x1b[?25h" in before + after
    for output in (
        "round 20/20",
        "accuracy 89.10 %",
        "said by a task",
        "20 rounds done",
        "from safetensors.torch import load_file",
        "weights = load_file('runs/mnist-cnn-20260102-030405/model.safetensors')",
    ):
        assert output in after


def test_a_failed_run_restores_the_terminal_without_a_verdict(fake_run):
    dashboard = Dashboard(console())
    with pytest.raises(RuntimeError), dashboard:
        fake_run(3).to(dashboard, end=False)
        dashboard.on_warning("something was odd")
        raise RuntimeError
    after = dashboard.console.file.getvalue().split("\x1b[?1049l")[1]
    assert "round 3/3" in after and "something was odd" in after and "done" not in after


def test_a_run_that_never_started_leaves_nothing_behind():
    dashboard = Dashboard(console())
    with pytest.raises(RuntimeError), dashboard:
        raise RuntimeError
    assert "\x1b[?1049h" not in dashboard.console.file.getvalue()


def test_equal_warnings_are_shown_once(fake_run):
    dashboard = dashboard_of(fake_run(3))
    for _ in range(5):
        dashboard.on_warning("this again")
    assert shown(dashboard.picture(100, 40)).count("this again") == 1


@pytest.fixture
def terminal():
    """Yield both ends of a pseudo-terminal."""
    ends = pty.openpty()
    yield ends
    for end in ends:
        os.close(end)


def resize(terminal: int, rows: int, columns: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def read_until(terminal: int, wanted: str) -> None:
    """Read from a terminal until `wanted` appears. Fails after 100 kB, or if nothing arrives for 20 s."""
    seen = b""
    while wanted.encode() not in seen:
        assert len(seen) < 100_000 and select.select([terminal], [], [], 20)[0], seen[
            -4000:
        ].decode(errors="replace")
        seen += os.read(terminal, 65536)


def test_the_dashboard_redraws_when_the_terminal_is_resized(terminal):
    ours, theirs = terminal
    resize(theirs, 20, 60)
    script = (
        "import sys; sys.path.insert(0, 'tests/cli'); from conftest import FakeRun; from fedcomp.cli.dashboard import Dashboard\n"
        "with Dashboard() as d: FakeRun(9).to(d, end=False); sys.stdin.readline()"
    )
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")} | {
        "TERM": "xterm",
        "PYTHONPATH": str(ROOT),
    }
    with subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=ROOT,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment,
    ) as run:
        try:
            read_until(ours, 40 * "─")
            resize(theirs, 20, 90)
            read_until(ours, 70 * "─")
            os.write(ours, b"\n")
            read_until(ours, "\x1b[?1049l")
            assert run.wait(20) == 0
        finally:
            run.kill()
