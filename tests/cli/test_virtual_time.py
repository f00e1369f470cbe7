"""Virtual time in displays: a column, a sum and a line of the verdict, but only for runs on a virtual network."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from fedcomp.cli.dashboard import Dashboard
from fedcomp.run_display import LineDisplay


class WithNetwork:
    """A fake run in which each round takes a minute and a half of virtual time."""

    def __init__(self, run):
        self.header = replace(run.header, network="mobile:absent=10%")
        self.records = [
            replace(r, simulated_s=90.0, simulated_hours=r.round / 40) for r in run.records
        ]
        self.summary, self.out = (
            replace(run.summary, simulated_hours=self.records[-1].simulated_hours),
            run.out,
        )

    def to(self, callback):
        callback.on_run_start(self.header)
        for record in self.records:
            callback.on_round_end(record)
        callback.on_run_end(self.summary, self.out)


def printed(run, width=120, height=40) -> str:
    console = Console(width=width, height=height, record=True, file=io.StringIO())
    dashboard = Dashboard(console)
    run.to(dashboard)
    console.print(dashboard.picture(width, height))
    console.print(dashboard.verdict())
    return console.export_text()


@pytest.mark.parametrize("width", [80, 120, 200])
def test_the_dashboard_shows_virtual_time(fake_run, width):
    text = printed(WithNetwork(fake_run(12)), width)
    assert (
        "mobile:absent=10%" in text
        and "18 min 00 s virtual" in text
        and "18 min 00 s of virtual time" in text
    )
    assert max(map(len, text.splitlines())) <= width
    (titles,) = (i for i, line in enumerate(text.splitlines()) if line.endswith("     virtual"))
    assert text.splitlines()[titles + 1].endswith("  1 min 30 s")


def test_virtual_time_is_not_shown_without_a_network(fake_run):
    assert "virtual" not in printed(fake_run(12))


def test_plain_lines_have_a_column_of_virtual_time(fake_run, capsys):
    plain = LineDisplay()
    with plain:
        WithNetwork(fake_run(4)).to(plain)
    lines = capsys.readouterr().out.splitlines()
    titles = next(i for i, line in enumerate(lines) if line.split()[:2] == ["round", "accuracy"])
    assert lines[titles].endswith("   virtual") and all(
        line.endswith("1 min 30 s") for line in lines[titles + 1 : titles + 5]
    )
    assert len({len(line) for line in lines[titles : titles + 5]}) == 1
    assert (
        "network   mobile:absent=10%" in lines and "network     6 min 00 s of virtual time" in lines
    )
