"""The first sentences of a report: which line to choose, as HTML."""

from collections.abc import Sequence
from html import escape

from ...formatting import decimal, human_bytes, three_digits
from .charts import Panel, ReportLine

CLOSE = 0.05  # a line counts as close to the best within this difference of accuracy, or relative difference of loss
MOST_NAMED = 3


def verdict(found: Sequence[Panel], target: float | None) -> list[str]:
    """Return a sentence or two for each problem, as HTML."""
    told = []
    for panel in found:
        if panel.comparable:
            said = _comparison(panel.entries, target)
        elif len(panel.entries) > 1:
            said = _range(panel.entries)
        else:
            said = _alone(panel.entries[0], target)
        told.append(f"<b>{escape(panel.title)}:</b> {said}" if panel.title else said)
    return told


def _alone(entry: ReportLine, target: float | None) -> str:
    line, runs = entry.result, entry.group.runs
    who = "The run" if len(runs) == 1 else f"The mean of {len(runs)} seeds"
    said = f"{who} reaches {_quality(entry)} in {line.rounds:g} rounds with {_cost(entry)}."
    if not line.rounds:
        said = "No round is done yet."
    elif line.rank is None:
        said = f"{who} sends {_cost(entry)} in {line.rounds:g} rounds; nothing was evaluated."
    if target is not None and line.rounds:
        said += (
            f" It does not reach {100 * target:g} %."
            if line.bytes_to_target is None
            else f" It reaches {100 * target:g} % in {line.rounds_to_target:g} rounds with {_bytes(line.bytes_to_target)}."
        )
    return said + _wrong([entry])


def _comparison(entries: Sequence[ReportLine], target: float | None) -> str:
    good = [e for e in entries if not e.result.note and e.result.rank is not None]
    if not good:
        unfinished = all(e.result.note.endswith("not finished") for e in entries)
        return "No run is finished yet." if unfinished else "No run succeeded." + _wrong(entries)
    best = max(good, key=lambda e: (e.result.rank, -e.result.sent_bytes))
    most = "most accurate" if best.result.accuracy is not None else "best"
    if target is None:
        cheaper = [e for e in good if e.result.sent_bytes < best.result.sent_bytes]
        close = [e for e in cheaper if e.result.rank >= _enough(best)]
        if close:
            other = min(close, key=lambda e: e.result.sent_bytes)
        else:
            other = max(cheaper, key=lambda e: e.result.rank, default=None)
        if other is None:
            said = f"{_name(best)} is the {most} at {_quality(best)} with {_cost(best)}"
            said += ", the fewest bytes of all." if len(good) > 1 else "."
        else:
            said = f"{_name(other)} reaches {_quality(other)} with {_cost(other)}; "
            said += f"{_name(best)} is the {most} at {_quality(best)} with {_bytes(best.result.sent_bytes)}."
        return said + _wrong(entries)
    there = [e for e in good if e.result.bytes_to_target is not None]
    said = f"No line reaches {100 * target:g} %"
    if there:
        first = min(there, key=lambda e: e.result.bytes_to_target)
        said = f"{_name(first)} reaches {100 * target:g} % with the fewest bytes, {_bytes(first.result.bytes_to_target)}"
        said += f" in {first.result.rounds_to_target:g} rounds"
        if missed := len(good) - len(there):
            said += f", and {missed} of {len(good)} lines never reach it"
    return f"{said}; {_name(best)} is the {most} at {_quality(best)} with {_cost(best)}." + _wrong(
        entries
    )


def _range(entries: Sequence[ReportLine]) -> str:
    """Compare lines that each learn a problem of their own, so that none can be recommended."""
    good = [e for e in entries if not e.result.note and e.result.rank is not None]
    if not good:
        return "No run is finished yet." + _wrong(entries)
    worst, best = (pick(good, key=lambda e: e.result.rank) for pick in (min, max))
    if worst is best:
        return f"{_name(best)} reaches {_quality(best)} with {_cost(best)}." + _wrong(entries)
    return (
        f"The runs learn different problems: {_name(best)} reaches {_quality(best)} with {_cost(best)}, "
        f"{_name(worst)} {_quality(worst)} with {_cost(worst)}." + _wrong(entries)
    )


def _enough(best: ReportLine) -> float:
    """Return the lowest rank that counts as close to the best line."""
    relative = best.result.accuracy is None
    return best.result.rank - CLOSE * (abs(best.result.rank) if relative else 1)


def _wrong(entries: Sequence[ReportLine]) -> str:
    wrong = [e for e in entries if e.result.note]
    if len(entries) == 1 and wrong:
        note = wrong[0].result.note.rstrip(".")
        return f" {escape(note[0].upper() + note[1:])}."
    said = [f" {_name(e)}: {escape(e.result.note.partition(':')[0])}." for e in wrong[:MOST_NAMED]]
    more = len(wrong) - MOST_NAMED
    return "".join(said) + (
        f" {more} more failed, diverged or are not finished." if more > 0 else ""
    )


def _name(entry: ReportLine) -> str:
    return f"<code>{escape(entry.name)}</code>"


def _quality(entry: ReportLine) -> str:
    line = entry.result
    if line.accuracy is None:
        return f"a loss of {decimal(line.loss)}"
    spread = "" if line.accuracy_spread is None else f" ± {100 * line.accuracy_spread:.1f}"
    return f"{100 * line.accuracy:.1f}{spread}\u00a0%"


def _cost(entry: ReportLine) -> str:
    line, said = entry.result, _bytes(entry.result.sent_bytes)
    dense = "float32 both ways" if line.baseline is None else "the dense line"
    if line.ratio is None or 0.95 < line.ratio < 1.05:
        return said
    factor, word = (line.ratio, "less") if line.ratio > 1 else (1 / line.ratio, "more")
    return f"{said}, {three_digits(factor)} times {word} than {dense}"


def _bytes(count: float) -> str:
    return human_bytes(round(count)).replace(" ", "\u00a0")
