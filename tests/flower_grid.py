"""A Flower Grid whose nodes are ClientApps in this process. It records the size of each message."""

import itertools
from collections.abc import Callable, Iterable
from types import SimpleNamespace

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

_numbers = itertools.count(1)
Fault = Callable[[Message], Message | None]  # returns the changed reply; None: it is lost


def identify_process() -> None:
    """Give this process the task identity that Flower gives to processes that it starts. Since flwr 1.38, `Message()` reads it."""
    try:
        from flwr.supercore.task_identity import TaskIdentity
    except ImportError:
        return
    if TaskIdentity._node_id is None:
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1


def name_messages(messages: Iterable[Message]) -> list[str]:
    """Give ids to messages, as a SuperLink does, and return the ids."""
    names = []
    for message in messages:
        name = str(next(_numbers))
        message.metadata.__dict__["_message_id"] = name
        names.append(name)
    return names


class AppGrid(Grid):
    """A grid of `nodes` nodes. `make()` returns a new ClientApp for each message, as a new process would import it."""

    def __init__(self, make: Callable[[], ClientApp], nodes: int):
        identify_process()
        self.make, self.nodes = (
            make,
            dict(enumerate(range(1 << 63, (1 << 63) + nodes))),
        )  # partition → node id
        self.faults: dict[tuple[str, int], Fault] = {}  # message type, partition → fault
        self.sent: list[tuple[str, int, int]] = []  # message type, partition, bytes down
        self.received: list[tuple[str, int, int]] = []  # message type, partition, bytes up
        self.here = set(self.nodes)
        self._replies: dict[str, Message] = {}
        self._run = SimpleNamespace(run_id=1)

    def restart(self, partition: int) -> None:
        """Restart a SuperNode that has no key of its own: it gets a new node id."""
        self.nodes[partition] += 1000

    def set_run(self, run) -> None:
        self._run = run

    @property
    def run(self):
        return self._run

    def create_message(self, content, message_type, dst_node_id, group_id, ttl=None) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> list[int]:
        return [self.nodes[partition] for partition in sorted(self.here)]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        messages = list(messages)
        names = name_messages(messages)
        for name, message in zip(names, messages, strict=True):
            self._replies[name] = self._answer(message)
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return [
            reply for name in message_ids if (reply := self._replies.pop(name, None)) is not None
        ]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        return self.pull_messages(self.push_messages(messages))

    def _answer(self, message: Message) -> Message | None:
        node, kind = message.metadata.dst_node_id, message.metadata.message_type
        partition = next(partition for partition, at in self.nodes.items() if at == node)
        self.sent.append((kind, partition, size(message)))
        copy = Message(message.content, node, kind, group_id=message.metadata.group_id)
        copy.metadata.__dict__["_message_id"] = message.metadata.message_id
        context = Context(
            run_id=1,
            node_id=node,
            node_config={"partition-id": partition},
            state=RecordDict(),
            run_config={},
        )
        try:
            reply = self.make()(copy, context)
        except Exception as error:
            return Message(Error(2, str(error)), reply_to=copy)
        self.received.append((kind, partition, size(reply)))
        fault = self.faults.pop((kind, partition), None)
        return fault(reply) if fault else reply

    def bytes_down(self, kind: str = "train") -> list[int]:
        return [count for type_, _, count in self.sent if type_ == kind]

    def bytes_up(self, kind: str = "train") -> list[int]:
        return [count for type_, _, count in self.received if type_ == kind]


def size(message: Message) -> int:
    return sum(record.count_bytes() for record in message.content.values())
