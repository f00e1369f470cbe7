"""The Flower App of flower_fedavg.py: a network of configurable size classifies ten clouds of random points."""

import json
import os
import time
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from torch import nn

INPUTS, CLASSES = 64, 10
LOCAL_STEPS, BATCH, LR = 5, 20, 0.1


def clouds(examples: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    centres = torch.randn(CLASSES, INPUTS, generator=torch.Generator().manual_seed(1)) / 2
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(CLASSES, (examples,), generator=generator)
    return centres[targets] + torch.randn(examples, INPUTS, generator=generator), targets


def network() -> nn.Module:
    hidden = max(1, round((int(os.environ["BENCH_NUMEL"]) - CLASSES) / (INPUTS + 1 + CLASSES)))
    return nn.Sequential(nn.Linear(INPUTS, hidden), nn.ReLU(), nn.Linear(hidden, CLASSES))


def mods() -> list:
    if not os.environ.get("BENCH_STATE"):
        return []
    from fedcomp.transports.flower import compression_mod

    return [compression_mod(state_dir=os.environ["BENCH_STATE"])]


client = ClientApp(mods=mods())
server = ServerApp()


@client.train()
def train(message: Message, context: Context) -> Message:
    net, number = network(), int(context.node_config["partition-id"])
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    inputs, targets = (part[number :: int(os.environ["BENCH_CLIENTS"])] for part in clouds(4000, 2))
    generator = torch.Generator().manual_seed(
        1000 * int(message.content["config"]["server-round"]) + number
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    for _ in range(LOCAL_STEPS):
        batch = torch.randint(len(inputs), (BATCH,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(inputs[batch]), targets[batch]).backward()
        optimizer.step()
    records = {
        "arrays": ArrayRecord(net.state_dict()),
        "metrics": MetricRecord({"num-examples": len(inputs)}),
    }
    return Message(RecordDict(records), reply_to=message)


@server.main()
def serve(grid: Grid, context: Context) -> None:
    config, clients = context.run_config, int(os.environ["BENCH_CLIENTS"])
    while len(list(grid.get_node_ids())) < clients:
        time.sleep(0.2)
    strategy = FedAvg(
        fraction_train=float(config["participation"]),
        fraction_evaluate=0.0,
        min_available_nodes=clients,
    )
    traffic = {}
    if config["density"]:
        from fedcomp.transports.flower import Compressed

        codec = f"stc:density={config['density']}"
        strategy = Compressed(strategy, uplink=codec, downlink=codec)
        traffic = strategy.traffic
    torch.manual_seed(0)
    net = network()
    result = strategy.start(grid, ArrayRecord(net.state_dict()), num_rounds=int(config["rounds"]))
    net.load_state_dict(result.arrays.to_torch_state_dict())
    inputs, targets = clouds(2000, 3)
    accuracy = (net(inputs).argmax(1) == targets).float().mean().item()
    frames = sum(sum(t.uplink.values()) + sum(t.downlink.values()) for t in traffic.values())
    exchanges = sum(len(t.uplink) for t in traffic.values())
    out = Path(config["out"])
    out.with_suffix(".new").write_text(
        json.dumps({"accuracy": accuracy, "frames": frames, "exchanges": exchanges})
    )
    out.with_suffix(".new").rename(out)
