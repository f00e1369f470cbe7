"""The report: one HTML file that needs nothing else, and the pictures beside it as PNG."""

import os
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import mean

import numpy as np

from ... import __version__
from ...config import flag
from ...errors import RunFolderError
from ...formatting import NOTHING, decimal, duration, percent
from ...runs import ALIKE, Group, Run, groups
from ..results import FRONT, cells, legend, results
from ..results import head as titles
from .charts import NAMES, charts, hours

MOST_NAMED = 12  # clients in a cell
STYLE = """
:root { color-scheme: light; font-family: system-ui, sans-serif; line-height: 1.45; color: #111; background: #fff }
body { max-width: 78rem; margin: 0 auto; padding: 1rem }
h1 { font-size: 1.5rem; margin: .2rem 0 } h2 { font-size: 1.15rem; margin: 1.8rem 0 .5rem }
p { margin: .3rem 0 } .quiet { color: #555; font-size: .9rem }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-size: .92rem; font-variant-numeric: tabular-nums }
th, td { padding: .28rem .7rem .28rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid #ddd }
th { border-bottom: 1.5px solid #444; vertical-align: bottom } td.n, th.n { text-align: right; white-space: nowrap }
@media screen { td.n ~ td:not(.n) { min-width: 16rem } }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)); gap: 1rem }
figure { margin: 0; break-inside: avoid } figcaption { font-weight: 600; font-size: .95rem } svg { width: 100%; height: auto }
li { margin: .2rem 0 } code { font-size: .92em; overflow-wrap: anywhere }
@media print {
  body { max-width: none; padding: 0 } .charts { grid-template-columns: 1fr 1fr } .wide { overflow: visible } table { font-size: 8pt }
  h2 { break-after: avoid } tr { break-inside: avoid } details::details-content { content-visibility: visible; block-size: auto }
}
"""


def write(
    runs: Sequence[Run],
    page: Path,
    *,
    pictures: bool = True,
    target: float | None = None,
    failed: Mapping[str, str] | None = None,
) -> list[Path]:
    """Write the report on `runs`, and its pictures into the folder of its name; returns the files.

    `target`: an accuracy, 0..1, to which rounds and bytes are told; `failed`: by folder, why a run did not end. Raises RunFolderError
    when a file cannot be written.
    """
    found = groups(runs)
    drawn = list(charts(found))
    try:
        folder = page.with_suffix("")
        (folder if pictures and drawn else page.parent).mkdir(parents=True, exist_ok=True)
        for name in NAMES:  # of a report that was here before
            (folder / f"{name}.png").unlink(missing_ok=True)
        files = [
            _written(
                page,
                html(
                    found, [(chart.title, chart.svg()) for chart in drawn], target, failed
                ).encode(),
            )
        ]
        if pictures:
            files += [_written(folder / f"{chart.name}.png", chart.png()) for chart in drawn]
    except OSError as error:
        raise RunFolderError(
            f"{page} cannot be written ({error.strerror}); give another --out"
        ) from error
    return files


def html(
    found: Sequence[Group],
    pictures: Iterable[tuple[str, str]],
    target: float | None,
    failed: Mapping[str, str] | None = None,
) -> str:
    tasks = ", ".join(dict.fromkeys(str(group.runs[0].options["task"]) for group in found))
    figures = "".join(
        f"<figure><figcaption>{escape(title)}</figcaption>{svg}</figure>" for title, svg in pictures
    )
    runs = [run for group in found for run in group.runs]
    parts = [
        f"<h1>{escape(tasks)}</h1>",
        f'<p class="quiet">{len(runs)} run{"s" * (len(runs) > 1)}; bytes are lengths of frames that were sent. fedcomp {__version__}</p>',
        _section("Results", _results(found, target, failed)),
        _section("Curves", f'<div class="charts">{figures}</div>')
        if figures
        else "<p>No round is done yet.</p>",
        "" if not figures or "Test loss" in figures else "<p>No loss was a finite number.</p>",
        _section("Settings", _settings(found)),
        _section("Turned down", _rejections(found)),
        _section("Suspected", _suspicion(found)),
        _section("Warnings", _warnings(runs)),
        _section(
            "Folders",
            "<ul>"
            + "".join(f"<li><code>{escape(str(run.folder))}</code></li>" for run in runs)
            + "</ul>",
        ),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(tasks)}: report</title><style>{STYLE}</style></head>\n<body>{''.join(parts)}</body></html>\n"
    )


def _section(title: str, content: str) -> str:
    return f"<h2>{title}</h2>\n{content}\n" if content else ""


Cell = str | tuple[str]  # a figure, to the right, is a tuple of one


def _table(head: Sequence[Cell], rows: Iterable[Sequence[Cell]]) -> str:
    def shown(cell: Cell, tag: str) -> str:
        return (
            f'<{tag} class="n">{escape(cell[0])}</{tag}>'
            if isinstance(cell, tuple)
            else f"<{tag}>{escape(cell)}</{tag}>"
        )

    def line(cells: Sequence[Cell], tag: str) -> str:
        return f"<tr>{''.join(shown(cell, tag) for cell in cells)}</tr>"

    body = "".join(line(row, "td") for row in rows)
    return f'<div class="wide"><table><thead>{line(head, "th")}</thead><tbody>{body}</tbody></table></div>'


def _results(found: Sequence[Group], target: float | None, failed: Mapping[str, str] | None) -> str:
    lines, timed = (
        results(found, target, failed),
        any(_simulated(run) is not None for group in found for run in group.runs),
    )
    several, notes = len(lines) > 1, any(line.note for line in lines)
    head: list[Cell] = [*([""] if several else []), "run", *((title,) for title in titles(target))]
    own = list(
        dict.fromkeys(name for group in found for run in group.runs for name in _own_metrics(run))
    )
    head += [(name,) for name in own] + [("simulated",)] * timed + [""] * notes
    rows: list[list[Cell]] = [
        [
            *([FRONT if line.on_front else ""] if several else []),
            line.label,
            *((cell,) for cell in cells(line, target)),
            *((_mean(group, name),) for name in own),
            *([(_hours(group),)] if timed else []),
            *([line.note] if notes else []),
        ]
        for group, line in zip(found, lines, strict=True)
    ]
    return _table(head, rows) + "".join(
        f'<p class="quiet">{escape(sentence)}</p>' for sentence in legend(lines)
    )


def _own_metrics(run: Run) -> Mapping[str, float | None]:
    """The task's own, as measured last."""
    return next((record.metrics for record in reversed(run.records) if record.metrics), {})


def _mean(group: Group, name: str) -> str:
    """Of one of these, over the seeds."""
    values = [_own_metrics(run).get(name) for run in group.runs]
    return NOTHING if None in values else decimal(mean(values))


def _hours(group: Group) -> str:
    ends = [_simulated(run) for run in group.runs]
    return NOTHING if None in ends else duration(3600 * mean(ends))


def _simulated(run: Run) -> float | None:
    """Hours that the run took its clients; None without a network."""
    end = hours(run)[-1:]
    return float(end[0]) if np.isfinite(end).all() and end.size else None


def _settings(found: Sequence[Group]) -> str:
    names = [
        name
        for name in dict.fromkeys(name for group in found for name in group.runs[0].options)
        if name not in ALIKE
    ]
    values = {name: [_shown(group.runs[0].options.get(name)) for group in found] for name in names}
    different = [name for name in names if len(set(values[name])) > 1]
    own = (
        _table(
            ["option", *(group.label for group in found)],
            ([flag(name), *values[name]] for name in different),
        )
        if different
        else ""
    )
    common = _table(
        ["option", "value"],
        [
            (
                "parameters",
                ", ".join(
                    dict.fromkeys(
                        f"{run.parameters:,}"
                        for group in found
                        for run in group.runs
                        if run.parameters
                    )
                )
                or NOTHING,
            ),
            (
                "seeds",
                ", ".join(
                    dict.fromkeys(
                        _shown(run.options.get("seed", 0)) for group in found for run in group.runs
                    )
                ),
            ),
            *((flag(name), values[name][0]) for name in names if name not in different),
            *(
                (
                    name,
                    ", ".join(
                        dict.fromkeys(
                            _shown(run.resolved.get(name)) for group in found for run in group.runs
                        )
                    ),
                )
                for name in dict.fromkeys(
                    name for group in found for run in group.runs for name in run.resolved
                )
            ),
        ],
    )
    folded, title = ("", "common to all") if different else (" open", "all options")
    return f"{own}<details{folded}><summary>{title}</summary>{common}</details>"


def _rejections(found: Sequence[Group]) -> str:
    rows = []
    for group in found:
        for run in group.runs:
            for r in run.summary.rejections if run.summary else ():
                more = f" and {r.more_clients} more" if r.more_clients else ""
                named = ", ".join(map(str, r.clients[:MOST_NAMED]))
                rows.append([_of(group, run), (f"{r.updates:,}",), r.stage, r.reason, named + more])
    return _table(["run", ("updates",), "at", "reason", "clients"], rows) if rows else ""


def _suspicion(found: Sequence[Group]) -> str:
    rows = []
    for group in found:
        for run in group.runs:
            last = next((r.suspicion for r in reversed(run.records) if r.suspicion), {})
            worst = sorted(last.items(), key=lambda item: (-item[1], item[0]))[:MOST_NAMED]
            rows += [
                [_of(group, run), (str(client),), (percent(share),)]
                for client, share in worst
                if share > 0
            ]
    return (
        '<p class="quiet">Share of a client\'s votes that lost by a wide margin.</p>'
        + _table(["run", ("client",), ("suspicion",)], rows)
        if rows
        else ""
    )


def _warnings(runs: Sequence[Run]) -> str:
    said = dict.fromkeys(
        sentence
        for run in runs
        for told in (*run.records, run.summary)
        if told
        for sentence in told.warnings
    )
    return (
        "<ul>" + "".join(f"<li>{escape(sentence)}</li>" for sentence in said) + "</ul>"
        if said
        else ""
    )


def _of(group: Group, run: Run) -> str:
    return (
        f"{group.label}, seed {run.options.get('seed', 0)}" if len(group.runs) > 1 else group.label
    )


def _shown(value: object) -> str:
    return (
        NOTHING
        if value is None
        else ("yes" if value else "no")
        if isinstance(value, bool)
        else str(value)
    )


def _written(path: Path, data: bytes) -> Path:
    new = path.with_name(f".{path.name}.new")
    new.write_bytes(data)
    os.replace(new, path)
    return path
