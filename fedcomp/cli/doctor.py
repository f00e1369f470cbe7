"""`fedcomp doctor`: whether a machine, a port, a server, an enrolment file, a folder of keys or of data is as it should be.

One line a check: ✓ as it should be, ✗ not so and what to do, – not checked or not needed and why. What is checked is imported where it is
needed: a broken package is a finding, not a failure.
"""

import errno
import json
import os
import platform
import shutil
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..config import at_home
from ..errors import FedcompError, KeysError, MissingExtraError, UnreachableError, UserError
from .figures import human_bytes
from .keys import days_left

if TYPE_CHECKING:
    from ..clients.connection import Contact
    from ..clients.enrolment import Enrolment

LEAST_FREE = 10**9  # bytes where runs go
SOON = timedelta(days=30)
AHEAD_S, BEHIND_S = 4, 240  # of a client's clock; Flower refuses what is signed 5 s ahead or 305 s behind the server's
TIMEOUT_S = 5.0
WIDTH = 12  # of what is checked
OK, FAILED, SKIPPED = "ok", "failed", "skipped"
SIGNS = {OK: "✓", FAILED: "✗", SKIPPED: "–"}


@dataclass(frozen=True)
class Check:
    what: str
    state: str  # ok, failed or skipped
    found: str
    fix: str = ""  # what to do

    def line(self, width: int) -> str:
        return f"{SIGNS[self.state]} {self.what:<{width}}  {self.found}{f'; {self.fix}' if self.fix else ''}"


def doctor(
    server: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="A server to reach; that of --client when not given.")] = None,
    client: Annotated[Path | None, typer.Option("--client", "--enrolment", metavar="FILE", help="An enrolment file.")] = None,
    keys: Annotated[Path | None, typer.Option(metavar="DIR", help="A folder that fedcomp keys init made.")] = None,
    data: Annotated[Path | None, typer.Option(metavar="DIR", help="A folder of data; each task reads its own from it.")] = None,
    port: Annotated[int | None, typer.Option(metavar="N", min=1, max=65_535, help="A port that a server is to listen on.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON in place of lines.")] = False,
) -> None:
    """Check this machine and whatever is named, and say what to do. Exit status 2 where something is not as it should be."""
    from .watch import one_line

    done = []
    for check in checks(server, client, keys, data, port):
        done.append(check)
        if not as_json:
            print(one_line(check.line(WIDTH)), flush=True)
    well = all(check.state != FAILED for check in done)
    if as_json:
        print(json.dumps({"ok": well, "checks": [asdict(check) for check in done]}, indent=2))
    if not well:
        raise typer.Exit(UserError.exit_status)


def checks(server: str | None, client: Path | None, keys: Path | None, data: Path | None, port: int | None) -> Iterator[Check]:
    """What is found, one after the other. Raises UserError only where an option cannot be read at all."""
    from ..clients.connection import address

    where = address(server) if server else None
    yield from machine()
    if port is not None:
        yield listening(port)
    enrolment = None
    if client is not None:
        enrolment, found = enrolment_file(at_home(client, "--client"))
        yield from found
    if keys is not None:
        yield from keys_folder(at_home(keys, "--keys"), enrolment)
    if where is None and enrolment and enrolment.server:
        where = address(enrolment.server, f"'server' in {client}")
    yield from reaching(where, _ca(enrolment, keys)) if where else [_own_clock()]
    if data is not None:
        yield from data_folder(at_home(data, "--data"))


# The machine.


def machine() -> Iterator[Check]:
    yield from packages()
    yield from torch_and_cuda()
    yield disk(Path("runs"))


def packages() -> Iterator[Check]:
    """Python, flwr and the other packages against what fedcomp declares."""
    from importlib import metadata

    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

    try:
        about = metadata.metadata("fedcomp")
    except metadata.PackageNotFoundError:
        yield Check("packages", SKIPPED, "fedcomp is not installed but run from its sources", "install it with: pip install .")
        return
    wanted, here = SpecifierSet(about["Requires-Python"] or ""), platform.python_version()
    fits = wanted.contains(here, prereleases=True)
    yield Check("python", OK if fits else FAILED, here if fits else f"{here}, and {wanted} is needed",
                "" if fits else f"make an environment with Python {wanted}")
    needed = [Requirement(line) for line in about.get_all("Requires-Dist") or []]
    needed = [one for one in needed if one.marker is None or one.marker.evaluate({"extra": ""})]
    wrong = [one for one in needed if not _fits(one.name, one.specifier.contains)]
    for one in needed:
        if one.name == "flwr" and one not in wrong:
            yield Check("flwr", OK, f"{metadata.version('flwr')}, within {one.specifier}")
    for one in wrong:
        yield Check(one.name, FAILED, f"{_version(one.name)}, and {one.specifier} is needed", f"pip install '{one.name}{one.specifier}'")
    if not wrong:
        yield Check("packages", OK, f"{len(needed)} as needed: {', '.join(one.name for one in needed)}")


def _version(name: str) -> str:
    from importlib import metadata

    with suppress(metadata.PackageNotFoundError):
        return metadata.version(name)
    return "not installed"


def _fits(name: str, contains: Callable[..., bool]) -> bool:
    return (version := _version(name)) != "not installed" and contains(version, prereleases=True)


def torch_and_cuda() -> Iterator[Check]:
    try:
        import torch
    except Exception as error:  # a library that is missing is an OSError, a half-installed package anything
        yield Check("torch", FAILED, f"cannot be imported ({type(error).__name__}: {error})", "install it anew with: pip install "
                    "--force-reinstall torch")
        return
    yield Check("torch", OK, torch.__version__)
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        yield Check("cuda", OK, f"{len(names)} device{'s' * (len(names) > 1)}: {', '.join(names)}")
    elif torch.version.cuda and Path("/dev/nvidia0").exists():
        yield Check("cuda", FAILED, f"a GPU is here and torch {torch.__version__} cannot use it", "update NVIDIA's driver, or run with "
                    "--device cpu")
    elif Path("/dev/nvidia0").exists():
        yield Check("cuda", FAILED, f"a GPU is here and torch {torch.__version__} is built without CUDA", "install torch's CUDA build, or "
                    "run with --device cpu")
    else:
        yield Check("cuda", SKIPPED, "no device is here, runs are on the CPU")
    yield threads(torch.get_num_threads(), cores())


def cores(limit: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Cores that this process may use: those it is bound to, or as many as its container's share of time amounts to."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):
        quota, period = map(int, limit.read_text().split())  # "max" is no number: no limit
        bound = min(bound, max(1, -(-quota // period)))
    return bound


def threads(count: int, usable: int) -> Check:
    said = f"{count} on {usable} core{'s' * (usable > 1)}"
    if count > usable:
        return Check("threads", FAILED, f"{said}, which slows every step", f"set OMP_NUM_THREADS={usable}")
    return Check("threads", OK, said)


def disk(runs: Path) -> Check:
    """Whether runs can be written, and have room, where they go unless --out says otherwise."""
    place = runs.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        return Check("disk", FAILED, f"{place} cannot be written", "work in another folder, or give --out")
    if free < LEAST_FREE:
        return Check("disk", FAILED, f"{human_bytes(free)} free in {place}", f"free {human_bytes(LEAST_FREE)}, or give --out elsewhere")
    return Check("disk", OK, f"{human_bytes(free)} free in {place}")


# Ports and servers.


def listening(port: int) -> Check:
    """Whether a server could listen on a port, on every address of this machine."""
    what = f"port {port}"
    for family, everywhere in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as trial:
                trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: what was closed just now is no hindrance
                if family == socket.AF_INET6:
                    trial.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                trial.bind((everywhere, port))
                trial.listen(1)
        except PermissionError:
            return Check(what, FAILED, "this user may not listen there", "give --port with a number from 1024")
        except OSError as error:
            if family == socket.AF_INET6 and error.errno != errno.EADDRINUSE:
                continue  # a machine without IPv6
            return Check(what, FAILED, f"something listens there already ({error.strerror})",
                         f"stop what ss -ltnp 'sport = :{port}' shows, or give --port with another number")
    return Check(what, OK, "free")


def reaching(where: tuple[str, int], ca: str | None) -> Iterator[Check]:
    """The server's certificate and health, and both clocks."""
    from ..clients.connection import contact

    host, port = where
    name = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        met = contact(host, port, ca, TIMEOUT_S)
    except UnreachableError as error:
        if ca is None and error.cause == "tls":
            yield Check("server", SKIPPED, f"{name} has a certificate that was not checked", "give --client FILE, or --keys DIR")
        else:
            yield _refused("server", error)
        yield _own_clock()
        return
    except KeysError as error:
        yield _refused("server", error)
        yield _own_clock()
        return
    yield Check("server", OK, f"{name} is there{'' if met.certificate else ', without TLS'}, {1000 * met.seconds:.0f} ms")
    if met.certificate:
        yield _ending("server's", met.certificate.not_valid_after_utc, met.asked, "on the server: fedcomp keys renew server")
    yield clock(met)


def clock(met: "Contact") -> Check:
    """This machine's clock against the server's, which tells whole seconds."""
    from ..clients.enrolment import iso

    if met.date is None:
        return Check("clock", SKIPPED, f"{iso(met.asked)} here; the server does not tell its own")
    ahead = (met.asked - met.date).total_seconds() - 0.5
    apart = f"{iso(met.asked)} here, {iso(met.date)} on the server"
    if not -BEHIND_S <= ahead <= AHEAD_S:
        return Check("clock", FAILED, f"{apart}, which refuses clients whose clock is more than 5 s ahead or 5 min behind",
                     "set both clocks by NTP: timedatectl set-ntp true")
    return Check("clock", OK, f"{apart}")


def _own_clock() -> Check:
    from ..clients.enrolment import iso, utc_now

    return Check("clock", SKIPPED, f"{iso(utc_now())} here; compared with a server's where one is reached")


# Keys.


def enrolment_file(path: Path) -> tuple["Enrolment | None", list[Check]]:
    from ..clients.enrolment import Enrolment, utc_now

    try:
        enrolment = Enrolment.read(path)
    except KeysError as error:
        return None, [_refused("client", error)]
    found = [Check("client", OK, f"{path} is whole, its keys are a pair: client {enrolment.id}")]
    remedy = f"on the server: fedcomp keys renew {enrolment.id}, then copy the new file"
    found += [_private(path, "client file"), _ending("client key", enrolment.not_after, utc_now(), remedy)]
    return enrolment, found


def keys_folder(folder: Path, enrolment: "Enrolment | None") -> Iterator[Check]:
    """The CA, the server's certificate, the registry and the files that belong to it; and whether a client is in it."""
    from cryptography import x509

    from ..clients.enrolment import utc_now
    from ..server import keys
    from ..server.certificates import read_certificate

    try:
        registry = keys.read_registry(folder)
        ca, certificate = read_certificate(folder / keys.CA_CRT), keys.check_server_files(folder)
    except KeysError as error:
        yield _refused("keys", error)
        return
    now = utc_now()
    yield _ending("ca", ca.not_valid_after_utc, now, "make new keys with: fedcomp keys init")
    yield _ending("certificate", certificate.not_valid_after_utc, now, "fedcomp keys renew server",
                  f"for {', '.join(keys.hosts_of(certificate))} ")
    for name in (keys.CA_KEY, keys.SERVER_KEY):
        if (folder / name).exists():
            yield _private(folder / name, name)
    counts = {"let in": len(registry.enrolled())}
    counts["revoked"] = sum(entry.state == "revoked" for entry in registry.entries)
    counts["expired"] = len(registry.entries) - sum(counts.values())
    said = ", ".join(f"{count} {state}" for state, count in counts.items() if count) or "none"
    yield Check("registry", FAILED if counts["expired"] else OK, f"clients: {said}", "fedcomp keys renew" if counts["expired"] else "")
    yield files_of(folder / keys.CLIENTS, registry.entries)
    if enrolment is not None:
        why = registry.reason(enrolment.public_key)
        here = registry.id_of(enrolment.public_key)
        if not why and here != enrolment.id:
            why = f"its key is that of client {here} here and its file says {enrolment.id}; copy {keys.CLIENTS}/{here}.toml anew"
        if not why and x509.load_pem_x509_certificate(enrolment.ca.encode()) != ca:
            why = f"client {enrolment.id} is let in and trusts another CA; copy {keys.CLIENTS}/{here}.toml anew"
        yield Check("enrolled", FAILED if why else OK, *(_parted(why) if why else [f"client {enrolment.id} is let in"]))


def files_of(folder: Path, entries: tuple) -> Check:
    """Whether the enrolment files that are still there go with the registry and are private."""
    from ..clients.enrolment import Enrolment

    for entry in entries:
        path = folder / f"{entry.id}.toml"
        if not path.is_file():
            continue  # handed out and deleted: as good
        try:
            enrolment = Enrolment.read(path)
        except KeysError as error:
            return Check("files", FAILED, *_parted(str(error).rpartition(";")[0] + f"; fedcomp keys renew {entry.id}"))
        if (enrolment.id, enrolment.public_key) != (entry.id, entry.public_key):
            return Check("files", FAILED, f"{path} is not what the registry has for client {entry.id}", f"fedcomp keys renew {entry.id}")
        if (private := _private(path, "files")).state == FAILED:
            return private
    unknown = [path for path in sorted(folder.glob("*.toml")) if path.stem not in {str(entry.id) for entry in entries}]
    if unknown:
        return Check("files", FAILED, f"{unknown[0]} is of no client in the registry", "delete it; fedcomp keys add makes new ones")
    there = sum((folder / f"{entry.id}.toml").is_file() for entry in entries)
    return Check("files", OK, f"{there} of {len(entries)} enrolment files are here, as the registry says")


def _private(path: Path, what: str) -> Check:
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        return Check(what, FAILED, f"{path} may be read by others (mode {mode:03o})", f"chmod 600 {path}")
    return Check(what, OK, f"{path} is readable by its owner alone")


def _ending(what: str, ends: datetime, now: datetime, remedy: str, before: str = "") -> Check:
    from ..clients.enrolment import iso

    if now >= ends:
        return Check(what, FAILED, f"{before}ended on {iso(ends)}, and it is {iso(now)} by this machine's clock",
                     f"correct the clock if it is wrong, else {remedy}")
    days = days_left(ends, now)
    return Check(what, OK, f"{before}good until {iso(ends)}, {days} days", f"renew it soon, {remedy}" if ends - now < SOON else "")


def _ca(enrolment: "Enrolment | None", keys: Path | None) -> str | None:
    if enrolment is not None:
        return enrolment.ca
    with suppress(OSError, ValueError):
        return (at_home(keys, "--keys") / "ca.crt").read_text(encoding="ascii") if keys else None
    return None


# Data.


def data_folder(folder: Path) -> Iterator[Check]:
    """Each built-in task reads what it would read in a run; a set that is not in the folder at all is no fault while another is."""
    from ..tasks import available_tasks, load

    found = {name: _read(lambda name=name: load(name, folder)) for name in available_tasks() if name != "digits"}
    any_there = any(not isinstance(result, FedcompError) for result in found.values())
    for name, result in found.items():
        if not isinstance(result, FedcompError):
            yield Check("data", OK, f"{name}: {result[0]:,} examples to learn from, {result[1]:,} to test on")
        elif (folder / name.partition("-")[0]).exists() or not any_there:
            yield _refused("data", result, f"{name}: ")
        else:
            yield Check("data", SKIPPED, f"{name}: not in {folder}")


def _read(task: Callable) -> tuple[int, int] | FedcompError:
    try:
        made = task()
        return len(made.train()), len(made.test())
    except (UserError, MissingExtraError) as error:
        return error


def _refused(what: str, error: FedcompError, before: str = "") -> Check:
    return Check(what, FAILED, *_parted(before + str(error)))


def _parted(sentence: str) -> tuple[str, str]:
    """A sentence of ours as what is found and what to do."""
    found, _, fix = sentence.partition("; ")
    return found, fix
