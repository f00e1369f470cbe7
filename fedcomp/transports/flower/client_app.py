"""A client session as a Flower ClientApp: the clients' end of `FlowerStrategy`."""

from collections.abc import Sequence
from typing import Protocol

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from ...messages import Assignment, Report
from .records import from_records, to_records


class Session(Protocol):
    """Handles the assignments of the clients that it hosts, such as `fedcomp.clients.session.ClientSession`."""

    def handle(self, assignments: Sequence[Assignment]) -> list[Report]: ...


def client_app(session: Session) -> ClientApp:
    """Return a ClientApp that answers train messages with the reports of a session."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        (report,) = session.handle([from_records(message.content, Assignment)])
        return Message(to_records(report, {"num-examples": report.examples}), reply_to=message)

    return app
