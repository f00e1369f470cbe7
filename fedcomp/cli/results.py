"""The results of runs, for tables, reports and JSON. Runs that differ only in the seed are averaged into one result."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean
from typing import TYPE_CHECKING, Any

from .. import spec
from ..errors import UserError
from ..formatting import NOTHING, decimal, duration, human_bytes, percent, ratio

if TYPE_CHECKING:
    from ..runs import Group, Run

FRONT = "*"
FRONT_LEGEND = (
    "* on the Pareto front: no other row with the same task, partition, clients and attack is at least as accurate with fewer "
    "bytes (up plus down), or more accurate without more bytes"
)
SPREAD_LEGEND = "±: half of the difference in accuracy between the best and the worst seed"
RATIO_TO_DENSE = "ratio: bytes of the uncompressed row (dense), divided by the bytes of this row, up plus down, over equally many rounds"
RATIO_TO_FLOAT32 = (
    "ratio: bytes of the same messages in float32, divided by the bytes sent, up plus down"
)


@dataclass(frozen=True)
class Result:
    """One row of a table of results: the runs that differ only in the seed. Numbers are means over these runs.

    Bytes and seconds are totals of the rounds that a run has finished.
    """

    label: str
    folders: tuple[str, ...]
    accuracy: float | None = None  # last measured accuracy, in [0, 1]
    # Half of the difference in accuracy between the best and worst seed, or None for a single seed.
    accuracy_spread: float | None = None
    loss: float | None = None  # last finite loss, or None
    rounds: float = 0.0
    uplink_bytes: float = 0.0
    downlink_bytes: float = 0.0
    ratio: float | None = None  # compression ratio: bytes without compression divided by bytes sent
    seconds: float = 0.0
    # Rounds until the target accuracy is reached. None if there is no target, or if one of the runs never reached it.
    rounds_to_target: float | None = None
    # Uplink plus downlink bytes until the target accuracy is reached, or None as in `rounds_to_target`.
    bytes_to_target: float | None = None
    on_front: bool = False  # whether the result is on the Pareto front
    note: str = ""  # why the run failed, diverged or is not finished
    # The options that define the learning problem. Results of different problems have separate Pareto fronts.
    problem: Mapping[str, Any] = field(default_factory=dict)
    # Label of the uncompressed result that `ratio` compares with, or None if it compares with the same messages in float32.
    baseline: str | None = None
    # Mean accuracy or loss over the worst tenth of the clients, or None if clients do not evaluate the model.
    worst_decile: float | None = None

    @property
    def sent_bytes(self) -> float:
        """Uplink plus downlink bytes."""
        return self.uplink_bytes + self.downlink_bytes

    @property
    def rank(self) -> float:
        """The accuracy, or else the negative loss, or −∞ if neither was measured. A better result has a higher rank."""
        if self.accuracy is not None:
            return self.accuracy
        return -math.inf if self.loss is None else -self.loss


def results(
    all_groups: Sequence["Group"],
    target: float | None = None,
    failed: Mapping[str, str] | None = None,
) -> list[Result]:
    """Return a result for each group of runs that differ only in the seed, and mark the results on the Pareto front.

    A compression ratio is relative to the uncompressed (dense) group whose options are equal except for compression. If there is no such
    group, the ratio is relative to the same messages in float32. `target` is an accuracy in [0, 1]. `failed` maps the folder of each failed
    run to its error message.
    """
    from ..runs import baseline_of

    baselines = [baseline_of(group, all_groups) for group in all_groups]
    lines = [_result(*pair, target, failed or {}) for pair in zip(all_groups, baselines)]
    return [replace(line, on_front=on) for line, on in zip(lines, front(lines), strict=True)]


def front(lines: Sequence[Result]) -> list[bool]:
    """Return, for each result, whether it is on the Pareto front of its learning problem.

    Results of failed, diverged or unfinished runs are never on the front.
    """
    candidates = [line for line in lines if not line.note and math.isfinite(line.rank)]

    def dominates(one: Result, other: Result) -> bool:
        return (
            one.problem == other.problem
            and one.rank >= other.rank
            and one.sent_bytes <= other.sent_bytes
            and (one.rank, one.sent_bytes) != (other.rank, other.sent_bytes)
        )

    best = [c for c in candidates if not any(dominates(other, c) for other in candidates)]
    return [line in best for line in lines]


def legend(lines: Sequence[Result]) -> list[str]:
    """Return the lines of the legend below a table of results."""
    ratios = [line for line in lines if line.ratio is not None]
    against_dense = [line for line in ratios if line.baseline is not None]
    text = [FRONT_LEGEND] if len(lines) > 1 else []
    if against_dense:
        others = "; for rows without such an uncompressed row, bytes of the same messages in float32, divided by the bytes sent"
        text.append(RATIO_TO_DENSE + others * (len(against_dense) < len(ratios)))
    elif ratios:
        text.append(RATIO_TO_FLOAT32)
    return text + [SPREAD_LEGEND] * any(line.accuracy_spread is not None for line in lines)


def _ratio(runs: Sequence["Run"], baseline: "Group | None") -> tuple[float | None, str | None]:
    """Return the compression ratio of `runs`, and the label of the baseline to which the ratio is relative (see `Result.baseline`)."""
    sent = sum(run.sent_bytes for run in runs)
    if not sent:
        return None, None
    rounds = [len(run.records) for run in runs]
    if baseline and max(rounds) <= min(len(run.records) for run in baseline.runs):
        both = [[r.uplink_bytes + r.downlink_bytes for r in run.records] for run in baseline.runs]
        dense = sum(mean(sum(each[:count]) for each in both) for count in rounds)
        return dense / sent, baseline.label
    dense = sum(run.dense_bytes for run in runs)
    return (dense / sent if dense else None), None


def _result(
    group: "Group", baseline: "Group | None", target: float | None, failed: Mapping[str, str]
) -> Result:
    runs = group.runs
    measured = [run.accuracy for run in runs if run.accuracy is not None]
    spreads = [run.client_metrics.get("accuracy" if measured else "loss") for run in runs]
    ratio, dense_label = _ratio(runs, baseline)
    costs = [(run.cost_to(target) if target else None) or (None, None) for run in runs]
    return Result(
        problem=runs[0].problem,
        label=group.label + (f" ({len(runs)} seeds)" if len(runs) > 1 else ""),
        folders=tuple(str(run.folder) for run in runs),
        accuracy=mean(measured) if measured else None,
        accuracy_spread=(max(measured) - min(measured)) / 2 if len(measured) > 1 else None,
        loss=mean_or_none(_last_loss(run) for run in runs),
        worst_decile=mean_or_none(getattr(each, "worst_decile", None) for each in spreads),
        rounds=mean(len(run.records) for run in runs),
        uplink_bytes=mean(sum(r.uplink_bytes for r in run.records) for run in runs),
        downlink_bytes=mean(sum(r.downlink_bytes for r in run.records) for run in runs),
        ratio=ratio,
        baseline=dense_label,
        seconds=mean(sum(r.seconds for r in run.records) for run in runs),
        rounds_to_target=mean_or_none(rounds for rounds, _ in costs),
        bytes_to_target=mean_or_none(bytes_ for _, bytes_ in costs),
        note=_note(runs, failed),
    )


def _last_loss(run: "Run") -> float | None:
    losses = (r.measured_loss for r in reversed(run.records))
    return next((loss for loss in losses if loss is not None and math.isfinite(loss)), None)


def mean_or_none(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values, or None if any value is None."""
    all_values = [*values]
    known = [value for value in all_values if value is not None]
    return mean(known) if len(known) == len(all_values) else None


def _note(runs: Sequence["Run"], failed: Mapping[str, str]) -> str:
    """Return how the first unsuccessful run ended, such as "diverged: the loss is not finite", or "" if all runs succeeded."""
    for run in runs:
        if problem := _problem(run, failed.get(str(run.folder), "")):
            return problem if len(runs) == 1 else f"seed {run.options.get('seed', 0)} {problem}"
    return ""


def _problem(run: "Run", error: str) -> str:
    if error:
        return f"failed: {error}"
    if run.summary is None:
        return "not finished"
    if run.summary.measured_loss is None:
        return "diverged: the loss is not finite"
    if run.records and not run.records[-1].accepted:
        last = max((r.round for r in run.records if r.accepted), default=0)
        reason = f" ({run.summary.rejections[0].reason})" if run.summary.rejections else ""
        return f"diverged: no update was accepted after round {last}{reason}"
    return ""


def cells(line: Result, target: float | None) -> dict[str, str]:
    """Return the table cells of a result as text, by column title."""
    spread = "" if line.accuracy_spread is None else f" ± {100 * line.accuracy_spread:.2f}"
    loss = NOTHING if line.loss is None else f"loss {decimal(line.loss)}"
    texts = {
        "accuracy": loss if line.accuracy is None else percent(line.accuracy) + spread,
        "up": human_bytes(round(line.uplink_bytes)),
        "down": human_bytes(round(line.downlink_bytes)),
        "ratio": NOTHING if line.ratio is None else ratio(round(line.ratio * 10**6), 10**6),
        "rounds": f"{line.rounds:g}",
        "time": duration(line.seconds),
    }
    if target is not None:
        rounds, sent = line.rounds_to_target, line.bytes_to_target
        goal = f"{100 * target:g} %"
        texts[f"rounds to {goal}"] = NOTHING if rounds is None else f"{rounds:g}"
        texts[f"bytes to {goal}"] = NOTHING if sent is None else human_bytes(round(sent))
    return texts


def parse_accuracy(text: str | None) -> float | None:
    """Parse --target-accuracy as a number in (0, 1]. Raises UserError for any other text."""
    if text is None:
        return None
    try:
        accuracy = spec.parse_number(text)
    except spec.MALFORMED:
        accuracy = -1.0
    if not 0 < accuracy <= 1:
        raise UserError(
            f"--target-accuracy is '{text}'; give a number above 0 and up to 1, such as 90% or 0.9"
        )
    return accuracy
