"""Messages whose parts are on their way, over a real SuperLink: what was announced is waited for, and comes once."""

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Message
from loopback import wait_until

from fedcomp.clients.flower import Fleet, Going, from_records, send_parts, to_records
from fedcomp.messages import Farewell, Presence

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(300)]


@pytest.fixture
def client(network):
    """A client that is there, and its node."""
    fleet = Fleet(
        f"127.0.0.1:{network.guard.port}",
        ec.generate_private_key(ec.SECP384R1()),
        None,
        enrolled=False,
    )
    node = fleet.enter()
    yield fleet, node
    fleet.leave()
    fleet.close()


def asked(network, node, rounds):
    return [
        Message(to_records(Farewell("a run", round)), node, "query.leave", group_id="")
        for round in rounds
    ]


def received(fleet):
    found = []
    wait_until(
        lambda: (message := fleet.receive()) is not None and (found.append(message) or True), 60.0
    )
    return found[0]


def announce(network, fleet, message):
    """The head of a reply and no part of it yet; what is left to do."""
    from flwr.proto.fleet_pb2 import PushMessagesRequest
    from flwr.supercore.inflatable.inflatable_object import no_object_id_recompute
    from flwr.supercore.inflatable.inflatable_protobuf_utils import make_push_object_fn_protobuf

    with no_object_id_recompute():
        going = Going(Message(to_records(Presence("a run", 3, "", "")), reply_to=message))
        request = PushMessagesRequest(
            node=fleet._node,
            messages_list=[going.head],
            message_object_trees=[going.tree],
            clientapp_runtime_list=[0.0],
        )
        answer = fleet._client.PushMessages(request)
    push = make_push_object_fn_protobuf(
        fleet._client.PushObject, fleet._node, message.metadata.run_id, answer.session_id
    )

    def rest():
        with no_object_id_recompute():
            assert not send_parts([going], answer.objects_to_push, push)

    return rest


def test_a_reply_that_was_announced_before_its_parts_came_is_waited_for(network, client):
    fleet, node = client
    (name,) = network.task.push(asked(network, node, [1]))
    rest = announce(network, fleet, received(fleet))
    assert [network.task.pull({name}) for _ in range(3)] == [[], [], []]
    rest()
    (reply,) = network.task.pull({name})
    assert not reply.has_error() and from_records(reply.content, Presence).client == 3


def test_one_that_is_not_whole_holds_up_no_other(network, client):
    fleet, node = client
    late, whole = network.task.push(asked(network, node, [1, 2]))
    messages = {
        from_records(m.content, Farewell).round: m for m in (received(fleet), received(fleet))
    }
    rest = announce(network, fleet, messages[1])
    fleet.reply(to_records(Presence("a run", 4, "", "")), messages[2], 0.0)
    replies = []
    wait_until(lambda: replies.extend(network.task.pull({late, whole})) or replies, 60.0)
    assert [from_records(reply.content, Presence).client for reply in replies] == [
        4
    ] and network.task.pull({late}) == []
    rest()
    assert [
        from_records(reply.content, Presence).client for reply in network.task.pull({late})
    ] == [3]


def test_more_messages_than_go_in_a_batch_all_arrive_and_keep_their_names(network, client):
    fleet, node = client
    rounds = range(1, 41)
    names = network.task.push(asked(network, node, rounds))
    assert len(set(names)) == 40 and all(names)
    heard = {}
    for _ in rounds:
        message = received(fleet)
        heard[message.metadata.message_id] = from_records(message.content, Farewell).round
    assert [heard[name] for name in names] == list(rounds)


def test_one_that_is_announced_is_remembered_while_others_are_asked_for(network, client):
    """As the late answer of a client that was given up is looked for now and then."""
    fleet, node = client
    late, other = network.task.push(asked(network, node, [1, 2]))
    messages = {
        from_records(m.content, Farewell).round: m for m in (received(fleet), received(fleet))
    }
    rest = announce(network, fleet, messages[1])
    assert network.task.pull({late}) == [] and network.task.pull({other}) == []
    rest()
    assert [
        from_records(reply.content, Presence).client for reply in network.task.pull({late, other})
    ] == [3]
