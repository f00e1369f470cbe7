"""A Flower strategy that runs a fedcomp strategy in a ServerApp, and a ClientApp for the clients of the run.

    strategy = FlowerStrategy("powersgd:rank=2", StrategyConfig(...))
    strategy.start(grid, initial_arrays, num_rounds=10)

Flower's own round loop always starts at round 1, saves no checkpoints, and ends a run at the first malformed reply. `start` therefore runs
fedcomp's round loop, which checks every reply as it arrives, rejects malformed replies and continues the run.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import Tensor

from ...clients.session import ClientSession
from ...errors import ConfigError
from ...layout import Layout
from ...messages import Assignment
from ...server.asynchronous_loop import make_loop
from ...server.broadcasts import Broadcasts
from ...server.results import summarize_client_metrics
from ...server.round_loop import RoundLoop, RoundResult
from ...strategies import StrategyConfig, strategy
from .grid_transport import GridTransport, NodeIds, by_node
from .packed_records import ArrayLayout
from .records import from_records, to_records


class FlowerStrategy(Strategy):
    """A Flower strategy for a ServerApp. It runs the fedcomp strategy with the spec string `spec` and the settings `config`.

    `node_ids(grid)` returns the Flower node id of each client that can be reached, by logical id (number of the client in the run); by
    default, both ids are equal. The attribute `loop` is the round loop, or None before `start`.
    """

    def __init__(
        self, spec: str, config: StrategyConfig | None = None, *, node_ids: NodeIds = by_node
    ):
        self.spec, self.config, self.node_ids = spec, config or StrategyConfig(), node_ids
        self.loop: RoundLoop | None = None

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run `num_rounds` rounds from `initial_arrays`, and evaluate the model on the server with `evaluate_fn` after each round.

        `timeout`: time limit of each phase of a round in seconds, unless the config sets `timeout_s`. `train_config` and `evaluate_config`
        have no effect.
        """
        loop, result = self.initialize(grid, initial_arrays, num_rounds, timeout), Result()
        for round_result in loop.rounds(range(1, num_rounds + 1)):
            round = round_result.round
            result.arrays = self.arrays()
            result.train_metrics_clientapp[round] = _metrics(round_result)
            metrics = evaluate_fn(round, result.arrays) if evaluate_fn else None
            if metrics is not None:
                result.evaluate_metrics_serverapp[round] = metrics
        return result

    def initialize(
        self, grid: Grid, initial_arrays: ArrayRecord, num_rounds: int, timeout: float | None = None
    ) -> RoundLoop:
        """Make the round loop of a run over `grid` from the model `initial_arrays`.

        Raises SpecError or ConfigError for invalid settings.
        """
        config = replace(
            self.config,
            timeout_s=timeout if self.config.timeout_s is None else self.config.timeout_s,
            rounds=self.config.rounds or num_rounds,
        )
        layout, weights = vector_of(initial_arrays)
        run_strategy = strategy(self.spec, config, layout)
        transport = GridTransport(grid, self.node_ids)
        broadcasts = Broadcasts.of(run_strategy, weights)
        self.loop = make_loop(run_strategy, broadcasts, transport)
        return self.loop

    def arrays(self) -> ArrayRecord:
        """Return the model as Flower arrays, with the names of the initial arrays."""
        if self.loop is None:
            raise ConfigError("the strategy has no model yet; call start() first")
        views = self.loop.strategy.model_layout.views(self.loop.model)
        return ArrayRecord({name: Array(view.numpy().copy()) for name, view in views.items()})

    def summary(self) -> None:
        c = self.config
        print(
            f"{self.spec}: uplink {c.uplink}, downlink {c.downlink}, participation {c.participation:g}"
        )

    def _only_start(self, *args: Any, **options: Any) -> Any:
        raise ConfigError("Flower's round loop cannot run this strategy; call start()")

    configure_train = aggregate_train = configure_evaluate = aggregate_evaluate = _only_start


def client_app(session: ClientSession) -> ClientApp:
    """Return a ClientApp for the clients of a `FlowerStrategy`. It answers each train message with the report that `session` makes."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        (report,) = session.handle([from_records(message.content, Assignment)])
        return Message(to_records(report, {"num-examples": report.examples}), reply_to=message)

    return app


def vector_of(arrays: ArrayRecord) -> tuple[Layout, Tensor]:
    """Return the layout of arrays and their values as one vector [numel]. Raises ConfigError for an array that has no floats."""
    layout = ArrayLayout.of(arrays, uncompressed=())
    if others := layout.uncompressed(arrays):
        name, array = next(iter(others.items()))
        raise ConfigError(
            f"initial array '{name}' has the dtype {array.dtype}; give only trainable parameters, which are floats"
        )
    return layout.vector_layout, layout.vector(arrays)


def _metrics(result: RoundResult) -> MetricRecord:
    values: dict[str, Any] = {
        "accepted": len(result.accepted),
        "rejected": len(result.rejections),
        "uplink-bytes": sum(result.traffic.uplink.values()),
        "downlink-bytes": sum(result.traffic.downlink.values()),
    }
    if result.train_loss is not None:
        values["train-loss"] = result.train_loss
    spreads, _ = summarize_client_metrics(
        result.round, result.accepted, lambda sentence, kind: None
    )
    values |= {f"client-{name}": spread.mean for name, spread in spreads.items()}
    return MetricRecord(values)
