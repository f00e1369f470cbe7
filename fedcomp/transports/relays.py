"""Addition of encoded updates (frames) at relays. A relay is a process that forwards messages between the server and a group of clients.

With --relays, a relay sends the server the sum of its clients' frames, to save bandwidth. A relay adds frames without decoding them. This
needs a linear codec, with which two frames can be combined into a frame of the sum of both updates. The server still receives one report
(message with an update) per client, because the server must tell each client whether its update was accepted. One report carries the sum,
and the reports of the other clients carry no frame. The server divides the sum by the number of updates, so all clients have the same
weight.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from ..codecs import Codec, Update
from ..codecs.s2 import S2, RecoveredUpdate
from ..codecs.update import Sections
from ..config import RunConfig
from ..errors import ConfigError, FrameError, ProtocolError
from ..layout import Layout
from ..messages import UPDATE, Assignment, Report, failure
from ..server.exchange import check_addressee, check_update
from ..strategies import RoundStrategy
from ..strategies.base import cohort_size

STRATEGIES = "average", "fetchsgd"  # strategies that need only the sum of the updates
# `stage` of a failed or lost report if a relay could not add its update, or if the server did not accept the sum with its update.
RELAY = "relay"


def can_add(assignment: Assignment, report: Report) -> bool:
    """Return whether a report is a valid answer to `assignment` with an update that a relay may add."""
    try:
        check_addressee(report, assignment)
        check_update(report, assignment)
    except ProtocolError:
        return False
    # A report with a reason is sent alone. All reports whose updates are added share one message, which long reasons could make too large.
    return report.kind == UPDATE and bool(report.frame) and not report.reason


def add_frames(
    codec: Codec, layout: Layout, assignments: Sequence[Assignment], reports: Sequence[Report]
) -> list[Report]:
    """Return the reports that a relay sends to the server, in the order of `reports`.

    `assignments`: the assignments that `reports` answer, in the same order. Reports for which `can_add` returns False stay unchanged. The
    frames (encoded updates) of all other reports are added. The first report whose frame is in the sum then carries the sum, and the others
    carry no frame. If not all frames can be added, a failure report with the stage "relay" replaces each report whose frame is left out.
    """
    summed = [*reports]
    adding = [i for i, report in enumerate(reports) if can_add(assignments[i], report)]
    frames = [reports[i].frame for i in adding]
    if not frames:
        return summed
    try:
        total, refused = codec.merge(frames, layout=layout), dict[int, str]()
    except FrameError:
        total, refused = _largest_sum(codec, layout, frames)
    for position, i in enumerate(adding):
        report = reports[i]
        if position in refused:
            reason = refused[position]
            summed[i] = failure(assignments[i], RELAY, reason, report.version, report.fingerprint)
        else:
            summed[i] = replace(report, frame=total)
            total = b""
    return summed


def _largest_sum(
    codec: Codec, layout: Layout, frames: Sequence[bytes]
) -> tuple[bytes, dict[int, str]]:
    """Divide frames into groups whose frames can be added to each other. Return the sum of the largest group.

    Also return why the other frames are not in this sum: a mapping from the index of each frame to the reason.
    """
    sums: list[tuple[bytes, list[int]]] = []  # each sum with the indices of its frames
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
    largest, added = max(sums, key=lambda entry: len(entry[1]), default=(b"", []))
    return largest, {
        i: refused.get(
            i,
            "a relay sends only the largest sum of updates that can be added to each other, and this client's update is not in it",
        )
        for i in range(len(frames))
        if i not in added
    }


def check(config: RunConfig, strategy: RoundStrategy) -> None:
    """Raise ConfigError if relays cannot add the encoded updates of a run with --relays."""
    if not config.relays:
        return
    uplink, memory = strategy.uplink, strategy.memory
    clients = cohort_size(config.participation, config.clients)
    per_relay = -(-config.clients // config.relays)  # largest number of clients per relay
    advice = f"use --uplink topk:density=1%+s2:union={min(clients, per_relay)}"
    only_sum = "a relay sends only the sum of its clients' encoded updates"
    inner = uplink.unscoped
    if strategy.name not in STRATEGIES:
        why = f"{only_sum}, but --strategy {strategy.name} needs each update; use --strategy {' or '.join(STRATEGIES)}"
    elif not uplink.linear:
        why = f"a relay adds encoded updates without decoding them, but --uplink {uplink} does not support this; {advice}, or identity"
    elif uplink.seeded and not uplink.shares_seed:
        why = f"a relay can add only updates encoded with the same seed, but with --uplink {uplink} each client has its own seed; {advice}"
    elif isinstance(inner, S2) and not inner.columns:
        why = f"a relay adds s2 frames of equal size, but with --uplink {uplink} the size depends on the update; {advice}, or s2:columns=N"
    elif config.weights != "uniform":
        why = f"a relay adds its clients' updates with equal weights, but --weights is {config.weights}; use --weights uniform"
    elif config.clip_update:
        why = f"{only_sum}, but --clip-update needs each update; leave --clip-update out"
    elif memory.counterpart is not None:
        why = f"{only_sum}, but --memory {memory.name} needs each update; use --memory residual"
    else:
        return
    raise ConfigError(f"--relays {config.relays}: {why}")


def inexact(updates: Iterable[Update | None]) -> int:
    """Return how many coordinates in sums of encoded updates could not be decoded exactly."""
    coordinates = 0
    for update in updates:
        if isinstance(update, Sections):
            coordinates += inexact(part for _, part in update.parts)
        elif isinstance(update, RecoveredUpdate):
            coordinates += update.missed
    return coordinates


def warn_if_inexact(
    round: int, updates: Sequence[Update | None], warn: Callable[..., None]
) -> None:
    """Warn, once in a run, if coordinates in the sums of encoded updates could not be decoded exactly.

    `warn(text, kind=...)` ignores a second warning of the same kind.
    """
    if coordinates := inexact(updates):
        total = sum(update.nonzeros for update in updates if update is not None)
        warn(
            f"round {round}: {coordinates} of {total} coordinates in the sums of the relays could not be decoded exactly; give s2 in "
            "--uplink a larger 'union' or more 'columns'",
            kind="inexact sums of relays",
        )
