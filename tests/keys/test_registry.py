"""A malformed registry is an error that names line or field; a running server accepts no client until it is repaired."""

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from fedcomp.errors import KeysError
from fedcomp.keys import key_folder as keys
from fedcomp.keys.enrolment import Enrolment, format_time, openssh, utc_now
from fedcomp.keys.key_folder import read_registry
from fedcomp.keys.registry import (
    ENROLLED,
    REVOKED,
    Registry,
    RegistryContent,
    RegistryEntry,
    read_file,
    registry_text,
)


@pytest.fixture
def folder(tmp_path) -> Path:
    keys.make(tmp_path / "keys", 2)
    return tmp_path / "keys"


def client(folder: Path, id: int) -> Enrolment:
    return Enrolment.read(folder / "clients" / f"{id}.toml")


def refused(act) -> str:
    with pytest.raises(KeysError) as raised:
        act()
    assert str(raised.value).isprintable()
    return str(raised.value)


def entries(count: int) -> list[RegistryEntry]:
    lines = [openssh(ec.generate_private_key(ec.SECP384R1()).public_key()) for _ in range(count)]
    return [
        RegistryEntry(id, line, ENROLLED, utc_now().replace(microsecond=0) + timedelta(days=1))
        for id, line in enumerate(lines)
    ]


def test_a_written_registry_is_read_back(tmp_path):
    made = entries(4)
    made[1] = replace(made[1], state=REVOKED, replaced=(made.pop().public_key,))
    (tmp_path / "registry.toml").write_text(registry_text(reversed(made), "server.example:1"))
    assert read_file(tmp_path / "registry.toml") == RegistryContent(
        tuple(made), (), "server.example:1"
    )


def relays(count: int) -> list[RegistryEntry]:
    return [replace(entry, relay=True) for entry in entries(count)]


def test_written_relays_are_read_back(tmp_path):
    clients, path = entries(2), tmp_path / "registry.toml"
    made = relays(3)
    made[1] = replace(made[1], state=REVOKED, replaced=(made.pop().public_key,))
    path.write_text(registry_text([*reversed(made), *reversed(clients)], None))
    assert read_file(path) == RegistryContent(tuple(clients), tuple(made))
    path.write_text(registry_text(made, None))
    assert read_file(path) == RegistryContent((), tuple(made))
    assert [entry.holder for entry in [*clients, *made]] == [0, 1, "relay-0", "relay-1"]


def test_a_relays_key_is_not_accepted_as_a_clients(folder):
    mine = client(folder, 0)
    (id, _), registry = keys.add_relay(folder, ["relay.example"]), read_registry(folder)
    theirs = Enrolment.read(folder / "relays" / f"{id}.toml")
    assert [entry.id for entry in registry.relays] == [0]
    assert [entry.id for entry in registry.entries] == [0, 1]
    assert (registry.find(theirs.key_hash).relay, registry.find(theirs.key_hash).client) == (
        0,
        None,
    )
    assert (registry.find(mine.key_hash).relay, registry.find(mine.key_hash).client) == (None, 0)
    assert registry.ids_by_hash() == {client(folder, i).key_hash: i for i in range(2)}
    assert registry.enrolled().keys() == {0, 1}


def test_a_relay_keeps_its_entry_when_clients_change(folder):
    keys.add_relay(folder, ["relay.example"])
    before = read_registry(folder).relays
    keys.add(folder, 2), keys.revoke(folder, 0), keys.renew(folder, 1)
    assert read_registry(folder).relays == before
    assert [entry.id for entry in read_registry(folder).entries] == [0, 1, 2, 3]
    keys.renew(folder, "relay-0")
    (after,) = read_registry(folder).relays
    assert after.replaced == (before[0].public_key,) and after.public_key != before[0].public_key


def test_the_table_of_keys_follows_changes_of_the_file(folder):
    later = utc_now() + timedelta(days=366)
    assert Registry(folder / "registry.toml", now=lambda: later).ids_by_hash() == {}
    registry, renewed = read_registry(folder), client(folder, 0)
    keys.renew(folder, 0), keys.revoke(folder, 1)
    assert registry.ids_by_hash() == {client(folder, 0).key_hash: 0}
    assert renewed.key_hash not in registry.ids_by_hash()
    (folder / "registry.toml").write_text("???")
    assert registry.ids_by_hash() == {}


def malformed():
    a, b, c = entries(3)
    whole = registry_text([a, b], None)
    yield (
        "two keys with one id",
        registry_text([a, replace(b, id=0)], None),
        ": client 0 has two keys; remove one of its two",
    )
    yield (
        "two ids with one key",
        registry_text([a, replace(b, public_key=a.public_key)], None),
        ": client 0 and client 1 have the same key; remove the .*new client with: fedcomp keys add",
    )
    yield (
        "a replaced key of another",
        registry_text([a, replace(b, replaced=(a.public_key,))], None),
        ": client 0 and client 1 have the same key; ",
    )
    yield (
        "its own replaced key",
        registry_text([replace(a, replaced=(c.public_key, a.public_key))], None),
        ": client 0: 'public_key' is also in",
    )
    yield (
        "an id",
        whole.replace("id = 1", "id = -1"),
        r": \[\[client\]\] number 2: 'id' is not a whole number from 0",
    )
    yield "no id", whole.replace("id = 1\n", ""), r": \[\[client\]\] number 2: 'id' is missing; "
    yield (
        "a state",
        whole.replace('"enrolled"', '"enroled"', 1),
        ": client 0: 'state' is not 'enrolled' or 'revoked'; correct it",
    )
    yield (
        "a list as state",
        whole.replace('"enrolled"', "[]", 1),
        ": client 0: 'state' is not 'enrolled' or 'revoked'; correct it",
    )
    yield (
        "a date",
        whole.replace(format_time(a.not_after), "soon", 1),
        ": client 0: 'not_after' is not a date such as",
    )
    yield (
        "a key",
        whole.replace(b.public_key, b.public_key[:60]),
        ": client 1: 'public_key' is not an EC P-384 public key",
    )
    yield (
        "replaced",
        registry_text([replace(a, replaced=("x",))], None),
        ": client 0: 'replaced' is not a list of EC",
    )
    yield (
        "replaced as text",
        whole + 'replaced = "x"\n',
        ": client 1: 'replaced' is not a list of EC",
    )
    yield "client", "client = 3\n", r": 'client' is not a list of tables with \[\[client\]\] above"
    yield (
        "clients",
        "client = [3]\n",
        r": 'client' is not a list of tables with \[\[client\]\] above",
    )
    d, e = relays(2)
    yield (
        "a key of a client and a relay",
        registry_text([a, replace(d, public_key=a.public_key)], None),
        ": client 0 and relay 0 have the same key; remove the \\[\\[relay\\]\\] table of relay 0, .*add --relay",
    )
    yield (
        "a replaced key of a relay",
        registry_text([replace(a, replaced=(d.public_key,)), d], None),
        ": client 0 and relay 0 have the same key",
    )
    yield (
        "two relays with one id",
        registry_text([a, d, replace(e, id=0)], None),
        r": relay 0 has two keys; remove one of its two \[\[relay\]\]",
    )
    yield (
        "an id of a relay",
        registry_text([d], None).replace("id = 0", 'id = "relay-0"'),
        r": \[\[relay\]\] number 1: 'id' is not a whole number from 0",
    )
    yield (
        "a state of a relay",
        registry_text([a, replace(d, state="x")], None),
        ": relay 0: 'state' is not 'enrolled' or 'revoked'",
    )
    yield (
        "relay",
        "relay = 3\n" + whole,
        r": 'relay' is not a list of tables with \[\[relay\]\] above",
    )
    yield "server", "server = 3\n" + whole, ": 'server' is not a text such as"
    yield "a line", whole + "???\n", r" is not TOML: .*\(at line 13, column 1\); correct it"
    yield "a cut", whole[:-40], " is not TOML: "


@pytest.mark.parametrize(
    ("text", "output"), [pytest.param(text, output, id=name) for name, text, output in malformed()]
)
def test_a_malformed_registry_names_file_and_line_or_field(text, output, tmp_path, folder):
    path = folder / "registry.toml"
    registry, key, whole = (
        read_registry(folder),
        client(folder, 0).key_hash,
        path.read_text(),
    )
    assert registry.find(key).client == 0
    path.write_text(text)
    for act in (lambda: read_file(path), lambda: read_registry(folder)):
        if not output.startswith(": 'server'"):
            assert re.match(re.escape(str(path)) + output, refused(act))
    before = sorted(path.read_bytes() for path in folder.rglob("*.*") if path.is_file())
    assert re.match(re.escape(str(path)) + output, refused(lambda: keys.add(folder)))
    assert sorted(path.read_bytes() for path in folder.rglob("*.*") if path.is_file()) == before

    # A running server accepts no client and gives the reason, until the file is repaired.
    assert registry.find(key).client is None and registry.enrolled() == {}
    assert registry.find(key).reason == registry.problem and re.match(
        re.escape(str(path)) + output, registry.problem
    )
    path.write_text(whole)
    assert registry.find(key).client == 0 and registry.problem == ""


def test_a_missing_registry_refuses_all_keys(folder):
    registry, key = read_registry(folder), client(folder, 0).key_hash
    (folder / "registry.toml").rename(folder / "elsewhere")
    assert (
        registry.find(key).client is None
        and "cannot be read (No such file or directory)" in registry.find(key).reason
    )
    (folder / "elsewhere").rename(folder / "registry.toml")
    assert registry.find(key).client == 0


def test_a_registry_that_loses_all_clients_counts_as_damaged(folder):
    path = folder / "registry.toml"
    registry, key, whole = (
        read_registry(folder),
        client(folder, 0).key_hash,
        path.read_text(),
    )
    path.write_text("")
    assert "has no clients any more" in registry.problem
    path.write_text("# nothing\n")
    assert "has no clients any more" in registry.problem
    path.write_text(whole)
    assert registry.problem == "" and registry.find(key).client == 0


# Look-up by key hash.


def test_a_key_hash_identifies_its_client_or_gives_the_reason_for_a_refusal(folder):
    registry, renewed, revoked = read_registry(folder), client(folder, 0), client(folder, 1)
    assert [registry.find(one.key_hash).client for one in (renewed, revoked)] == [0, 1]
    assert registry.find(renewed.key_hash).reason == ""
    assert not registry.poll(print)
    keys.renew(folder, 0)
    keys.revoke(folder, 1)
    assert registry.find(revoked.key_hash).client is None
    assert registry.find(renewed.key_hash).client is None
    assert registry.find(client(folder, 0).key_hash).client == 0
    assert registry.find(renewed.key_hash).reason == (
        "this key was replaced when client 0 was renewed; give client 0 the new clients/0.toml"
    )
    assert registry.find(revoked.key_hash).reason == (
        f"client 1 is revoked; to accept it again: fedcomp keys renew 1 --keys {folder}"
    )
    assert sorted(registry.enrolled()) == [0]
    assert registry.poll(print) and not registry.poll(print)
    keys.revoke(folder, 1)
    assert registry.find(revoked.key_hash).client is None


@pytest.mark.parametrize("stranger", [bytes(32), b"", b"no hash"])
def test_an_unknown_key_hash_is_refused(stranger, folder):
    registry = read_registry(folder)
    assert registry.find(stranger).client is None
    assert registry.find(stranger).reason == (
        f"the key of this client or relay is not in {folder}/registry.toml; make a new enrolment with: fedcomp keys add --keys {folder}"
    )


def test_the_hash_of_an_expired_key_is_refused(folder):
    later = utc_now() + timedelta(days=366)
    registry, mine = Registry(folder / "registry.toml", now=lambda: later), client(folder, 0)
    assert registry.find(mine.key_hash).client is None and registry.enrolled() == {}
    assert registry.find(mine.key_hash).reason == (
        f"the key of client 0 expired on {format_time(mine.not_after)}; make a new one: fedcomp keys renew 0 --keys {folder}"
    )


def test_many_threads_look_keys_up_while_the_file_changes(folder):
    registry, mine, over = read_registry(folder), client(folder, 0), threading.Event()

    def ask() -> list[int | None]:
        found = []
        while not over.is_set():
            found.append(registry.find(mine.key_hash).client)
            assert registry.problem == ""
        return found

    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(ask) for _ in range(4)]
        for _ in range(10):
            keys.add(folder)
        over.set()
        assert all(set(one.result()) <= {0} for one in asked)
    assert len(registry.enrolled()) == 12
