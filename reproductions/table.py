"""Tables of the results of a reproduction, for a terminal and for docs/reproductions.md."""

from collections.abc import Sequence
from pathlib import Path

from fedcomp.errors import UserError

from .base import IN_WORDS, Claim, MethodResult, Reproduction, Results, Verdict
from .running import ComputeTime, choice_text

COLUMNS = ("claim", "source", "the paper's number", "ours", "holds here")
RUNS = ("runs", "chosen", "accuracy", "bytes up", "bytes down")
JudgedClaims = Sequence[tuple[Claim, Verdict]]


def judge_claims(reproduction: Reproduction, results: Results) -> JudgedClaims:
    return [(claim, claim.judge(results)) for claim in reproduction.claims]


def summary_line(judged: JudgedClaims) -> str:
    """Return a line that says which claims hold, with the measured values of claims that do not hold."""
    failed = [i for i, (_, judgement) in enumerate(judged, 1) if not judgement.holds]
    if not failed:
        return "the claim holds here" if len(judged) == 1 else f"all {len(judged)} claims hold here"
    if len(judged) == 1:
        return f"the claim does not hold here: {judged[0][1].ours}"
    which = ", ".join(map(str, failed))
    others = (
        "none of them does"
        if len(failed) == len(judged)
        else "the other one holds"
        if len(judged) - len(failed) == 1
        else f"the other {len(judged) - len(failed)} hold"
    )
    values = "; ".join(judged[i - 1][1].ours for i in failed)
    return f"claim{'s' * (len(failed) > 1)} {which} {'do' if len(failed) > 1 else 'does'} not hold here: {values}; {others}"


def rows(judged: JudgedClaims) -> list[tuple[str, ...]]:
    return [
        (
            f"{i}. {claim.text}",
            claim.source,
            claim.paper,
            judgement.ours,
            "yes" if judgement.holds else "no",
        )
        for i, (claim, judgement) in enumerate(judged, 1)
    ]


def run_rows(results: Results) -> list[tuple[str, ...]]:
    return [
        (name, _choice(m), str(m), size(m.bytes("uplink")), size(m.bytes("downlink")))
        for name, m in results.items()
    ]


def _choice(measured: MethodResult) -> str:
    """Return the best choice and the number of choices as text, such as `lr 0.1 of 3, the highest`."""
    chosen, tried = choice_text(measured.choice), list(measured.tried)
    if len(tried) < 2:
        return chosen
    return (
        f"{chosen} of {len(tried)}"
        + ", the lowest" * (chosen == tried[0])
        + ", the highest" * (chosen == tried[-1])
    )


def edges(results: Results) -> str:
    """Return a sentence that lists the methods whose best choice is the first or the last of its grid, or "" if there are none."""
    names = [
        f"{name} ({choice_text(m.choice)})"
        for name, m in results.items()
        if len(tried := list(m.tried)) > 1 and choice_text(m.choice) in (tried[0], tried[-1])
    ]
    listed = ", ".join(names)
    return f"The chosen learning rate lies at an end of its grid for {listed}." if names else ""


def size(count: float) -> str:
    """Return a number of bytes as text with three digits and a unit."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count:.0f} B"


def section(
    reproduction: Reproduction,
    full: bool,
    results: Results,
    judged: JudgedClaims,
    time: ComputeTime,
) -> str:
    """Return the Markdown section of a reproduction, with its setting, results and compute time."""
    seeds = max(len(m.runs) for m in results.values())
    numbers = any(claim.paper != IN_WORDS for claim, _ in judged)
    shown = (0, 2, 3, 4) if numbers else (0, 3, 4)  # columns
    parts = [
        f"## {reproduction.name}{' --full' * full}: {reproduction.title}",
        f"{reproduction.paper}.",
        reproduction.full_setting if full else reproduction.setting,
        markdown([COLUMNS[i] for i in shown], [[row[i] for i in shown] for row in rows(judged)]),
        f"{seeds} seed{'s' * (seeds > 1)}. {edges(results)}".rstrip(),
        f"{_of_device(results)}: {time.processor_s / 60:.1f} minutes of processor time.",
    ]
    return "\n\n".join(parts)


def _of_device(results: Results) -> str:
    devices = {str(run.resolved.get("device", "cpu")) for m in results.values() for run in m.runs}
    return f"On the device {', '.join(sorted(devices))}"


def markdown(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    cells = [columns, ["---"] * len(columns), *lines]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") or " " for cell in line) + " |" for line in cells
    )


def write(name: str, text: str, page: Path) -> None:
    """Replace the section `name` in the file `page`, or append the section if the page does not have it.

    Raises UserError if the page cannot be written, for example outside of a checkout.
    """
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    try:
        old = page.read_text(encoding="utf-8")
        block = f"{begin}\n\n{text}\n\n{end}"
        if begin in old and end in old:
            new = old[: old.index(begin)] + block + old[old.index(end) + len(end) :]
        else:
            new = f"{old.rstrip()}\n\n{block}\n"
        page.write_text(new, encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"{page} cannot be written ({error.strerror}); leave --write out, or run the command in a checkout of fedcomp"
        ) from error
