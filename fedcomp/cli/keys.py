"""`fedcomp keys`: create, list, add, renew and revoke the keys of a server, its clients and its relays.

Modules that read and write keys are imported inside functions, so that --help is fast.
"""

import hashlib
import re
import shlex
from base64 import b64decode, b64encode
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ..config import KEYS, expand_home, keys_command
from ..errors import KeysError, UserError
from ..formatting import NOTHING, named_clients
from .exits import command_group, stoppable
from .flags import option, switch
from .tables import print_table

if TYPE_CHECKING:
    from ..keys.registry import RegistryEntry

RENEW_DAYS = 30  # certificates that expire within this number of days are due for renewal
RELAY = re.compile(r"relay-\d{1,10}", re.ASCII)
COLUMNS = ("holder", "state", "until", "days", "fingerprint", "file")

DEFAULT = Path(KEYS)
FOLDER = option(
    "DIR",
    "Folder of keys, written by fedcomp keys init.",
    "--keys",
    default=DEFAULT,
    callback=lambda folder: expand_home(folder, "--keys"),
)
DAYS = option("N", "Validity of the new certificates, in days.", default=365, min=1, max=36_500)
HOSTS = option(
    "HOST",
    "Host name or IP address at which clients reach the server or the relay; may be given more than once.",
    "--host",
)

app = command_group("Create and change the keys of a server, its clients and its relays.")


@app.command()
def init(
    clients: int = option(
        "N", "Number of clients to create enrolment files for.", default=..., min=1, max=100_000
    ),
    host: list[str] | None = HOSTS,
    out: Path = option("DIR", "Folder to create for the keys.", default=DEFAULT),
    days: int = DAYS,
    port: int = option(
        "N",
        "Port of the server, which is written to the enrolment files.",
        default=8080,
        min=1,
        max=65_535,
    ),
) -> None:
    """Create a certificate authority (CA), a key and certificate for the server, and an enrolment file (credentials) for each client."""
    from ..keys import key_folder as keys
    from ..keys.connection import join_address
    from ..keys.enrolment import DEFAULT_PATH, VARIABLE

    folder = expand_home(out, "--out")

    complete, none = f"{folder} is complete", "no keys were made"
    with stoppable(lambda cause: f"{cause}; {complete if folder.exists() else none}"):
        hosts = keys.make(folder, clients, host or (), days, port)
    enrolments = f"{clients} enrolment file{'s' * (clients > 1)}"
    certificate = f"a server certificate (for {', '.join(hosts)})"
    print(f"{folder} is written: a CA, {certificate} and {enrolments}.\n")
    start = ["fedcomp", "server", "start", "--keys", str(folder)]
    start += ["--port", str(port)] if port != 8080 else []
    join = ["fedcomp", "client", "--server", join_address(hosts[0], port)]
    files = folder / keys.CLIENTS / "N.toml"
    print(f"On the server: {shlex.join(start)}")
    print(
        f"On each device: copy the device's {files} to {DEFAULT_PATH} (or set {VARIABLE}), then: {shlex.join(join)}"
    )
    print(
        f"Anyone who has a client's file can act as that client: copy the file over a secure channel. Move {folder / keys.CA_KEY} "
        "to a safe place: only fedcomp keys add and fedcomp keys renew need this file."
    )
    if not host:
        print("Without --host, the server's certificate is valid only for clients on this machine.")


@app.command()
def add(
    folder: Path = FOLDER,
    count: int = option("N", "Number of clients to add.", default=1, min=1, max=100_000),
    relay: bool = switch(
        "--relay",
        "Enrol one relay, not clients. --host is the address at which clients reach the relay.",
    ),
    host: list[str] | None = HOSTS,
    days: int = DAYS,
) -> None:
    """Enrol new clients or a relay. The command needs the file ca.key, to sign the new certificates.

    New ids continue after the highest id in the folder. Clients and relays are numbered separately.
    """
    from ..keys import key_folder as keys

    if relay:
        if not host:
            raise UserError("--relay needs the address of the relay; give --host HOST")
        if count != 1:
            raise UserError("--relay enrols one relay at a time; leave --count out")
        id, names = keys.add_relay(folder, host, days)
        file = _file(folder, f"relay-{id}")
        print(f"Relay {id} is enrolled for {', '.join(names)}: {file}.", end=" ")
        print("Copy the file to the relay, and run there:")
        print(f"fedcomp relay --server HOST:PORT --enrolment {shlex.quote(file.name)}")
        return
    if host:
        raise UserError("--host is only for relays; add --relay, or leave --host out")
    ids = keys.add(folder, count, days)
    files = ", ".join(str(_file(folder, id)) for id in ids[:8])
    more = f" and {len(ids) - 8} more" if len(ids) > 8 else ""
    subject = f"{named_clients(ids).capitalize()} {'is' if len(ids) == 1 else 'are'}"
    print(f"{subject} enrolled: {files}{more}")


@app.command()
def revoke(
    ids: list[str] = typer.Argument(
        ...,
        metavar="ID...",
        help="Ids of clients, such as 3, or of relays, such as relay-0.",
        show_default=False,
    ),
    folder: Path = FOLDER,
) -> None:
    """Revoke the keys of clients or relays. A running server disconnects these clients and relays."""
    from ..keys import key_folder as keys

    holders = list(dict.fromkeys(_holder(id, folder, "revoke", "relay-0") for id in ids))
    keys.revoke(folder, *holders)
    clients = [holder for holder in holders if isinstance(holder, int)]
    names = [named_clients(clients)] if clients else []
    names += [holder.replace("-", " ") for holder in holders if isinstance(holder, str)]
    pronoun = "it" if len(holders) == 1 else "them"
    print(f"Revoked: {', '.join(names)}; a running server disconnects {pronoun}")


@app.command()
def renew(
    holder: str | None = typer.Argument(
        None,
        metavar="[ID|server]",
        help=f"Id of a client, such as 3, or of a relay, such as relay-0, or 'server'. Default: all clients, all relays and the server, if "
        f"their certificates expire within {RENEW_DAYS} days.",
        show_default=False,
    ),
    folder: Path = FOLDER,
    host: list[str] | None = HOSTS,
    days: int = DAYS,
) -> None:
    """Create a new key and certificate for a client, a relay or the server. The command needs the file ca.key, to sign the certificate."""
    from ..keys import key_folder as keys

    if holder is None:
        chosen = keys.expiring(folder, RENEW_DAYS)
    else:
        chosen = [_holder(holder, folder, "renew", "server", "relay-0")]
    if host and (holder is None or isinstance(chosen[0], int)):
        example = keys_command(folder, "renew", "server", "--host", host[0])
        raise UserError(
            f"--host is only for the certificate of the server or of a relay; leave it out, or renew one of these: {example}"
        )
    if not chosen:
        print(f"No certificate expires within {RENEW_DAYS} days;", end=" ")
        print("to renew one anyway, give a client's id, a relay such as relay-0, or 'server'.")
    for holder_id in chosen:
        if holder_id == "server":
            names, ends = keys.renew_server(folder, host or (), days)
            valid = f"for {', '.join(names)} until {ends:%Y-%m-%d}"
            print(f"The server's certificate is {valid}; restart the server to use it.")
        else:
            ends, file = keys.renew(folder, holder_id, days, host or ()), _file(folder, holder_id)
            subject = f"{'Relay' if isinstance(holder_id, str) else 'Client'} {file.stem}"
            print(f"{subject} has a new key, valid until {ends:%Y-%m-%d};", end=" ")
            print(
                f"copy {file} to the machine of {subject.lower()}. The old key is no longer accepted."
            )


@app.command("list")
def show(folder: Path = FOLDER) -> None:
    """List all keys with their state and expiry date. On a terminal, the list is a table, otherwise tab-separated lines."""
    from ..keys import key_folder as keys
    from ..keys.enrolment import utc_now

    registry, now = keys.read_registry(folder), utc_now()
    certificates = {"CA": keys.CA_CRT, "server": keys.SERVER_CRT}
    rows = [_certificate_row(folder / file, name, now) for name, file in certificates.items()]
    for entry in (*registry.relays, *registry.entries):
        rows.append(_row(entry, _file(folder, entry.holder), now))
    colours = {"valid": "", "enrolled": "", "revoked": "dim"}
    styles = [colours.get(row[1], "red") for row in rows]
    print_table(COLUMNS, rows, left={"state", "until", "fingerprint", "file"}, styles=styles)


def _file(folder: Path, holder: int | str) -> Path:
    """Return the path of the enrolment file of a client, such as 3, or of a relay, such as "relay-0"."""
    from ..keys import key_folder as keys

    if isinstance(holder, int):
        return folder / keys.CLIENTS / f"{holder}.toml"
    return folder / keys.RELAYS / f"{holder.removeprefix('relay-')}.toml"


def _row(entry: "RegistryEntry", file: Path, now: datetime) -> tuple[str, ...]:
    state = "expired" if entry.state == "enrolled" and entry.refusal(now) else entry.state
    raw = hashlib.sha256(b64decode(entry.public_key.split()[1])).digest()
    fingerprint = "SHA256:" + b64encode(raw).decode().rstrip("=")  # as ssh-keygen -l prints it
    until, days = f"{entry.not_after:%Y-%m-%d}", str(days_left(entry.not_after, now))
    shown = str(file) if file.is_file() else NOTHING
    return str(entry.holder), state, until, days, fingerprint, shown


def _certificate_row(path: Path, holder: str, now: datetime) -> tuple[str, ...]:
    from ..keys.certificates import read_certificate

    try:
        certificate = read_certificate(path)
    except KeysError:
        return holder, "unreadable", NOTHING, NOTHING, NOTHING, str(path)
    from cryptography.hazmat.primitives.hashes import SHA256

    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    state = "expired" if now >= ends else "valid" if now >= begins else "not yet valid"
    fingerprint = f"SHA256:{certificate.fingerprint(SHA256()).hex()}"
    return holder, state, f"{ends:%Y-%m-%d}", str(days_left(ends, now)), fingerprint, str(path)


def days_left(ends: datetime, now: datetime) -> int:
    """Return the number of days until a certificate ends, rounded up."""
    return max(0, -((now - ends) // timedelta(days=1)))


def _holder(text: str, folder: Path, command: str, *others: str) -> int | str:
    """Return a client's id as an int, or `text` if it is one of `others`. If `others` contains "relay-0", `text` may be any relay.

    Raises UserError for any other text.
    """
    if text.isascii() and text.isdigit():
        return int(text[:12])
    if text in others or "relay-0" in others and RELAY.fullmatch(text):
        return text
    words = " nor ".join(f"'{other}'" for other in others)
    raise UserError(
        f"'{text}' is neither a client's id nor {words}; give one of them, for example: {keys_command(folder, command, 3)}"
    )
