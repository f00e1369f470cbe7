"""Several alternatives from their options to their table: they are checked before the first one trains, run, and compared."""

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

from ... import __version__, spec
from ...config import RUN_FILE, RunConfig, flag
from ...errors import ConfigError, FedcompError
from ..doctor.machine import cores
from ..results import Result, results
from . import table
from .alternatives import Alternative, alternatives, compares_compression, refused
from .folder import BASELINE, TARGET, ComparisonFolder
from .progress import FAILED, AlternativeProgress, ComparisonDisplay
from .worker_pool import WorkerPool

ONE_CORE = {"batched", "serial"}  # engines that gain little from a second core
FACTS = "task partition clients participation rounds strategy uplink downlink memory attack network".split()


class Comparison:
    """The alternatives of one command. Raises UserError, before anything is written, for options that cannot work."""

    def __init__(
        self,
        values: Mapping[str, Any],
        watch: ComparisonDisplay,
        side_by_side: str = "auto",
        target: float | None = None,
        baseline: bool | None = None,
    ):
        for name, what in (
            ("log_json", "metrics.jsonl of each run folder has all rounds"),
            ("metrics_port", "give it to a single run"),
        ):
            if values.get(name) not in (None, -1):
                raise ConfigError(
                    f"{flag(name)} is for one run, and these are several; leave it out: {what}"
                )
        self.values, self.watch, self.asked = values, watch, _asked(side_by_side)
        self.folder = ComparisonFolder(values)
        if baseline is None:
            baseline = self.folder.stored_baseline(compares_compression(values))
        self.baseline = baseline
        self.all = alternatives(values, baseline)
        self.target = target if target is not None else self.folder.stored_target()
        self.over = {each.name for each in self.all if self.folder.is_over(each)}

    def run(self) -> list[Result]:
        """Train the alternatives that are not finished, and compare all."""
        with ExitStack() as ends:
            waiting = [each for each in self.all if each.name not in self.over]
            pool = ends.enter_context(WorkerPool(max(1, min(self.asked or cores(), len(waiting)))))
            checked = self._check(pool, waiting)
            side = self._side_by_side(checked)
            threads = 0 if side == 1 else max(1, cores() // side)
            pool.shrink(side)
            ends.callback(self.folder.close)
            self.folder.open(
                {"side_by_side": side, "threads": threads or cores(), BASELINE: self.baseline}
                | ({TARGET: self.target} if self.target else {})
            )
            self.watch.on_run_start(
                str(self.folder.path),
                _facts(self.values, checked),
                [self._progress(each) for each in self.all],
            )
            number = {each.name: i for i, each in enumerate(self.all)}
            orders = [
                {"order": "run", "values": self.folder.values_of(each), "threads": threads}
                for each in waiting
            ]
            for job, answer in pool.do(orders):
                self.watch.hear(number[waiting[job].name], answer)
            return self._compare(side)

    def _check(self, pool: WorkerPool, waiting: Sequence[Alternative]) -> list[dict[str, Any]]:
        """Return what is known of each alternative before it trains. Raises FedcompError if one is refused."""
        found: dict[int, dict[str, Any]] = {}
        for job, answer in pool.do(
            [{"order": "check", "values": self.folder.values_of(each)} for each in waiting]
        ):
            if "end" not in answer:
                continue
            if "failed" in answer["end"]:
                raise refused(waiting[job].name, answer["end"]["failed"], answer["end"]["status"])
            found[job] = answer["end"]
            self.watch.checked(len(found), len(waiting))
        alike: dict[str, str] = {}
        for job, each in enumerate(waiting):
            settings = found[job]["settings"]
            key = json.dumps({**settings, "out": None, "resume": None}, sort_keys=True)
            if (other := alike.setdefault(key, each.name)) != each.name:
                raise ConfigError(
                    f"{other} and {each.name} are one run, of the same options; leave one of them out"
                )
        return [found[job] for job in range(len(waiting))]

    def _side_by_side(self, checked: Sequence[Mapping[str, Any]]) -> int:
        """Return how many run at once: as asked for, else one a core if each uses one core of a CPU, else one."""
        if self.asked:
            return min(self.asked, max(len(checked), 1))
        alone = all(found["device"] == "cpu" and found["engine"] in ONE_CORE for found in checked)
        return max(1, min(cores(), len(checked))) if alone else 1

    def _progress(self, each: Alternative) -> AlternativeProgress:
        progress = AlternativeProgress(each.name, each.values.get("rounds", RunConfig.rounds))
        if each.name in self.over:
            self.folder.read_progress(each, progress)
        return progress

    def _compare(self, side_by_side: int) -> list[Result]:
        """Compare the runs in the folder, and write comparison.json and the report."""
        from ...runs import groups, load
        from .. import reports

        failed = {str(self.folder.path / p.name): p.why for p in self.watch.all if p.why}
        folders = [self.folder.of(each) for each in self.all]
        try:
            runs = [load(folder) for folder in folders if (folder / RUN_FILE).is_file()]
        except FedcompError as error:
            raise FedcompError(
                f"the alternatives in {self.folder.path} cannot be compared: {error}"
            ) from error
        loaded = {run.folder for run in runs}
        lines = results(groups(runs), self.target, failed) if runs else []
        lines += [
            Result.nothing(str(folder), failed.get(str(folder), ""))
            for folder in folders
            if folder not in loaded
        ]
        if runs:
            page = self.folder.path / reports.REPORT
            try:
                reports.write([run.folder for run in runs], page, self.target, failed)
            except FedcompError as error:
                self.watch.on_warning(f"{page.name} is not written: {error}")
        self.folder.write_comparison(
            {
                "version": __version__,
                TARGET: self.target,
                "side_by_side": side_by_side,
                "results": [asdict(line) for line in lines],
            }
        )
        return lines

    def show(self, lines: Sequence[Result]) -> None:
        """Print the table and the path of the report."""
        table.show(lines, self.target)
        page = self.folder.path / "report.html"
        print(page if page.is_file() else self.folder.path)

    @property
    def exit_status(self) -> int:
        """1 if all alternatives failed."""
        return int(all(p.state == FAILED for p in self.watch.all))


def _asked(text: str) -> int:
    """Return the number in --side-by-side, 0 for "auto"."""
    if text == "auto":
        return 0
    try:
        return spec.parse_count(text)
    except (ValueError, KeyError, ZeroDivisionError, OverflowError):
        raise ConfigError(
            f"--side-by-side is '{text}'; give a number of processes such as 2, or auto"
        ) from None


def _facts(
    values: Mapping[str, Any], checked: Sequence[Mapping[str, Any]]
) -> list[tuple[str, str]]:
    """Return the options that all have in common, as label and value."""
    own = {name: values.get(name, getattr(RunConfig, name)) for name in FACTS}
    found = [
        (name, str(value))
        for name, value in own.items()
        if value is not None and not isinstance(value, list)
    ]
    for label, key in (("parameters", "parameters"), ("device", "on"), ("engine", "engine")):
        these = [one[key] for one in checked]
        texts = [f"{value:,}" if isinstance(value, int) else value for value in these]
        found += [(label, ", ".join(dict.fromkeys(texts)))] if texts else []
    return found
