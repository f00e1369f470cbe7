"""Check an enrolment file, a folder of keys and its registry, and the connection to a server."""

import stat
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from ...config import KEYS, keys_command
from ...errors import KeysError, UnreachableError
from ..keys import days_left
from .check import FAILED, Check, failed, ok, refused, skipped

if TYPE_CHECKING:
    from cryptography import x509

    from ...keys.enrolment import Enrolment
    from ...keys.registry import Entry

RENEW_TIME = timedelta(days=30)
TIMEOUT_S = 5.0


def enrolment_file(path: Path, enrolment: "Enrolment", keys: str | Path) -> Iterator[Check]:
    """Check the permissions and the certificate of an enrolment file."""
    renew = keys_command(keys, "renew", enrolment.id)
    yield ok("client", f"{path} is valid: client {enrolment.id}")
    yield private(path, "client file")
    yield validity(
        "client certificate", enrolment.leaf, f"on the server: {renew}, then copy the new file"
    )


def keys_folder(folder: Path, enrolment: "Enrolment | None") -> Iterator[Check]:
    """Check the CA, the server's certificate, the registry and its enrolment files, and whether the registry accepts `enrolment`."""
    from ...keys import key_folder as keys
    from ...keys.certificates import hosts_of, parse_certificate, read_certificate
    from ...keys.enrolment import utc_now

    try:
        registry = keys.read_registry(folder)
        ca, certificate = read_certificate(folder / keys.CA_CRT), keys.check_server_files(folder)
    except KeysError as error:
        yield refused("keys", error)
        return
    remedy = "make new keys in another folder: fedcomp keys init --out DIR --clients N"
    yield validity("ca", ca, remedy)
    hosts = f"for {', '.join(hosts_of(certificate))}, "
    yield validity("certificate", certificate, keys_command(folder, "renew", "server"), hosts)
    for name in (keys.CA_KEY, keys.SERVER_KEY):
        if (folder / name).exists():
            yield private(folder / name, name)
    if not registry.entries and any((folder / keys.CLIENTS).glob("*.toml")):
        yield failed(
            "registry",
            f"{registry.path} has no clients, but there are enrolment files",
            "restore it from a copy; without one, make new keys in another folder",
        )
        return
    now = utc_now()
    yield keys_of(folder, keys.CLIENTS, registry.entries, now)
    yield files_of(folder, keys.CLIENTS, registry.entries)
    if registry.relays:
        yield keys_of(folder, keys.RELAYS, registry.relays, now)
        yield files_of(folder, keys.RELAYS, registry.relays)
    if enrolment is not None:
        problem = registry.reason_of_hash(enrolment.key_hash)
        id = registry.id_of_hash(enrolment.key_hash)
        copy = f"copy {keys.CLIENTS}/{id}.toml again"
        if problem:
            yield refused("enrolled", problem)
        elif id != enrolment.id:
            found = (
                f"the registry has its key for client {id}, but its file has the id {enrolment.id}"
            )
            yield failed("enrolled", found, copy)
        elif parse_certificate(enrolment.ca) != ca:
            found = f"client {enrolment.id} is accepted, but it trusts another CA"
            yield failed("enrolled", found, copy)
        else:
            yield ok("enrolled", f"client {enrolment.id} is accepted")


def keys_of(folder: Path, place: str, entries: "tuple[Entry, ...]", now: datetime) -> Check:
    """Check that no key of the clients or the relays in the registry has expired. `place`: "clients" or "relays"."""
    counts = {"accepted": sum(not entry.refusal(now) for entry in entries)}
    counts["revoked"] = sum(entry.state == "revoked" for entry in entries)
    counts["expired"] = len(entries) - sum(counts.values())
    text = ", ".join(f"{count} {state}" for state, count in counts.items() if count) or "none"
    if counts["expired"]:
        return failed("registry", f"{place}: {text}", keys_command(folder, "renew"))
    return ok("registry", f"{place}: {text}")


def files_of(folder: Path, place: str, entries: "tuple[Entry, ...]") -> Check:
    """Check that the enrolment files in `place` match the registry and are private. Files that were removed are not needed."""
    from ...keys.enrolment import Enrolment, openssh

    paths = {path.stem: path for path in sorted((folder / place).glob("*.toml"))}
    n_files = 0
    for entry in entries:
        path = paths.pop(str(entry.id), None)
        if path is None:
            continue  # copied to its device and deleted
        n_files += 1
        renew = keys_command(folder, "renew", entry.holder)
        try:
            enrolment = Enrolment.read(path)
        except KeysError as error:
            return refused("files", str(error).rpartition(";")[0] + f"; {renew}")
        if (enrolment.id, openssh(enrolment.pair[1])) != (entry.id, entry.public_key):
            return failed("files", f"{path} does not match the registry's {entry.name}", renew)
        if (checked := private(path, "files")).state == FAILED:
            return checked
    for path in paths.values():
        more = keys_command(folder, "add", *["--relay", "--host", "HOST"] * (place == "relays"))
        found = f"{path} belongs to none of the {place} in the registry"
        return failed("files", found, f"delete it; {more} makes new ones")
    return ok(
        "files",
        f"{n_files} of {len(entries)} enrolment files in {place} are present and match the registry",
    )


def private(path: Path, what: str) -> Check:
    """Check that only its owner can read a file."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        return failed(
            what, f"{path} can be read by other users (mode {mode:03o})", f"chmod 600 {path}"
        )
    return ok(what, f"{path} can be read only by its owner")


def validity(what: str, certificate: "x509.Certificate", remedy: str, before: str = "") -> Check:
    """Check that a certificate is valid now. If its validity has not begun, this machine's clock is slow."""
    from ...keys.enrolment import format_time, utc_now

    now = utc_now()
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    clock = f"and it is {format_time(now)} by this machine's clock"
    if now < begins:
        fix = "set the clock by NTP: timedatectl set-ntp true"
        return failed(what, f"{before}begins on {format_time(begins)}, {clock}", fix)
    if now >= ends:
        fix = f"correct the clock if it is wrong, else {remedy}"
        return failed(what, f"{before}ended on {format_time(ends)}, {clock}", fix)
    found = f"{before}valid until {format_time(ends)}, {days_left(ends, now)} days"
    return ok(what, found, f"renew it soon, {remedy}" if ends - now < RENEW_TIME else "")


def reachable(
    where: tuple[str, int], enrolment: "Enrolment | None", keys: Path | None
) -> Iterator[Check]:
    """Connect to a server with an enrolment, else with the CA of the folder of keys, and check the server's certificate."""
    from ...keys.connection import contact, join_address

    name = join_address(*where)
    trust: Enrolment | str | None = enrolment
    if trust is None and keys:
        with suppress(OSError, ValueError):
            trust = (keys / "ca.crt").read_text(encoding="ascii")
    try:
        server = contact(*where, trust, TIMEOUT_S)
    except (KeysError, UnreachableError) as error:
        if trust is None and isinstance(error, UnreachableError) and error.cause == "tls":
            found = f"{name} has a certificate that was not checked"
            yield skipped("server", found, "give --client FILE or --keys DIR")
        else:
            yield refused("server", error)
        return
    without = "" if server.certificate else ", without TLS"
    yield ok("server", f"{name} answers{without}, {1000 * server.seconds:.0f} ms")
    if server.certificate:
        renew = keys_command(keys or KEYS, "renew", "server")
        yield validity("server certificate", server.certificate, f"on the server: {renew}")
