"""Adding frames on the way: a relay passes on one frame, the sum of those of its clients.

A relay adds frames of a linear codec without decoding them to vectors. The server still receives a report from each client, so that every
proposal is committed or rolled back: the first report of a relay's clients carries the sum, and the others carry no frame. The strategy
takes the mean over all of them, so every client has the same weight.
"""

from collections.abc import Sequence
from dataclasses import replace

from ..codecs import Codec, LayerWise, Update
from ..codecs.s2 import S2, Found
from ..codecs.update import Sections
from ..config import RunConfig
from ..errors import ConfigError, FrameError
from ..layout import Layout
from ..memories import Memory
from ..messages import UPDATE, Assignment, Report, failure
from ..server.exchange import MOST_EXAMPLES
from ..strategies import RoundStrategy, cohort

STRATEGIES = "average", "fetchsgd"  # need no more than the sum of the frames
RELAY = "relay"  # the stage of clients whose frames cannot be added, or whose sum is not taken


def adds(assignment: Assignment, report: Report) -> bool:
    """Return whether a report has a frame to be added. The server would reject the others, which stay as they are."""
    a, r = assignment, report
    return (
        r.kind == UPDATE
        and bool(r.frame)
        and (r.round, r.phase, r.client) == (a.round, a.phase, a.client)
        and (r.version, r.fingerprint) == (a.version, a.fingerprint)
        and 1 <= r.examples <= MOST_EXAMPLES
    )


def add_frames(
    codec: Codec, layout: Layout, assignments: Sequence[Assignment], reports: Sequence[Report]
) -> list[Report]:
    """Return the reports that one relay passes on for these of its clients, in the same order.

    The first update carries the sum of all frames. A client whose frame cannot be added to those of most others fails in the stage
    "relay". Reports without a frame, and those that do not answer their assignment, stay as they are.
    """
    passed = [*reports]
    adding = [i for i, report in enumerate(reports) if adds(assignments[i], report)]
    frames = [reports[i].frame for i in adding]
    if not frames:
        return passed
    try:
        total, refused = codec.merge(frames, layout=layout), {}
    except FrameError:
        total, refused = _largest_sum(codec, layout, frames)
    for position, i in enumerate(adding):
        report = reports[i]
        if position in refused:
            reason = refused[position]
            passed[i] = failure(assignments[i], RELAY, reason, report.version, report.fingerprint)
        else:
            passed[i] = replace(report, frame=total)
            total = b""
    return passed


def _largest_sum(
    codec: Codec, layout: Layout, frames: Sequence[bytes]
) -> tuple[bytes, dict[int, str]]:
    """Return the sum of as many frames as can be added to each other, and by position why others are left out."""
    sums: list[tuple[bytes, list[int]]] = []  # and the positions of the frames in them
    refused: dict[int, str] = {}
    for i, frame in enumerate(frames):
        for j, (total, added) in enumerate([*sums, (b"", [])]):
            try:
                more = codec.merge([total, frame] if total else [frame], layout=layout)
            except FrameError as error:
                refused.setdefault(i, str(error))
            else:
                sums[j : j + 1] = [(more, [*added, i])]
                break
    most, kept = max(sums, key=lambda found: len(found[1]), default=(b"", []))
    return most, {
        i: refused.get(i, "this frame does not add to most of the others")
        for i in range(len(frames))
        if i not in kept
    }


def check(config: RunConfig, strategy: RoundStrategy, memory: Memory) -> None:
    """Raise ConfigError for a run whose frames relays cannot add."""
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
    """Return the most clients of a round that one relay may have: a cohort is not divided evenly."""
    return min(
        cohort.size(config.participation, config.clients), -(-config.clients // config.relays)
    )


def inexact(updates: Sequence[Update | None]) -> int:
    """Return how many coordinates of added frames could not be decoded exactly."""
    return sum(map(_inexact, updates))


def _inexact(update: Update | None) -> int:
    if isinstance(update, Sections):
        return sum(_inexact(part) for _, part in update.parts)
    return update.missed if isinstance(update, Found) else 0


def inexact_warning(round: int, coordinates: int, of: int) -> str:
    """Return the warning about sums that could not be decoded exactly."""
    return (
        f"round {round}: {coordinates} of {of} coordinates that relays added could not be decoded exactly; give s2 in --uplink "
        "a larger 'union', or more 'columns'"
    )
