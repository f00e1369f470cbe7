"""The client side: a Flower ClientApp with fedcomp's compression_mod as its first mod."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from digits_app import task
from fedcomp.transports.flower import compression_mod

app = ClientApp(mods=[compression_mod()])


@app.train()
def train(message: Message, context: Context) -> Message:
    client = int(context.node_config["partition-id"])
    inputs, targets = task.training_data(client, int(context.node_config["num-partitions"]))
    net = task.model()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    seed = 1000 * int(message.content["config"]["server-round"]) + client
    loss = task.train(net, inputs, targets, float(context.run_config["lr"]), seed)
    metrics = MetricRecord({"train-loss": loss, "num-examples": len(targets)})
    content = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics})
    return Message(content, reply_to=message)
