"""The metrics that clients report: means over the clients of a round, and the values of each client."""

import math
from collections.abc import Callable, Sequence

from ..callbacks import ClientMetric
from ..strategies.base import AcceptedUpdate

TRAIN = "train_"  # prefix of metrics from training
HIGHER_IS_BETTER = {"accuracy": True, "loss": False}  # metrics with a worst decile
NOT_FINITE = "metrics of clients"  # the kind of a warning


def metrics_of(accepted: AcceptedUpdate) -> dict[str, tuple[float, int]]:
    """Return a client's metrics and their numbers of examples, by name. Names of metrics from training begin with "train_"."""
    m = accepted.metrics
    return {
        name if name.startswith(TRAIN) else TRAIN + name: (value, accepted.examples)
        for name, value in m.training.items()
    } | {name: (value, m.examples) for name, value in m.evaluation.items()}


def summarize_client_metrics(
    round: int, accepted: Sequence[AcceptedUpdate], warn: Callable[..., None]
) -> tuple[dict[str, ClientMetric], dict[int, dict[str, float]]]:
    """Return the spread of each metric over the clients, and each client's values. Values that are not finite are left out."""
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
                    kind=NOT_FINITE,
                )
    return {name: _spread(name, column) for name, column in columns.items()}, by_client


def _spread(name: str, column: Sequence[tuple[float, int]]) -> ClientMetric:
    total = sum(examples for _, examples in column)
    values = sorted(value for value, _ in column)
    higher = HIGHER_IS_BETTER.get(name.removeprefix(TRAIN))
    worst = None
    if higher is not None:
        n_worst = -(-len(values) // 10)
        worst = sum(v / n_worst for v in (values[:n_worst] if higher else values[-n_worst:]))
    mean = sum(value * (examples / total) for value, examples in column)
    return ClientMetric(mean, worst, len(values), total)
