"""Check the options of all alternatives, run the alternatives, and compare their results."""

import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from ... import __version__, spec
from ...config import RUN_FILE, RunConfig, flag
from ...errors import ConfigError, FedcompError
from ...formatting import metric, one_line
from ...run_display import WORST
from ..doctor import cores
from ..results import FRONT, Result, cells, legend, results
from ..tables import aligned
from .alternatives import Alternative, alternative_error, alternatives, compares_compression
from .displays import AlternativeProgress, ComparisonLines, Facts
from .folder import BASELINE, TARGET, ComparisonFolder
from .worker_pool import WorkerPool

ONE_CORE_ENGINES = {"batched", "serial"}  # training engines that gain little from a second core
SHOWN_OPTIONS = "task partition clients participation rounds strategy uplink downlink memory attack network".split()
# Columns of the table of results that are left out first, in this order, if the terminal is narrow.
OPTIONAL_COLUMNS = ("time", "ratio", "rounds")
MIN_NAME_WIDTH = 11  # minimum width of the column of names, in characters; longer names are wrapped
# Options that comparisons refuse, with the reason.
REFUSED_OPTIONS = {
    "log_json": "metrics.jsonl in each run folder contains all rounds",
    "metrics_port": "the port serves the metrics of one run",
}


class Comparison:
    """A comparison of the alternatives of one command.

    `side_by_side` is the value of --side-by-side, `target` the target accuracy in [0, 1], and `baseline` the value of --baseline, or None
    to add dense runs only if the alternatives differ in their compression. Raises UserError for invalid options, before anything is
    written.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        display: ComparisonLines,
        side_by_side: str = "auto",
        target: float | None = None,
        baseline: bool | None = None,
    ):
        for name, advice in REFUSED_OPTIONS.items():
            if values.get(name) not in (None, -1):
                raise ConfigError(
                    f"{flag(name)} applies to a single run, but the options define several runs; leave {flag(name)} out, because {advice}"
                )
        self.values, self.display = values, display
        self.processes = _processes(side_by_side)
        self.folder = ComparisonFolder(values)
        if baseline is None:
            baseline = self.folder.stored.get(BASELINE, compares_compression(values))
        self.baseline = baseline
        self.all = alternatives(values, baseline)
        self.target = target or self.folder.stored_target_accuracy()
        self.finished = {each.name for each in self.all if self.folder.is_finished(each)}

    def run(self) -> list[Result]:
        """Run the alternatives that are not finished. Then compare all alternatives.

        Return their results, one for each group of runs that differ only in the seed.
        """
        unfinished = [each for each in self.all if each.name not in self.finished]
        workers = max(1, min(self.processes or cores(), len(unfinished)))
        with closing(self.folder), WorkerPool(workers) as pool:
            checked = self._check(pool, unfinished)
            parallel_runs = self._parallel_runs(checked)
            threads = 0 if parallel_runs == 1 else max(1, cores() // parallel_runs)
            pool.shrink(parallel_runs)
            resolved = {"side_by_side": parallel_runs, "threads": threads or cores()}
            resolved |= {BASELINE: self.baseline} | ({TARGET: self.target} if self.target else {})
            self.folder.open()
            self.folder.write_options(resolved)
            progress = [AlternativeProgress(each.name, each.config.rounds) for each in self.all]
            for each, shown in zip(self.all, progress, strict=True):
                if each.name in self.finished:
                    self.folder.read_progress(each, shown)
            facts = _facts(self.values, checked)
            self.display.on_run_start(str(self.folder.path), facts, progress)
            common = {"action": "run", "threads": threads}
            requests = [common | {"values": self.folder.run_options(each)} for each in unfinished]
            for i, message in pool.run(requests):
                self.display.on_message(self.all.index(unfinished[i]), message)
            return self._compare(parallel_runs)

    def _check(self, pool: WorkerPool, unfinished: Sequence[Alternative]) -> list[dict[str, Any]]:
        """Check the options of the unfinished alternatives. Return the result of `worker_pool.check` for each of them.

        Raises FedcompError for invalid options.
        """
        checks: dict[int, dict[str, Any]] = {}
        values = map(self.folder.run_options, unfinished)
        for i, message in pool.run([{"action": "check", "values": each} for each in values]):
            if (end := message.get("end")) is None:
                continue
            if "failed" in end:
                raise alternative_error(unfinished[i].name, end["failed"], end["status"])
            checks[i] = end
            self.display.on_checked(len(checks), len(unfinished))
        names: dict[RunConfig, str] = {}
        for i, each in enumerate(unfinished):
            if (other := names.setdefault(checks[i]["config"], each.name)) != each.name:
                raise ConfigError(
                    f"alternatives {other} and {each.name} have the same options; leave one of them out"
                )
        return [checks[i] for i in range(len(unfinished))]

    def _parallel_runs(self, checked: Sequence[Mapping[str, Any]]) -> int:
        """Return the number of runs to execute at the same time."""
        if self.processes:
            return min(self.processes, max(len(checked), 1))
        one_core = all(c["device"] == "cpu" and c["engine"] in ONE_CORE_ENGINES for c in checked)
        return max(1, min(cores(), len(checked))) if one_core else 1

    def _compare(self, parallel_runs: int) -> list[Result]:
        """Compare the alternatives, and write comparison.json and the HTML report."""
        from ...runs import groups, load
        from ..report import page

        failed = {str(self.folder.path / p.name): p.error for p in self.display.all if p.error}
        folders = [self.folder.path / each.name for each in self.all]
        started = [folder for folder in folders if (folder / RUN_FILE).is_file()]
        try:
            grouped = groups([load(folder) for folder in started])
        except FedcompError as error:
            where = f"the alternatives in {self.folder.path}"
            raise FedcompError(f"{where} cannot be compared: {error}") from error
        lines = results(grouped, self.target, failed)
        for folder in folders:
            if folder not in started:
                note = f"failed: {failed[str(folder)]}" if str(folder) in failed else "not started"
                lines.append(Result(folder.name, (str(folder),), note=note))
        if started:
            try:
                page.write(grouped, self.folder.path / page.REPORT, self.target, failed)
            except FedcompError as error:
                self.display.on_warning(f"{page.REPORT} is not written: {error}")
        written = {"version": __version__, TARGET: self.target, "side_by_side": parallel_runs}
        self.folder.write_comparison(written | {"results": [asdict(line) for line in lines]})
        return lines

    def show(self, lines: Sequence[Result]) -> None:
        """Print the table of results, notes, and the path of the HTML report."""
        notes = [one_line(f"{line.label} {line.note}") for line in lines if line.note]
        notes += legend(lines)
        if sys.stdout.isatty():
            console = Console(highlight=False, markup=False)
            console.print(as_rich_table(lines, self.target, console.width), *notes, sep="\n")
        else:
            print("\n".join([*as_text(lines, self.target), *notes]))
        page = self.folder.path / "report.html"
        print(page if page.is_file() else self.folder.path)


def _processes(text: str) -> int:
    """Parse --side-by-side as a number of processes, or 0 for "auto"."""
    if text == "auto":
        return 0
    try:
        return spec.parse_count(text)
    except spec.MALFORMED:
        advice = "give a number of processes such as 2, or auto"
        raise ConfigError(f"--side-by-side is '{text}'; {advice}") from None


def _facts(values: Mapping[str, Any], checked: Sequence[Mapping[str, Any]]) -> Facts:
    """Return pairs (label, value) that describe all alternatives: shared options, model sizes, devices and engines."""
    options = {name: values.get(name, getattr(RunConfig, name)) for name in SHOWN_OPTIONS}
    facts = [(k, str(v)) for k, v in options.items() if v is not None and not isinstance(v, list)]
    for label, key in (("parameters", "parameters"), ("device", "on"), ("engine", "engine")):
        of_all = [check[key] for check in checked]
        texts = [f"{value:,}" if isinstance(value, int) else value for value in of_all]
        facts += [(label, ", ".join(dict.fromkeys(texts)))] if texts else []
    return facts


def as_text(lines: Sequence[Result], target: float | None) -> list[str]:
    """Return the table of results as lines of plain text."""
    rows = _rows(lines, target)
    texts = [["", "alternative", *rows[0]]]
    texts += [[*_name(line), *row.values()] for line, row in zip(lines, rows, strict=True)]
    return aligned(texts, left=2)


def as_rich_table(lines: Sequence[Result], target: float | None, width: int) -> Table:
    """Return the table of results for a terminal of `width` characters. Long names are wrapped, but numbers are never cut off.

    The column of rounds is left out if all runs have the same number of rounds. If the table is too wide, columns are left out: first
    OPTIONAL_COLUMNS, then the remaining columns from right to left.
    """
    rows = _rows(lines, target)
    titles = {name: name.replace(" to ", "\nto ") for name in rows[0]}
    if len({line.rounds for line in lines}) == 1:
        del titles["rounds"]
    widths = {
        name: max(map(len, [*title.split("\n"), *(row[name] for row in rows)]))
        for name, title in titles.items()
    }
    optional = [name for name in OPTIONAL_COLUMNS if name in titles]
    for name in optional + [name for name in reversed(titles) if name not in optional]:
        if 2 + MIN_NAME_WIDTH + sum(widths[each] + 1 for each in titles) > width:
            del titles[name]
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("", no_wrap=True)
    table.add_column("alternative", overflow="fold", min_width=MIN_NAME_WIDTH)
    for title in titles.values():
        table.add_column(title, justify="right", no_wrap=True, vertical="top")
    for line, row in zip(lines, rows, strict=True):
        style = "bold" if line.on_front else ""
        table.add_row(*_name(line), *(row[name] for name in titles), style=style)
    return table


def _rows(lines: Sequence[Result], target: float | None) -> list[dict[str, str]]:
    """Return the table cells of each result by column title, with a column for the worst decile if clients evaluated the model."""
    rows = [cells(line, target) for line in lines]
    if any(line.worst_decile is not None for line in lines):
        for i, line in enumerate(lines):
            worst = metric("loss" if line.accuracy is None else "accuracy", line.worst_decile)
            rows[i] = {"accuracy": rows[i]["accuracy"], WORST: worst} | rows[i]
    return rows


def _name(line: Result) -> tuple[str, str]:
    note = f", {line.note.partition(':')[0]}" if line.note else ""
    return FRONT if line.on_front else "", line.label + note
