"""Check an enrolment file, a folder of keys, and whether the folder's registry accepts the enrolment."""

import stat
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from ...config import KEYS, keys_command
from ...errors import KeysError
from .asked import Asked
from .check import FAILED, OK, Check, parted, refused, validity

if TYPE_CHECKING:
    from ...keys.enrolment import Enrolment
    from ...keys.registry import Entry


def checks(asked: Asked) -> Iterator[Check]:
    if asked.client is not None:
        yield from enrolment_file(asked)
    if asked.keys is not None:
        yield from keys_folder(asked.keys, asked.enrolment)


def enrolment_file(asked: Asked) -> Iterator[Check]:
    from ...keys.enrolment import utc_now

    if asked.unreadable:
        yield refused("client", asked.unreadable)
        return
    enrolment, path = asked.enrolment, asked.client
    yield Check("client", OK, f"{path} is whole: client {enrolment.id}")
    yield private(path, "client file")
    yield validity("client's", enrolment.leaf, utc_now(), _remedy(asked))


def _remedy(asked: Asked) -> str:
    return f"on the server: {keys_command(asked.keys or KEYS, 'renew', asked.enrolment.id)}, then copy the new file"


def keys_folder(folder: Path, enrolment: "Enrolment | None") -> Iterator[Check]:
    """Check the CA, the server's certificate, the registry and its enrolment files, and whether the registry accepts `enrolment`."""
    from ...keys import key_folder as keys
    from ...keys.certificates import one_certificate, read_certificate
    from ...keys.enrolment import utc_now

    try:
        registry = keys.read_registry(folder)
        ca, certificate = read_certificate(folder / keys.CA_CRT), keys.check_server_files(folder)
    except KeysError as error:
        yield refused("keys", error)
        return
    now = utc_now()
    yield validity(
        "ca",
        ca,
        now,
        "make new keys in another folder: fedcomp keys init --out DIR --clients N",
    )
    yield validity(
        "certificate",
        certificate,
        now,
        keys_command(folder, "renew", "server"),
        f"for {', '.join(keys.hosts_of(certificate))}, ",
    )
    for name in (keys.CA_KEY, keys.SERVER_KEY):
        if (folder / name).exists():
            yield private(folder / name, name)
    if not registry.entries and any((folder / keys.CLIENTS).glob("*.toml")):
        yield Check(
            "registry",
            FAILED,
            f"{registry.path} holds no client, and there are enrolment files: it was emptied",
            "bring back a copy of it; without one, make new keys in another folder",
        )
        return
    yield keys_of(folder, keys.CLIENTS, registry.entries, now)
    yield files_of(folder, keys.CLIENTS, registry.entries)
    if registry.relays:
        yield keys_of(folder, keys.RELAYS, registry.relays, now)
        yield files_of(folder, keys.RELAYS, registry.relays)
    if enrolment is not None:
        why = registry.reason_of_hash(enrolment.key_hash)
        here = registry.id_of_hash(enrolment.key_hash)
        if not why and here != enrolment.id:
            why = f"the registry has its key for client {here}, but its file says {enrolment.id}; copy {keys.CLIENTS}/{here}.toml anew"
        if not why and one_certificate(enrolment.ca) != ca:
            why = f"client {enrolment.id} is let in and trusts another CA; copy {keys.CLIENTS}/{here}.toml anew"
        yield Check(
            "enrolled",
            FAILED if why else OK,
            *(parted(why) if why else [f"client {enrolment.id} is let in"]),
        )


def keys_of(folder: Path, place: str, entries: "tuple[Entry, ...]", now: datetime) -> Check:
    """Check that no key of the clients or the relays in the registry has expired. `place`: "clients" or "relays"."""
    counts = {"let in": sum(not entry.refused(now) for entry in entries)}
    counts["revoked"] = sum(entry.state == "revoked" for entry in entries)
    counts["expired"] = len(entries) - sum(counts.values())
    said = ", ".join(f"{count} {state}" for state, count in counts.items() if count) or "none"
    expired = counts["expired"] > 0
    renew = keys_command(folder, "renew") if expired else ""
    return Check("registry", FAILED if expired else OK, f"{place}: {said}", renew)


def files_of(folder: Path, place: str, entries: "tuple[Entry, ...]") -> Check:
    """Check that the enrolment files in `place` match the registry and are private. Files that were removed are not needed."""
    from ...keys.enrolment import Enrolment, openssh

    for entry in entries:
        renew = keys_command(folder, "renew", entry.holder)
        path = folder / place / f"{entry.id}.toml"
        if not path.is_file():
            continue  # copied to its device and deleted
        try:
            enrolment = Enrolment.read(path)
        except KeysError as error:
            return Check("files", FAILED, *parted(str(error).rpartition(";")[0] + f"; {renew}"))
        if (enrolment.id, openssh(enrolment.pair[1])) != (entry.id, entry.public_key):
            return Check(
                "files", FAILED, f"{path} does not match the registry's {entry.name}", renew
            )
        if (found := private(path, "files")).state == FAILED:
            return found
    unknown = [
        path
        for path in sorted((folder / place).glob("*.toml"))
        if path.stem not in {str(entry.id) for entry in entries}
    ]
    if unknown:
        more = keys_command(folder, "add", *["--relay", "--host", "HOST"] * (place == "relays"))
        return Check(
            "files",
            FAILED,
            f"{unknown[0]} belongs to none of the {place} in the registry",
            f"delete it; {more} makes new ones",
        )
    there = sum((folder / place / f"{entry.id}.toml").is_file() for entry in entries)
    return Check(
        "files",
        OK,
        f"{there} of {len(entries)} enrolment files in {place} are here, as the registry says",
    )


def private(path: Path, what: str) -> Check:
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        return Check(
            what, FAILED, f"{path} may be read by others (mode {mode:03o})", f"chmod 600 {path}"
        )
    return Check(what, OK, f"{path} is readable by its owner alone")
