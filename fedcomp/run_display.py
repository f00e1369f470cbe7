"""The base class of displays of a run, the text that all displays share, and a display that prints lines of text."""

import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from statistics import median_low
from time import monotonic
from typing import Self

from .callbacks import Callback, ClientMetric, Header, RoundRecord, Summary
from .formatting import (
    NOTHING,
    decimal,
    duration,
    human_bytes,
    metric,
    one_line,
    percent,
    ratio,
    three_digits,
)


@dataclass(frozen=True)
class Column:
    """A column of the table of rounds."""

    title: str
    width: int
    priority: int  # columns with higher numbers are left out first if the table is too wide
    cell: Callable[[RoundRecord], str]  # text of the column for a round


def total_ratio(of: "RoundRecord | Totals") -> str:
    """Return the compression ratio of a round, or of the rounds in a `Totals`, for uplink plus downlink."""
    dense = of.dense_uplink_bytes + of.dense_downlink_bytes
    return ratio(dense, of.uplink_bytes + of.downlink_bytes)


COLUMNS = (
    Column("round", 5, 0, lambda r: str(r.round)),
    Column("accuracy", 8, 1, lambda r: percent(r.measured_accuracy)),
    Column("loss", 8, 5, lambda r: decimal(r.measured_loss)),
    Column("train loss", 10, 10, lambda r: decimal(r.train_loss)),
    Column("up", 7, 2, lambda r: human_bytes(r.uplink_bytes)),
    Column("up ratio", 8, 8, lambda r: ratio(r.dense_uplink_bytes, r.uplink_bytes)),
    Column("down", 7, 3, lambda r: human_bytes(r.downlink_bytes)),
    Column("down ratio", 10, 9, lambda r: ratio(r.dense_downlink_bytes, r.downlink_bytes)),
    Column("ratio", 6, 4, total_ratio),
    Column("accepted", 9, 6, lambda r: f"{r.accepted}/{r.cohort}"),
    Column("time", 10, 7, lambda r: duration(r.seconds)),
)
# Column of runs with a virtual network.
VIRTUAL = Column(
    "virtual", 10, 4, lambda r: NOTHING if r.simulated_s is None else duration(r.simulated_s)
)
WORST = "worst 10 %"  # title of the column with the mean metric of the worst tenth of the clients
GAP = 2  # number of spaces between columns
# A client's suspicion is the fraction of its votes that contradicted a large majority of clients. The client is a suspect if its suspicion
# is above MIN_SUSPICION, and at least SUSPICION_RATIO times the median suspicion of all clients.
MIN_SUSPICION, SUSPICION_RATIO = 0.2, 3.0
# Maximum number of client ids in a line of text, and maximum number of reasons for rejections that are shown for a round.
MAX_LISTED = 8


def columns_of(header: Header) -> tuple[Column, ...]:
    """Return the columns of the table of rounds that suit a run with this header."""
    judged = header.judged
    first, *others = [c for c in COLUMNS if c.title != "accuracy" or judged == "accuracy"]

    def task_metric(name: str) -> Column:
        return Column(name, max(8, len(name)), 1, lambda r: decimal(r.metrics.get(name)))

    def of_clients(title: str, priority: int, field: str) -> Column:
        def cell(record: RoundRecord) -> str:
            return metric(judged, getattr(record.client_metrics.get(judged), field, None))

        return Column(title, max(8, len(title)), priority, cell)

    task_metrics = map(task_metric, header.measures)
    mean, worst = of_clients("clients", 1, "mean"), of_clients(WORST, 2, "worst_decile")
    clients = {"server": [], "clients": [worst], "both": [mean, worst]}[header.evaluate]
    virtual = [VIRTUAL] if header.network else []
    return (first, *task_metrics, others[0], *clients, *others[1:], *virtual)


def table_line(columns: Sequence[Column], record: RoundRecord | None = None) -> str:
    """Return the line of a round in the table of rounds, or the column titles if `record` is None."""
    cells = ((c.title if record is None else c.cell(record)).rjust(c.width) for c in columns)
    return (" " * GAP).join(cells)


def columns_for(width: int, columns: Sequence[Column] = COLUMNS) -> list[Column]:
    """Return the most important columns that fit into `width` characters, in the order of `columns`."""
    chosen: list[Column] = []
    for column in sorted(columns, key=lambda c: c.priority):
        if sum(c.width + GAP for c in chosen) + column.width > width:
            break
        chosen.append(column)
    return [c for c in columns if c in chosen]


@dataclass
class Totals:
    """Sums over the rounds that this process has executed. In a resumed run, they exclude earlier rounds."""

    uplink_bytes: int = 0
    downlink_bytes: int = 0
    dense_uplink_bytes: int = 0
    dense_downlink_bytes: int = 0
    accepted: int = 0
    rejected: int = 0
    relayed_bytes: int = 0

    def add(self, record: RoundRecord) -> None:
        for name in vars(self):
            setattr(self, name, getattr(self, name) + (getattr(record, name) or 0))

    def links(self) -> list[str]:
        """Return the bytes and the compression ratio of uplink and downlink, such as ["up 1.2 kB ×98", "down 2.3 kB ×51"]."""
        up, down = self.uplink_bytes, self.downlink_bytes
        return [
            f"up {human_bytes(up)} {ratio(self.dense_uplink_bytes, up)}",
            f"down {human_bytes(down)} {ratio(self.dense_downlink_bytes, down)}",
        ]


@dataclass
class RunDisplay(Callback):
    """Base class of displays. A display is a context manager around the whole run."""

    clock: Callable[[], float] = monotonic  # returns a time in seconds
    header: Header = field(init=False, repr=False)  # set when the run starts
    last: RoundRecord | None = None  # record of the last finished round
    summary: Summary | None = None  # result, or None until the end of the run
    # Record of the round with the highest accuracy, or the lowest loss if the task has no accuracy.
    best: RoundRecord | None = None
    totals: Totals = field(default_factory=Totals)
    # (round, accuracy or loss) of each round with a finite value, for curves.
    points: list[tuple[int, float]] = field(default_factory=list)
    # Values of `clock()` at the ends of the latest rounds. The first entry may be the start of the run.
    ends: deque[float] = field(default_factory=lambda: deque(maxlen=33))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None: ...

    @property
    def has_started(self) -> bool:
        return "header" in vars(self)

    @property
    def last_round(self) -> int:
        """The number of the last finished round, or 0 if no round has finished."""
        if self.last:
            return self.last.round
        return self.header.first_round - 1 if self.has_started else 0

    @property
    def reached(self) -> str:
        """The progress of the run as text, such as "after round 7 of 20"."""
        if not self.last_round:
            return "before the end of round 1"
        return f"after round {self.last_round} of {self.header.rounds}"

    @property
    def seconds_a_round(self) -> float | None:
        return (self.ends[-1] - self.ends[0]) / (len(self.ends) - 1) if len(self.ends) > 1 else None

    def on_run_start(self, header: Header) -> None:
        self.header = header
        self.ends.append(self.clock())

    def on_round_end(self, record: RoundRecord) -> None:
        self.last = record
        self.totals.add(record)
        self.ends.append(self.clock())
        if (value := self.judged(record)) is not None and isfinite(value):
            self.points.append((record.round, value))
        best = self.merit(self.best) if self.best else None
        if (merit := self.merit(record)) is not None and (best is None or merit > best):
            self.best = record

    def on_run_end(self, summary: Summary, out: str) -> None:
        self.summary = summary

    def merit(self, record: RoundRecord) -> float | None:
        """Return how good a round is, where higher is better: the accuracy, or the negative loss if the task has no accuracy.

        Return None if the accuracy or loss was not measured, or if the loss is not finite.
        """
        value = self.judged(record)
        if value is None or self.header.judged == "accuracy":
            return value
        return -value if isfinite(value) else None

    def judged(self, record: RoundRecord) -> float | None:
        """Return the accuracy of a round, or the loss if the task has no accuracy, or None if the value was not measured."""
        by_accuracy = self.header.judged == "accuracy"
        return record.measured_accuracy if by_accuracy else record.measured_loss


def evenly_spaced(count: int, max_count: int) -> list[int]:
    """Return at most `max_count` + 1 evenly spaced indices from 0 to `count` − 1, including both ends."""
    step = -(-count // max_count)
    return [*range(0, count - 1, step), count - 1]


def header_rows(header: Header) -> list[tuple[str, str]]:
    """Return the description of a run as pairs (label, value), in order of importance."""
    h = header
    byzantine = f"{h.byzantine:,} of {h.clients:,} clients are Byzantine"
    rows = [
        ("task", f"{h.task}, {h.parameters:,} parameters"),
        ("clients", f"{h.clients:,}, {h.cohort:,} a round, {h.partition}"),
        ("relays", f"{h.relays:,}; each relay sums the frames of its clients" if h.relays else ""),
        ("attack", h.attack and f"{byzantine}: {h.attack}"),
        ("strategy", h.strategy),
        ("uplink", h.uplink),
        ("downlink", h.downlink),
        ("memory", h.memory),
        ("note", h.notice),
        ("network", h.network),
        ("device", h.device),
        ("engine", ": ".join(filter(None, (h.engine, h.engine_reason)))),
        ("residuals", h.residuals),
        ("metrics", h.metrics),
        ("folder", h.out),
    ]
    return [(label, value) for label, value in rows if value]


def rejections(record: RoundRecord) -> list[str]:
    """Return a line for each reason why updates were rejected in a round, the most frequent reason first. A line names up to 8 clients.

    If there are ten or more reasons, all but the first eight share one line. Clients whose updates arrived after the quorum was reached are
    left out.
    """
    clients: dict[tuple[str, str], list[int]] = {}
    for r in record.rejections:
        if r.stage != "quorum":
            clients.setdefault((r.stage, r.reason), []).append(r.client)
    limit = MAX_LISTED if len(clients) > MAX_LISTED + 1 else None
    listed = sorted(clients.items(), key=lambda item: -len(item[1]))[:limit]
    lines = [
        one_line(f"round {record.round}: {_list_clients(ids)} rejected at {stage}: {reason}")
        for (stage, reason), ids in listed
    ]
    if reasons := len(clients) - len(listed):
        rest = sum(map(len, clients.values())) - sum(len(ids) for _, ids in listed)
        more = f"{rest} more clients rejected, for {reasons} other reasons"
        lines.append(f"round {record.round}: {more}; metrics.jsonl lists them")
    return lines


def suspects(record: RoundRecord) -> str:
    """Return text with up to three suspects (see MIN_SUSPICION) and their suspicion, or "" if there are no suspects."""
    median = median_low(record.suspicion.values()) if len(record.suspicion) > 1 else 0.0
    suspects = [
        (fraction, client)
        for client, fraction in record.suspicion.items()
        if fraction > MIN_SUSPICION and fraction >= SUSPICION_RATIO * median
    ]
    worst = sorted(suspects, key=lambda item: (-item[0], item[1]))
    return ", ".join(f"client {client} {100 * fraction:.0f} %" for fraction, client in worst[:3])


def _list_clients(clients: Sequence[int], more: int = 0) -> str:
    more += max(0, len(clients) - MAX_LISTED)
    names = ", ".join(map(str, clients[:MAX_LISTED])) + (f" and {more} more" if more else "")
    return f"client {names}" if len(clients) + more == 1 else f"clients {names}"


def summary_rows(summary: Summary, totals: Totals) -> list[tuple[str, str]]:
    """Return the result of a run as pairs (label, value)."""
    up, down = summary.uplink_bytes, summary.downlink_bytes
    dense_up, dense_down = summary.dense_uplink_bytes, summary.dense_downlink_bytes
    relayed = totals.relayed_bytes
    wire = (summary.wire_bytes_in or 0) + (summary.wire_bytes_out or 0)
    virtual_s = 3600 * (summary.simulated_hours or 0.0)
    has_accuracy = summary.accuracy is not None or summary.measured_loss is None
    has_loss = summary.loss is not None or not summary.client_metrics
    rejected = f"{totals.rejected:,} update{'s' * (totals.rejected != 1)}"
    speed = f"{three_digits(summary.client_updates_per_s)} client updates per second"
    rows = [
        ("accuracy", percent(summary.accuracy) if has_accuracy else ""),
        ("loss", decimal(summary.loss) if has_loss else ""),
        *((name, decimal(value)) for name, value in summary.metrics.items()),
        *(("clients", client_metric_text(name, s)) for name, s in summary.client_metrics.items()),
        ("bytes up", _with_ratio(up, dense_up)),
        ("relayed", relayed and _with_ratio(relayed, totals.dense_uplink_bytes)),
        ("bytes down", _with_ratio(down, dense_down)),
        ("both", _with_ratio(up + down, dense_up + dense_down)),
        ("at the port", wire and _with_ratio(wire, dense_up + dense_down)),
        ("time", f"{duration(summary.seconds)}, {speed}"),
        ("network", virtual_s and f"{duration(virtual_s)} of virtual time"),
        ("rejected", totals.rejected and rejected),
    ]
    for r in summary.rejections[:3]:
        clients = _list_clients(r.clients, r.more_clients)
        updates = f"{r.updates:,} update{'s' * (r.updates != 1)} of {clients}"
        rows.append(("", one_line(f"{updates} rejected at {r.stage}: {r.reason}")))
    return [(label, str(value)) for label, value in rows if value]


def client_metric_text(name: str, spread: ClientMetric) -> str:
    """Format a metric that clients reported, such as "accuracy 81.20 %, worst decile 55.00 %, 20 clients"."""
    worst = spread.worst_decile
    text = f"{name} {metric(name, spread.mean)}"
    text += "" if worst is None else f", worst decile {metric(name, worst)}"
    return f"{text}, {spread.clients} client{'s' * (spread.clients != 1)}"


def _with_ratio(sent: int, dense: int) -> str:
    text, times = human_bytes(sent), ratio(dense, sent)
    known = times != NOTHING
    return f"{text}, {times} against {human_bytes(dense)} in float32" if known else text


def model_file(out: str) -> str:
    return str(Path(out) / "model.safetensors")


def how_to_load(out: str) -> list[str]:
    """Return two lines of Python code that load the trained weights."""
    return ["from safetensors.torch import load_file", f"weights = load_file({model_file(out)!r})"]


def waiting_text(connected: Sequence[int], wanted: int) -> str:
    """Return text about the connected clients while the run waits for more clients."""
    text = f"{len(connected)} of {wanted} client{'s are' if wanted != 1 else ' is'} connected"
    more = f" and {len(connected) - 16} more" if len(connected) > 16 else ""
    names = ", ".join(map(str, connected[:16])) + more
    return f"{text}: {names}" if connected else text


class LineDisplay(RunDisplay):
    """A display that prints a line per round on standard output, and warnings on standard error."""

    def on_run_start(self, header: Header) -> None:
        super().on_run_start(header)
        for label, value in header_rows(header):
            self._print(f"{label:<10}{value}")
        self._print(f"{'rounds':<10}{header.first_round} to {header.rounds}")
        ratios = "bytes of the same messages in float32, divided by the bytes sent"
        self._print(f"{'ratios':<10}{ratios}")
        self._print(table_line(columns_of(header)))

    def on_waiting(self, connected: Sequence[int], wanted: int) -> None:
        self._print(waiting_text(connected, wanted))

    def on_round_end(self, record: RoundRecord) -> None:
        super().on_round_end(record)
        self._print(table_line(columns_of(self.header), record))
        for line in rejections(record):
            self._print(line)
        if suspected := suspects(record):
            self._print(
                f"suspected clients, with the fraction of their votes that contradicted a large majority: {suspected}"
            )

    def on_warning(self, sentence: str) -> None:
        print(f"warning: {one_line(sentence)}", file=sys.stderr, flush=True)

    def on_run_end(self, summary: Summary, out: str) -> None:
        super().on_run_end(summary, out)
        for label, value in [*summary_rows(summary, self.totals), ("model", model_file(out))]:
            self._print(f"{label:<12}{value}")

    def _print(self, line: str) -> None:
        print(line, flush=True)
