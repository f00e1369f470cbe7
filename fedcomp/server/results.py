"""Functions that simulations and deployments share: make the strategy, check options, collect warnings and metrics, summarize the run."""

import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from typing import Any

from .. import __version__, spec
from ..callbacks import ClientMetric, Rejection, RejectionSummary, RoundRecord, Summary
from ..config import RunConfig, flag
from ..errors import ConfigError
from ..layout import Layout
from ..local_optimizer import read as read_optimizer
from ..memories.base import Changes, ReadValue, ReadVector
from ..strategies import RoundStrategy, StrategyConfig, strategy
from ..strategies.base import AcceptedUpdate, cohort_size
from ..tasks import Task
from ..tasks.data import Examples, describe_non_finite

# Maximum number of rejection reasons in summary.json, and maximum number of client ids for each reason. metrics.jsonl has all rejections.
MAX_REASONS, MAX_CLIENTS = 16, 16
# Fields of Summary whose values are those of the last round, and fields that are sums over all rounds.
OF_LAST_ROUND = ("accuracy", "loss", "simulated_hours", "metrics", "client_metrics")
TOTALS = "uplink_bytes downlink_bytes dense_uplink_bytes dense_downlink_bytes wire_bytes_in wire_bytes_out".split()
TRAIN_PREFIX = "train_"  # prefix of the names of metrics from training
# Metrics whose mean over the worst tenth of the clients is reported, and whether a higher value is better.
HIGHER_IS_BETTER = {"accuracy": True, "loss": False}
KINDS = "kinds"  # name of the checkpoint entry with the kinds of the reported warnings
# Kinds of warnings (see WarningLog).
METRICS_NOT_FINITE, LOSS_NOT_FINITE = "metrics of clients", "test loss"
# Fields of RunConfig that have no effect if the task has its own optimizer, or its own train_fn (training function).
UNUSED_BY_OWN_OPTIMIZER = {"optimizer", "lr", "momentum", "weight_decay"}
UNUSED_BY_TRAIN_FN = {"optimizer", "optimizer_state", "step_schedule", "accumulate", "momentum"}
UNUSED_BY_TRAIN_FN |= {"keep_momentum", "weight_decay", "augment", "proximal", "clip"}
NUMBER = re.compile(r"\d+(\.\d+)?")


class WarningLog:
    """A log of the warnings of a run, which passes each warning to `forward` and keeps it for the record of the round.

    The kind of a warning is a text such as "test loss". A run, including its resumed parts, reports only the first warning of each kind.
    Warnings with `kind=""` are always reported.
    """

    def __init__(self, forward: Callable[[str], None]):
        self.forward = forward
        self.kinds: set[str] = set()  # kinds of the reported warnings
        self._of_round: list[str] = []

    def __call__(self, sentence: str, kind: str = "") -> None:
        if kind and kind in self.kinds:
            return
        if kind:
            self.kinds.add(kind)
        self._of_round.append(sentence)
        self.forward(sentence)

    def take(self) -> tuple[str, ...]:
        """Return the warnings since the last call."""
        taken, self._of_round = tuple(self._of_round), []
        return taken

    def take_changes(self) -> Changes:
        return {}, {KINDS: json.dumps(sorted(self.kinds)).encode()}

    def restore(self, vector: ReadVector, value: ReadValue) -> None:
        self.kinds |= set(json.loads(value(KINDS) or b"[]"))


def make_strategy(config: RunConfig, layout: Layout, **settings: Any) -> RoundStrategy:
    """Return the strategy of a run. `settings`: keyword arguments for the constructor of the strategy.

    Raises SpecError for an option that cannot be parsed, and ConfigError for options that do not work together.
    """
    if config.local_steps_schedule and config.local_epochs:
        raise ConfigError(
            "--local-steps-schedule and --local-epochs both set how long clients train; give one of them"
        )
    if config.holdout != RunConfig.holdout and not config.clients_evaluate:
        raise ConfigError(
            f"--holdout {config.holdout:g} has no effect if clients do not evaluate; give --evaluate clients as well, or omit --holdout"
        )
    budget_bytes, budget_s = spec.parse_budget(config.budget) if config.budget else (0, 0.0)
    local = dict(read_optimizer(config.optimizer).options)
    options = {field.name for field in fields(config)}
    shared = [f.name for f in fields(StrategyConfig) if f.name in options]
    strategy_config = StrategyConfig(
        **{name: getattr(config, name) for name in shared}
        | {"lr": config.learning_rate, "momentum": local.get("momentum", config.momentum)},
        budget_bytes=budget_bytes,
        budget_s=budget_s,
        timeout_s=config.deadline or None,
    )
    made = strategy(config.strategy, strategy_config, layout, **settings)
    if made.decays_in_server_step and (decay := local.get("weight_decay")):
        raise ConfigError(
            f"--optimizer {config.optimizer} applies weight decay on the clients, but --strategy {made.name} applies it on the server, "
            f"after the vote; leave weight_decay out of --optimizer, and give --weight-decay {decay:g}"
        )
    return made


def client_config(config: RunConfig, strategy: RoundStrategy) -> RunConfig:
    """Return the options with which clients train. If the server applies the weight decay, theirs is 0."""
    return replace(config, weight_decay=0.0) if strategy.decays_in_server_step else config


def refuse_unused_options(config: RunConfig, task: Task, strategy: RoundStrategy) -> None:
    """Raise ConfigError if the user gave an option of local training that the task's own optimizer or train_fn makes ineffective."""
    trains = client_config(config, strategy)
    if task.train_fn is not None:
        unused, own = UNUSED_BY_TRAIN_FN, "its own train_fn"
    elif task.optimizer is not None:
        keeps_lr = config.lr_schedule is not None or strategy.uses_lr
        unused, own = UNUSED_BY_OWN_OPTIMIZER - ({"lr"} if keeps_lr else set()), "its own optimizer"
    else:
        return
    for f in fields(RunConfig):
        value = getattr(trains, f.name)
        if f.name in unused and value != f.default:
            given = flag(f.name) if value is True else f"{flag(f.name)} {value}"
            raise ConfigError(
                f"{given} has no effect, because task '{task.name}' has {own}; leave {flag(f.name)} out, and set the value in "
                "the task"
            )


def bandwidths_of(
    strategy: RoundStrategy, config: RunConfig, uplinks: Sequence[float] | None = None
) -> dict[int, float]:
    """Return the uplink bandwidth of each client in bytes per second, or an empty dict without --budget.

    The bandwidths come from --bandwidths if it is given. Otherwise, they come from `uplinks`, the bandwidths of the virtual network (None
    without a network). A list that is shorter than the number of clients is repeated. Raises ConfigError if the budget is too small for an
    update, or if options exclude each other.
    """
    c = config
    if c.bandwidths and not c.budget:
        raise ConfigError("--bandwidths has no effect without --budget; give --budget as well")
    if c.bandwidths and uplinks is not None:
        raise ConfigError(
            "--bandwidths and --network both set the speed of uplinks; leave --bandwidths out"
        )
    if not c.budget:
        return {}
    speeds = spec.parse_byte_list(c.bandwidths) if c.bandwidths else uplinks
    bandwidths = {}
    if speeds is not None:
        bandwidths = {client: float(speeds[client % len(speeds)]) for client in range(c.clients)}
    if strategy.config.budget_s and not bandwidths:
        raise ConfigError(
            f"--budget {c.budget} is a time and needs the speed of each uplink; give --bandwidths or --network"
        )
    n_clients = c.clients if strategy.config.budget_s else cohort_size(c.participation, c.clients)
    strategy.schedule.for_clients(1, range(n_clients), bandwidths)
    return bandwidths


def metrics_of(accepted: AcceptedUpdate) -> dict[str, tuple[float, int]]:
    """Return the metrics that a client reported: (value, number of examples) by name. Names of training metrics begin with "train_"."""
    m = accepted.metrics
    return {
        name if name.startswith(TRAIN_PREFIX) else TRAIN_PREFIX + name: (value, accepted.examples)
        for name, value in m.training.items()
    } | {name: (value, m.examples) for name, value in m.evaluation.items()}


def summarize_client_metrics(
    round: int, accepted: Sequence[AcceptedUpdate], warn: Callable[..., None]
) -> tuple[dict[str, ClientMetric], dict[int, dict[str, float]]]:
    """Return the statistics of each metric over the clients, by metric name, and the metrics of each client, by client id.

    Values that are not finite are left out with a warning.
    """
    by_client: dict[int, dict[str, float]] = {}
    columns: dict[str, list[tuple[float, int]]] = {}
    for a in accepted:
        for name, (value, examples) in metrics_of(a).items():
            if math.isfinite(value):
                by_client.setdefault(a.client, {})[name] = value
                columns.setdefault(name, []).append((value, examples))
            else:
                warn(
                    f"round {round}: client {a.client} reports {value} as its '{name}'; metrics that are not finite are left out",
                    kind=METRICS_NOT_FINITE,
                )
    return {name: _summarize(name, column) for name, column in columns.items()}, by_client


def _summarize(name: str, column: Sequence[tuple[float, int]]) -> ClientMetric:
    total = sum(examples for _, examples in column)
    values = sorted(value for value, _ in column)
    higher = HIGHER_IS_BETTER.get(name.removeprefix(TRAIN_PREFIX))
    worst = None
    if higher is not None:
        n_worst = -(-len(values) // 10)
        worst = sum(v / n_worst for v in (values[:n_worst] if higher else values[-n_worst:]))
    mean = sum(value * (examples / total) for value, examples in column)
    return ClientMetric(mean, worst, len(values), total)


def summarize_run(
    records: Sequence[RoundRecord], config: RunConfig, device: str, warnings: Iterable[str]
) -> Summary:
    """Return the summary of a run from the records of its rounds. `warnings`: further warnings, which belong to no round."""

    def total(field: str) -> Any:
        """Return the sum of a field over all rounds, or None if it is None in any round."""
        values = [getattr(record, field) for record in records]
        return None if None in values else sum(values)

    last, accepted, seconds = records[-1], total("accepted"), total("seconds")
    warnings = [*(sentence for record in records for sentence in record.warnings), *warnings]
    return Summary(
        **{name: total(name) for name in TOTALS},
        **{name: getattr(last, name) for name in OF_LAST_ROUND},
        rounds=len(records),
        clients=config.clients,
        client_updates=accepted,
        seconds=seconds,
        client_updates_per_s=accepted / seconds if seconds else 0.0,
        device=device,
        seed=config.seed,
        version=__version__,
        warnings=tuple(dict.fromkeys(warnings)),
        rejections=summarize_rejections(records),
    )


def summarize_rejections(records: Iterable[RoundRecord]) -> tuple[RejectionSummary, ...]:
    """Count a run's rejections by reason, the most frequent first. Reasons that differ only in numbers are combined."""
    by_reason: dict[tuple[str, str], list[Rejection]] = {}
    for rejection in (rejection for record in records for rejection in record.rejections):
        reason = NUMBER.sub("#", rejection.reason)
        by_reason.setdefault((rejection.stage, reason), []).append(rejection)
    summaries = []
    for alike in sorted(by_reason.values(), key=lambda alike: -len(alike))[:MAX_REASONS]:
        clients = sorted({rejection.client for rejection in alike})
        named, more = tuple(clients[:MAX_CLIENTS]), max(0, len(clients) - MAX_CLIENTS)
        summaries.append(RejectionSummary(alike[0].stage, alike[0].reason, len(alike), named, more))
    return tuple(summaries)


def check_loss(warn: WarningLog, round: int, loss: float | None, test: Examples | None) -> None:
    """Warn if `loss` is not finite; only the first such loss in a run causes a warning.

    `loss`: the loss on the data `test` after the round, or None if the model was not evaluated.
    """
    if loss is None or math.isfinite(loss) or LOSS_NOT_FINITE in warn.kinds:
        return
    values = describe_non_finite(test)
    why = "the model may have diverged; try a smaller --lr"
    if values:
        why = f"the test data holds {values}; correct test()"
    warn(
        f"round {round}: the test loss is {loss} (null in metrics.jsonl), and the run continues: {why}",
        kind=LOSS_NOT_FINITE,
    )
