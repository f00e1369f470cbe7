"""Totals and texts of a run that is watched, for dashboards, plain lines and notebooks."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from statistics import median_low
from time import monotonic
from typing import Self

from .callbacks import Callback, Header, RoundRecord, Summary
from .formatting import NOTHING, decimal, duration, human_bytes, one_line, percent, rate, ratio


@dataclass(frozen=True)
class Column:
    title: str
    width: int
    importance: int  # where there is no room for all columns, those of the highest number go first
    cell: Callable[[RoundRecord], str]


COLUMNS = (
    Column("round", 5, 0, lambda r: str(r.round)),
    Column("accuracy", 8, 1, lambda r: percent(r.accuracy)),
    Column("loss", 8, 5, lambda r: decimal(r.loss)),
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
# Of runs with a network.
VIRTUAL = Column(
    "virtual", 10, 4, lambda r: NOTHING if r.simulated_s is None else duration(r.simulated_s)
)
GAP = 2  # blanks between columns
# A client is suspected from this share of votes lost by a wide margin, and from so many times the median.
SUSPECT, UNLIKE = 0.2, 3.0
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
    return (*kept[:1], *measured, *kept[1:], *([VIRTUAL] if header.network else []))


def columns_for(width: int, columns: Sequence[Column] = COLUMNS) -> list[Column]:
    """Return the most important columns that fit into `width` characters, in their order."""
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
class Watch(Callback):
    """Follows a run at a constant cost per round. Entered before the run is prepared, left when it has ended or failed."""

    clock: Callable[[], float] = monotonic
    header: Header | None = None
    last: RoundRecord | None = None
    summary: Summary | None = None  # of the run that is over
    best: RoundRecord | None = None  # by accuracy, or by loss if the task has none
    totals: Totals = field(default_factory=Totals)
    # The ends of the newest rounds, and the begin of the first.
    ends: deque[float] = field(default_factory=lambda: deque(maxlen=33))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None: ...

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
        return f"after round {self.last_round} of {self.header.rounds}"

    @property
    def seconds_a_round(self) -> float | None:
        return (self.ends[-1] - self.ends[0]) / (len(self.ends) - 1) if len(self.ends) > 1 else None

    def started(self, header: Header) -> None:
        self.header = header
        self.ends.append(self.clock())

    def round_done(self, record: RoundRecord) -> None:
        self.last = record
        self.totals.add(record)
        self.ends.append(self.clock())
        if (merit := self.merit(record)) is not None and (
            self.best is None or merit > self.merit(self.best)
        ):
            self.best = record

    def finished(self, summary: Summary, out: str) -> None:
        self.summary = summary

    def merit(self, record: RoundRecord) -> float | None:
        """Return the accuracy, or the negative loss of a task without one; None if neither was measured."""
        if self.header is None or self.header.judged == "accuracy":
            return record.accuracy
        return -record.loss if record.loss is not None and isfinite(record.loss) else None


def facts(header: Header) -> list[tuple[str, str]]:
    """Return the options of a run as label and value, the most important first."""
    attack = f"{header.liars:,} of {header.clients:,} clients lie: {header.attack}"
    pairs = [
        ("task", f"{header.task}, {header.parameters:,} parameters"),
        ("clients", f"{header.clients:,}, {header.cohort:,} a round, {header.partition}"),
        ("relays", header.relays and f"{header.relays:,}, each adds the frames of its clients"),
        ("attack", header.attack and attack),
        ("strategy", header.strategy),
        ("uplink", header.uplink),
        ("downlink", header.downlink),
        ("memory", header.memory),
        ("note", header.notice),
        ("network", header.network),
        ("device", header.device),
        ("engine", header.engine),
        ("residuals", header.residuals),
        ("metrics", header.metrics),
        ("folder", header.out),
    ]
    return [(label, value) for label, value in pairs if value]


def rejections(record: RoundRecord) -> list[str]:
    """Return a line for each stage and reason with at most eight clients; of more than eight reasons, the most frequent.

    Clients that a round with a quorum did not wait for are left out.
    """
    clients: dict[tuple[str, str], list[int]] = {}
    for r in record.rejections:
        if r.stage == "quorum":
            continue
        clients.setdefault((r.stage, r.reason), []).append(r.client)
    told = sorted(clients.items(), key=lambda found: -len(found[1]))[
        : NAMED if len(clients) > NAMED + 1 else None
    ]
    lines = [
        one_line(f"round {record.round}: {_named(who)} rejected at {stage}: {reason}")
        for (stage, reason), who in told
    ]
    if reasons := len(clients) - len(told):
        rest = sum(map(len, clients.values())) - sum(len(who) for _, who in told)
        more = f"{rest} more rejected, for {reasons} reasons; metrics.jsonl has them"
        lines.append(f"round {record.round}: {more}")
    return lines


def suspects(record: RoundRecord) -> str:
    """Return at most three clients whose votes lose by a wide margin much more often than those of most others; "" without any."""
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
    """Return how the run ended, as label and value. `totals`: of the rounds that were watched."""
    up, down = summary.uplink_bytes, summary.downlink_bytes
    dense_up, dense_down = summary.dense_uplink_bytes, summary.dense_downlink_bytes
    wire = (summary.wire_bytes_in or 0) + (summary.wire_bytes_out or 0)
    lines = []
    if summary.accuracy is not None or summary.loss is None:
        lines.append(("accuracy", percent(summary.accuracy)))
    lines.append(("loss", decimal(summary.loss)))
    lines += [(name, decimal(value)) for name, value in summary.metrics.items()]
    lines.append(("bytes up", _against(up, dense_up)))
    if totals.relayed_bytes:
        lines.append(("relayed", _against(totals.relayed_bytes, totals.dense_uplink_bytes)))
    lines.append(("bytes down", _against(down, dense_down)))
    lines.append(("both", _against(up + down, dense_up + dense_down)))
    if wire:
        lines.append(("at the port", _against(wire, dense_up + dense_down)))
    lines.append(("time", f"{duration(summary.seconds)}, {rate(summary.client_updates_per_s)}"))
    if summary.simulated_hours is not None:
        lines.append(("network", f"{duration(3600 * summary.simulated_hours)} of virtual time"))
    if totals.rejected:
        updates = f"{totals.rejected:,} update{'s' * (totals.rejected != 1)}"
        lines.append(("rejected", updates))
    for r in summary.rejections[:3]:
        who = _named(r.clients, r.more_clients)
        lines.append(("", one_line(f"{r.updates:,} of {who} at {r.stage}: {r.reason}")))
    return lines


def _against(sent: int, dense: int) -> str:
    if not sent or not dense:
        return human_bytes(sent)
    return f"{human_bytes(sent)}, {ratio(dense, sent)} against {human_bytes(dense)} dense"


def model_file(out: str) -> str:
    return str(Path(out) / "model.safetensors")


def how_to_load(out: str) -> list[str]:
    """Return two lines of Python that load the model."""
    return ["from safetensors.torch import load_file", f"weights = load_file({model_file(out)!r})"]


def awaited(here: Sequence[int], wanted: int) -> str:
    """Return who is connected while a round waits for clients."""
    said = f"{len(here)} of {wanted} client{'s are' if wanted != 1 else ' is'} here"
    more = f" and {len(here) - 16} more" if len(here) > 16 else ""
    return f"{said}: {', '.join(map(str, here[:16]))}{more}" if here else said
