"""The registry: which key speaks for which client. One key, one logical id, one voice.

    server = "server.example:8080"               where clients find the server, for the enrolment files of new ones
    [[client]]
    id = 3
    state = "enrolled"                           or "revoked"
    not_after = "2027-11-21T16:33:08Z"
    public_key = "ecdsa-sha2-nistp384 AAAA..."
    replaced = []                                keys that it had before; they are never let in again

Flower's node authentication has each request signed with the client's key and compares that key, as PEM, byte by byte with those that
were registered (`flwr supernode register`). Here keys are compared as keys, however they are written down.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import tomli_w

from ..config import KEYS, keys_command
from ..errors import KeysError
from .enrolment import (
    LARGEST_ID,
    iso,
    logical_id,
    moment,
    openssh,
    public_key,
    read_toml,
    take,
    utc_now,
)

ENROLLED, REVOKED = "enrolled", "revoked"
REMEDY = "mend it, or restore the file from a copy"
HEAD = "# Which key speaks for which client. Written by `fedcomp keys`; the server rereads it when it changes.\n"


@dataclass(frozen=True)
class Entry:
    """A client in the registry."""

    id: int
    public_key: str  # OpenSSH, one line
    state: str  # enrolled or revoked
    not_after: datetime  # UTC
    replaced: tuple[str, ...] = ()  # keys that it had before; they are never let in again

    def refused(self, now: datetime, folder: str | Path = KEYS) -> str:
        """Why its key is not let in, empty when it is; what to do about it in the folder of keys."""
        if self.state == REVOKED:
            return f"client {self.id} is revoked; to let it in again: {keys_command(folder, 'renew', self.id)}"
        if now >= self.not_after:
            renew = keys_command(folder, "renew", self.id)
            return f"the key of client {self.id} ended on {iso(self.not_after)}; make it a new one: {renew}"
        return ""


class Registry:
    """What registry.toml says now: it is read again whenever the file has changed.

    Raises KeysError when it cannot be read at first. Where that happens later, nobody is let in until it is mended, and `reason` says so.
    """

    def __init__(self, path: Path, now: Callable[[], datetime] = utc_now):
        self.path, self.now = path, now
        self._seen = self._stamp()
        self._all, self._broken = read_entries(path), ""
        self._by_key = _by_key(self._all)

    @property
    def entries(self) -> tuple[Entry, ...]:
        """All clients by id; none while the file is malformed."""
        self._look()
        return self._all

    @property
    def problem(self) -> str:
        """What is wrong with the file, empty when nothing is."""
        self._look()
        return self._broken

    def id_of(self, key: bytes | str) -> int | None:
        """The logical id that a public key, PEM or OpenSSH, speaks for; None where `reason` says why."""
        entry, why = self._judged(key)
        return entry.id if entry and not why else None

    def reason(self, key: bytes | str) -> str:
        """Why a public key is not let in, in one sentence; empty when it is."""
        return self._judged(key)[1]

    def enrolled(self) -> dict[int, str]:
        """What registering needs: logical id → public key as one OpenSSH line, of all clients that are let in now."""
        now = self.now()
        return {entry.id: entry.public_key for entry in self.entries if not entry.refused(now)}

    def write_public_keys(self, folder: Path) -> dict[int, Path]:
        """A file `ID.pub` in a folder for each that is let in, as `flwr supernode register` takes it."""
        written = {}
        for id, line in self.enrolled().items():
            written[id] = folder / f"{id}.pub"
            written[id].write_text(f"{line} client-{id}\n", encoding="ascii")
        return written

    def _judged(self, key: bytes | str) -> tuple[Entry | None, str]:
        self._look()
        if self._broken:
            return None, self._broken
        line = _line(key)
        if line is None:
            return (
                None,
                f"what it shows is no EC P-384 public key; give it its file from {self.path.parent / 'clients'}",
            )
        entry = self._by_key.get(line)
        if entry is None:
            return (
                None,
                f"its key is not in {self.path}; enrol it with: {keys_command(self.path.parent, 'add')}",
            )
        if line != entry.public_key:
            return (
                entry,
                f"its key was replaced when client {entry.id} was renewed; give it the new clients/{entry.id}.toml",
            )
        return entry, entry.refused(self.now(), self.path.parent)

    def _stamp(self) -> tuple[int, ...]:
        try:
            status = os.stat(self.path)
        except OSError:
            return ()
        return status.st_ino, status.st_size, status.st_mtime_ns

    def _look(self) -> None:
        if (stamp := self._stamp()) == self._seen:
            return
        try:
            entries = read_entries(self.path)
            if not entries and (self._all or self._broken):
                raise KeysError(
                    f"{self.path} holds no client any more, as if it was emptied; {REMEDY}"
                )
            self._all, self._broken = entries, ""
        except KeysError as error:
            self._all, self._broken = (), str(error)
        self._by_key, self._seen = _by_key(self._all), stamp


class News:
    """Says once that a registry cannot be used any more, and once that it can again."""

    def __init__(self, registry: Registry, say: Callable[[str], None]):
        self.registry, self.say, self._told = registry, say, ""

    def look(self) -> None:
        problem = self.registry.problem
        if problem and problem != self._told:
            self.say(f"{problem}; until then no client is let in, and those that come try again")
        elif self._told and not problem:
            self.say(
                f"{self.registry.path} is whole again: {len(self.registry.enrolled())} of its clients are let in"
            )
        self._told = problem


@lru_cache(4096)  # a server asks at each request
def _line(key: bytes | str) -> str | None:
    try:
        return openssh(public_key(key))
    except ValueError:
        return None


def read_entries(path: Path) -> tuple[Entry, ...]:
    """The clients of a registry.toml by id. Raises KeysError, naming file and line or field."""
    return read_file(path)[0]


def read_file(path: Path) -> tuple[tuple[Entry, ...], str | None]:
    """The same, and where the server is when that is known."""
    table = read_toml(path, REMEDY)
    server = take(
        {"server": ""} | table,
        "server",
        _text,
        "a text such as server.example:8080",
        str(path),
        REMEDY,
    )
    return _entries(table, str(path)), server or None


def _entries(table: dict[str, Any], path: str) -> tuple[Entry, ...]:
    clients = table.get("client", [])
    if not isinstance(clients, list) or not all(isinstance(client, dict) for client in clients):
        raise KeysError(
            f"{path}: 'client' is no list of tables; write [[client]] above each client"
        )
    entries = sorted(
        (_entry(client, number, path) for number, client in enumerate(clients, 1)),
        key=lambda entry: entry.id,
    )
    for one, next in zip(entries, entries[1:]):
        if one.id == next.id:
            raise KeysError(
                f"{path}: client {one.id} has two keys; take out one of its two [[client]] tables"
            )
    holders: dict[str, int] = {}
    for entry in entries:
        for key in (entry.public_key, *entry.replaced):
            if (other := holders.setdefault(key, entry.id)) != entry.id:
                raise KeysError(
                    f"{path}: clients {other} and {entry.id} have one key; give one of them its own with: "
                    f"{keys_command(Path(path).parent, 'renew', entry.id)}, after taking out its [[client]] table"
                )
        if entry.public_key in entry.replaced:
            raise KeysError(
                f"{path}: client {entry.id}: 'public_key' is among 'replaced'; take it out there"
            )
    return tuple(entries)


def _entry(client: dict[str, Any], number: int, path: str) -> Entry:
    def key(value: Any) -> str:
        return openssh(public_key(_text(value)))

    def state(value: Any) -> str:
        if value not in (ENROLLED, REVOKED):
            raise ValueError("no state")
        return value

    def keys(value: Any) -> tuple[str, ...]:
        if not isinstance(value, list):
            raise ValueError("no list")
        return tuple(map(key, value))

    id = take(
        client,
        "id",
        logical_id,
        f"a whole number from 0 to {LARGEST_ID}",
        f"{path}: [[client]] number {number}",
        REMEDY,
    )
    where = f"{path}: client {id}"
    return Entry(
        id,
        take(client, "public_key", key, "an EC P-384 public key in OpenSSH form", where, REMEDY),
        take(client, "state", state, f"'{ENROLLED}' or '{REVOKED}'", where, REMEDY),
        take(client, "not_after", moment, "a date such as 2027-11-21T16:33:08Z", where, REMEDY),
        take(
            {"replaced": []} | client,
            "replaced",
            keys,
            "a list of EC P-384 public keys in OpenSSH form",
            where,
            REMEDY,
        ),
    )


def _by_key(entries: Sequence[Entry]) -> dict[str, Entry]:
    return {key: entry for entry in entries for key in (*entry.replaced, entry.public_key)}


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("no text")
    return value


def text_of(entries: Sequence[Entry], server: str | None) -> str:
    """The content of a registry.toml."""
    top = tomli_w.dumps({"server": server}) if server else ""
    return (
        HEAD
        + top
        + "".join(
            f"\n[[client]]\n{tomli_w.dumps(_table(entry))}"
            for entry in sorted(entries, key=lambda entry: entry.id)
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
