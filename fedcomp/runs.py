"""Runs loaded from their folders, finished or not: options, metrics as arrays, and the trained model."""

import dataclasses
import json
from collections.abc import Collection, Sequence
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
from .errors import RunFolderError, UserError
from .formatting import NOTHING, human_bytes, metric, ratio
from .run_display import client_metric_text
from .server.run_folder import METRICS, MODEL, SUMMARY, read_records, read_summary

if TYPE_CHECKING:
    from torch import nn

    from .tasks import Task

# Options that do not distinguish runs in a comparison: the seed, and options without effect on the result.
NEUTRAL_OPTIONS = {"seed", "data", "checkpoint_every"} | NOT_INHERITED
# Options whose values appear in labels without the name of the option.
LABEL_OPTIONS = {"uplink", "strategy", "memory", "task", "partition", "attack"}
# Options whose values fedcomp chooses if they are not given. Each choice may depend on the options after it in this tuple.
CHOSEN_OPTIONS = ("downlink_memory", "memory", "downlink", "uplink")
# Options that define the learning problem. Only runs of the same problem are compared.
PROBLEM_OPTIONS = ("task", "partition", "clients", "attack")
MAX_LABEL_CHARS = 60


@dataclass(frozen=True)
class Run:
    """The content of a run folder at the time it was loaded: options, metrics by round, summary and trained model.

        run = fedcomp.load("runs/first")
        print(run)  # task, accuracy, bytes, rounds and folder, one line each
        run.metrics["accuracy"]  # float64 [rounds]
        model = run.model()

    Numbers of bytes are lengths of encoded frames. Until the first round ends, `records` is empty, `accuracy` is None, and the numbers of
    bytes are 0.
    """

    folder: Path
    options: dict[str, Any]  # options of the run, by the names of RunConfig's fields
    resolved: dict[str, Any]  # choices that the run made for this machine: device, engine, …
    records: tuple[RoundRecord, ...]  # one record for each finished round, from round 1
    summary: Summary | None  # content of summary.json; None: the run is not finished
    # The task object, if this process simulated the run with one; None: the options name the task.
    task: "Task | None" = field(default=None, repr=False, compare=False)

    def __repr__(self) -> str:
        sent = []
        for name, link in (("up", "uplink"), ("down", "downlink")):
            bytes_, dense = self._total(f"{link}_bytes"), self._total(f"dense_{link}_bytes")
            times = ratio(dense, bytes_)
            sent.append(f"{human_bytes(bytes_)} {name}" + f" ({times})" * (times != NOTHING))
        if (times := ratio(self.dense_bytes, self.sent_bytes)) != NOTHING:
            sent.append(f"{times} smaller than float32 both ways")
        cohort = f", {self.records[-1].cohort:,} a round" if self.records else ""
        clients = self.options.get("clients", RunConfig.clients)
        lines = (
            f"Run {self.folder.name}, task {self.options.get('task', RunConfig.task).removeprefix('object:')}",
            self._quality(),
            *(f"clients   {client_metric_text(*item)}" for item in self.client_metrics.items()),
            f"bytes     {', '.join(sent)}",
            f"rounds    {len(self.records)}{'' if self.summary else ', not finished'}; {clients:,} clients{cohort}",
            f"folder    {self.folder}",
        )
        return "\n".join(lines)

    def _quality(self) -> str:
        """Return the last and the best accuracy as one line, or the loss if no accuracy was measured."""
        for name, best, word in (("accuracy", max, "best"), ("loss", min, "lowest")):
            values = [(getattr(r, f"measured_{name}"), r.round) for r in self.records]
            if measured := [(value, round) for value, round in values if value is not None]:
                value, at = best(measured, key=lambda point: point[0])
                last = metric(name, measured[-1][0])
                return f"{name:<10}{last} ({word} {metric(name, value)} in round {at})"
        return f"accuracy  {NOTHING}"

    @cached_property
    def metrics(self) -> dict[str, np.ndarray]:
        """The numbers of metrics.jsonl and the task's own metrics by name: float64 [rounds] each, NaN for rounds without a value.

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
        return {name: np.array(column, np.float64) for name, column in columns.items()}

    @property
    def client_metrics(self) -> dict[str, ClientMetric]:
        """The last reported value of each metric that clients reported, by name."""
        return {n: spread for record in self.records for n, spread in record.client_metrics.items()}

    def metric_by_client(self, name: str) -> np.ndarray:
        """Return a metric that clients reported as float64 [rounds, clients], with NaN where a client did not report it in a round."""
        values = np.full((len(self.records), self.config.clients), np.nan)
        for row, record in zip(values, self.records, strict=True):
            for client in record.by_client:
                row[client.client] = client.metrics.get(name, np.nan)
        return values

    @property
    def config(self) -> RunConfig:
        """The options of the run as a RunConfig. Raises ConfigError or SpecError for values that this version does not accept."""
        return RunConfig(**self.options)

    @property
    def problem(self) -> dict[str, Any]:
        """The options that define the learning problem: task, partition, clients and attack."""
        return {name: self.options.get(name, getattr(RunConfig, name)) for name in PROBLEM_OPTIONS}

    @property
    def accuracy(self) -> float | None:
        """The last measured accuracy, 0 to 1: that of the server, or the mean over the clients if only clients evaluate."""
        values = [r.measured_accuracy for r in self.records if r.measured_accuracy is not None]
        return values[-1] if values else None

    @property
    def parameters(self) -> int:
        """The number of trained parameters of the model; 0 if no update was accepted."""
        for r in self.records:
            if r.accepted and r.dense_uplink_bytes:
                return r.dense_uplink_bytes // (4 * r.accepted)
        return 0

    @property
    def sent_bytes(self) -> int:
        """The number of bytes of all frames of the run, both directions together."""
        return self._total("uplink_bytes") + self._total("downlink_bytes")

    @property
    def dense_bytes(self) -> int:
        """The number of bytes that the run would have sent with uncompressed float32 models, both directions together."""
        return self._total("dense_uplink_bytes") + self._total("dense_downlink_bytes")

    def _total(self, name: str) -> int:
        return sum(getattr(record, name) for record in self.records)

    def cost_to(self, accuracy: float) -> tuple[int, int] | None:
        """Return the first round with at least this accuracy, 0 to 1, and the bytes sent in both directions up to the end of this round.

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
        """Return the task's module on the CPU in eval mode, with the trained weights and the exported buffers.

        `task` replaces the task that the options name. `task` is required if the run was simulated with a Task object and then loaded by
        `fedcomp.load`. Raises RunFolderError if the folder has no weights yet, or if the weights do not fit the module. Raises TaskError if
        the task cannot be loaded.
        """
        from .server.initial_weights import load_weights
        from .tasks import initial_model, load

        path = self.folder / MODEL
        if not path.is_file():
            advice = "wait for the end of the run, or continue it with --resume"
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
    """Return the run in a folder, such as "runs/first", at its present state: finished or not, simulated or deployed.

    A leading ~ is the home directory. Raises RunFolderError if the folder holds no run or cannot be read.
    """
    path = expand_home(folder, "the run folder")
    if not path.is_dir():
        example = "runs/digits-20260101-120000"
        raise RunFolderError(
            f"{folder} is not a folder; give the folder of a run, such as {example}"
        )
    if not (path / RUN_FILE).is_file():
        advice = "give the folder of a run, or leave this folder out"
        raise RunFolderError(f"{folder} holds no run: it has no {RUN_FILE}; {advice}")
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
    """Runs that differ only in their seeds."""

    label: str  # the options in which the group differs from the others, or the name of its folder if the options are too long
    runs: tuple[Run, ...]
    method_label: str = ""  # the label without the options of the problem
    problem_label: str = ""  # the options of the problem that differ between the groups


def groups(runs: Sequence[Run]) -> list[Group]:
    """Group runs that differ only in their seeds, in the order of `runs`.

    A group's label names the options in which the group differs. Raises UserError for two runs with the same options and seed.
    """
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
        """Return the options that differ between groups. For options that the baseline overrides, compare only the groups `among`."""
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
            break  # the only group that compresses is labelled with its codec
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
    """Return the group of uncompressed runs whose other options are those of `group`, or None if `groups` has none."""
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
    """Return whether an option of CHOSEN_OPTIONS has the value that fedcomp chooses if the option is not given."""
    from .memories import with_memories
    from .strategies import resolved

    others = {key: value for key, value in run.options.items() if key not in (name, "resume")}
    try:
        chosen = with_memories(resolved(RunConfig(**others)), run.parameters or 1)
    except UserError:  # a plugin that the options name is not installed here
        return False
    return str(getattr(chosen, name)) == run.options.get(name)


def _words(run: Run, names: Sequence[str]) -> list[str]:
    """Return the values of the options `names`, for a label. An option that is not set is left out, unless it is the only option."""
    words = []
    for name in names:
        value = run.options.get(name)
        if value is not None and name in LABEL_OPTIONS:
            words.append(str(value))
        elif value is not None or len(names) == 1:
            words.append(f"{flag(name)[2:]} {NOTHING if value is None else value}")
    return words
