"""Two levels: relays between clients and server, which add the frames of their clients and pass on one.

A relay merges frames of a linear codec and opens none. Client i is at relay i mod `relays`. The server hears of every client, so that what
each proposed is committed or rolled back; what a relay adds comes in the report of the first of its clients, and the others bring nothing
more. The mean is taken over all of them: every client has the same weight. What the server sends, it sends to each client as ever.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..codecs import Codec, Update
from ..codecs.s2 import Found
from ..codecs.update import Sections
from ..config import RunConfig
from ..errors import ConfigError, FrameError
from ..memories import Memory
from ..messages import UPDATE, Assignment, Report, failure
from ..strategies import RoundStrategy
from .grid import Population

STRATEGIES = "average", "fetchsgd"  # which need no more than the sum of the frames


@dataclass
class Passed:
    """What relays did since they were last asked."""

    client_bytes: int = 0  # of frames that came from clients
    empty: int = 0  # clients that had nothing to send


class Relays:
    """A population behind relays. A client whose frame cannot be added to those before it fails, and its relay goes on without it."""

    def __init__(self, population: Population, relays: int, codec: Codec, numel: int):
        self.population, self.relays, self.codec, self.numel = population, relays, codec, numel
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
            merged, refused = self.codec.merge([report.frame for report in reports], numel=self.numel), {}
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
        """The frames that add up in their order, merged, and why others do not."""
        merged, refused = b"", {}
        for i, report in enumerate(reports):
            try:
                merged = self.codec.merge([merged, report.frame] if merged else [report.frame], numel=self.numel)
            except FrameError as error:
                refused[i] = str(error)
        return merged, refused


def check(config: RunConfig, strategy: RoundStrategy, memory: Memory) -> None:
    """Raise ConfigError for what relays cannot add."""
    uplink = strategy.uplink
    if not uplink.linear:
        raise ConfigError(f"--relays add frames, and those of {uplink} do not add; use --uplink s2, sketch or identity")
    if uplink.seeded and not uplink.shares_seed:
        raise ConfigError(f"--relays add frames of one seed, and each client makes those of {uplink} with its own; use --uplink topk+s2")
    if strategy.name not in STRATEGIES:
        raise ConfigError(f"--relays pass on sums, and --strategy {strategy.name} needs each frame; use {' or '.join(STRATEGIES)}")
    if config.weights != "uniform":
        raise ConfigError(f"--relays add frames as they are, and --weights {config.weights} weighs them first; use --weights uniform")
    if memory.counterpart is not None:
        raise ConfigError(f"--relays pass on sums, and --memory {memory.name} needs each client's frame; use --memory residual")


def missed(update: Update | None) -> int:
    """How many coordinates of what relays added could not be told exactly."""
    if isinstance(update, Sections):
        return sum(missed(part) for _, part in update.parts)
    return update.missed if isinstance(update, Found) else 0
