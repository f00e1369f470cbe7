"""The registry: which key belongs to which client or relay. Each client and relay has one key, and no key has two holders.

    server = "server.example:8080"               the server's address, for the enrolment files of new clients
    [[client]]
    id = 3
    state = "enrolled"                           or "revoked"
    not_after = "2027-11-21T16:33:08Z"           the end of its certificate
    public_key = "ecdsa-sha2-nistp384 AAAA..."
    replaced = []                                its earlier keys, which stay refused
    [[relay]]                                    a relay, with the same fields; ids of relays and of clients are separate

Clients and relays are looked up by the SHA-256 of their certificate's public key (`key_hash` in enrolment.py).
"""

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from time import monotonic
from typing import Any

import tomli_w

from ..config import KEYS, keys_command
from ..errors import KeysError
from .enrolment import (
    LARGEST_ID,
    iso,
    key_hash,
    logical_id,
    moment,
    openssh,
    public_key,
    read_toml,
    take,
    utc_now,
)

ENROLLED, REVOKED = "enrolled", "revoked"
REMEDY = "correct it, or restore the file from a copy"
CHECK_S = 0.5  # least time between two checks of the file by methods that are called often
HEAD = "# The public key of each client and relay. Written by `fedcomp keys`; the server rereads it when it changes.\n"


@dataclass(frozen=True)
class Entry:
    """A client or a relay in the registry."""

    id: int
    public_key: str  # OpenSSH, one line
    state: str  # ENROLLED or REVOKED
    not_after: datetime  # UTC
    replaced: tuple[str, ...] = ()  # earlier keys, which stay refused
    relay: bool = False

    @property
    def name(self) -> str:
        """The name in messages."""
        return f"relay {self.id}" if self.relay else f"client {self.id}"

    @property
    def holder(self) -> int | str:
        """The argument of `fedcomp keys revoke` and `renew`: a client's id, or a text such as "relay-0"."""
        return f"relay-{self.id}" if self.relay else self.id

    def refused(self, now: datetime, folder: str | Path = KEYS) -> str:
        """Return why the key is refused and how to renew it in `folder`, the folder of keys; "" if it is accepted."""
        if self.state == REVOKED:
            return f"{self.name} is revoked; to let it in again: {keys_command(folder, 'renew', self.holder)}"
        if now >= self.not_after:
            renew = keys_command(folder, "renew", self.holder)
            return f"the key of {self.name} ended on {iso(self.not_after)}; make a new one: {renew}"
        return ""


@dataclass(frozen=True)
class _Content:
    """The content of a registry.toml when it was read."""

    entries: tuple[Entry, ...]  # clients
    relays: tuple[Entry, ...]
    problem: str  # why the file cannot be used, "" if it can
    version: int  # number of times that the file was read
    holders: dict[bytes, tuple[Entry, bool]]  # key hash → entry, and whether the key was replaced


class Registry:
    """The current content of registry.toml: the file is read again whenever it has changed.

    All methods may be called from any thread. The constructor raises KeysError if the file cannot be read. If the file becomes malformed
    later, no client is accepted until it is repaired, and `problem` returns the reason.
    """

    def __init__(self, path: Path, now: Callable[[], datetime] = utc_now):
        self.path, self.now = path, now
        self._seen, self._looked = self._stamp(), monotonic()
        self._reading = threading.Lock()
        entries, relays, _ = read_file(path)
        self._content = _Content(entries, relays, "", 1, _holders([*entries, *relays]))

    @property
    def entries(self) -> tuple[Entry, ...]:
        """All clients in the order of their ids; none while the file is malformed."""
        return self._look().entries

    @property
    def relays(self) -> tuple[Entry, ...]:
        """All relays in the order of their ids; none while the file is malformed."""
        return self._look().relays

    @property
    def problem(self) -> str:
        """The reason why the file cannot be used, "" if it can."""
        return self._look().problem

    @property
    def version(self) -> int:
        """The number of times that the file was read. It grows at most CHECK_S after the file has changed.

        When it grows, a server calls `id_of_hash` again for each connected client. A key can expire without a new version.
        """
        return self._glance().version

    def id_of_hash(self, key_hash: bytes) -> int | None:
        """Return the logical id of the client with this key hash, None if it is refused. `reason_of_hash` returns the reason.

        This is a dict lookup. A change of the file takes effect at most CHECK_S later.
        """
        entry, why = self._judged(self._glance(), key_hash)
        return entry.id if entry and not why and not entry.relay else None

    def relay_of_hash(self, key_hash: bytes) -> int | None:
        """Return the id of the relay with this key hash, None if it is refused. `reason_of_hash` returns the reason."""
        entry, why = self._judged(self._glance(), key_hash)
        return entry.id if entry and not why and entry.relay else None

    def reason_of_hash(self, key_hash: bytes) -> str:
        """Return why the client or relay with this key hash is refused, as one sentence; "" if it is accepted."""
        return self._judged(self._glance(), key_hash)[1]

    def ids_by_hash(self) -> dict[bytes, int]:
        """Return key hash → logical id of all clients that are accepted now."""
        now = self.now()
        return {
            _parsed(entry.public_key)[1]: entry.id
            for entry in self.entries
            if not entry.refused(now)
        }

    def id_of(self, key: bytes | str) -> int | None:
        """Return the logical id of the client with this public key, PEM or OpenSSH, None if it is refused."""
        content, hashed = self._look(), _hash(key)
        entry, why = self._judged(content, hashed) if hashed else (None, "no key")
        return entry.id if entry and not why and not entry.relay else None

    def reason(self, key: bytes | str) -> str:
        """Return why a public key is refused, as one sentence; "" if it is accepted."""
        content, hashed = self._look(), _hash(key)
        if hashed is None and not content.problem:
            return f"its key is not an EC P-384 public key; give it its file from {self.path.parent / 'clients'}"
        return self._judged(content, hashed or b"")[1]

    def enrolled(self) -> dict[int, str]:
        """Return logical id → public key (one OpenSSH line) of all clients that are accepted now."""
        now = self.now()
        return {entry.id: entry.public_key for entry in self.entries if not entry.refused(now)}

    def write_public_keys(self, folder: Path) -> dict[int, Path]:
        """Write a file `ID.pub`, as `flwr supernode register` reads it, for each accepted client. Return id → path."""
        written = {}
        for id, line in self.enrolled().items():
            written[id] = folder / f"{id}.pub"
            written[id].write_text(f"{line} client-{id}\n", encoding="ascii")
        return written

    def _judged(self, content: _Content, key_hash: bytes) -> tuple[Entry | None, str]:
        """Return the entry of a key hash, None if it is unknown, and the reason for a refusal, "" if it is accepted."""
        if content.problem:
            return None, content.problem
        if key_hash not in content.holders:
            return (
                None,
                f"its key is not in {self.path}; enrol it with: {keys_command(self.path.parent, 'add')}",
            )
        entry, replaced = content.holders[key_hash]
        if replaced:
            return (
                entry,
                f"its key was replaced when {entry.name} was renewed; give it the new {'relays' if entry.relay else 'clients'}/"
                f"{entry.id}.toml",
            )
        return entry, entry.refused(self.now(), self.path.parent)

    def _stamp(self) -> tuple[int, ...]:
        """Return inode, size and modification time of the file; () if it is not there."""
        try:
            status = os.stat(self.path)
        except OSError:
            return ()
        return status.st_ino, status.st_size, status.st_mtime_ns

    def _glance(self) -> _Content:
        """Return the content, at most CHECK_S old, or the previous one while another thread reads the file."""
        if monotonic() - self._looked >= CHECK_S and self._reading.acquire(blocking=False):
            try:
                self._read_again()
            finally:
                self._reading.release()
        return self._content

    def _look(self) -> _Content:
        """Return the current content."""
        with self._reading:
            self._read_again()
        return self._content

    def _read_again(self) -> None:
        self._looked = monotonic()
        if (stamp := self._stamp()) == self._seen:
            return
        old, problem = self._content, ""
        entries: tuple[Entry, ...] = ()
        relays: tuple[Entry, ...] = ()
        try:
            entries, relays, _ = read_file(self.path)
            if not entries and (old.entries or old.problem):
                raise KeysError(
                    f"{self.path} has no clients any more, as if it was emptied; {REMEDY}"
                )
        except KeysError as error:
            problem = str(error)
        holders = _holders([*entries, *relays])
        self._content = _Content(entries, relays, problem, old.version + 1, holders)
        self._seen = stamp


class News:
    """Reports once when a registry becomes malformed, and once when it is repaired."""

    def __init__(self, registry: Registry, say: Callable[[str], None]):
        self.registry, self.say, self._told = registry, say, ""

    def look(self) -> None:
        problem = self.registry.problem
        if problem and problem != self._told:
            self.say(
                f"{problem}; until then no client is accepted, and clients that connect try again"
            )
        elif self._told and not problem:
            self.say(
                f"{self.registry.path} is valid again: {len(self.registry.enrolled())} of its clients are accepted"
            )
        self._told = problem


@lru_cache(1 << 17)  # most entries of a changed registry are the same
def _parsed(key: bytes | str) -> tuple[str, bytes]:
    """Return a public key as one OpenSSH line and its `key_hash`. Raises ValueError."""
    parsed = public_key(key)
    return openssh(parsed), key_hash(parsed)


def _hash(key: bytes | str) -> bytes | None:
    try:
        return _parsed(key)[1]
    except ValueError:
        return None


def read_file(path: Path) -> tuple[tuple[Entry, ...], tuple[Entry, ...], str | None]:
    """Return the clients and the relays of a registry.toml in the order of their ids, and the server's address or None.

    Raises KeysError, which names the file and the line or field.
    """
    table = read_toml(path, REMEDY)
    server = take(
        {"server": ""} | table,
        "server",
        _text,
        "a text such as server.example:8080",
        str(path),
        REMEDY,
    )
    clients, relays = (_entries(table, kind, str(path)) for kind in ("client", "relay"))
    _refuse_shared_keys([*clients, *relays], path)
    return clients, relays, server or None


def _entries(table: dict[str, Any], kind: str, path: str) -> tuple[Entry, ...]:
    """Return the clients or the relays of a registry in the order of their ids."""
    tables = table.get(kind, [])
    if not isinstance(tables, list) or not all(isinstance(one, dict) for one in tables):
        raise KeysError(
            f"{path}: '{kind}' is no list of tables; write [[{kind}]] above each {kind}"
        )
    entries = sorted(
        (_entry(one, kind, number, path) for number, one in enumerate(tables, 1)),
        key=lambda entry: entry.id,
    )
    for one, next in zip(entries, entries[1:]):
        if one.id == next.id:
            raise KeysError(
                f"{path}: {one.name} has two keys; take out one of its two [[{kind}]] tables"
            )
    return tuple(entries)


def _refuse_shared_keys(entries: Sequence[Entry], path: Path) -> None:
    """Raise KeysError if two holders have the same key, or a key is both current and replaced."""
    holders: dict[str, Entry] = {}
    for entry in entries:
        for key in (entry.public_key, *entry.replaced):
            if (other := holders.setdefault(key, entry)) is not entry:
                raise KeysError(
                    f"{path}: {other.name} and {entry.name} have the same key; give one of them its own with: "
                    f"{keys_command(path.parent, 'renew', entry.holder)}, after taking out its [[{'relay' if entry.relay else 'client'}]] "
                    "table"
                )
        if entry.public_key in entry.replaced:
            raise KeysError(
                f"{path}: {entry.name}: 'public_key' is among 'replaced'; take it out there"
            )


def _entry(table: dict[str, Any], kind: str, number: int, path: str) -> Entry:
    """Return the entry of the `number`-th table of a kind, "client" or "relay". Raises KeysError."""

    def key(value: Any) -> str:
        return _parsed(_text(value))[0]

    def state(value: Any) -> str:
        if value not in (ENROLLED, REVOKED):
            raise ValueError("no state")
        return value

    def keys(value: Any) -> tuple[str, ...]:
        if not isinstance(value, list):
            raise ValueError("no list")
        return tuple(map(key, value))

    id = take(
        table,
        "id",
        logical_id,
        f"a whole number from 0 to {LARGEST_ID}",
        f"{path}: [[{kind}]] number {number}",
        REMEDY,
    )
    where = f"{path}: {kind} {id}"
    return Entry(
        id,
        take(table, "public_key", key, "an EC P-384 public key in OpenSSH form", where, REMEDY),
        take(table, "state", state, f"'{ENROLLED}' or '{REVOKED}'", where, REMEDY),
        take(table, "not_after", moment, "a date such as 2027-11-21T16:33:08Z", where, REMEDY),
        take(
            {"replaced": []} | table,
            "replaced",
            keys,
            "a list of EC P-384 public keys in OpenSSH form",
            where,
            REMEDY,
        ),
        kind == "relay",
    )


def _holders(entries: Sequence[Entry]) -> dict[bytes, tuple[Entry, bool]]:
    """Return key hash → entry, and whether the key was replaced."""
    return {
        _parsed(key)[1]: (entry, replaced)
        for entry in entries
        for keys, replaced in ((entry.replaced, True), ((entry.public_key,), False))
        for key in keys
    }


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("no text")
    return value


def text_of(entries: Sequence[Entry], server: str | None) -> str:
    """Return the content of a registry.toml."""
    top = tomli_w.dumps({"server": server}) if server else ""
    return (
        HEAD
        + top
        + "".join(
            f"\n[[{'relay' if entry.relay else 'client'}]]\n{tomli_w.dumps(_table(entry))}"
            for entry in sorted(entries, key=lambda entry: (entry.relay, entry.id))
        )
    )


def _table(entry: Entry) -> dict[str, Any]:
    table = {
        "id": entry.id,
        "state": entry.state,
        "not_after": iso(entry.not_after),
        "public_key": entry.public_key,
    }
    return table | ({"replaced": list(entry.replaced)} if entry.replaced else {})
