"""Flower strategies wrapped in `Compressed`, and apps with `compression_mod`: arrays on both sides, bytes sent, and faults."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from flower_grid import AppGrid
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideFixedClipping,
    FedAdam,
    FedAvg,
    FedProx,
)

from fedcomp.clients.device_state import CLIENT
from fedcomp.clients.state import ClientState
from fedcomp.codecs import codec
from fedcomp.errors import ConfigError, FedcompError, SpecError
from fedcomp.memories import memory
from fedcomp.messages import DENSE, FRAMES, OVERWRITE, UP_TO_DATE, Assignment, Report
from fedcomp.state_folder import StateFolder
from fedcomp.transports.flower import Compressed, compression_mod
from fedcomp.transports.flower.packed_records import Parcel
from fedcomp.transports.flower.records import from_records

NUMEL = 60 * 50 + 50
IDENTITY = {"uplink": "identity", "downlink": "identity"}
QUIET = {"fraction_evaluate": 0.0}  # no messages for evaluation


def initial() -> ArrayRecord:
    generator = np.random.default_rng(0)
    return ArrayRecord(
        {
            "layer.weight": Array(generator.standard_normal((60, 50)).astype(np.float32)),
            "norm.running_var": Array(np.ones(50, np.float32)),
            "norm.num_batches_tracked": Array(np.array(0)),
            "layer.bias": Array(np.zeros(50, np.float32)),
        }
    )


def target(partition: int, name: str, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng([partition, len(name)]).standard_normal(shape).astype(np.float32)


class Seen:
    """The arrays that the apps received, by type of message and partition, and the apps' updates by partition."""

    def __init__(self):
        self.given: dict[tuple[str, int], list[dict[str, np.ndarray]]] = {}
        self.updates: dict[int, list[np.ndarray]] = {}

    def note(self, kind: str, partition: int, arrays: ArrayRecord) -> dict[str, np.ndarray]:
        values = {name: array.numpy() for name, array in arrays.items()}
        self.given.setdefault((kind, partition), []).append(values)
        return values


def flat(values: dict[str, np.ndarray]) -> np.ndarray:
    return np.concatenate([values[name].reshape(-1) for name in ("layer.weight", "layer.bias")])


def plain_app(seen: Seen, mods: list) -> ClientApp:
    app = ClientApp(mods=mods)

    @app.train()
    def train(message: Message, context) -> Message:
        partition = context.node_config["partition-id"]
        assert message.content["config"]["server-round"] >= 1
        given = seen.note("train", partition, message.content["arrays"])
        trained = {
            name: values + np.float32(0.5) * (target(partition, name, values.shape) - values)
            for name, values in given.items()
            if name.startswith("layer")
        }
        trained["norm.running_var"] = given["norm.running_var"] + np.float32(partition)
        trained["norm.num_batches_tracked"] = given["norm.num_batches_tracked"] + 5
        seen.updates.setdefault(partition, []).append(
            flat(trained).astype(np.float64) - flat(given)
        )
        metrics = MetricRecord({"num-examples": 10 + partition, "loss": 1.0})
        arrays = ArrayRecord({name: Array(np.asarray(trained[name])) for name in given})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context) -> Message:
        seen.note("evaluate", context.node_config["partition-id"], message.content["arrays"])
        metrics = MetricRecord({"num-examples": 1, "accuracy": 0.5})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


class Federation:
    """Apps with the mod, each with its own state folder, and a grid that reaches them."""

    def __init__(self, folder, nodes: int = 3, **options):
        self.seen, self.folder = Seen(), folder
        self.grid = AppGrid(
            lambda: plain_app(self.seen, [compression_mod(state_dir=folder, **options)]), nodes
        )

    def residual(self, partition: int) -> np.ndarray:
        """Return the residual of a client, which includes its pending update."""
        return self.memory(partition)["residual"].double().numpy()

    def memory(self, partition: int) -> dict:
        """Return the state of a client's memory."""
        state = self.state(partition)
        stored = ClientState.unpack(
            CLIENT, state[CLIENT], state.get, lambda: memory("residual", codec("stc"), NUMEL)
        )
        return stored.memory.state_dict()

    def state(self, partition: int) -> dict:
        folder = StateFolder(self.folder / f"partition-{partition}")
        try:
            return folder.load("run-1.bin")
        finally:
            folder.close()


@pytest.fixture
def federation(tmp_path):
    return Federation(tmp_path)


def values_of(record: ArrayRecord) -> dict[str, np.ndarray]:
    return {name: array.numpy() for name, array in record.items()}


def run(strategy, grid, rounds=3, **options):
    return strategy.start(grid, initial(), num_rounds=rounds, **options)


def private(**options):
    return DifferentialPrivacyServerSideFixedClipping(
        FedAvg(**options), noise_multiplier=0.0, clipping_norm=1e6, num_sampled_clients=3
    )


@pytest.mark.parametrize("make", [FedAdam, private, lambda **o: FedProx(proximal_mu=0.1, **o)])
def test_lossless_codecs_give_the_results_of_the_uncompressed_strategy(make, federation, tmp_path):
    plain = AppGrid(lambda: plain_app(Seen(), []), 3)
    expected = run(make(), plain)
    found = run(Compressed(make(), **IDENTITY), federation.grid)
    assert list(found.arrays) == list(expected.arrays)
    for name, values in values_of(expected.arrays).items():
        np.testing.assert_allclose(found.arrays[name].numpy(), values, rtol=1e-4, atol=1e-5)
    assert (
        found.train_metrics_clientapp.keys() == expected.train_metrics_clientapp.keys() == {1, 2, 3}
    )
    assert found.evaluate_metrics_clientapp == expected.evaluate_metrics_clientapp


def test_clients_have_the_servers_model_bit_for_bit(federation):
    strategy = Compressed(FedAvg())
    result = run(strategy, federation.grid)
    for partition in range(3):
        last = federation.seen.given["evaluate", partition][-1]
        assert list(last) == list(result.arrays)
        assert all(
            np.array_equal(last[name], array.numpy()) for name, array in result.arrays.items()
        )
    first = federation.seen.given["train", 0][0]
    assert all(np.array_equal(first[name], array.numpy()) for name, array in initial().items())


def test_buffers_and_integers_are_sent_uncompressed(federation):
    result = run(
        Compressed(FedAvg(**QUIET), uplink="stc:density=1/1000"), federation.grid, rounds=1
    )
    weights = np.array([10, 11, 12]) / 33
    np.testing.assert_allclose(
        result.arrays["norm.running_var"].numpy(), np.full(50, 1 + weights @ [0, 1, 2]), rtol=1e-6
    )
    assert result.arrays["norm.num_batches_tracked"].numpy() == pytest.approx(5)
    assert federation.seen.given["train", 1][-1]["norm.num_batches_tracked"] == 0


def test_after_the_first_download_only_frames_are_sent(federation):
    plain = AppGrid(lambda: plain_app(Seen(), []), 3)
    run(FedAvg(**QUIET), plain)
    strategy = Compressed(FedAvg(**QUIET))
    run(strategy, federation.grid)
    assert min(plain.bytes_up()) > 4 * NUMEL and min(plain.bytes_down()) > 4 * NUMEL
    # Most bytes of such a small model are headers and buffers.
    assert max(federation.grid.bytes_up()) < min(plain.bytes_up()) / 8
    assert max(federation.grid.bytes_down()[3:]) < min(plain.bytes_down()) / 8
    for round in (1, 2, 3):
        traffic, of_round = strategy.traffic[round, "train"], slice(3 * round - 3, 3 * round)
        uplink, up = sum(traffic.uplink.values()), federation.grid.bytes_up()[of_round]
        assert uplink < sum(up) < uplink + 3 * 1000
        downlink, down = sum(traffic.downlink.values()), federation.grid.bytes_down()[of_round]
        assert downlink < sum(down) < downlink + 3 * 1000


def test_unsent_parts_of_updates_are_kept_and_no_update_counts_twice(tmp_path):
    """Check Σ accepted + residual = Σ updates for a client with lost replies and restarts under a new node id."""
    federation = Federation(tmp_path, nodes=2)
    federation.grid.here = {0}
    strategy = Compressed(
        FedAvg(min_train_nodes=1, min_available_nodes=1, fraction_evaluate=0.0),
        uplink="stc:density=1/20",
        downlink="identity",
    )
    accepted = np.zeros(NUMEL)
    arrays, config = initial(), ConfigRecord()
    for round in range(1, 9):
        if round in (
            3,
            6,
        ):  # the last update was accepted (3) or lost (6), and the client does not know which
            federation.grid.restart(0)
        if round in (4, 5):
            federation.grid.faults["train", 0] = lambda reply: None
        before = strategy.model and flat(values_of(strategy.model.arrays)).astype(np.float64)
        replies = federation.grid.send_and_receive(
            strategy.configure_train(round, arrays, config, federation.grid)
        )
        new, _ = strategy.aggregate_train(round, replies)
        assert (new is None) == (round in (4, 5))
        if new is not None:
            before = flat(values_of(initial())) if before is None else before
            moved = flat(values_of(new)).astype(np.float64) - before
            accepted, arrays = accepted + moved, new
    pending = federation.memory(0)["pending"]
    last = codec("stc").decode(pending, numel=NUMEL).double().numpy()
    kept = federation.residual(0) - last  # the last update was accepted
    np.testing.assert_allclose(accepted + kept, sum(federation.seen.updates[0]), atol=1e-4)
    assert np.abs(kept).sum() > 1


def downloads(strategy, round, grid, arrays):
    """Return the messages of a round, and their assignments by node."""
    messages = strategy.configure_train(round, arrays, ConfigRecord(), grid)
    asked = [
        Assignment.unpack(from_records(message.content, Parcel).message) for message in messages
    ]
    return messages, {
        message.metadata.dst_node_id: a for message, a in zip(messages, asked, strict=True)
    }


def test_a_client_downloads_missed_broadcasts_or_the_model_if_it_has_no_state(tmp_path):
    federation = Federation(tmp_path)
    grid = federation.grid
    strategy = Compressed(FedAvg(**QUIET), uplink="stc:density=1/100", downlink="stc:density=1/100")
    arrays = initial()

    def step(round):
        messages, asked = downloads(strategy, round, grid, arrays)
        new, _ = strategy.aggregate_train(round, grid.send_and_receive(messages))
        return new, {
            partition: asked[node].form for partition, node in grid.nodes.items() if node in asked
        }

    arrays, forms = step(1)
    assert forms == {0: DENSE, 1: DENSE, 2: DENSE}
    grid.here = {0, 1}
    for round in (2, 3):
        arrays, forms = step(round)
        assert forms == {0: FRAMES, 1: FRAMES}
    grid.here = {0, 1, 2}
    # Client 1 loses its state, and the server does not know it.
    (tmp_path / "partition-1" / "run-1.bin").unlink()
    arrays, forms = step(4)
    assert forms[2] in (FRAMES, OVERWRITE) and forms[0] == FRAMES
    assert strategy.traffic[4, "train"].catch_up_bytes > 0
    (rejection,) = strategy.rejections[4, "train"]
    assert rejection.client == 1 and "no state of this run is stored" in rejection.reason
    arrays, forms = step(5)
    assert forms[1] == DENSE and not strategy.rejections[5, "train"]
    torch.testing.assert_close(*(federation.state(p)["weights"] for p in (0, 2)), rtol=0, atol=0)
    torch.testing.assert_close(*(federation.state(p)["weights"] for p in (0, 1)), rtol=0, atol=0)


def test_evaluation_messages_update_the_model_and_tell_which_updates_were_accepted(federation):
    strategy = Compressed(FedAvg())
    run(strategy, federation.grid, rounds=2)
    # The messages carry only the newest broadcast, because each client has the earlier ones.
    assert max(federation.grid.bytes_down("evaluate")) < 2000
    assert all("pending" not in federation.memory(p) for p in range(3))
    assert strategy.traffic[2, "train"].downlink.keys() == {0, 1, 2}
    messages, asked = downloads(strategy, 3, federation.grid, strategy.model.arrays)
    assert {a.form for a in asked.values()} == {UP_TO_DATE}


def broken(change):
    """Return a fault that replaces the report in a reply."""

    def fault(reply: Message) -> Message:
        parcel = from_records(reply.content, Parcel)
        report = Report.unpack(parcel.message)
        reply.content = change(parcel, report, reply.content)
        return reply

    return fault


def with_report(**changed):
    def change(parcel, report, content):
        return replace(parcel, message=replace(report, **changed).pack()).put(content, "")

    return broken(change)


def with_parcel(**changed):
    def change(parcel, report, content):
        return replace(parcel, **changed).put(content, "")

    return broken(change)


def without(key):
    def fault(reply):
        reply.content = RecordDict(
            {name: record for name, record in reply.content.items() if name != key}
        )
        return reply

    return fault


def with_metrics(**metrics):
    def fault(reply):
        reply.content["metrics"] = MetricRecord(metrics)
        return reply

    return fault


FAULTS = {
    "a bad frame": with_report(frame=b"nonsense"),
    "a frame of another size": with_report(frame=codec("stc").encode(torch.ones(7))),
    "a frame of another codec": with_report(frame=codec("identity").encode(torch.ones(NUMEL))),
    "a report of another round": with_report(round=77),
    "a report of another version": with_report(version="0" * 32),
    "a report of another client": with_report(client=2),
    "no report": without("fedcomp"),
    "no metrics": without("metrics"),
    "no weight": with_metrics(loss=1.0),
    "zero weight": with_metrics(loss=1.0, **{"num-examples": 0}),
    "a weight that is not a number": with_metrics(loss=1.0, **{"num-examples": float("nan")}),
    "other metrics": with_metrics(**{"num-examples": 3, "other": 1.0}),
    "no buffers": with_parcel(array_headers="[]", array_data=[]),
    "malformed buffers": with_parcel(array_data=[b"x", b"y"]),
    "headers that are not JSON": with_parcel(array_headers="{"),
    "the key of another record": with_parcel(record="metrics"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_malformed_reply_is_rejected_with_a_reason_and_the_run_continues(fault, federation):
    federation.grid.faults["train", 1] = FAULTS[fault]
    strategy = Compressed(FedAvg(**QUIET), downlink="identity", uplink="stc:density=1/20")
    result = run(strategy, federation.grid, rounds=2)
    assert result.train_metrics_clientapp.keys() == {1, 2}
    dropped = strategy.rejections[1, "train"]
    assert [r.client for r in dropped] == [1] and dropped[0].reason
    assert not strategy.rejections[2, "train"]
    # The update of round 1 was rolled back, so the frame of round 2 contains parts of both updates.
    frame = codec("stc").decode(federation.memory(1)["pending"], numel=NUMEL).double().numpy()
    unsent = federation.residual(1) - frame
    np.testing.assert_allclose(sum(federation.seen.updates[1]) - unsent, frame, atol=1e-5)


def test_a_node_that_answers_twice_counts_once(federation):
    strategy = Compressed(FedAvg(**QUIET), **IDENTITY)
    replies = federation.grid.send_and_receive(
        strategy.configure_train(1, initial(), ConfigRecord(), federation.grid)
    )
    twice = Message(RecordDict(dict(replies[0].content)), replies[0].metadata.dst_node_id, "train")
    twice.metadata.__dict__["_src_node_id"] = replies[0].metadata.src_node_id
    strategy.aggregate_train(1, [*replies, twice])
    assert ["already" in r.reason for r in strategy.rejections[1, "train"]] == [True]


def test_an_error_in_a_client_reaches_the_wrapped_strategy(federation):
    def raises():
        app = ClientApp(mods=[compression_mod(state_dir=federation.folder)])

        @app.train()
        def train(message, context):
            if context.node_config["partition-id"] == 1:
                raise ValueError("a sensor is broken")
            return plain_app(federation.seen, [])(message, context)

        return app

    federation.grid.make = raises
    strategy = Compressed(FedAvg(**QUIET))
    result = run(strategy, federation.grid, rounds=2)
    assert result.train_metrics_clientapp.keys() == {1, 2}
    assert set(federation.seen.updates) == {0, 2}


def test_the_rejection_of_a_client_without_the_mod_names_the_mod(federation):
    """Client 1 reads the record of arrays, as most apps do. Client 2 returns arrays without reading it."""

    def unread(message: Message, context) -> Message:
        metrics = MetricRecord({"num-examples": 1})
        return Message(RecordDict({"arrays": initial(), "metrics": metrics}), reply_to=message)

    def client(message: Message, context) -> Message:
        if context.node_config["partition-id"] == 0:
            return app_with_the_mod(message, context)
        app = plain_app(federation.seen, [])
        if context.node_config["partition-id"] == 2:
            app = ClientApp()
            app.train()(unread)
        return app(message, context)

    app_with_the_mod = federation.grid.make()
    federation.grid.make = lambda: client
    strategy = Compressed(FedAvg(**QUIET))
    run(strategy, federation.grid, rounds=1)
    reasons = {r.client: r.reason for r in strategy.rejections[1, "train"]}
    assert reasons.keys() == {1, 2}
    assert reasons[1].startswith("the client's app failed before it sent a compressed record (")
    assert reasons[1].endswith(
        "if compression_mod is not among its mods, add compression_mod to the ClientApp's mods"
    )
    assert reasons[2] == (
        "the client sent an uncompressed record; add compression_mod to the ClientApp's mods"
    )


def test_a_run_of_clients_without_the_mod_ends_in_an_error_that_names_it(federation):
    federation.grid.make = lambda: plain_app(federation.seen, [])
    with pytest.raises(FedcompError, match="no client's update was accepted.* add compression_mod"):
        run(Compressed(FedAvg(**QUIET)), federation.grid, rounds=2)
    run(Compressed(FedAvg(fraction_train=0.0)), federation.grid, rounds=1)  # evaluation alone


def test_a_round_without_valid_answers_keeps_the_model(federation):
    strategy = Compressed(FedAvg(**QUIET))
    federation.grid.faults = {("train", partition): FAULTS["a bad frame"] for partition in range(3)}
    with pytest.raises(FedcompError, match="no client's update was accepted in any round: client "):
        run(strategy, federation.grid, rounds=1)
    assert len(strategy.rejections[1, "train"]) == 3
    assert all(
        np.array_equal(strategy.model.arrays[name].numpy(), array.numpy())
        for name, array in initial().items()
    )


def test_an_aggregate_with_infinity_is_refused_and_the_model_kept(federation):
    class Infinite(FedAvg):
        def aggregate_train(self, server_round, replies):
            arrays, metrics = super().aggregate_train(server_round, replies)
            arrays["layer.bias"] = Array(np.full(50, np.inf, np.float32))
            return arrays, metrics

    strategy = Compressed(Infinite(**QUIET))
    with pytest.raises(FedcompError, match="is inf in tensor"):
        run(strategy, federation.grid, rounds=1)
    assert len(strategy.rejections[1, "train"]) == 3 and not strategy.model.tickets
    assert np.array_equal(
        strategy.model.arrays["layer.bias"].numpy(), initial()["layer.bias"].numpy()
    )


def test_a_strategy_that_overrides_start_runs_its_own_loop(federation):
    class Saving(FedAvg):
        def start(self, grid, initial_arrays, *rest, **options):
            self.began = True
            result = super().start(grid, initial_arrays, *rest, **options)
            self.ended = result.arrays
            return result

    inner = Saving(**QUIET)
    result = run(Compressed(inner), federation.grid, rounds=1)
    assert inner.began and inner.ended is result.arrays
    assert "configure_train" not in vars(inner)
    assert max(federation.grid.bytes_up()) < NUMEL


def test_clients_download_a_replaced_model_completely(federation):
    strategy = Compressed(FedAvg(**QUIET))
    run(strategy, federation.grid, rounds=2)
    other = ArrayRecord(
        {name: Array(np.asarray(array.numpy() + 1)) for name, array in initial().items()}
    )
    messages, asked = downloads(strategy, 3, federation.grid, other)
    assert {a.form for a in asked.values()} == {DENSE}
    strategy.aggregate_train(3, federation.grid.send_and_receive(messages))
    assert not strategy.rejections[3, "train"]
    given = federation.seen.given["train", 0][-1]
    assert all(np.array_equal(given[name], array.numpy()) for name, array in other.items())


def test_clients_discard_their_state_of_an_earlier_training(tmp_path):
    # With two clients, the sum of the updates does not depend on their order.
    strategy, federation = Compressed(FedAvg(**QUIET)), Federation(tmp_path, nodes=2)
    first, second = run(strategy, federation.grid), run(strategy, federation.grid)
    assert all(
        np.array_equal(second.arrays[name].numpy(), array.numpy())
        for name, array in first.arrays.items()
    )


def test_half_precision_arrays_stay_in_half_precision(tmp_path):
    seen = Seen()

    def make():
        app = ClientApp(mods=[compression_mod(state_dir=tmp_path)])

        @app.train()
        def train(message, context):
            given = seen.note(
                "train", context.node_config["partition-id"], message.content["arrays"]
            )
            trained = ArrayRecord({"w": Array(given["w"] + np.float16(0.25))})
            metrics = MetricRecord({"num-examples": 1})
            return Message(RecordDict({"arrays": trained, "metrics": metrics}), reply_to=message)

        return app

    grid = AppGrid(make, 2)
    first = ArrayRecord({"w": Array((np.arange(500) / 7).astype(np.float16))})
    result = Compressed(FedAvg(**QUIET), **IDENTITY).start(grid, first, num_rounds=4)
    assert result.arrays["w"].numpy().dtype == np.float16
    np.testing.assert_allclose(result.arrays["w"].numpy(), first["w"].numpy() + 1, atol=0.2)


def test_invalid_options_and_models_are_refused(federation):
    with pytest.raises(SpecError, match="did you mean 'stc'"):
        Compressed(FedAvg(**QUIET), uplink="stcc")
    with pytest.raises(ConfigError, match="downlink_memory"):
        Compressed(FedAvg(**QUIET), downlink_memory="ef21")
    with pytest.raises(ConfigError, match="no array of floats"):
        Compressed(FedAvg(**QUIET)).configure_train(
            1, ArrayRecord({"n": Array(np.arange(3))}), ConfigRecord(), federation.grid
        )


def test_a_strategy_that_sends_a_node_two_messages_is_refused(federation):
    class Twice(FedAvg):
        def configure_train(self, *given):
            return [*super().configure_train(*given), *super().configure_train(*given)]

    with pytest.raises(ConfigError, match="two messages in one phase"):
        Compressed(Twice(**QUIET)).configure_train(1, initial(), ConfigRecord(), federation.grid)
