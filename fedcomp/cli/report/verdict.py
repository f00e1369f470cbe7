"""Sentences at the top of a report, as HTML, that recommend one of the configurations."""

from collections.abc import Sequence
from html import escape
from math import isfinite

from ...formatting import decimal, human_bytes, three_digits
from .charts import Panel, ReportEntry

# A result counts as close to the best result if its accuracy is at most 0.05 lower, or its loss at most 5 % higher.
CLOSE = 0.05
MAX_NAMED = 3  # maximum number of failed runs that are named


def verdict(panels: Sequence[Panel], target: float | None) -> list[str]:
    """Return a text of a few sentences about the results of each panel: a recommendation, and failures."""
    sentences = []
    for panel in panels:
        entries = panel.entries
        good = [e for e in entries if not e.result.note and isfinite(e.result.rank)]
        if len(entries) == 1:
            text = _single(entries[0], target)
        elif not good:
            unfinished = all(e.result.note.endswith("not finished") for e in entries)
            text = "No run is finished yet." if unfinished else "No run succeeded."
        elif not panel.comparable:
            text = _range(good)
        elif target is None:
            text = _recommendation(good)
        else:
            text = _cheapest_to(target, good)
        title = f"<b>{escape(panel.title)}:</b> " if panel.title else ""
        sentences.append(title + text + _failures(entries))
    return sentences


def _single(entry: ReportEntry, target: float | None) -> str:
    result, runs = entry.result, entry.group.runs
    subject = "The run" if len(runs) == 1 else f"The mean of {len(runs)} seeds"
    text = f"{subject} reaches {_quality(entry)} in {result.rounds:g} rounds with {_cost(entry)}."
    if not result.rounds:
        text = "No round is done yet."
    elif not isfinite(result.rank):
        text = f"{subject} sends {_cost(entry)} in {result.rounds:g} rounds; nothing was evaluated."
    if target is not None and result.rounds:
        if result.bytes_to_target is None:
            return f"{text} It does not reach {100 * target:g} %."
        cost = f"{result.rounds_to_target:g} rounds with {_bytes(result.bytes_to_target)}"
        text += f" It reaches {100 * target:g} % in {cost}."
    return text


def _best(good: Sequence[ReportEntry]) -> tuple[ReportEntry, str]:
    """Return the best result, and the beginning of a sentence about it, such as "X is the most accurate at 91.1 % with"."""
    best = max(good, key=lambda e: (e.result.rank, -e.result.sent_bytes))
    most = "most accurate" if best.result.accuracy is not None else "best"
    return best, f"{_name(best)} is the {most} at {_quality(best)} with"


def _recommendation(good: Sequence[ReportEntry]) -> str:
    """Return a sentence about the best result, and about the cheapest result that is close to the best."""
    best, best_text = _best(good)
    cheaper = [e for e in good if e.result.sent_bytes < best.result.sent_bytes]
    if not cheaper:
        fewest = ", the fewest bytes of all" if len(good) > 1 else ""
        return f"{best_text} {_cost(best)}{fewest}."
    rank = best.result.rank
    close_rank = rank - CLOSE * (abs(rank) if best.result.accuracy is None else 1)
    other = max(cheaper, key=lambda e: e.result.rank)
    if other.result.rank >= close_rank:
        close = [e for e in cheaper if e.result.rank >= close_rank]
        other = min(close, key=lambda e: e.result.sent_bytes)
    reaches = f"{_name(other)} reaches {_quality(other)} with {_cost(other)}"
    return f"{reaches}; {best_text} {_bytes(best.result.sent_bytes)}."


def _cheapest_to(target: float, good: Sequence[ReportEntry]) -> str:
    """Return a sentence about the result that reaches the target accuracy with the fewest bytes, and about the best result."""
    best, best_text = _best(good)
    reached = [(cost, e) for e in good if (cost := e.result.bytes_to_target) is not None]
    text = f"No configuration reaches {100 * target:g} %"
    if reached:
        cost, first = min(reached, key=lambda pair: pair[0])
        text = f"{_name(first)} reaches {100 * target:g} % with the fewest bytes, {_bytes(cost)}"
        text += f" in {first.result.rounds_to_target:g} rounds"
        if missed := len(good) - len(reached):
            text += f", and {missed} of {len(good)} configurations never reached it"
    return f"{text}; {best_text} {_cost(best)}."


def _range(good: Sequence[ReportEntry]) -> str:
    """Return a sentence about the best and the worst result. It recommends none, because their learning problems differ."""
    worst, best = (pick(good, key=lambda e: e.result.rank) for pick in (min, max))
    if worst is best:
        return f"{_name(best)} reaches {_quality(best)} with {_cost(best)}."
    return (
        f"The runs learn different problems: {_name(best)} reaches {_quality(best)} with {_cost(best)}, "
        f"and {_name(worst)} reaches {_quality(worst)} with {_cost(worst)}."
    )


def _failures(entries: Sequence[ReportEntry]) -> str:
    failed = [e for e in entries if e.result.note]
    if len(entries) == 1 and failed:
        note = failed[0].result.note.rstrip(".")
        return f" {escape(note[0].upper() + note[1:])}."
    text = [f" {_name(e)}: {escape(e.result.note.partition(':')[0])}." for e in failed[:MAX_NAMED]]
    if (more := len(failed) - MAX_NAMED) > 0:
        text.append(f" {more} more failed, diverged or are not finished.")
    return "".join(text)


def _name(entry: ReportEntry) -> str:
    return f"<code>{escape(entry.name)}</code>"


def _quality(entry: ReportEntry) -> str:
    result = entry.result
    if result.accuracy is None:
        return f"a loss of {decimal(result.loss)}"
    spread = "" if result.accuracy_spread is None else f" ± {100 * result.accuracy_spread:.1f}"
    return f"{100 * result.accuracy:.1f}{spread}\u00a0%"


def _cost(entry: ReportEntry) -> str:
    result, text = entry.result, _bytes(entry.result.sent_bytes)
    dense = "in float32" if result.baseline is None else "the uncompressed run"
    if result.ratio is None or 0.95 < result.ratio < 1.05:
        return text
    factor, word = (result.ratio, "less") if result.ratio > 1 else (1 / result.ratio, "more")
    return f"{text}, {three_digits(factor)} times {word} than {dense}"


def _bytes(count: float) -> str:
    return human_bytes(round(count)).replace(" ", "\u00a0")
