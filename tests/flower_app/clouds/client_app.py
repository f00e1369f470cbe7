"""The ClientApp."""

import os

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from clouds.task import model
from clouds.task import test as test_model
from clouds.task import train as train_model
from fedcomp.transports.flower import compression_mod

app = ClientApp(mods=[compression_mod(state_dir=os.environ.get("CLOUDS_STATE"))])


@app.train()
def train(message: Message, context: Context) -> Message:
    net = model()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    loss, examples = train_model(
        net,
        int(context.node_config["partition-id"]),
        int(message.content["config"]["server-round"]),
    )
    metrics = MetricRecord({"train_loss": loss, "num-examples": examples})
    return Message(
        RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=message
    )


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    net = model()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    loss, accuracy = test_model(net)
    metrics = MetricRecord({"eval_loss": loss, "eval_acc": accuracy, "num-examples": 2000})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)
