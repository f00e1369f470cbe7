"""Several alternatives from their options to their table: checked before the first one trains, run, compared."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from ... import __version__, spec
from ...config import RunConfig, flag
from ...errors import ConfigError, FedcompError
from ..results import Result
from . import table
from .alternatives import Alternative, alternatives, compares_compression, refused
from .folder import BASELINE, TARGET, ComparisonFolder
from .progress import FAILED, Progress, Watch
from .worker_pool import WorkerPool, cores

ONE_CORE = {"batched", "serial"}  # engines that gain little from a second core
REPORT = "report.html"
FACTS = (
    "task",
    "partition",
    "clients",
    "participation",
    "rounds",
    "strategy",
    "uplink",
    "downlink",
    "memory",
    "attack",
    "network",
)


class Comparison:
    """Alternatives of one command. Raises UserError, before anything is written, for what cannot work."""

    def __init__(
        self,
        values: Mapping[str, Any],
        watch: Watch,
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
            baseline = self.folder.stored_baseline()
        self.baseline = compares_compression(values) if baseline is None else baseline
        self.all = alternatives(values, self.baseline)
        self.target = target if target is not None else self.folder.stored_target()
        self.over = {each.name for each in self.all if self.folder.is_over(each)}

    def run(self) -> list[Result]:
        """Train what is not over, and compare all."""
        with ExitStack() as ends:
            waiting = [each for each in self.all if each.name not in self.over]
            pool = ends.enter_context(WorkerPool(max(1, min(self.asked or cores(), len(waiting)))))
            checked = self._check(pool, waiting)
            side = self._side_by_side(checked)
            threads = 0 if side == 1 else max(1, cores() // side)
            pool.shrink(side)
            ends.callback(self.folder.close)
            self.folder.open(
                {
                    "side_by_side": side,
                    "threads": threads or cores(),
                    BASELINE: self.baseline,
                }
                | ({TARGET: self.target} if self.target else {})
            )
            self.watch.started(
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
            return self._compare(pool, side)

    def _check(self, pool: WorkerPool, waiting: Sequence[Alternative]) -> list[dict[str, Any]]:
        """What is known of each before it trains. Raises what refuses one of them."""
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
            key = str(
                sorted(
                    (name, value)
                    for name, value in found[job]["settings"].items()
                    if name not in ("out", "resume")
                )
            )
            if (other := alike.setdefault(key, each.name)) != each.name:
                raise ConfigError(
                    f"{other} and {each.name} are one run, of the same options; leave one of them out"
                )
        return [found[job] for job in range(len(waiting))]

    def _side_by_side(self, checked: Sequence[Mapping[str, Any]]) -> int:
        """How many at once: as asked for; else on a CPU one a core where each would use little more than one, elsewhere one."""
        if self.asked:
            return min(self.asked, max(len(checked), 1))
        alone = all(found["device"] == "cpu" and found["engine"] in ONE_CORE for found in checked)
        return max(1, min(cores(), len(checked))) if alone else 1

    def _progress(self, each: Alternative) -> Progress:
        rounds = each.values.get("rounds", RunConfig.rounds)
        return (
            self.folder.ended(each, rounds)
            if each.name in self.over
            else Progress(each.name, rounds)
        )

    def _compare(self, pool: WorkerPool, side: int) -> list[Result]:
        failed = {
            str(self.folder.path / p.name): p.why for p in self.watch.all if p.state == FAILED
        }
        order = {
            "order": "compare",
            "folders": [str(self.folder.of(each)) for each in self.all],
            "failed": failed,
            "target": self.target,
            "page": str(self.folder.path / REPORT),
        }
        lines: list[dict[str, Any]] = []
        for _, answer in pool.do([order]):
            if "warning" in answer:
                self.watch.warning(answer["warning"])
            if "failed" in answer.get("end", {}):
                raise FedcompError(
                    f"the alternatives in {self.folder.path} cannot be compared: {answer['end']['failed']}"
                )
            lines = answer.get("end", {}).get("results", lines)
        self.folder.write_comparison(
            {"version": __version__, TARGET: self.target, "side_by_side": side, "results": lines}
        )
        return [Result(**line | {"folders": tuple(line["folders"])}) for line in lines]

    def show(self, lines: Sequence[Result]) -> None:
        """The table, and where everything is."""
        table.show(lines, self.target)
        page = self.folder.path / REPORT
        print(f"{page if page.is_file() else self.folder.path}")

    @property
    def exit_status(self) -> int:
        """1 where no alternative could be run to its end."""
        return int(all(p.state == FAILED for p in self.watch.all))


def _asked(text: str) -> int:
    """How many at once; 0 for "auto"."""
    if text == "auto":
        return 0
    try:
        found = spec.count(text)
    except (ValueError, KeyError, ZeroDivisionError, OverflowError):
        raise ConfigError(
            f"--side-by-side is '{text}'; give a number of processes such as 2, or auto"
        ) from None
    return found


def _facts(
    values: Mapping[str, Any], checked: Sequence[Mapping[str, Any]]
) -> list[tuple[str, str]]:
    """What all have in common, as label and value."""
    own = {name: values.get(name, getattr(RunConfig, name)) for name in FACTS}
    found = [
        (name, str(value))
        for name, value in own.items()
        if value is not None and not isinstance(value, list)
    ]
    for label, key in (("parameters", "parameters"), ("device", "on"), ("engine", "engine")):
        told = list(
            dict.fromkeys(
                f"{one[key]:,}" if isinstance(one[key], int) else one[key] for one in checked
            )
        )
        found += [(label, ", ".join(told))] if told else []
    return found


def continued(why: str, command: str, watch: Watch) -> str:
    """How far alternatives were when they were stopped, and what goes on with them."""
    if not watch.out:
        return f"{why} before the first alternative began"
    return (
        f"{why} with {watch.ended} of {len(watch.all)} alternatives done; continue with: {command}"
    )
