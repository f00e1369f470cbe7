"""Two levels: relays between clients and server, which add the frames of their clients and pass on one.

A relay merges frames of a linear codec and opens none. Client i is at relay i mod `relays`. The server hears of every client, so that what
each proposed is committed or rolled back; what a relay adds comes in the report of the first of its clients, and the others bring nothing
more. The mean is taken over all of them: every client has the same weight. What the server sends, it sends to each client as ever.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..codecs import Codec, LayerWise, Update
from ..codecs.s2 import S2, Found
from ..codecs.update import Sections
from ..config import RunConfig
from ..errors import ConfigError, FrameError
from ..layout import Layout
from ..memories import Memory
from ..messages import UPDATE, Assignment, Report, failure
from ..strategies import RoundStrategy, cohort
from ..transports.inprocess import Population

STRATEGIES = "average", "fetchsgd"  # which need no more than the sum of the frames


@dataclass
class Passed:
    """What relays did since they were last asked."""

    client_bytes: int = 0  # of frames that came from clients
    empty: int = 0  # clients that had nothing to send


class Relays:
    """A population behind relays. A client whose frame cannot be added to those before it fails, and its relay goes on without it."""

    def __init__(self, population: Population, relays: int, codec: Codec, layout: Layout):
        self.population, self.relays, self.codec, self.layout = population, relays, codec, layout
        self._passed = Passed()

    @property
    def clients(self) -> int:
        return self.population.clients

    @property
    def at_once(self) -> int:
        return self.clients  # a relay waits for all of its clients

    def handle(self, assignments: Sequence[Assignment]) -> list[Report]:
        each = self.population.at_once
        pieces = [assignments[start : start + each] for start in range(0, len(assignments), each)]
        reports = [report for piece in pieces for report in self.population.handle(piece)]
        self._passed.client_bytes += sum(len(report.frame) for report in reports)
        self._passed.empty += sum(report.kind == UPDATE and not report.frame for report in reports)
        at: dict[int, list[int]] = {}
        for i in sorted(range(len(reports)), key=lambda i: reports[i].client):
            if reports[i].kind == UPDATE and reports[i].frame:
                at.setdefault(reports[i].client % self.relays, []).append(i)
        for mine in at.values():
            told = self._merge([assignments[i] for i in mine], [reports[i] for i in mine])
            for i, report in zip(mine, told, strict=True):
                reports[i] = report
        return reports

    def take(self) -> Passed:
        """What was done since the last call."""
        passed, self._passed = self._passed, Passed()
        return passed

    def _merge(self, assignments: Sequence[Assignment], reports: Sequence[Report]) -> list[Report]:
        """The reports of one relay's clients, with one frame among them."""
        try:
            merged = self.codec.merge([report.frame for report in reports], layout=self.layout)
            refused = {}
        except FrameError:
            merged, refused = self._merge_each(reports)
        told = []
        for i, (a, report) in enumerate(zip(assignments, reports, strict=True)):
            if i in refused:
                told.append(failure(a, "relay", refused[i], report.version, report.fingerprint))
            else:
                told.append(replace(report, frame=merged))
                merged = b""
        return told

    def _merge_each(self, reports: Sequence[Report]) -> tuple[bytes, dict[int, str]]:
        """Of the frames that add up the most, merged, and why others do not."""
        sums: list[tuple[bytes, list[int]]] = []  # and whose frames are in them
        refused: dict[int, str] = {}
        for i, report in enumerate(reports):
            for j, (merged, whose) in enumerate([*sums, (b"", [])]):
                try:
                    more = self.codec.merge(
                        [merged, report.frame] if merged else [report.frame], layout=self.layout
                    )
                except FrameError as error:
                    refused.setdefault(i, str(error))
                else:
                    sums[j : j + 1] = [(more, [*whose, i])]
                    break
        most, kept = max(sums, key=lambda found: len(found[1]), default=(b"", []))
        return most, {
            i: refused.get(i, "this frame does not add to most of the others")
            for i in range(len(reports))
            if i not in kept
        }


def check(config: RunConfig, strategy: RoundStrategy, memory: Memory) -> None:
    """Raise ConfigError for what relays cannot add."""
    uplink = strategy.uplink
    advised = f"use --uplink topk:density=1%+s2:union={most_at_one(config)}"
    inner = uplink.inner if isinstance(uplink, LayerWise) else uplink
    if strategy.name not in STRATEGIES:
        raise ConfigError(
            f"--relays pass on sums, and --strategy {strategy.name} needs each frame; use {' or '.join(STRATEGIES)}"
        )
    if not uplink.linear:
        raise ConfigError(
            f"--relays add frames, and those of {uplink} do not add; {advised}, or identity"
        )
    if uplink.seeded and not uplink.shares_seed:
        raise ConfigError(
            f"--relays add frames of one seed, and each client makes those of {uplink} with its own; {advised}"
        )
    if isinstance(inner, S2) and not inner.columns:
        raise ConfigError(
            f"--relays add tables of one size, and that of {uplink} goes by an update's nonzeros; {advised}, or s2:columns=N"
        )
    if config.weights != "uniform":
        raise ConfigError(
            f"--relays add frames as they are, and --weights {config.weights} weighs them first; use --weights uniform"
        )
    if config.clip_update:
        raise ConfigError(
            "--relays add frames before the server could clip what each client sent; leave --clip-update out"
        )
    if memory.counterpart is not None:
        raise ConfigError(
            f"--relays pass on sums, and --memory {memory.name} needs each client's frame; use --memory residual"
        )


def most_at_one(config: RunConfig) -> int:
    """Clients of a round that one relay may have: a cohort is not dealt out evenly."""
    return min(
        cohort.size(config.participation, config.clients), -(-config.clients // config.relays)
    )


def missed(update: Update | None) -> int:
    """How many coordinates of what relays added could not be told exactly."""
    if isinstance(update, Sections):
        return sum(missed(part) for _, part in update.parts)
    return update.missed if isinstance(update, Found) else 0
