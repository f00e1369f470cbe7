"""Both displays name Byzantine clients, rejected clients, and clients whose votes are suspected."""

from dataclasses import replace

import pytest

from fedcomp.callbacks import Rejection, RejectionSummary, RoundRecord
from fedcomp.cli.dashboard import Dashboard
from fedcomp.run_display import LineDisplay, Totals, header_rows, rejections, summary_rows, suspects
from fedcomp.server.results import MAX_CLIENTS, MAX_REASONS, summarize_rejections


def rejected(record: RoundRecord, *given: tuple[int, str]) -> RoundRecord:
    return replace(
        record, rejections=tuple(Rejection(client, "reply", reason) for client, reason in given)
    )


def test_the_header_names_byzantine_clients(fake_run):
    header = replace(fake_run(3).header, attack="inverted 3/7, alie 12", byzantine=3)
    assert ("attack", "3 of 500 clients are Byzantine: inverted 3/7, alie 12") in header_rows(
        header
    )
    assert "attack" not in dict(header_rows(fake_run(3).header))


def test_the_most_frequent_reasons_of_a_round_are_listed(fake_run):
    record = rejected(
        fake_run(3).record(2), *((client, f"noise {client % 40}") for client in range(60))
    )
    lines = rejections(record)
    assert len(lines) == 9
    assert lines[0] == "round 2: clients 0, 40 rejected at reply: noise 0"
    assert (
        lines[-1]
        == "round 2: 44 more clients rejected, for 32 other reasons; metrics.jsonl lists them"
    )
    assert (
        len(rejections(rejected(record, *((client, f"noise {client}") for client in range(9)))))
        == 9
    )
    (line,) = rejections(rejected(record, *((client, "noise") for client in range(300))))
    assert line == "round 2: clients 0, 1, 2, 3, 4, 5, 6, 7 and 292 more rejected at reply: noise"


def test_the_summary_combines_reasons_that_differ_only_in_numbers(fake_run):
    records = [
        rejected(
            fake_run(3).record(n),
            (4, f"{n} bytes are too short"),
            (9, "no answer"),
            (2, f"{7 * n} bytes are too short"),
        )
        for n in (1, 2)
    ]
    assert summarize_rejections(records) == (
        RejectionSummary("reply", "1 bytes are too short", 4, (2, 4)),
        RejectionSummary("reply", "no answer", 2, (9,)),
    )
    assert summarize_rejections([fake_run(3).record(1)]) == ()


def test_the_summary_is_short_for_many_rejected_clients(fake_run):
    many = rejected(
        fake_run(3).record(1), *((client, "noise " + "x" * (client % 30)) for client in range(6000))
    )
    found = summarize_rejections([many])
    assert len(found) == MAX_REASONS and all(
        len(r.clients) == MAX_CLIENTS and r.more_clients == 200 - MAX_CLIENTS for r in found
    )


def test_the_verdict_names_clients_with_rejected_updates_and_the_reasons(fake_run):
    found = (
        RejectionSummary("reply", "no answer", 12, (1, 6)),
        RejectionSummary("encode", "the update is nan", 4, tuple(range(16)), 100),
    )
    lines = summary_rows(replace(fake_run(3).summary, rejections=found), Totals(rejected=16))
    assert lines[-3:] == [
        ("rejected", "16 updates"),
        ("", "12 updates of clients 1, 6 rejected at reply: no answer"),
        (
            "",
            "4 updates of clients 0, 1, 2, 3, 4, 5, 6, 7 and 108 more rejected at encode: the update is nan",
        ),
    ]


@pytest.mark.parametrize(("suspicions", "shown"), [
    ((0.19, 0.0, 0.0), ""),
    ((0.5, 0.45, 0.4, 0.3), ""),
    ((0.21, 0.05, 0.07, 0.06), "client 0 21 %"),
    ((0.01, 0.9), "client 1 90 %"),
    ((0.9,), "client 0 90 %"),
    ((0.0, 0.3, 0.3, 0.3, 0.3, 0.0, 0.0, 0.0, 0.0), "client 1 30 %, client 2 30 %, client 3 30 %"),
])  # fmt: skip
def test_clients_that_vote_like_others_are_not_suspected(fake_run, suspicions, shown):
    assert suspects(replace(fake_run(3).record(3), suspicion=dict(enumerate(suspicions)))) == shown


def test_suspected_clients_are_ordered_by_suspicion(fake_run, capsys):
    run = fake_run(3)
    record = replace(run.record(3), suspicion={7: 0.125, 3: 0.92, 5: 0.0, 1: 0.5, 2: 0.125})
    assert suspects(record) == "client 3 92 %, client 1 50 %" and suspects(run.record(3)) == ""
    plain = LineDisplay()
    plain.on_run_start(run.header)
    plain.on_round_end(record)
    assert (
        "votes that contradicted a large majority: client 3 92 %, client 1 50 %"
        in capsys.readouterr().out
    )
    dashboard = Dashboard()
    dashboard.on_run_start(run.header)
    dashboard.on_round_end(record)
    dashboard.console.print(dashboard.picture(160, 40))
    assert "suspected: client 3 92 %" in capsys.readouterr().out


@pytest.mark.parametrize("width", [60, 80, 100, 160, 200])
@pytest.mark.parametrize("height", [10, 24, 40])
def test_suspected_clients_are_shown_at_any_width(fake_run, capsys, width, height):
    run = fake_run(3)
    record = replace(
        run.record(3),
        rejected=2,
        suspicion={3: 0.92, 1: 0.5, 2: 0.9, 7: 0.0, 5: 0.0, 4: 0.0, 6: 0.0},
    )
    dashboard = Dashboard()
    dashboard.on_run_start(run.header)
    dashboard.on_round_end(record)
    dashboard.console.width = width
    dashboard.console.print(dashboard.picture(width, height))
    lines = capsys.readouterr().out.splitlines()
    (found,) = (
        line for line in lines if "suspected: client 3 92 %, client 2 90 %, client 1 50 %" in line
    )
    assert len(lines) <= height and found.startswith("suspected")
