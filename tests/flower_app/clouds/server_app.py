"""The ServerApp."""

import json
import time
from pathlib import Path

from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg, Strategy
from safetensors.torch import save_file

from clouds.task import model
from clouds.task import test as test_model
from fedcomp.transports.flower import Compressed

app = ServerApp()


def make_strategy(config: dict) -> Strategy:
    nodes = int(config["min-nodes"])
    strategy = FedAvg(
        fraction_evaluate=float(config["fraction-evaluate"]),
        min_train_nodes=nodes,
        min_available_nodes=nodes,
    )
    if config["compressed"]:
        strategy = Compressed(
            strategy,
            uplink=f"stc:density={config['density']}",
            downlink=f"stc:density={config['density']}",
        )
    return strategy


def measured(round: int, arrays: ArrayRecord) -> MetricRecord:
    net = model()
    net.load_state_dict(arrays.to_torch_state_dict())
    loss, accuracy = test_model(net)
    print(f"after round {round}: accuracy {accuracy:.4f}", flush=True)
    return MetricRecord({"loss": loss, "accuracy": accuracy})


@app.main()
def main(grid: Grid, context: Context) -> None:
    config, accuracies = context.run_config, {}

    def after(round: int, arrays: ArrayRecord) -> MetricRecord:
        metrics = measured(round, arrays)
        accuracies[round] = metrics["accuracy"]
        if config["out"]:
            save_file(arrays.to_torch_state_dict(), f"{config['out']}.safetensors")
            Path(f"{config['out']}.new").write_text(json.dumps(accuracies))
            Path(f"{config['out']}.new").rename(f"{config['out']}.json")
        while round == 1 and config["wait-for"] and not Path(config["wait-for"]).exists():
            time.sleep(0.1)
        return metrics

    make_strategy(config).start(
        grid,
        ArrayRecord(model().state_dict()),
        num_rounds=int(config["num-server-rounds"]),
        evaluate_fn=after,
    )
