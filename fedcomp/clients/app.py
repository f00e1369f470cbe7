"""The ClientApp that a run's bundle names. Clients are long-lived processes of their own, `fedcomp client`."""

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    raise RuntimeError("clients of this run keep a state; start one with: fedcomp client --server HOST:PORT")
