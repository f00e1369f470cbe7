"""Totals and texts of a run that is watched, for dashboards, plain lines and notebooks."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from statistics import median_low
from time import monotonic
from types import TracebackType
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
    rate,
    ratio,
)


@dataclass(frozen=True)
class Column:
    title: str
    width: int
    importance: int  # columns of higher numbers are left out first if there is not enough room
    cell: Callable[[RoundRecord], str]


COLUMNS = (
    Column("round", 5, 0, lambda r: str(r.round)),
    Column("accuracy", 8, 1, lambda r: percent(r.measured_accuracy)),
    Column("loss", 8, 5, lambda r: decimal(r.measured_loss)),
    Column("train loss", 10, 10, lambda r: decimal(r.train_loss)),
    Column("up", 7, 2, lambda r: human_bytes(r.uplink_bytes)),
    Column("up ratio", 8, 8, lambda r: ratio(r.dense_uplink_bytes, r.uplink_bytes)),
    Column("down", 7, 3, lambda r: human_bytes(r.downlink_bytes)),
    Column("down ratio", 10, 9, lambda r: ratio(r.dense_downlink_bytes, r.downlink_bytes)),
    Column(
        "ratio",
        6,
        4,
        lambda r: ratio(
            r.dense_uplink_bytes + r.dense_downlink_bytes, r.uplink_bytes + r.downlink_bytes
        ),
    ),
    Column("accepted", 9, 6, lambda r: f"{r.accepted}/{r.cohort}"),
    Column("time", 10, 7, lambda r: duration(r.seconds)),
)
# Of a run with a network.
VIRTUAL = Column(
    "virtual", 10, 4, lambda r: NOTHING if r.simulated_s is None else duration(r.simulated_s)
)
# Of a run whose clients evaluate the model.
WORST = "worst 10 %"
GAP = 2  # blanks between columns
SUSPECT = 0.2  # share of votes lost by a wide margin from which a client is shown,
UNLIKE = 3.0  # if it is also this multiple of the median
NAMED = 8  # clients in a line, and reasons of a round's rejections


def columns_of(header: Header | None) -> tuple[Column, ...]:
    """Return the columns of a run."""
    if header is None:
        return COLUMNS
    kept = [c for c in COLUMNS if c.title != "accuracy" or header.judged == "accuracy"]
    measured = [
        Column(name, max(8, len(name)), 1, lambda r, name=name: decimal(r.metrics.get(name)))
        for name in header.measures
    ]
    virtual = [VIRTUAL] if header.network else []
    return (*kept[:1], *measured, *kept[1:2], *_of_clients(header), *kept[2:], *virtual)


def _of_clients(header: Header) -> list[Column]:
    """Return the columns of what clients measured: the mean, unless it takes the place of the server's measure, and the worst decile."""
    name = header.judged

    def cell(field: str) -> Callable[[RoundRecord], str]:
        return lambda r: metric(name, getattr(r.client_metrics.get(name), field, None))

    mean = Column("clients", 8, 1, cell("mean"))
    worst = Column(WORST, len(WORST), 2, cell("worst_decile"))
    return {"server": [], "clients": [worst], "both": [mean, worst]}[header.evaluate]


def columns_for(width: int, columns: Sequence[Column] = COLUMNS) -> list[Column]:
    """Return the most important of `columns` that fit into `width` characters, in their order."""
    kept: list[Column] = []
    for column in sorted(columns, key=lambda c: c.importance):
        if sum(c.width + GAP for c in kept) + column.width > width:
            break
        kept.append(column)
    return [c for c in columns if c in kept]


@dataclass
class Totals:
    """Sums over the rounds that were watched."""

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


@dataclass
class RunDisplay(Callback):
    """Base class of displays: follows a run at a constant cost per round. Entered before the run is prepared, left after its end."""

    clock: Callable[[], float] = monotonic
    header: Header | None = None
    last: RoundRecord | None = None
    summary: Summary | None = None  # of the run that is over
    best: RoundRecord | None = None  # highest accuracy, or lowest loss of a task without accuracy
    totals: Totals = field(default_factory=Totals)
    # When the newest rounds ended, and when the first began.
    ends: deque[float] = field(default_factory=lambda: deque(maxlen=33))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    @property
    def last_round(self) -> int:
        """The last finished round of the run, 0 before any."""
        if self.last:
            return self.last.round
        return self.header.first_round - 1 if self.header else 0

    @property
    def reached(self) -> str:
        """How far the run is: "after round 7 of 20"."""
        if not self.last_round:
            return "before round 1 was done"
        rounds = self.header.rounds if self.header else self.last_round
        return f"after round {self.last_round} of {rounds}"

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
        if (merit := self.merit(record)) is not None and (
            self.best is None or merit > self.merit(self.best)
        ):
            self.best = record

    def on_run_end(self, summary: Summary, out: str) -> None:
        self.summary = summary

    def merit(self, record: RoundRecord) -> float | None:
        """Return the accuracy, or the negative loss of a task without accuracy; None if it was not measured."""
        if self.header is None or self.header.judged == "accuracy":
            return record.measured_accuracy
        loss = record.measured_loss
        return -loss if loss is not None and isfinite(loss) else None

    def judged(self, record: RoundRecord) -> float | None:
        """Return the accuracy of the round, or the loss of a task without accuracy."""
        by_accuracy = self.header is None or self.header.judged == "accuracy"
        return record.measured_accuracy if by_accuracy else record.measured_loss


def facts(header: Header) -> list[tuple[str, str]]:
    """Return labels and values that describe a run, the most important first."""
    h = header
    rows = [
        ("task", f"{h.task}, {h.parameters:,} parameters"),
        ("clients", f"{h.clients:,}, {h.cohort:,} a round, {h.partition}"),
        ("relays", f"{h.relays:,}, each adds the frames of its clients" if h.relays else ""),
        (
            "attack",
            h.attack and f"{h.byzantine:,} of {h.clients:,} clients are Byzantine: {h.attack}",
        ),
        ("strategy", h.strategy),
        ("uplink", h.uplink),
        ("downlink", h.downlink),
        ("memory", h.memory),
        ("note", h.notice),
        ("network", h.network),
        ("device", h.device),
        ("engine", h.engine),
        ("residuals", h.residuals),
        ("metrics", h.metrics),
        ("folder", h.out),
    ]
    return [(label, value) for label, value in rows if value]


def rejections(record: RoundRecord) -> list[str]:
    """Return a line for each stage and reason with at most eight of its clients; of more than eight reasons, the most frequent ones.

    Clients that a quorum did not wait for are left out.
    """
    clients: dict[tuple[str, str], list[int]] = {}
    for r in record.rejections:
        if r.stage == "quorum":
            continue
        clients.setdefault((r.stage, r.reason), []).append(r.client)
    most = NAMED if len(clients) > NAMED + 1 else None
    told = sorted(clients.items(), key=lambda found: -len(found[1]))[:most]
    lines = [
        one_line(f"round {record.round}: {_named(who)} rejected at {stage}: {reason}")
        for (stage, reason), who in told
    ]
    if len(told) < len(clients):
        rest = sum(len(who) for who in clients.values()) - sum(len(who) for _, who in told)
        lines.append(
            f"round {record.round}: {rest} more rejected, for {len(clients) - len(told)} reasons; metrics.jsonl has them"
        )
    return lines


def suspects(record: RoundRecord) -> str:
    """Return up to three clients whose votes lose by a wide margin much more often than those of most others; "" for none."""
    usual = median_low(record.suspicion.values()) if len(record.suspicion) > 1 else 0.0
    found = [
        (share, client)
        for client, share in record.suspicion.items()
        if share > SUSPECT and share >= UNLIKE * usual
    ]
    worst = sorted(found, key=lambda found: (-found[0], found[1]))
    return ", ".join(f"client {client} {100 * share:.0f} %" for share, client in worst[:3])


def _named(clients: Sequence[int], more: int = 0) -> str:
    more += max(0, len(clients) - NAMED)
    names = ", ".join(map(str, clients[:NAMED])) + (f" and {more} more" if more else "")
    return f"client {names}" if len(clients) + more == 1 else f"clients {names}"


def verdict(summary: Summary, totals: Totals) -> list[tuple[str, str]]:
    """Return the result of a run as labels and values. Rejections and relayed bytes are those of the rounds that were watched."""
    up, down = summary.uplink_bytes, summary.downlink_bytes
    dense_up, dense_down = summary.dense_uplink_bytes, summary.dense_downlink_bytes
    wire = (summary.wire_bytes_in or 0) + (summary.wire_bytes_out or 0)
    virtual_s = 3600 * (summary.simulated_hours or 0.0)
    has_accuracy = summary.accuracy is not None or summary.measured_loss is None
    has_loss = summary.loss is not None or not summary.client_metrics
    rejected = f"{totals.rejected:,} update{'s' * (totals.rejected != 1)}"
    rows = [
        ("accuracy", percent(summary.accuracy) if has_accuracy else ""),
        ("loss", decimal(summary.loss) if has_loss else ""),
        *((name, decimal(value)) for name, value in summary.metrics.items()),
        *(("clients", client_metric_text(name, s)) for name, s in summary.client_metrics.items()),
        ("bytes up", _against(up, dense_up)),
        (
            "relayed",
            totals.relayed_bytes and _against(totals.relayed_bytes, totals.dense_uplink_bytes),
        ),
        ("bytes down", _against(down, dense_down)),
        ("both", _against(up + down, dense_up + dense_down)),
        ("at the port", wire and _against(wire, dense_up + dense_down)),
        ("time", f"{duration(summary.seconds)}, {rate(summary.client_updates_per_s)}"),
        ("network", virtual_s and f"{duration(virtual_s)} of virtual time"),
        ("rejected", totals.rejected and rejected),
    ]
    for r in summary.rejections[:3]:
        clients = _named(r.clients, r.more_clients)
        rows.append(("", one_line(f"{r.updates:,} of {clients} at {r.stage}: {r.reason}")))
    return [(label, str(value)) for label, value in rows if value]


def client_metric_text(name: str, spread: ClientMetric) -> str:
    """Return a metric of clients as text: "accuracy 81.20 %, worst decile 55.00 %, 20 clients"."""
    worst = spread.worst_decile
    said = f"{name} {metric(name, spread.mean)}"
    said += "" if worst is None else f", worst decile {metric(name, worst)}"
    return f"{said}, {spread.clients} client{'s' * (spread.clients != 1)}"


def _against(sent: int, dense: int) -> str:
    times = ratio(dense, sent)
    return (
        human_bytes(sent)
        if times == NOTHING
        else f"{human_bytes(sent)}, {times} against {human_bytes(dense)} in float32"
    )


def model_file(out: str) -> str:
    return str(Path(out) / "model.safetensors")


def how_to_load(out: str) -> list[str]:
    """Return two lines of Python that load the weights."""
    return ["from safetensors.torch import load_file", f"weights = load_file({model_file(out)!r})"]


def waiting_text(here: Sequence[int], wanted: int) -> str:
    """Return which clients are connected while a round waits for more."""
    said = f"{len(here)} of {wanted} client{'s are' if wanted != 1 else ' is'} here"
    more = f" and {len(here) - 16} more" if len(here) > 16 else ""
    names = ", ".join(map(str, here[:16])) + more
    return f"{said}: {names}" if here else said
