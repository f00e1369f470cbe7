"""The registry: a file with the public key of each client and relay.

    server = "server.example:8080"               # the server's address, copied into new enrolment files
    [[client]]
    id = 3
    state = "enrolled"                           # or "revoked"
    not_after = "2027-11-21T16:33:08Z"           # end of the validity of the client's certificate
    public_key = "ecdsa-sha2-nistp384 AAAA..."
    replaced = []                                # public keys before renewals; they are refused
    [[relay]]                                    # the same fields; a relay and a client may have the same id

Each key belongs to only one client or relay. A server looks up a client or relay by the hash of its public key (enrolment.key_hash).
"""

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w

from ..config import KEYS, keys_command
from ..errors import KeysError
from .enrolment import (
    ID_VALUES,
    TomlTable,
    ascii_text,
    format_time,
    key_hash,
    openssh,
    parse_id,
    parse_public_key,
    parse_time,
    utc_now,
)

ENROLLED, REVOKED = "enrolled", "revoked"
REMEDY = "correct it, or restore the file from a copy"
HEAD = "# The public key of each client and relay. Written by `fedcomp keys`; the server reads this file again when it changes.\n"


@dataclass(frozen=True)
class RegistryEntry:
    """A client or a relay in the registry."""

    id: int
    public_key: str  # OpenSSH, one line
    state: str  # ENROLLED or REVOKED
    not_after: datetime  # UTC
    replaced: tuple[str, ...] = ()  # public keys before renewals
    relay: bool = False

    @property
    def name(self) -> str:
        """The name in messages, such as "client 3"."""
        return f"relay {self.id}" if self.relay else f"client {self.id}"

    @property
    def file(self) -> str:
        """The path of the enrolment file inside the folder of keys."""
        return f"{'relays' if self.relay else 'clients'}/{self.id}.toml"

    @property
    def holder(self) -> int | str:
        """The argument of `fedcomp keys revoke` and `renew`: a client's id, or a text such as "relay-0"."""
        return f"relay-{self.id}" if self.relay else self.id

    def refusal(self, now: datetime, folder: str | Path = KEYS) -> str:
        """Return "" if the key is accepted at the time `now`, and otherwise the reason with the command that renews the key.

        `folder`: the folder of keys, for the command.
        """
        if self.state == REVOKED:
            return f"{self.name} is revoked; to accept it again: {keys_command(folder, 'renew', self.holder)}"
        if now >= self.not_after:
            renew = keys_command(folder, "renew", self.holder)
            return f"the key of {self.name} expired on {format_time(self.not_after)}; make a new one: {renew}"
        return ""


@dataclass(frozen=True)
class RegistryContent:
    """The content of a registry.toml. Clients and relays are in the order of their ids."""

    clients: tuple[RegistryEntry, ...] = ()
    relays: tuple[RegistryEntry, ...] = ()
    server: str | None = None  # the server's address
    problem: str = ""  # why the file cannot be used, or "" if it can be used

    # By key hash: the client or relay with this key, and whether a renewal has replaced the key.
    holders: Mapping[bytes, tuple[RegistryEntry, bool]] = field(default_factory=dict, compare=False)


class KeyStatus(NamedTuple):
    """The id of the client or relay with a key, or the reason why the key is refused."""

    client: int | None = None
    relay: int | None = None
    reason: str = ""


class Registry:
    """The current content of registry.toml: the file is read again whenever it has changed.

    All methods may be called from any thread. The constructor raises KeysError if the file cannot be read. If the file becomes malformed
    later, no client is accepted until it is repaired, and `problem` returns the reason.
    """

    def __init__(self, path: Path, now: Callable[[], datetime] = utc_now):
        self.path, self.now = path, now
        self._lock = threading.Lock()
        self._last_stamp = self._stamp()
        self._content = self._polled = read_file(path)

    @property
    def entries(self) -> tuple[RegistryEntry, ...]:
        """All clients in the order of their ids; empty while registry.toml is malformed."""
        return self._current().clients

    @property
    def relays(self) -> tuple[RegistryEntry, ...]:
        """All relays in the order of their ids; empty while registry.toml is malformed."""
        return self._current().relays

    @property
    def problem(self) -> str:
        """The reason why registry.toml cannot be used, or "" if it can be used."""
        return self._current().problem

    def find(self, key_hash: bytes) -> KeyStatus:
        """Look up a key by its hash."""
        content, folder = self._current(), self.path.parent
        if content.problem:
            return KeyStatus(reason=content.problem)
        if key_hash not in content.holders:
            add = keys_command(folder, "add")
            reason = f"the key of this client or relay is not in {self.path}; make a new enrolment with: {add}"
            return KeyStatus(reason=reason)
        entry, replaced = content.holders[key_hash]
        if replaced:
            reason = f"this key was replaced when {entry.name} was renewed; give {entry.name} the new {entry.file}"
            return KeyStatus(reason=reason)
        if reason := entry.refusal(self.now(), folder):
            return KeyStatus(reason=reason)
        return KeyStatus(relay=entry.id) if entry.relay else KeyStatus(client=entry.id)

    def enrolled(self) -> dict[int, str]:
        """Return the public keys (OpenSSH lines) of all clients that are accepted now, by client id."""
        now = self.now()
        return {entry.id: entry.public_key for entry in self.entries if not entry.refusal(now)}

    def ids_by_hash(self) -> dict[bytes, int]:
        """Return the ids of all clients that are accepted now, by key hash."""
        return {_parsed(key)[1]: id for id, key in self.enrolled().items()}

    def poll(self, log: Callable[[str], None]) -> bool:
        """Return whether registry.toml has changed since the last call and is valid now.

        If so, the caller must check the keys of connected clients again. Calls `log` when the file becomes malformed or is repaired.
        """
        before, self._polled = self._polled, self._current()
        content = self._polled
        if content is before:
            return False
        if content.problem and content.problem != before.problem:
            log(
                f"{content.problem}; until then, no client is accepted, but refused clients keep trying to connect"
            )
        elif before.problem and not content.problem:
            accepted = len(self.enrolled())
            log(f"{self.path} is valid again: {accepted} of its clients may join")
        return not content.problem

    def _stamp(self) -> tuple[int, ...]:
        """Return the file's inode, size and modification time, which change with its content, or () if the file does not exist."""
        try:
            status = os.stat(self.path)
        except OSError:
            return ()
        return status.st_ino, status.st_size, status.st_mtime_ns

    def _current(self) -> RegistryContent:
        with self._lock:
            if (stamp := self._stamp()) != self._last_stamp:
                self._content, self._last_stamp = self._read_again(), stamp
            return self._content

    def _read_again(self) -> RegistryContent:
        old = self._content
        try:
            content = read_file(self.path)
        except KeysError as error:
            return RegistryContent(problem=str(error))
        if not content.clients and (old.clients or old.problem):
            return RegistryContent(problem=f"{self.path} has no clients any more; {REMEDY}")
        return content


# Cached, because most keys stay the same when the file is read again.
@lru_cache(1 << 17)
def _parsed(key: str) -> tuple[str, bytes]:
    """Return a public key as one OpenSSH line, and the hash of the key. Raises ValueError for a malformed key."""
    parsed = parse_public_key(key)
    return openssh(parsed), key_hash(parsed)


def read_file(path: Path) -> RegistryContent:
    """Return the content of a registry.toml. Raises KeysError if the file cannot be read or is malformed."""
    fields = TomlTable.of_file(path, REMEDY)
    clients, relays = (_entries(fields, kind) for kind in ("client", "relay"))
    holders = _holders([*clients, *relays], path)
    return RegistryContent(clients, relays, fields.server, holders=holders)


def _entries(fields: TomlTable, kind: str) -> tuple[RegistryEntry, ...]:
    if kind not in fields.table:
        return ()
    path = fields.where
    expected = f"a list of tables with [[{kind}]] above each {kind}"
    tables = fields.take(kind, lambda value: _list(value, dict), expected)
    entries = [_entry(table, kind, number, path) for number, table in enumerate(tables, 1)]
    entries.sort(key=lambda entry: entry.id)
    for entry, following in zip(entries, entries[1:]):
        if entry.id == following.id:
            raise KeysError(
                f"{path}: {entry.name} has two keys; remove one of its two [[{kind}]] tables"
            )
    return tuple(entries)


def _holders(
    entries: Sequence[RegistryEntry], path: Path
) -> dict[bytes, tuple[RegistryEntry, bool]]:
    """Return `RegistryContent.holders`. Raises KeysError if two entries have the same key, or if an entry lists its own key as replaced."""
    holders: dict[bytes, tuple[RegistryEntry, bool]] = {}
    for entry in entries:
        for key in (entry.public_key, *entry.replaced):
            holder = entry, key != entry.public_key
            other, _ = holders.setdefault(_parsed(key)[1], holder)
            if other is not entry:
                kind = "relay" if entry.relay else "client"
                options = ["--relay", "--host", "HOST"] if entry.relay else []
                raise KeysError(
                    f"{path}: {other.name} and {entry.name} have the same key; remove the [[{kind}]] table of {entry.name}, and enrol a "
                    f"new {kind} with: {keys_command(path.parent, 'add', *options)}"
                )
        if entry.public_key in entry.replaced:
            raise KeysError(
                f"{path}: {entry.name}: 'public_key' is also in 'replaced'; remove it from 'replaced'"
            )
    return holders


def _entry(table: dict[str, Any], kind: str, number: int, path: str) -> RegistryEntry:
    """Parse a [[client]] or [[relay]] table, the `number`th in the file. Raises KeysError."""
    fields = TomlTable({"replaced": []} | table, f"{path}: [[{kind}]] number {number}", REMEDY)
    id = fields.take("id", parse_id, ID_VALUES)
    fields = replace(fields, where=f"{path}: {kind} {id}")
    keys = "a list of EC P-384 public keys in OpenSSH form"
    return RegistryEntry(
        id,
        fields.take("public_key", _key, "an EC P-384 public key in OpenSSH form"),
        fields.take("state", _state, f"'{ENROLLED}' or '{REVOKED}'"),
        fields.take("not_after", parse_time, "a date such as 2027-11-21T16:33:08Z"),
        fields.take("replaced", lambda value: tuple(map(_key, _list(value, str))), keys),
        kind == "relay",
    )


def _key(value: Any) -> str:
    return _parsed(ascii_text(value))[0]


def _state(value: Any) -> str:
    if value not in (ENROLLED, REVOKED):
        raise ValueError("not a state")
    return value


def _list(value: Any, of: type) -> list[Any]:
    if not isinstance(value, list) or not all(isinstance(entry, of) for entry in value):
        raise ValueError(f"the value is not a list of {of}")
    return value


def registry_text(entries: Sequence[RegistryEntry], server: str | None) -> str:
    """Return the content of a registry.toml."""
    content: dict[str, Any] = {"server": server} if server else {}
    for entry in sorted(entries, key=lambda entry: (entry.relay, entry.id)):
        ends = format_time(entry.not_after)
        table: dict[str, Any] = {"id": entry.id, "state": entry.state, "not_after": ends}
        table["public_key"] = entry.public_key
        if entry.replaced:
            table["replaced"] = list(entry.replaced)
        content.setdefault("relay" if entry.relay else "client", []).append(table)
    return HEAD + tomli_w.dumps(content)
