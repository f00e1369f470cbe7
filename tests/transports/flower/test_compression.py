"""`compression_mod`: messages that it does not change or refuses, and its state. test_compressed.py tests it with the server."""

import numpy as np
import pytest
from cases import for_each
from flower_grid import AppGrid
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

from fedcomp.errors import ConfigError, FedcompError, SpecError
from fedcomp.transports.flower import Compressed, compression_mod
from fedcomp.transports.flower.compression import default_state_dir, folder_name

STRATEGY = {"fraction_evaluate": 0.0}
ZEROS = {"w": Array(np.zeros(100, np.float32))}


def adding(value: float, state_dir, *mods, key: str = "arrays") -> ClientApp:
    """Return an app with the mod, whose training adds `value` to every weight."""
    app = ClientApp(mods=[compression_mod(state_dir=state_dir), *mods])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        arrays = message.content["arrays"].items()
        trained = {name: Array(array.numpy() + np.float32(value)) for name, array in arrays}
        return reply_with(message, trained, key)

    return app


def reply_with(message: Message, arrays: dict[str, Array], key: str = "arrays") -> Message:
    records = {key: ArrayRecord(arrays), "metrics": MetricRecord({"num-examples": 1})}
    return Message(RecordDict(records), reply_to=message)


def context_of(node: int, config: dict, run_id: int = 1) -> Context:
    return Context(
        run_id=run_id, node_id=node, node_config=config, state=RecordDict(), run_config={}
    )


def run(strategy, make, rounds=1, nodes=2):
    grid = AppGrid(make, nodes)
    return strategy.start(grid, ArrayRecord(ZEROS), num_rounds=rounds), grid


def test_the_mod_does_not_change_messages_of_other_strategies(tmp_path):
    result, _ = run(FedAvg(**STRATEGY), lambda: adding(1.0, tmp_path))
    assert result.arrays["w"].numpy().tolist() == [1.0] * 100
    assert not list(tmp_path.iterdir())


def test_an_app_may_return_the_arrays_under_another_key(tmp_path):
    strategy = Compressed(FedAvg(**STRATEGY), uplink="identity", downlink="identity")
    result, _ = run(strategy, lambda: adding(1.0, tmp_path, key="trained"))
    assert result.arrays["w"].numpy().tolist() == [1.0] * 100


def test_later_mods_see_decoded_arrays(tmp_path):
    seen = []

    def looking(message, context, call_next):
        seen.append(message.content["arrays"]["w"].numpy().size)
        reply = call_next(message, context)
        seen.append(reply.content["arrays"]["w"].numpy().size)
        return reply

    run(Compressed(FedAvg(**STRATEGY)), lambda: adding(1.0, tmp_path, looking))
    assert seen == [100] * 4


def test_clients_of_one_machine_have_separate_folders_and_old_runs_are_removed(tmp_path):
    for run_id in range(7):
        grid = AppGrid(lambda: adding(1.0, tmp_path), 2)
        strategy = Compressed(FedAvg(**STRATEGY))
        messages = strategy.configure_train(1, ArrayRecord(ZEROS), ConfigRecord(), grid)
        for message in messages:
            node = message.metadata.dst_node_id
            partition = next(partition for partition, at in grid.nodes.items() if at == node)
            context = context_of(node, {"partition-id": partition}, run_id)
            assert not adding(1.0, tmp_path)(message, context).has_error()
    assert {path.name for path in tmp_path.iterdir()} == {"partition-0", "partition-1"}
    assert {path.name for path in (tmp_path / "partition-0").glob("run-*")} == {
        f"run-{i}.bin" for i in range(3, 7)
    }


PLACES = [
    ({"partition-id": 3}, "partition-3"),
    ({}, "node-17"),
    ({"partition-id": "../x"}, "partition-.._x"),
]


@for_each("config, name", PLACES)
def test_a_clients_folder_is_named_after_its_partition_or_else_its_node(config, name):
    assert folder_name(context_of(17, config)) == name


def test_the_default_state_folder_is_in_xdg_state_home(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert default_state_dir() == tmp_path / "fedcomp"


@for_each("memory", ["ef21", "diana", "laq", "sketched"])
def test_a_memory_that_needs_server_support_is_refused_at_once(memory):
    with pytest.raises(ConfigError, match="memory='residual'"):
        compression_mod(memory=memory)


def test_an_unknown_memory_is_refused_at_once():
    with pytest.raises(SpecError, match="did you mean 'residual'"):
        compression_mod(memory="residuals")


def refused(make, strategy=None):
    """Return the reason for which both clients are rejected."""
    strategy = strategy or Compressed(FedAvg(**STRATEGY))
    with pytest.raises(FedcompError, match="no client's update was accepted"):
        run(strategy, make)
    reasons = {
        r.reason.replace("partition-0", "partition-1") for r in strategy.rejections[1, "train"]
    }
    assert len(strategy.rejections[1, "train"]) == 2 and len(reasons) == 1
    return reasons.pop()


def test_a_memory_that_would_diverge_with_the_servers_codec_is_a_reason_for_rejection(tmp_path):
    strategy = Compressed(FedAvg(**STRATEGY), uplink="qsgd:levels=1")
    assert "diverges" in refused(lambda: adding(1.0, tmp_path), strategy)


def test_an_infinite_update_is_rejected_and_does_not_change_the_memory(tmp_path):
    assert "inf" in refused(lambda: adding(np.inf, tmp_path))
    result, _ = run(
        Compressed(FedAvg(**STRATEGY), uplink="identity"),
        lambda: adding(1.0, tmp_path),
    )
    assert np.isfinite(result.arrays["w"].numpy()).all()


def test_an_app_that_returns_no_model_is_a_reason_for_rejection(tmp_path):
    def make():
        app = ClientApp(mods=[compression_mod(state_dir=tmp_path)])

        @app.train()
        def train(message, context):
            return reply_with(message, {"other": Array(np.zeros(3))})

        return app

    assert "returned 0 ArrayRecords with the names and shapes of the received arrays" in refused(
        make
    )


def test_the_error_for_a_damaged_state_names_its_file(tmp_path):
    strategy = Compressed(FedAvg(min_train_nodes=1, min_available_nodes=1, **STRATEGY))
    grid = AppGrid(lambda: adding(1.0, tmp_path), 1)
    grid.send_and_receive(strategy.configure_train(1, ArrayRecord(ZEROS), ConfigRecord(), grid))
    (tmp_path / "partition-0" / "run-1.bin").write_bytes(b"damaged")
    messages = strategy.configure_train(2, strategy.model.arrays, ConfigRecord(), grid)
    strategy.aggregate_train(2, grid.send_and_receive(messages))
    (dropped,) = strategy.rejections[2, "train"]
    assert "run-1.bin is damaged" in dropped.reason and "remove this file" in dropped.reason


def test_a_full_disk_rejects_the_update_and_keeps_the_previous_state(tmp_path):
    strategy = Compressed(FedAvg(**STRATEGY))
    run(strategy, lambda: adding(1.0, tmp_path))
    before = (tmp_path / "partition-0" / "run-1.bin").read_bytes()
    for partition in range(2):
        (tmp_path / f"partition-{partition}" / ".run-1.bin.new").mkdir()
    assert "cannot be written" in refused(lambda: adding(1.0, tmp_path))
    assert (tmp_path / "partition-0" / "run-1.bin").read_bytes() == before
