"""A wrapper that compresses the messages of any Flower strategy.

    strategy = Compressed(FedAvg(...), uplink="stc:density=1/100")

Add `compression_mod` to the mods of each client's ClientApp. The wrapped strategy still sends, receives and aggregates complete models
(ArrayRecords). Before a message is sent, the wrapper replaces the model by the compressed model changes (broadcasts) that the client has
missed. A client replies with its compressed update, from which the wrapper rebuilds the client's model for the wrapped strategy. Both sides
use error feedback, as in Sattler et al. 2019, algorithm 2. In that algorithm, however, the server averages updates, not models. The wrapper
rejects a malformed reply and logs the reason.
"""

import logging
import secrets
from collections.abc import Callable, Iterable, Sequence

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from ...callbacks import Rejection
from ...codecs import codec
from ...errors import ConfigError, FedcompError, MismatchError, NonFiniteError
from ...layout import Layout
from ...memories import Memory, memory
from ...messages import TRAIN
from ...server.broadcasts import Broadcasts
from ...server.exchange import Traffic
from .packed_records import BUFFERS, ArrayLayout
from .server_model import ADD_MOD, IDS, Model, PhaseExchange, inconsistent

EVALUATE = "evaluate"
HOOKS = "configure_train aggregate_train configure_evaluate aggregate_evaluate summary".split()

log = logging.getLogger("flwr.fedcomp")  # a logger whose messages Flower's own log handlers print


class Compressed(Strategy):
    """A Flower strategy whose messages are compressed.

    `uplink`, `downlink`: specs of the codecs for the clients' updates and the server's broadcasts; the codec `identity` does not compress.
    `downlink_memory`: spec of the server's error-feedback memory, which stores the parts of the model's changes that the broadcasts left
    out. `cache`: size limit of the cache of old broadcasts for clients that missed rounds, as a multiple of the model's size in float32.
    `uncompressed`: name patterns of float arrays to send uncompressed; arrays of other types are always sent uncompressed. `seed`: seed of
    the codecs that use random numbers.

    In each round, Flower has two phases, "train" and "evaluate". The keys of the dictionaries `traffic` and `rejections` are tuples (round,
    phase). `traffic` has the bytes that each client received and sent, and `rejections` the rejected replies with the reasons. Raises
    SpecError for an invalid spec, and ConfigError for a memory that cannot be used for the downlink.
    """

    def __init__(
        self,
        strategy: Strategy,
        uplink: str = "stc:density=1/100",
        downlink: str = "stc:density=1/100",
        *,
        downlink_memory: str = "residual",
        cache: float = 1.0,
        uncompressed: Sequence[str] = BUFFERS,
        seed: int = 0,
    ):
        self.strategy, self.uplink, self.downlink = strategy, codec(uplink), codec(downlink)
        self.downlink_memory = downlink_memory
        self.cache = cache
        self.uncompressed = tuple(uncompressed)
        self.seed = seed
        self.traffic: dict[tuple[int, str], Traffic] = {}
        self.rejections: dict[tuple[int, str], list[Rejection]] = {}
        self.model: Model | None = None
        self._training = secrets.token_hex(8)
        self._exchanges: dict[str, PhaseExchange] = {}  # by phase
        self._sent, self._accepted = 0, 0  # numbers of sent training messages and accepted updates
        self._last_rejection = ""  # reason of the last rejection of an update
        self._hooks = {name: getattr(strategy, name) for name in HOOKS}  # the strategy's methods
        self._downlink_memory(Layout.flat(1))  # check the spec

    # Flower's loop.

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
        """Call the wrapped strategy's `start`. During the call, this wrapper's methods replace the strategy's methods named in HOOKS.

        Raises FedcompError at the end of a run in which training messages were sent but no update was accepted.
        """
        self.model, self._training, attributes = None, secrets.token_hex(8), vars(self.strategy)
        self._sent, self._accepted, self._last_rejection = 0, 0, ""
        before = {name: attributes[name] for name in HOOKS if name in attributes}
        attributes.update({name: getattr(self, name) for name in HOOKS})
        try:
            configs = train_config, evaluate_config
            result = self.strategy.start(
                grid, initial_arrays, num_rounds, timeout, *configs, evaluate_fn
            )
        finally:
            for name in HOOKS:
                del attributes[name]
            attributes.update(before)
        if self._sent and not self._accepted:
            reason = self._last_rejection or "every reply was an error; the log has the reasons"
            if not self._last_rejection and (self.model is None or not self.model.versions):
                reason = f"no client answered with a compressed record; {ADD_MOD}"
            raise FedcompError(f"no client's update was accepted in any round: {reason}")
        return result

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the wrapped strategy's messages. In each one, the broadcasts that its receiver missed replace the model."""
        messages = self._pack(server_round, TRAIN, arrays, config, grid)
        self._sent += len(self._exchanges[TRAIN].assignments)
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Let the wrapped strategy aggregate the clients' models. Return the model that clients will have after the next broadcast."""
        exchange = self._exchanges[TRAIN]
        opened = self._open(exchange, replies)
        arrays, metrics = self._hooks["aggregate_train"](server_round, opened)
        if arrays is not None:
            nodes = [reply.metadata.src_node_id for reply in opened if not reply.has_error()]
            try:
                exchange.model.advance(server_round, arrays)
            except NonFiniteError as error:
                self._reject(exchange, nodes, f"the strategy's result cannot be used: {error}")
                return None, None
            exchange.model.accept(exchange, [node % IDS for node in nodes])
            self._accepted += len(nodes)
            arrays = exchange.model.arrays
        self._log_traffic(exchange)
        return arrays, metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the wrapped strategy's messages. In each one, the broadcasts that its receiver missed replace the model."""
        return self._pack(server_round, EVALUATE, arrays, config, grid)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        exchange = self._exchanges[EVALUATE]
        metrics = self._hooks["aggregate_evaluate"](server_round, self._open(exchange, replies))
        self._log_traffic(exchange)
        return metrics

    def summary(self) -> None:
        log.info("\t├──> Compressed: uplink %s, downlink %s", self.uplink, self.downlink)
        self._hooks["summary"]()

    # Messages.

    def _model_of(self, arrays: ArrayRecord) -> Model:
        """Return the current Model if it equals `arrays`. Otherwise, return a new Model, which every client must download completely."""
        if self.model is not None and self.model.equals(arrays):
            return self.model
        layout = ArrayLayout.of(arrays, self.uncompressed)
        vector = layout.vector_layout
        if not vector.numel:
            raise ConfigError(
                "the model has no array of floats to compress; use the strategy without Compressed, or change the argument `uncompressed`"
            )
        downlink = self.downlink, self._downlink_memory(vector), int(self.cache * 4 * vector.numel)
        broadcasts = Broadcasts(layout.vector(arrays), vector, *downlink)
        announced = {"training": self._training, "uplink": str(self.uplink)}
        announced |= {"downlink": str(self.downlink), "layout": vector.fingerprint}
        announced |= {"seed": str(self.seed)}
        tickets = self.model.tickets if self.model else {}
        self.model = Model(arrays, layout, self.uplink, broadcasts, self.seed, announced, tickets)
        return self.model

    def _downlink_memory(self, layout: Layout) -> Memory:
        try:
            m = memory(self.downlink_memory, self.downlink, layout.numel, layout)
        except MismatchError as error:
            error.memory, error.uplink = "downlink_memory", "downlink"
            raise
        if m.counterpart is not None or m.required_strategy or m.needs_moments:
            raise ConfigError(
                f"downlink_memory '{m.name}' supports only clients' updates, not the server's broadcasts; use downlink_memory='residual'"
            )
        return m

    def _pack(
        self, round: int, phase: str, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        model = self._model_of(arrays)
        exchange = self._exchanges[phase] = PhaseExchange(round, phase, model)
        self.traffic[round, phase], self.rejections[round, phase] = exchange.traffic, []
        messages = list(self._hooks[f"configure_{phase}"](round, model.arrays, config, grid) or [])
        for message in messages:
            for key, record in message.content.items():
                if isinstance(record, ArrayRecord) and model.equals(record):
                    model.pack(message, key, exchange)
                    break
        return messages

    def _open(self, exchange: PhaseExchange, replies: Iterable[Message]) -> list[Message]:
        """Return the replies that are not rejected, with the client's model in place of each encoded update.

        Error replies and replies to uncompressed messages stay unchanged.
        """
        opened, others = [], []
        for reply in replies:
            node = reply.metadata.src_node_id
            if node not in exchange.assignments:
                others.append(reply)
                continue
            try:
                if reply.has_error():
                    exchange.model.check_error(reply)
                    others.append(reply)
                else:
                    exchange.model.open(reply, exchange)
                    opened.append(reply)
            except FedcompError as error:
                self._reject(exchange, [node], str(error))
        weight = weighted_by(self.strategy)
        faults = inconsistent(opened, weight, exchange.phase == TRAIN) if weight else {}
        for i, reason in faults.items():
            self._reject(exchange, [opened[i].metadata.src_node_id], reason)
        return [reply for i, reply in enumerate(opened) if i not in faults] + others

    def _reject(self, exchange: PhaseExchange, nodes: Iterable[int], reason: str) -> None:
        for node in nodes:
            rejection = Rejection(node % IDS, "reply", reason)
            self.rejections[exchange.round, exchange.phase].append(rejection)
            log.warning("%s: the reply of client %d was rejected: %s", exchange.phase, node, reason)
            if exchange.phase == TRAIN:
                self._last_rejection = f"client {node}: {reason}"

    def _log_traffic(self, exchange: PhaseExchange) -> None:
        """Log how many bytes a phase sent, and how many it would have sent without compression."""
        dense = 4 * exchange.model.layout.vector_layout.numel
        traffic, phase = exchange.traffic, exchange.phase
        directions = [("down to", traffic.downlink, len(exchange.assignments))]
        if phase == TRAIN:
            directions.append(("up from", traffic.uplink, len(exchange.tickets)))
        for direction, by_client, clients in directions:
            sent, uncompressed = sum(by_client.values()), clients * dense
            log.info(
                f"{phase}: {sent:,} bytes {direction} {clients} clients (uncompressed {uncompressed:,})"
            )


def weighted_by(strategy: Strategy) -> str:
    """Return the name of the metric with which a strategy weights replies, or "" if it has none.

    If the strategy wraps another strategy, the name may come from the wrapped strategy.
    """
    wrapped: object = strategy
    while wrapped is not None:
        if isinstance(key := getattr(wrapped, "weighted_by_key", None), str):
            return key
        wrapped = getattr(wrapped, "strategy", None)
    return ""
