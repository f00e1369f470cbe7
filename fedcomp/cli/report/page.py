"""Reports on runs, as self-contained HTML files without scripts. `fedcomp report` writes a report, and each run writes one when it ends."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from ... import __version__, durable_files
from ...config import ALTERNATIVE_OPTIONS, ALTERNATIVES_FILE, RUN_FILE, flag, read_toml
from ...errors import FedcompError, RunFolderError, UserError, os_errors
from ...formatting import NOTHING, duration, metric, percent, three_digits
from ...runs import NEUTRAL_OPTIONS, Group, Run, load
from ...runs import groups as groups_of
from ..comparison.alternatives import alternatives
from ..results import FRONT, cells, legend, mean_or_none, parse_accuracy, results
from . import svg
from .charts import Panel, ReportEntry, curve_charts, final_charts, panels
from .verdict import verdict

REPORT = "report.html"
MAX_CLIENTS = 12  # maximum number of client ids in a table cell
MAX_LEGEND_COLUMN = 8  # maximum number of entries in a column of a chart legend
AT_PORT, SIMULATED = "ratio at the port", "simulated"  # titles of columns


def write_and_print_path(folders: Sequence[Path], out: Path | None, target: str | None) -> None:
    """Write the report on the runs and comparisons in `folders`, and print the absolute path of the report.

    Raises UserError if a run cannot be read or the report cannot be written.
    """
    accuracy = parse_accuracy(target)
    default = folders[0] if len(folders) == 1 else Path()
    runs: dict[Path, Path] = {}  # resolved path → path as given
    for run in (run for folder in folders for run in _runs_in(folder)):
        if runs.setdefault(run.resolve(), run) is not run:
            raise UserError(f"the run folder {run} is given twice; give each run once")
    page = (out or default) / REPORT
    write(groups_of([load(run) for run in runs.values()]), page, accuracy)
    print(page.absolute())


def _runs_in(folder: Path) -> list[Path]:
    """Return the folders of the started runs of the comparison in `folder`, or only `folder` if it does not contain a comparison."""
    file = folder / ALTERNATIVES_FILE
    if not file.is_file():
        return [folder]
    try:
        all = alternatives(read_toml(file, ALTERNATIVE_OPTIONS), baseline=True)
    except UserError as error:
        advice = f"give the run folders in {folder} in place of {folder}"
        raise RunFolderError(f"{file} cannot be read ({error}); {advice}") from error
    names = [each.name for each in all]
    if started := [folder / name for name in names if (folder / name / RUN_FILE).is_file()]:
        return started
    raise RunFolderError(
        f"no run in {folder} was started; leave the folder out, or continue with: fedcomp sim --out {folder} --resume"
    )


def write(
    groups: Sequence[Group],
    page: Path,
    target: float | None = None,
    failed: Mapping[str, str] | None = None,
) -> None:
    """Write the report that `html` returns to the file `page`. Raises RunFolderError if the file cannot be written."""
    text = html(groups, target, failed)
    with os_errors(RunFolderError, f"{page} cannot be written", "give another --out"):
        page.parent.mkdir(parents=True, exist_ok=True)
        durable_files.replace(page, [text.encode()], 0o666)  # the umask restricts this mode


def after_run(folder: Path, warn: Callable[[str], None], target: float | None = None) -> None:
    """Write report.html to the folder of a run that has ended, unless this folder contains no options. Errors are passed to `warn`."""
    if (folder / RUN_FILE).is_file():
        try:
            write(groups_of([load(folder)]), folder / REPORT, target)
        except FedcompError as error:
            warn(f"{REPORT} is not written: {error}")


def html(
    groups: Sequence[Group], target: float | None, failed: Mapping[str, str] | None = None
) -> str:
    """Return the report on groups of runs as an HTML document.

    If `target` is an accuracy in [0, 1], the report states the rounds and bytes needed to reach it. `failed` maps the folder of each failed
    run to its error message.
    """
    lines = results(groups, target, failed)
    drawn = panels(groups, lines)
    entries = {id(entry.group): entry for panel in drawn for entry in panel.entries}
    rows = [entries[id(group)] for group in groups]
    tasks = ", ".join(dict.fromkeys(str(group.runs[0].problem["task"]) for group in groups))
    runs = [run for group in groups for run in group.runs]
    styles = len({entry.style for entry in rows})
    quality = "Test loss" if all(panel.by_loss for panel in drawn) else "Accuracy"
    parts = [
        svg.markers(),
        f"<h1>{escape(tasks)}</h1>",
        f'<p class="quiet">{len(runs)} run{"s" * (len(runs) > 1)}; bytes count the encoded updates and models that were sent. '
        f"fedcomp {__version__}</p>",
        f'<div class="verdict">{"".join(f"<p>{sentence}</p>" for sentence in verdict(drawn, target))}</div>',
        _section(f"{quality} against bytes", _front(drawn, rows) if len(rows) > 1 else ""),
        _section("Curves", "".join(_curves(panel, drawn) for panel in drawn)),
        _section("Results", _results(rows, target)),
        _section("Settings", _settings(groups)),
        _section("Rejected updates", _rejections(groups)),
        _section("Suspected clients", _suspicion(groups)),
        _section("Warnings", _warnings(runs)),
        _section("Folders", _list(f"<code>{escape(str(run.folder))}</code>" for run in runs)),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(tasks)}: report</title><style>{svg.style_sheet()}{_highlight(styles)}</style></head>\n"
        f"<body>{''.join(parts)}</body></html>\n"
    )


def _highlight(styles: int) -> str:
    """Return CSS rules for `styles` line styles. While the mouse pointer is over a line or its name, the rules fade all other lines."""
    rule = "body:has(.s{i}:hover) .s:not(.s{i}) {{ opacity: .15 }}\n"
    return "".join(rule.format(i=i) for i in range(styles)) if styles > 1 else ""


def _section(title: str, content: str) -> str:
    return f"<h2>{title}</h2>\n{content}\n" if content else ""


def _charts(drawn: Iterable[tuple[str, str]], more: str = "") -> str:
    """Return HTML with charts (title, <svg>) side by side, followed by the HTML `more`."""
    figures = ""
    for title, picture in drawn:
        caption = f"<figcaption>{escape(title)}</figcaption>" if title else ""
        figures += f"<figure>{caption}{picture}</figure>"
    return f'<div class="charts">{figures}{more}</div>' if figures or more else ""


def _front(drawn: Sequence[Panel], rows: Sequence[ReportEntry]) -> str:
    """Return the charts of final accuracy or loss against bytes, and the legend of all charts."""
    names = {entry.style: entry.name for entry in rows}
    items = "".join(
        f'<li class="{svg.classes(style)}">{svg.swatch(style)}<span>{_breakable(name)}</span></li>'
        for style, name in sorted(names.items())
    )
    if any(panel.comparable for panel in drawn):
        items += (
            '<li><svg class="swatch" viewBox="0 0 34 14" width="34" height="14" aria-hidden="true">'
            '<path class="front" d="M1 7H33"/><circle class="ring" cx="17" cy="7" r="6"/></svg>'
            "<span>Pareto front</span></li>"
        )
    many = " many" if len(names) > MAX_LEGEND_COLUMN else ""
    return _charts(final_charts(drawn), f'<ul class="legend{many}">{items}</ul>')


def _breakable(name: str) -> str:
    """Escape a name, and allow line breaks after its commas."""
    return escape(name).replace(",", ",<wbr>")


def _curves(panel: Panel, all_panels: Sequence[Panel]) -> str:
    charts = "".join(_charts(row) for row in curve_charts(panel, all_panels))
    title = f"<h3>{escape(panel.title)}</h3>" if panel.title and charts else ""
    return title + charts


@dataclass(frozen=True)
class Cell:
    """A cell of an HTML table. `css_class` is `n` (number), `name` or `note`. `icon` is HTML in front of the text."""

    text: str
    css_class: str = ""
    icon: str = ""

    def html(self, tag: str) -> str:
        attribute = f' class="{self.css_class}"' if self.css_class else ""
        text = _breakable(self.text) if self.css_class == "name" else escape(self.text)
        if self.icon:
            text = f'<div class="named">{self.icon}<span>{text}</span></div>'
        return f"<{tag}{attribute}>{text}</{tag}>"


def _numbers(texts: Iterable[str]) -> list[Cell]:
    return [Cell(text, "n") for text in texts]


def _table(head: Sequence[Cell | str], rows: Iterable[Sequence[Cell | str]]) -> str:
    def line(cells: Sequence[Cell | str], tag: str) -> str:
        made = (cell if isinstance(cell, Cell) else Cell(cell) for cell in cells)
        return f"<tr>{''.join(cell.html(tag) for cell in made)}</tr>"

    body = "".join(line(row, "td") for row in rows)
    return f'<div class="wide" tabindex="0"><table><thead>{line(head, "th")}</thead><tbody>{body}</tbody></table></div>'


def _results(rows: Sequence[ReportEntry], target: float | None) -> str:
    lines, runs = [row.result for row in rows], [run for row in rows for run in row.group.runs]
    compared, notes = len(rows) > 1, any(line.note for line in lines)
    more = [*dict.fromkeys(title for run in runs for title in _more_numbers(run))]
    table = _table(
        [*[""] * compared, "run", *_numbers([*cells(lines[0], target), *more]), *[""] * notes],
        (
            [
                *[FRONT if row.result.on_front else ""] * compared,
                Cell(row.result.label, "name", svg.swatch(row.style) if compared else ""),
                *_numbers(cells(row.result, target).values()),
                *_numbers(_mean_text(title, row.group) for title in more),
                *[Cell(row.result.note, "note")] * notes,
            ]
            for row in rows
        ),
    )
    return table + "".join(f'<p class="quiet">{escape(text)}</p>' for text in legend(lines))


def _more_numbers(run: Run) -> dict[str, float | None]:
    """Return a run's values for the optional columns of the table of results, by column title.

    The values are the ratio of float32 bytes to TCP payload at the server's port (only in deployments), the last values of the metrics that
    the task defines or clients reported, and the duration on the virtual network in seconds (only with --network).
    """
    numbers: dict[str, float | None] = {}
    wire = [n for r in run.records for n in (r.wire_bytes_in, r.wire_bytes_out) if n is not None]
    if len(wire) == 2 * len(run.records) and any(wire):
        numbers[AT_PORT] = run.dense_bytes / sum(wire)
    numbers |= next((record.metrics for record in reversed(run.records) if record.metrics), {})
    for name, spread in run.client_metrics.items():
        numbers[f"client {name}"] = spread.mean
        if spread.worst_decile is not None:
            numbers[f"worst decile of client {name}"] = spread.worst_decile
    if run.records and (hours := run.records[-1].simulated_hours) is not None:
        numbers[SIMULATED] = 3600 * hours
    return numbers


def _mean_text(title: str, group: Group) -> str:
    """Format the mean of an optional column over the runs of a group."""
    value = mean_or_none(_more_numbers(run).get(title) for run in group.runs)
    if value is None:
        return NOTHING
    if title == AT_PORT:
        return f"×{three_digits(value)}"
    return duration(value) if title == SIMULATED else metric(title.split()[-1], value)


def _settings(groups: Sequence[Group]) -> str:
    """Return a table of the options that differ between groups, and a table of all other options and of the values that fedcomp chose."""
    options = [group.runs[0].options for group in groups]
    names = dict.fromkeys(name for each in options for name in each if name not in NEUTRAL_OPTIONS)
    values = {name: [_shown(each.get(name)) for each in options] for name in names}
    different = [name for name, shown in values.items() if len(set(shown)) > 1]
    table = ""
    if different:
        labels = [Cell(group.label, "name") for group in groups]
        rows = zip(labels, *(values[name] for name in different), strict=True)
        table = _table(["run", *map(flag, different)], rows)
    runs = [run for group in groups for run in group.runs]
    resolved = dict.fromkeys(name for run in runs for name in run.resolved)
    common = [
        ("parameters", _distinct(f"{run.parameters:,}" for run in runs if run.parameters)),
        ("seeds", _distinct(_shown(run.options.get("seed", 0)) for run in runs)),
        *((flag(name), shown[0]) for name, shown in values.items() if name not in different),
        *((name, _distinct(_shown(run.resolved.get(name)) for run in runs)) for name in resolved),
    ]
    folded, title = ("", "options that all runs share") if different else (" open", "all options")
    details = _table(["option", "value"], common)
    return f"{table}<details{folded}><summary>{title}</summary>{details}</details>"


def _distinct(texts: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(texts)) or NOTHING


def _rejections(groups: Sequence[Group]) -> str:
    rows: list[list[Cell | str]] = []
    for name, run in _runs(groups):
        for r in run.summary.rejections if run.summary else ():
            more = f" and {r.more_clients} more" if r.more_clients else ""
            clients = ", ".join(map(str, r.clients[:MAX_CLIENTS])) + more
            notes = Cell(r.reason, "note"), Cell(clients, "note")
            rows.append([name, Cell(f"{r.updates:,}", "n"), r.stage, *notes])
    head: list[Cell | str] = ["run", Cell("updates", "n"), "stage", "reason", "clients"]
    return _table(head, rows) if rows else ""


def _suspicion(groups: Sequence[Group]) -> str:
    rows = []
    for name, run in _runs(groups):
        last = next((r.suspicion for r in reversed(run.records) if r.suspicion), {})
        worst = sorted(last.items(), key=lambda item: (-item[1], item[0]))[:MAX_CLIENTS]
        rows += [[name, *_numbers([str(client), percent(f)])] for client, f in worst if f > 0]
    if not rows:
        return ""
    table = _table(["run", *_numbers(["client", "suspicion"])], rows)
    return f'<p class="quiet">Suspicion is the fraction of a client\'s votes that contradicted a large majority of clients.</p>{table}'


def _warnings(runs: Sequence[Run]) -> str:
    sources = [source for run in runs for source in (*run.records, run.summary) if source]
    return _list(dict.fromkeys(escape(text) for source in sources for text in source.warnings))


def _list(items: Iterable[str]) -> str:
    lines = "".join(f"<li>{item}</li>" for item in items)
    return f"<ul>{lines}</ul>" if lines else ""


def _runs(groups: Sequence[Group]) -> Iterator[tuple[Cell, Run]]:
    """Yield (table cell with the name of the run, run)."""
    for group in groups:
        for run in group.runs:
            seed = f", seed {run.options.get('seed', 0)}" if len(group.runs) > 1 else ""
            yield Cell(group.label + seed, "name"), run


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return NOTHING if value is None else str(value)
