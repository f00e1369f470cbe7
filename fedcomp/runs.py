"""Load runs from their folders: options, metrics as NumPy arrays, and the trained model. A run need not be finished."""

import dataclasses
import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from . import baseline
from .callbacks import ClientMetric, RoundRecord, Summary
from .config import (
    NOT_INHERITED,
    RUN_FILE,
    RunConfig,
    expand_home,
    flag,
    inherited_options,
    read_run,
)
from .errors import RunFolderError, UserError, nearest
from .formatting import NOTHING, human_bytes, metric, ratio
from .run_display import client_metric_text
from .server.run_folder import METRICS, MODEL, SUMMARY, read_records, read_summary

if TYPE_CHECKING:
    from torch import nn

    from .tasks import Task

# Options that a comparison ignores: the seed, and options without effect on the result.
NEUTRAL_OPTIONS = {"seed", "data", "checkpoint_every"} | NOT_INHERITED
# Options that a run's label shows without their names: `stc` instead of `uplink stc`.
LABEL_OPTIONS = {"uplink", "strategy", "memory", "task", "partition", "attack"}
# Options whose values fedcomp chooses if the user does not give them. The value of an option may depend on the options that follow it here.
CHOSEN_OPTIONS = ("downlink_memory", "memory", "downlink", "uplink")
# Options of the learning problem. Each learning problem has its own baseline and Pareto front in a comparison.
PROBLEM_OPTIONS = ("task", "partition", "clients", "attack")
MAX_LABEL_CHARS = 60


class MetricsByName(dict[str, np.ndarray]):
    """The metrics of a run by name. The KeyError for an unknown name lists the known names."""

    def __missing__(self, name: str) -> np.ndarray:
        raise KeyError(f"the run has no metric '{name}'; {nearest(name, self)}")


@dataclass(frozen=True)
class Run:
    """The content of a run folder at the time of loading: options, metrics by round, summary and trained model.

        run = fedcomp.load("runs/first")
        print(run)  # task, accuracy, bytes, rounds and folder, one line each
        run.metrics["accuracy"]  # float64 [rounds]
        model = run.model()

    Byte counts are lengths of frames (encoded vectors). Until the first round ends, `accuracy` is None and byte counts are 0.
    """

    folder: Path
    options: dict[str, Any]  # by field name of RunConfig
    resolved: dict[str, Any]  # automatic choices of the run, such as device and engine
    records: tuple[RoundRecord, ...]  # one record for each finished round, from round 1
    summary: Summary | None  # content of summary.json, or None if the run is not finished
    # Task object with which this process simulated the run, or None for a loaded run.
    task: "Task | None" = field(default=None, repr=False, compare=False)

    def __repr__(self) -> str:
        sent = []
        for name, link in (("up", "uplink"), ("down", "downlink")):
            bytes_, dense = self._total(f"{link}_bytes"), self._total(f"dense_{link}_bytes")
            times = ratio(dense, bytes_)
            sent.append(f"{human_bytes(bytes_)} {name}" + f" ({times})" * (times != NOTHING))
        if self.dense_bytes and self.sent_bytes:
            pair, word = (self.dense_bytes, self.sent_bytes), "smaller"
            if self.sent_bytes > self.dense_bytes:
                pair, word = pair[::-1], "larger"
            sent.append(f"in total {ratio(*pair)} {word} than in float32")
        cohort = f", {self.records[-1].cohort:,} a round" if self.records else ""
        clients = self.options.get("clients", RunConfig.clients)
        lines = (
            f"Run {self.folder.name}, task {self.options.get('task', RunConfig.task).removeprefix('object:')}",
            self._quality(),
            *(f"clients   {client_metric_text(*item)}" for item in self.client_metrics.items()),
            f"bytes     {', '.join(sent)}",
            f"rounds    {len(self.records)}{'' if self.summary else ', not finished'}; {clients:,} clients{cohort}",
            f"folder    {self.folder}",
            *self._failure(),
        )
        return "\n".join(lines)

    def _failure(self) -> Iterator[str]:
        """Yield a line about the rejections if the run is finished and no update was accepted."""
        if self.summary and not self.summary.client_updates:
            reasons = [f", for example: {r.reason}" for r in self.summary.rejections[:1]]
            yield f"rejected  all updates{''.join(reasons)}"

    def _quality(self) -> str:
        """Return a line with the last and the best accuracy, or with the last and the lowest loss if no accuracy was measured."""
        for name, best, word in (("accuracy", max, "best"), ("loss", min, "lowest")):
            values = [(getattr(r, f"measured_{name}"), r.round) for r in self.records]
            if measured := [(value, round) for value, round in values if value is not None]:
                value, at = best(measured, key=lambda point: point[0])
                last = metric(name, measured[-1][0])
                return f"{name:<10}{last} ({word} {metric(name, value)} in round {at})"
        return f"accuracy  {NOTHING}"

    @cached_property
    def metrics(self) -> dict[str, np.ndarray]:
        """The numbers in metrics.jsonl by name, as float64 arrays of shape [rounds]. Missing values are NaN.

        For a metric NAME that clients reported, client_NAME is the mean over the clients. For accuracy and loss, client_NAME_worst_decile
        is the mean over the worst tenth of the clients.
        """
        kinds = (int, float, float | None, int | None)
        names = [f.name for f in dataclasses.fields(RoundRecord) if f.type in kinds]
        columns = {name: [getattr(record, name) for record in self.records] for name in names}
        for name in dict.fromkeys(name for record in self.records for name in record.metrics):
            columns[name] = [record.metrics.get(name) for record in self.records]
        for name in dict.fromkeys(n for record in self.records for n in record.client_metrics):
            reported = [record.client_metrics.get(name) for record in self.records]
            columns[f"client_{name}"] = [getattr(metric, "mean", None) for metric in reported]
            worst = [getattr(metric, "worst_decile", None) for metric in reported]
            if any(value is not None for value in worst):
                columns[f"client_{name}_worst_decile"] = worst
        return MetricsByName(
            {name: np.array(column, np.float64) for name, column in columns.items()}
        )

    @property
    def client_metrics(self) -> dict[str, ClientMetric]:
        """The last reported value of each metric that clients reported, by name."""
        return {n: spread for record in self.records for n, spread in record.client_metrics.items()}

    def metric_by_client(self, name: str) -> np.ndarray:
        """Return a metric that clients reported, as a float64 array of shape [rounds, clients]. Missing values are NaN."""
        values = np.full((len(self.records), self.config.clients), np.nan)
        for row, record in zip(values, self.records, strict=True):
            for client in record.by_client:
                row[client.client] = client.metrics.get(name, np.nan)
        return values

    @property
    def config(self) -> RunConfig:
        """The options of the run. Raises ConfigError or SpecError for values that this version of fedcomp refuses."""
        return RunConfig(**self.options)

    @property
    def problem(self) -> dict[str, Any]:
        """The options that define the learning problem (task, partition, clients and attack), by name."""
        return {name: self.options.get(name, getattr(RunConfig, name)) for name in PROBLEM_OPTIONS}

    @property
    def accuracy(self) -> float | None:
        """The last measured accuracy, 0 to 1: the server's accuracy, or the mean over the clients if only clients evaluate."""
        values = [r.measured_accuracy for r in self.records if r.measured_accuracy is not None]
        return values[-1] if values else None

    @property
    def parameters(self) -> int:
        """The number of trained parameters of the model, or 0 if the run has no round."""
        sizes = (r.dense_uplink_bytes // (4 * r.cohort) for r in self.records if r.cohort)
        return next(sizes, 0)

    @property
    def sent_bytes(self) -> int:
        """The total bytes of all frames (encoded vectors) of the run, uplink plus downlink."""
        return self._total("uplink_bytes") + self._total("downlink_bytes")

    @property
    def dense_bytes(self) -> int:
        """The total bytes that the run would have sent without compression (float32)."""
        return self._total("dense_uplink_bytes") + self._total("dense_downlink_bytes")

    def _total(self, name: str) -> int:
        return sum(getattr(record, name) for record in self.records)

    def cost_to(self, accuracy: float) -> tuple[int, int] | None:
        """Return the first round that reaches `accuracy` (0 to 1), and the uplink plus downlink bytes up to the end of this round.

        Return None if no round reaches the accuracy.
        """
        sent = 0
        for record in self.records:
            sent += record.uplink_bytes + record.downlink_bytes
            measured = record.measured_accuracy
            if measured is not None and measured >= accuracy:
                return record.round, sent
        return None

    def model(self, task: "Task | None" = None) -> "nn.Module":
        """Return the task's model on the CPU in eval mode, with the trained weights and the saved buffers.

        `task` replaces the task in the options. It is required for a loaded run that was simulated with a Task object. Raises
        RunFolderError if the folder has no weights yet or the weights do not fit the model, and TaskError if the task cannot be loaded.
        """
        from .server.initial_weights import load_weights
        from .tasks import initial_model, load

        path = self.folder / MODEL
        if not path.is_file():
            advice = "wait for the end of the run, or continue the run with --resume"
            raise RunFolderError(f"{self.folder} has no {MODEL} yet; {advice}")
        config = self.config
        data = expand_home(config.data, "--data") if config.data else None
        task = task or self.task or load(config.task, data)
        model = initial_model(task, config.seed)
        try:
            load_weights(path, model)
        except ValueError as error:
            advice = "restore the file, or the version of the task that was trained"
            raise RunFolderError(f"{path} {error}; {advice}") from error
        return model.eval()


def load(folder: str | Path) -> Run:
    """Load the run in a folder, such as "runs/first" or "~/runs/first". The run may be simulated or deployed, finished or not.

    Raises RunFolderError if the folder contains no run or cannot be read.
    """
    path = expand_home(folder, "the run folder")
    if not path.is_dir():
        example = "runs/digits-20260101-120000"
        raise RunFolderError(
            f"{folder} is not a folder; give the folder of a run, such as {example}"
        )
    if not (path / RUN_FILE).is_file():
        advice = "give the folder of a run, or leave this folder out"
        raise RunFolderError(
            f"{folder} contains no run, because the file {RUN_FILE} is missing; {advice}"
        )
    try:
        options = inherited_options(path) | {"out": str(path)}
        resolved = read_run(path).get("resolved", {})
        records = tuple(read_records(path / METRICS))
        return Run(path, options, resolved, records, read_summary(path / SUMMARY))
    except UserError as error:
        found = str(error).partition(";")[0]
        raise RunFolderError(f"{found}; leave this run out, or restore its files") from error


@dataclass(frozen=True)
class Group:
    """A group of runs that differ only in the seed."""

    # The options in which the group differs from other groups. If this text is longer than MAX_LABEL_CHARS characters, or if there is only
    # one group, the label is the name of a run folder.
    label: str
    runs: tuple[Run, ...]
    method_label: str = ""  # the label without the options of the learning problem
    problem_label: str = ""  # the options of the learning problem that differ between groups


def groups(runs: Sequence[Run]) -> list[Group]:
    """Group runs that differ only in the seed, in the order of `runs`. Raises UserError if two runs have the same options and seed."""
    by_key: dict[str, dict[int, Run]] = {}
    for run in runs:
        options = {name: v for name, v in run.options.items() if name not in NEUTRAL_OPTIONS}
        key = json.dumps(options, default=str, sort_keys=True)
        seed = run.options.get("seed", RunConfig.seed)
        if (other := by_key.setdefault(key, {}).setdefault(seed, run)) is not run:
            raise UserError(
                f"{other.folder} and {run.folder} have the same options and seed; leave one of them out"
            )
    members = [[*by_seed.values()] for by_seed in by_key.values()]
    compressed = [runs for runs in members if not baseline.is_dense(runs[0].options)]
    dense = [runs for runs in members if runs not in compressed] if compressed else []

    def different(among: Sequence[Sequence[Run]]) -> list[str]:
        """Return the options that differ between groups. An option that a dense baseline overrides must differ within `among`."""
        overridden = baseline.COMPRESSION_OPTIONS | {"strategy"}
        names = []
        for name in (f.name for f in dataclasses.fields(RunConfig)):
            compared = among if name in overridden else members
            values = {str(runs[0].options.get(name)) for runs in compared}
            if len(values) > 1 and name not in NEUTRAL_OPTIONS:
                names.append(name)
        return names

    in_dense = [name for name in different(dense) if name not in baseline.COMPRESSION_OPTIONS]
    in_others = different(compressed if len(compressed) > 1 else members)
    for name in CHOSEN_OPTIONS:
        if name == "uplink" and len(compressed) == 1:
            break  # the label of a single compressed group always shows the codec
        if name in in_others and all(_is_chosen(runs[0], name) for runs in compressed or members):
            in_others.remove(name)

    def label(runs: Sequence[Run], without: Collection[str] = ()) -> str:
        names = [n for n in (in_dense if runs in dense else in_others) if n not in without]
        words = [baseline.NAME] * (runs in dense) + _words(runs[0], names)
        return ", ".join(words) or "defaults"

    labels = [label(runs) for runs in members]
    if max(map(len, labels), default=0) > MAX_LABEL_CHARS or len(members) == 1:
        labels = [runs[0].folder.name for runs in members]
    return [
        Group(
            text if labels.count(text) == 1 else f"{text} ({runs[0].folder.name})".strip(),
            tuple(runs),
            label(runs, without=PROBLEM_OPTIONS),
            ", ".join(
                f"{flag(name)[2:]} {'none' if value is None else value}"
                for name, value in runs[0].problem.items()
                if name in in_others
            ),
        )
        for text, runs in zip(labels, members, strict=True)
    ]


def baseline_of(group: Group, groups: Sequence[Group]) -> Group | None:
    """Return the group of uncompressed runs that has the options of `group`, except for compression. Return None if there is none."""
    if len(groups) < 2:
        return None

    def key(one: Group) -> dict[str, Any]:
        options = {f.name: f.default for f in dataclasses.fields(RunConfig)} | one.runs[0].options
        # The horizon may belong to a density schedule, which the baseline does not have.
        items = baseline.dense(options).items()
        return {name: value for name, value in items if name not in NEUTRAL_OPTIONS | {"horizon"}}

    dense = (one for one in groups if baseline.is_dense(one.runs[0].options))
    return next((one for one in dense if key(one) == key(group)), None)


def _is_chosen(run: Run, name: str) -> bool:
    """Return whether an option has the value that fedcomp chooses if the option is not given."""
    from .memories import with_memories
    from .strategies import resolved

    others = {key: value for key, value in run.options.items() if key not in (name, "resume")}
    try:
        chosen = with_memories(resolved(RunConfig(**others)), run.parameters or 1)
    except UserError:  # the options name a plugin that is not installed on this machine
        return False
    return str(getattr(chosen, name)) == run.options.get(name)


def _words(run: Run, names: Sequence[str]) -> list[str]:
    """Return the words of a label: the values of the options `names`. An unset option is included only if it is the only name."""
    words = []
    for name in names:
        value = run.options.get(name)
        if value is not None and name in LABEL_OPTIONS:
            words.append(str(value))
        elif value is not None or len(names) == 1:
            words.append(f"{flag(name)[2:]} {NOTHING if value is None else value}")
    return words
