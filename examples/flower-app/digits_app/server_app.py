"""The server side: a Flower ServerApp with the strategy FedAvg, wrapped in fedcomp's Compressed."""

from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from digits_app import task
from fedcomp.transports.flower import Compressed

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config, net = context.run_config, task.model()
    strategy = Compressed(
        FedAvg(fraction_train=float(config["fraction-train"]), fraction_evaluate=0.0),
        uplink=str(config["uplink"]),
        downlink=str(config["downlink"]),
    )

    def evaluate(round: int, arrays: ArrayRecord) -> MetricRecord:
        net.load_state_dict(arrays.to_torch_state_dict())
        return MetricRecord({"accuracy": task.accuracy(net)})

    rounds = int(config["num-server-rounds"])
    result = strategy.start(
        grid, ArrayRecord(net.state_dict()), num_rounds=rounds, evaluate_fn=evaluate
    )
    accuracy = result.evaluate_metrics_serverapp[rounds]["accuracy"]
    sent = sum(sum(traffic.uplink.values()) for traffic in strategy.traffic.values())
    updates = sum(len(traffic.uplink) for traffic in strategy.traffic.values())
    dense = 4 * updates * sum(value.numel() for value in net.state_dict().values())
    print(f"accuracy {accuracy:.4f} after {rounds} rounds", flush=True)
    print(f"{updates} updates: {sent} bytes of frames, {dense} bytes uncompressed", flush=True)
