"""Everything that touches the inside of Flower: records of our messages, and the private symbols that a Grid in this process, a client
that is one process, and a server that drives its own run need.

Tested with flwr 1.40 to 1.42. A message travels as one value: bytes in a ConfigRecord up to 1 MiB, and above that an
Array, which Flower sends in chunks; the Array's `stype` keeps everyone from averaging it by accident.
"""

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from importlib import metadata
from typing import Any, TypeVar

from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    Metadata,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp

try:
    from flwr.supercore.run import Run
    from flwr.supercore.task_identity import TaskIdentity
except ImportError:  # an older Flower, which `check_version` refuses below
    Run = TaskIdentity = None

from ..errors import ConfigError, ProtocolError, UnreachableError, UserError
from ..messages import Values

MESSAGE, METRICS = "fedcomp", "metrics"
LARGEST_VALUE = 1 << 20  # bytes in a ConfigRecord; more goes into an Array
STYPE = "fedcomp.v1"
SUPERLINK_NODE = 1
AWAY = 5  # ErrorCode.NODE_UNAVAILABLE
PATIENCE_S = 20.0  # with a SuperLink on this machine that does not answer, and with a message that is announced and does not come
OBJECTS_S = 0.05, 1.0  # between looks for its parts, at first and at most
BATCH = 16  # messages that a server announces before it sends them
LATE = 1000  # replies that are announced, not whole, and not asked for just now, that are remembered: nobody hears of one twice
AT_ONCE = 8  # objects that a server sends or fetches at a time: a SuperLink that clients keep busy lets each wait for its turn
_NUMBERS = itertools.count(1)
RECORDS, RECORD = RecordDict(), ConfigRecord()  # empty ones

TESTED = (1, 40), (1, 42)  # the oldest and the newest minor version

M = TypeVar("M", bound=Values)
T = TypeVar("T")


def check_version(installed: str) -> None:
    """Raise ConfigError unless this version of flwr is one that the private symbols above were tested with."""
    (major, oldest), (_, newest) = TESTED
    if not TESTED[0] <= tuple(int(part) for part in installed.split(".")[:2]) <= TESTED[1]:
        raise ConfigError(
            f"flwr {installed} is installed, fedcomp works with {major}.{oldest} to {major}.{newest}; "
            f"run: pip install 'flwr>={major}.{oldest},<{major}.{newest + 1}'"
        )


check_version(metadata.version("flwr"))


def to_records(message: Values, metrics: dict[str, int | float] | None = None) -> RecordDict:
    """A message as Flower records, with metrics beside it for those who read Flower's own."""
    data = message.pack()
    if len(data) <= LARGEST_VALUE:
        made, record = (
            RECORDS.copy(),
            RECORD.copy(),
        )  # whose types need not be looked at again, which takes ten times as long
        made.__dict__["_data"][MESSAGE], record.__dict__["_data"][MESSAGE] = record, data
    else:
        made = RecordDict(
            {
                MESSAGE: ArrayRecord(
                    {MESSAGE: Array(dtype="uint8", shape=(len(data),), stype=STYPE, data=data)}
                )
            }
        )
    if metrics:
        made[METRICS] = MetricRecord(metrics)
    made.origin = message, data
    return made


def carried(message: Values) -> RecordDict:
    """`to_records` for a Grid that hands the message over in this process: the message itself, and no bytes."""
    made = RECORDS.copy()
    made.origin = message, None
    return made


def from_records(records: RecordDict, kind: type[M]) -> M:
    """The message in Flower records. Raises ProtocolError when there is none of this kind."""
    message, packed = getattr(records, "origin", (None, b""))
    if packed is None and isinstance(message, kind):
        return message
    record = records.get(MESSAGE)
    value = record.get(MESSAGE) if isinstance(record, ConfigRecord | ArrayRecord) else None
    data = value.data if isinstance(value, Array) and value.stype == STYPE else value
    if data is packed and isinstance(message, kind):
        return message  # made in this process and carried as it was: no need to read it back
    if not isinstance(data, bytes):
        raise ProtocolError(
            f"the message holds no record '{MESSAGE}' of bytes; both sides need fedcomp"
        )
    return kind.unpack(data)


def identify_process() -> None:
    """Give this process the identity that `Message()` reads when no Flower process has set one."""
    if TaskIdentity._node_id is None:
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, SUPERLINK_NODE


def empty_run() -> Run:
    """The run that a Grid without a SuperLink belongs to."""
    return Run.create_empty(1)


def name_messages(messages: Iterable[Message]) -> list[str]:
    """Give messages ids that are theirs alone in this process, as a SuperLink would."""
    ids = []
    for message in messages:
        _about(message)["_message_id"] = name = str(next(_NUMBERS))
        ids.append(name)
    return ids


def addressed(like: Message, content: RecordDict, node: int) -> Message:
    """A message like another, that has no id yet, with content of its own and to another node: a fifth of what `Message()` costs."""
    return _made(content, _about(like) | {"_dst_node_id": node, "_created_at": time.time()})


def replied(to: Message, content: RecordDict) -> Message:
    """`Message(content, reply_to=to)`, at a tenth of its cost."""
    asked, now_s = _about(to), time.time()
    return _made(
        content,
        asked
        | {
            "_message_id": "",
            "_reply_to_message_id": asked["_message_id"],
            "_created_at": now_s,
            "_ttl": asked["_created_at"] + asked["_ttl"] - now_s,
            "_src_node_id": asked["_dst_node_id"],
            "_dst_node_id": asked["_src_node_id"],
            "_src_task_id": asked["_dst_task_id"],
            "_dst_task_id": asked["_src_task_id"],
        },
    )


def _about(message: Message) -> dict[str, Any]:
    """A message's metadata, without the type checks of its properties."""
    return message.__dict__["_metadata"].__dict__


def _made(content: RecordDict, metadata: dict[str, Any]) -> Message:
    about, made = Metadata.__new__(Metadata), Message.__new__(Message)
    about.__dict__ = metadata
    made.__dict__ = {"_metadata": about, "_content": content, "_error": None}
    return made


class Actors:
    """The actors of Flower's Ray engine: of `resources` each, as many as Ray has room for. `app` is what they load, and may be replaced.

    `init` is for ray.init, where Ray does not run in this process yet. Raises what Ray does, and ValueError where there is room for none.
    """

    def __init__(self, init: dict[str, Any], resources: dict[str, int | float]):
        from flwr.server.superlink.fleet.vce.backend.raybackend import RayBackend

        hush()
        self._backend = RayBackend({"init_args": init, "client_resources": resources})
        self._backend.build(self.app)
        self._all = list(self._backend.pool.pool)

    app: Callable[[], ClientApp] = ClientApp

    @property
    def count(self) -> int:
        return self._backend.num_workers

    def ask(self, message: Message, context: Context) -> Message:
        """The answer of an actor. To be called from as many threads as there are actors. Raises what Ray does when the actor dies."""
        self._backend.app_fn = self.app
        reply, _ = self._backend.process_message(message, context)
        return reply

    def kill(self) -> None:
        """End them at once; whoever waits for an answer hears that they died."""
        import ray

        for actor in self._all:
            ray.kill(actor)


# A deployment: what speaks to a SuperLink. The imports stand inside, a simulation needs none of them.


@contextmanager
def _reaching(server: str) -> Iterator[None]:
    """Raises UnreachableError where trying again may help, and UserError for an answer that no SuperLink of this version gives."""
    import httpx

    try:
        yield
    except httpx.HTTPStatusError as error:
        code = error.response.status_code
        if code not in (401, 403, 408, 413, 425, 429) and code < 500:
            raise UserError(
                f"{server} answered {code} to a client's request; see that fedcomp serves there, and both sides have the same "
                "version"
            ) from error
        raise UnreachableError(
            f"{server} answered {code} ({_said(error.response)})", "starting"
        ) from error
    except httpx.TransportError as error:
        raise UnreachableError(
            f"{server} is cut off ({str(error) or type(error).__name__})", "network"
        ) from error


def _said(response: Any) -> str:
    """What a SuperLink says with an error."""
    try:
        said = response.json()
        text = said.get("message") or said.get("detail") or said.get("public_message")
    except (ValueError, AttributeError):
        text = None
    return " ".join(str(text or response.reason_phrase).split())[:200]


def hush() -> None:
    """Keep Flower's and httpx's log lines off the screen: what they tell is told in our own words."""
    for name in ("flwr", "httpx", "httpcore"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


class Fleet:
    """A client's connection to a SuperLink, by its key. Each call raises UnreachableError, or UserError where trying again is of no use.

    `ca`: PEM of the authority that signed the server's certificate; None = without TLS. `enrolled`: the server has a list of keys.
    """

    def __init__(self, server: str, key: Any, ca: bytes | None, enrolled: bool):
        from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL
        from flwr.proto.node_pb2 import Node
        from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
        from flwr.supercore.primitives.asymmetric import public_key_to_bytes
        from flwr.supernode.fleet_http_client import FleetHttpClient
        from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

        hush()
        self.server, self.enrolled, self.interval_s = server, enrolled, HEARTBEAT_DEFAULT_INTERVAL
        self._public, self._node = public_key_to_bytes(key.public_key()), Node(node_id=0)
        signed = [
            RuntimeVersionHttpInterceptor(component_name="SuperNode"),
            NodeAuthHttpInterceptor(key, key.public_key()),
        ]
        self._client = FleetHttpClient.from_server_address(server, ca is None, ca, signed)

    def enter(self, node: int = 0) -> int:
        """Be there, or be there anew, and get the node id that goes with the key; `node` is the one that it had, 0 = none that is known.

        Raises UserError for a key that is not let in.
        """
        import httpx
        from flwr.proto.fleet_pb2 import ActivateNodeRequest, RegisterNodeFleetRequest

        self._node.node_id = node or self._node.node_id
        self.leave()  # who is still taken to be there could not come
        request = ActivateNodeRequest(public_key=self._public, heartbeat_interval=self.interval_s)
        with _reaching(self.server):
            try:
                self._node.node_id = self._client.ActivateNode(request).node_id
                return self._node.node_id
            except httpx.HTTPStatusError as error:
                code = error.response.status_code
                if code == 401 and self.enrolled:
                    raise UserError(
                        f"{self.server} does not let this client's key in; ask for a new enrolment file, and see that this "
                        "machine's clock is right"
                    ) from error
                if code in (401, 408, 429) or code >= 500:
                    raise
            try:
                self._client.RegisterNode(RegisterNodeFleetRequest(public_key=self._public))
            except httpx.HTTPStatusError as error:
                if (
                    error.response.status_code in (401, 408, 429)
                    or error.response.status_code >= 500
                ):
                    raise
                raise UnreachableError(
                    f"{self.server} takes this client to be there already: another one uses its key, or it was here "
                    "until a minute ago",
                    "starting",
                ) from error
            self._node.node_id = self._client.ActivateNode(request).node_id
        return self._node.node_id

    def heartbeat(self) -> None:
        """Say that the client is alive; to be done every `interval_s`. May be called from another thread."""
        from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest

        with _reaching(self.server):
            self._client.SendNodeHeartbeat(
                SendNodeHeartbeatRequest(node=self._node, heartbeat_interval=self.interval_s)
            )

    def receive(self) -> Message | None:
        """The next message, if there is one."""
        from flwr.proto.fleet_pb2 import PullMessagesRequest
        from flwr.supercore.inflatable.inflatable_protobuf_utils import (
            make_confirm_message_received_fn_protobuf,
            make_pull_object_fn_protobuf,
        )
        from flwr.supercore.inflatable.inflatable_utils import ObjectPullError

        with _reaching(self.server):
            answer = self._client.PullMessages(PullMessagesRequest(node=self._node))
            if not answer.messages_list:
                return None
            coming = Coming(answer.messages_list[0], answer.message_object_trees[0])
            deadline = time.monotonic() + PATIENCE_S
            pull = make_pull_object_fn_protobuf(self._client.PullObject, self._node, coming.run)
            pause_s, longest_s = OBJECTS_S
            try:
                while (message := coming.take(pull)) is None:
                    if time.monotonic() > deadline:
                        raise UnreachableError(
                            f"{self.server} announced a message that does not come", "network"
                        )
                    time.sleep(pause_s)
                    pause_s = min(longest_s, 2 * pause_s)
            except (ObjectPullError, ValueError) as error:
                raise UnreachableError(
                    f"{self.server} announced a message that did not come whole ({error})",
                    "network",
                ) from error
            make_confirm_message_received_fn_protobuf(
                self._client.ConfirmMessageReceived, self._node, coming.run
            )(coming.name)
        return message

    def reply(self, content: RecordDict, to: Message, seconds: float) -> None:
        """Answer a message, which took `seconds` of work."""
        from flwr.proto.fleet_pb2 import PushMessagesRequest
        from flwr.supercore.inflatable.inflatable_object import no_object_id_recompute
        from flwr.supercore.inflatable.inflatable_protobuf_utils import make_push_object_fn_protobuf

        with no_object_id_recompute(), _reaching(self.server):
            going = Going(Message(content, reply_to=to))
            request = PushMessagesRequest(
                node=self._node,
                messages_list=[going.head],
                message_object_trees=[going.tree],
                clientapp_runtime_list=[seconds],
            )
            answer = self._client.PushMessages(request)
            push = make_push_object_fn_protobuf(
                self._client.PushObject, self._node, to.metadata.run_id, answer.session_id
            )
            if send_parts([going], answer.objects_to_push, push):
                raise UnreachableError(f"{self.server} did not take the reply", "network")

    def leave(self) -> None:
        """Say that the client goes; its place stays."""
        from flwr.proto.fleet_pb2 import DeactivateNodeRequest

        with suppress(UserError), _reaching(self.server):
            if self._node.node_id:
                self._client.DeactivateNode(DeactivateNodeRequest(node_id=self._node.node_id))

    def close(self) -> None:
        self._client.close()


def _only_record(tree: Any) -> Any | None:
    """Of a message as a tree of objects, the one record that every message of ours has; what is above it is known without it."""
    below = [record for records in tree.children for record in records.children]
    return below[0] if len(below) == len(tree.children) == 1 else None


class Going:
    """A message as it is sent: the head, the tree of its objects, and these. To be made where flwr does not compute ids anew."""

    def __init__(self, message: Message):
        from flwr.app.message import remove_content_from_message
        from flwr.common.serde import message_to_proto
        from flwr.supercore.inflatable.inflatable_object import (
            get_all_nested_objects,
            get_object_tree,
            iterate_object_tree,
        )

        message.metadata.__dict__["_message_id"] = message.object_id
        self.head = message_to_proto(remove_content_from_message(message))
        self.tree = get_object_tree(message)
        self.objects = get_all_nested_objects(message)
        only = _only_record(self.tree)
        self.last = (
            {part.object_id for part in iterate_object_tree(only)} if only is not None else set()
        )


def send_parts(
    messages: Sequence[Going],
    wanted: Iterable[str],
    push: Callable[[str, bytes], None],
    at_once: Executor | None = None,
) -> set[str]:
    """Send the objects of messages that are wanted. Returns the names of those that were missed and not taken.

    Who fetches a record takes the message for whole, so records go last; what is above one is not missed once it was fetched. Few
    objects exist as bytes at a time, however many `at_once` sends.
    """
    from flwr.supercore.inflatable.inflatable_utils import ObjectPushError

    def send(name: str, data: bytes) -> str:
        try:
            push(name, data)
        except ObjectPushError:
            return name
        return ""

    wanted, last = set(wanted), set().union(*(going.last for going in messages))
    objects = {
        name: part for going in messages for name, part in going.objects.items() if name in wanted
    }
    first, then = ([name for name in objects if (name in last) is late] for late in (False, True))
    _each(send, ((name, objects[name].deflate()) for name in first), at_once)
    return set(_each(send, ((name, objects[name].deflate()) for name in then), at_once)) - {""}


def _each(work: Callable[..., T], calls: Iterable[tuple], at_once: Executor | None) -> list[T]:
    """The results of these calls, some of which are made at once; so many arguments exist at a time."""
    if at_once is None:
        return [work(*call) for call in calls]
    going: deque[Future[T]] = deque()
    results = []
    for call in calls:
        if len(going) == AT_ONCE:
            results.append(going.popleft().result())
        going.append(at_once.submit(work, *call))
    return results + [future.result() for future in going]


class Coming:
    """A message that is announced, whose parts are fetched: they may be on their way still, and of an announcement nobody hears twice."""

    def __init__(self, head: Any, tree: Any):
        from flwr.common.serde import message_from_proto
        from flwr.supercore.inflatable.inflatable_object import iterate_object_tree

        self.head, self.tree, self.contents = message_from_proto(head), tree, {}
        self.run = head.metadata.run_id
        self.name = tree.object_id
        self.reply_to = head.metadata.reply_to_message_id
        self.only = _only_record(tree)
        self.parts = [part.object_id for part in iterate_object_tree(self.only or tree)]

    def take(self, pull: Callable[[str], bytes]) -> Message | None:
        """The message, or None while it is not whole. Raises flwr's ObjectPullError, or ValueError, when it never will be."""
        from flwr.app.message import make_message
        from flwr.supercore.inflatable.inflatable_utils import (
            ObjectUnavailableError,
            inflate_object_from_contents,
        )

        if self.head.has_error():
            return self.head
        try:
            for part in self.parts:
                if part not in self.contents:
                    self.contents[part] = pull(part)
        except ObjectUnavailableError:
            return None
        if self.only is not None:
            record = inflate_object_from_contents(
                self.only.object_id, self.contents, keep_object_contents=False
            )
            message = make_message(
                metadata=self.head.metadata, content=RecordDict({MESSAGE: record})
            )
        else:
            message = inflate_object_from_contents(
                self.name, self.contents, keep_object_contents=False
            )
        message.metadata.__dict__["_message_id"] = self.name
        return message


@dataclass(frozen=True)
class Place:
    """A client as a SuperLink knows it."""

    node: int
    key: bytes  # public, PEM
    since: float  # when it last came or came back, in seconds


class Task:
    """The one run of a SuperLink, taken on by this process in place of one that Flower would start: its Grid, and who is there."""

    def __init__(self, address: str, secret: bytes):
        from flwr.common.serde import run_from_proto
        from flwr.proto.runtime_pb2 import PullTaskInputRequest
        from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
        from flwr.superlink.grid import HttpGrid

        hush()
        self.server = address
        self._coming: list[Coming] = []
        self._at_once = ThreadPoolExecutor(AT_ONCE, "flower-objects")
        with _reaching(address):
            self.grid = HttpGrid(address, insecure=True, token=self._acquire(address, secret))
            self.grid._retry_invoker.max_time = PATIENCE_S
            self._client = self.grid._runtime_client
            self._heart = HeartbeatSender(make_task_heartbeat_fn_http(self._client))
            self._heart.start()
            given = self._client.PullTaskInput(PullTaskInputRequest())
        TaskIdentity.task_id = given.task_id
        TaskIdentity.run_id = given.run.run_id
        TaskIdentity.node_id = given.context.node_id
        self.grid.set_run(run_from_proto(given.run))

    @staticmethod
    def _acquire(address: str, secret: bytes) -> str:
        """The token of the run that waits to be taken on."""
        from flwr.proto.runtime_pb2 import AcquireTaskRequest
        from flwr.supercore.constant import TaskType
        from flwr.supercore.interceptors import (
            RuntimeVersionHttpInterceptor,
            SuperExecAuthHttpInterceptor,
        )
        from flwr.supercore.runtime import RuntimeHttpClient

        proof = SuperExecAuthHttpInterceptor(
            master_secret=secret, protected_methods={"/flwr.proto.Runtime/AcquireTask"}
        )
        told = [RuntimeVersionHttpInterceptor(component_name="SuperExec"), proof]
        with RuntimeHttpClient.from_server_address(address, True, None, told) as client:
            answer = client.AcquireTask(
                AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP])
            )
        if not answer.token:
            raise ProtocolError(
                f"the SuperLink at {address} has no run to take on; start the server again"
            )
        return answer.token

    def places(self) -> list[Place]:
        """Who is there now."""
        with _reaching(self.server):
            nodes = self.grid.get_nodes()
        return [
            Place(
                node.node_id,
                node.public_key,
                datetime.fromisoformat(node.last_activated_at).timestamp(),
            )
            for node in nodes
        ]

    def finish(self, whole: bool) -> None:
        """The run is over, `whole` or not."""
        from flwr.common.constant import SubStatus
        from flwr.proto.runtime_pb2 import PushTaskOutputRequest

        self.grid._retry_invoker.max_tries = 1
        self._heart._stop_event.set()
        self._at_once.shutdown(cancel_futures=True)
        with suppress(UserError), _reaching(self.server):
            self._client.PushTaskOutput(
                PushTaskOutputRequest(
                    sub_status=SubStatus.COMPLETED if whole else SubStatus.STOPPED, details=""
                )
            )
        self.grid.close()

    def push(self, messages: Sequence[Message]) -> list[str]:
        """Send messages; their ids, "" for one that could not be sent.

        A few at a time: a message is announced with its batch, and who hears of it asks for its parts until they are there.
        """
        from flwr.supercore.inflatable.inflatable_object import no_object_id_recompute

        with no_object_id_recompute(), _reaching(self.server):
            return [
                name
                for i in range(0, len(messages), BATCH)
                for name in self._push(messages[i : i + BATCH])
            ]

    def _push(self, messages: Sequence[Message]) -> list[str]:
        from flwr.proto.runtime_pb2 import PushAppMessagesRequest
        from flwr.supercore.inflatable.inflatable_protobuf_utils import make_push_object_fn_protobuf

        going = [Going(message) for message in messages]
        request = PushAppMessagesRequest(
            messages_list=[g.head for g in going], message_object_trees=[g.tree for g in going]
        )
        answer = self._client.PushMessages(request)
        push = make_push_object_fn_protobuf(
            self._client.PushObject, self.grid.node, self.grid.run.run_id, answer.session_id
        )
        missed = send_parts(going, answer.objects_to_push, push, self._at_once)
        return [
            "" if missed & g.last else name
            for g, name in zip(going, answer.message_ids, strict=True)
        ]

    def pull(self, names: Iterable[str]) -> list[Message]:
        """Replies to messages with these ids, as far as they are whole. One that is not holds nobody up."""
        from flwr.proto.runtime_pb2 import PullAppMessagesRequest

        if not (names := set(names)):
            return []
        waiting = [coming for coming in self._coming if coming.reply_to in names]
        others = [coming for coming in self._coming if coming.reply_to not in names][-LATE:]
        unheard = names - {
            coming.reply_to for coming in waiting
        }  # who is asked again for what was announced has forgotten it
        with _reaching(self.server):
            if unheard:
                answer = self._client.PullMessages(PullAppMessagesRequest(message_ids=unheard))
                waiting += [
                    Coming(*pair)
                    for pair in zip(answer.messages_list, answer.message_object_trees, strict=True)
                ]
            self._coming = others + waiting
            taken = _each(self._take, ((coming,) for coming in waiting), self._at_once)
        self._coming = others + [
            coming
            for coming, (message, lost) in zip(waiting, taken, strict=True)
            if message is None and not lost
        ]
        return [message for message, _ in taken if message is not None]

    def _take(self, coming: Coming) -> tuple[Message | None, bool]:
        """A reply if it is whole, and else whether it never will be: its sender was cut off, and is asked again when it is back."""
        from flwr.supercore.inflatable.inflatable_protobuf_utils import (
            make_confirm_message_received_fn_protobuf,
            make_pull_object_fn_protobuf,
        )
        from flwr.supercore.inflatable.inflatable_utils import ObjectPullError

        try:
            message = coming.take(
                make_pull_object_fn_protobuf(self._client.PullObject, self.grid.node, coming.run)
            )
        except (ObjectPullError, ValueError):
            return None, True
        if message is not None:
            make_confirm_message_received_fn_protobuf(
                self._client.ConfirmMessageReceived, self.grid.node, coming.run
            )(coming.name)
        return message, False


def readdress(reply: Message, name: str) -> Message:
    """A reply as one to another message: the same question was asked twice."""
    reply.metadata.__dict__["_reply_to_message_id"] = name
    return reply
