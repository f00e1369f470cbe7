"""What a reproduction found, as lines for a terminal and as a section of docs/reproductions.md."""

from collections.abc import Sequence
from pathlib import Path

from fedcomp.errors import UserError

from .base import Claim, Form, Judgement, Measured, Reproduction, Results
from .running import Spent, shown

COLUMNS = ("claim", "source", "the paper's number", "ours", "holds here")
RUNS = ("runs", "chosen", "accuracy", "bytes up", "bytes down")
Judged = Sequence[tuple[Claim, Judgement]]


def judged(reproduction: Reproduction, results: Results) -> Judged:
    """Each claim, with what the results say of it."""
    return [(claim, claim.judge(results)) for claim in reproduction.claims]


def verdict(found: Judged) -> str:
    """One line."""
    failed = [i for i, (_, judgement) in enumerate(found, 1) if not judgement.holds]
    if not failed:
        return (
            "the claim holds here" if len(found) == 1 else f"the claims hold here, all {len(found)}"
        )
    if len(found) == 1:
        return f"the claim does not hold here: {found[0][1].ours}"
    which = ", ".join(map(str, failed))
    kept = (
        "none of them does"
        if len(failed) == len(found)
        else f"the other {len(found) - len(failed)} hold" + "s" * (len(found) - len(failed) == 1)
    )
    said = "; ".join(found[i - 1][1].ours for i in failed)
    return f"claim{'s' * (len(failed) > 1)} {which} {'do' if len(failed) > 1 else 'does'} not hold here: {said}; {kept}"


def rows(found: Judged) -> list[tuple[str, ...]]:
    return [
        (
            f"{i}. {claim.text}",
            claim.source,
            claim.paper,
            judgement.ours,
            "yes" if judgement.holds else "no",
        )
        for i, (claim, judgement) in enumerate(found, 1)
    ]


def run_rows(results: Results) -> list[tuple[str, ...]]:
    return [
        (name, _choice(m), str(m), size(m.bytes("uplink")), size(m.bytes("downlink")))
        for name, m in results.items()
    ]


def _choice(measured: Measured) -> str:
    """What was taken of how many; the end of a grid is said to be one, where a better value may lie beyond it."""
    chosen, tried = shown(measured.choice), list(measured.tried)
    if len(tried) < 2:
        return chosen
    return (
        f"{chosen} of {len(tried)}"
        + ", the lowest" * (chosen == tried[0])
        + ", the highest" * (chosen == tried[-1])
    )


def size(count: float) -> str:
    """Bytes, to three digits."""
    for unit, of in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= of:
            return f"{count / of:.3g} {unit}"
    return f"{count:.0f} B"


def section(
    reproduction: Reproduction,
    form: Form,
    full: bool,
    results: Results,
    found: Judged,
    spent: Spent,
) -> str:
    """The Markdown of a reproduction, with how it was made."""
    seeds = max(len(m.runs) for m in results.values())
    command = f"fedcomp reproduce {reproduction.name}" + " --full" * full
    command += f" --seeds {seeds}" * (seeds != reproduction.form(full).seeds)
    parts = [
        f"## {reproduction.name}: {reproduction.title}",
        f"{reproduction.paper}.",
        f"```sh\n{command}\n```",
        reproduction.full_setting if full else reproduction.setting,
        markdown(COLUMNS, rows(found)),
        f"**{verdict(found)[0].upper()}{verdict(found)[1:]}.**",
        f"Accuracy at the end, {seeds} seed{'s' * (seeds > 1)}; bytes of a run, headers and catching up included:",
        markdown(RUNS, run_rows(results)),
        f"{_of_device(results)}: {spent.processor_s / 60:.1f} minutes of one core, {spent.processor_s / 120:.1f} on two if both are kept "
        f"busy; {spent.wall_s / 60:.1f} minutes by the clock as it was run.",
    ]
    return "\n\n".join(parts)


def _of_device(results: Results) -> str:
    devices = {str(run.resolved.get("device", "cpu")) for m in results.values() for run in m.runs}
    return f"On {', '.join(sorted(devices))}"


def markdown(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    cells = [columns, ["---"] * len(columns), *lines]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") or " " for cell in line) + " |" for line in cells
    )


def write(name: str, text: str, page: Path) -> None:
    """Put a section between its marks in the page, in place of what was there, or at the page's end.

    Raises UserError where there is no such page: the command was not given in a checkout.
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
            f"{page} cannot be written ({error.strerror}); leave --write out, or give it in a checkout of fedcomp"
        ) from error
