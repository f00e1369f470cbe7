"""`fedcomp doctor`: check the machine, a port, a server, an enrolment file, a folder of keys or a data folder.

The command prints one line per check: ✓ (passed), ✗ (failed, with a fix) or – (skipped, with a reason). A check imports the packages that
it needs, so that a broken package fails one check and does not end the command.
"""

import json
import os
import platform
import shutil
import socket
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ..config import KEYS, expand_home, keys_command
from ..errors import FedcompError, KeysError, MissingExtraError, UnreachableError, UserError
from ..formatting import human_bytes, one_line
from .flags import ENROLMENT_DEFAULT, JSON, option
from .keys import RENEW_DAYS, days_left

if TYPE_CHECKING:
    from cryptography import x509

    from ..keys.enrolment import Enrolment
    from ..keys.registry import Registry, RegistryEntry

OK, FAILED, SKIPPED = "ok", "failed", "skipped"
SYMBOLS = {OK: "✓", FAILED: "✗", SKIPPED: "–"}
WIDTH = 18  # width of the column with the subjects of the checks, in characters
MIN_FREE_BYTES = 10**9  # required free space on the disk of the run folders


@dataclass(frozen=True)
class Check:
    """The result of one check. The fields are the keys of `fedcomp doctor --json`."""

    what: str  # subject of the check, such as torch
    state: str  # result: ok, failed or skipped
    found: str  # description of the result
    fix: str = ""  # advice, such as how to fix a failed check

    def line(self, width: int) -> str:
        return f"{SYMBOLS[self.state]} {self.what:<{width}}  {self.found}{f'; {self.fix}' if self.fix else ''}"


def ok(what: str, found: str, fix: str = "") -> Check:
    return Check(what, OK, found, fix)


def failed(what: str, found: str, fix: str) -> Check:
    return Check(what, FAILED, found, fix)


def from_error(what: str, error: FedcompError | str) -> Check:
    """Return the failed check of an error, whose message consists of the problem, a semicolon and the fix."""
    found, _, fix = str(error).partition("; ")
    return failed(what, found, fix)


def doctor(
    server: str | None = option(
        "HOST:PORT", "Server to connect to. Default: the server that the enrolment file names."
    ),
    client: Path | None = option(
        "FILE",
        f"Enrolment file of a client or relay. Default, unless --keys is given: {ENROLMENT_DEFAULT}.",
        "--client",
        "--enrolment",
    ),
    keys: Path | None = option("DIR", "Folder of keys, written by fedcomp keys init."),
    data: Path | None = option("DIR", "Folder with the data sets of built-in tasks."),
    port: int | None = option(
        "N", "Port on which a server is to listen, to check that it is free.", min=1, max=65_535
    ),
    as_json: bool = JSON,
) -> None:
    """Check this machine, and the server, port, files and folders given as options. The exit status is 2 if a check fails."""
    from ..keys.enrolment import VARIABLE, default_enrolment

    if client:
        client = expand_home(client, "--client")
    elif not keys and (default_enrolment().exists() or os.environ.get(VARIABLE)):
        client = default_enrolment()
    keys, data = keys and expand_home(keys, "--keys"), data and expand_home(data, "--data")
    results = []
    for check in _checks(server, client, keys, data, port):
        results.append(check)
        if not as_json:
            print(one_line(check.line(WIDTH)), flush=True)
    passed = all(check.state != FAILED for check in results)
    if as_json:
        print(json.dumps({"ok": passed, "checks": [asdict(check) for check in results]}, indent=2))
    if not passed:
        raise typer.Exit(UserError.exit_status)


def _checks(
    server: str | None, client: Path | None, keys: Path | None, data: Path | None, port: int | None
) -> Iterator[Check]:
    """Yield the results of all checks. Raises ConfigError before the first check if --server is malformed."""
    from ..keys.connection import address
    from ..keys.enrolment import VARIABLE, Enrolment, default_enrolment

    where = address(server) if server else None
    yield from packages()
    yield from torch_and_cuda()
    yield disk(Path("runs"))
    if port is not None:
        yield listening(port)
    enrolment = None
    if client:
        try:
            enrolment = Enrolment.read(client)
        except KeysError as error:
            yield from_error("client", error)
        else:
            yield ok("client", f"{client} is valid: {enrolment.name}")
            yield private(client, "client file")
            holder = f"relay-{enrolment.id}" if enrolment.relay else enrolment.id
            renew = keys_command(keys or KEYS, "renew", holder)
            remedy = f"on the server: {renew}, then copy the new file"
            yield validity("client certificate", enrolment.x509_certificate, remedy)
    elif not keys:
        found = f"no enrolment file at {default_enrolment()}, and {VARIABLE} is not set"
        fix = "only the clients and relays of a deployment need this file; make it on the server: fedcomp keys init --clients N --host HOST"
        yield Check("client", SKIPPED, found, fix)
    if keys:
        yield from keys_folder(keys, enrolment)
    if not where and enrolment and enrolment.server:
        where = address(enrolment.server, f"'server' in {client}")
    if where:
        yield from reachable(where, enrolment, keys)
    if data:
        yield from data_folder(data)


def packages() -> Iterator[Check]:
    """Check that Python and fedcomp's dependencies have the required versions."""
    from importlib import metadata

    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

    try:
        about = metadata.metadata("fedcomp")
    except metadata.PackageNotFoundError:
        found = "fedcomp runs from its source tree and is not installed"
        yield Check("packages", SKIPPED, found, "install it with: pip install .")
        return
    required = [Requirement(line) for line in about.get_all("Requires-Dist") or []]
    needed = {r.name: r.specifier for r in required if not r.marker or r.marker.evaluate()}
    versions = {"python": SpecifierSet(about["Requires-Python"] or ""), "flwr": needed["flwr"]}
    all_fit = True
    for name, allowed in (versions | needed).items():
        version, fix = "not installed", f"pip install '{name}{allowed}'"
        if name == "python":
            version, fix = platform.python_version(), f"make an environment with Python {allowed}"
        else:
            with suppress(metadata.PackageNotFoundError):
                version = metadata.version(name)
        if version == "not installed" or not allowed.contains(version, prereleases=True):
            all_fit = False
            yield failed(name, f"{version}, but {allowed} is required", fix)
        elif name in versions:
            yield ok(name, version)
    if all_fit:
        yield ok("packages", f"{len(needed)} have the required versions: {', '.join(needed)}")


def torch_and_cuda() -> Iterator[Check]:
    try:
        import torch
    except Exception as error:  # a broken package may raise any error, such as OSError
        found = f"cannot be imported ({type(error).__name__}: {error})"
        yield failed("torch", found, "install it again with: pip install --force-reinstall torch")
        return
    yield ok("torch", torch.__version__)
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        yield ok("cuda", f"{len(names)} device{'s' * (len(names) > 1)}: {', '.join(names)}")
    elif not Path("/dev/nvidia0").exists():
        yield Check("cuda", SKIPPED, "this machine has no GPU; runs use the CPU")
    else:
        built = torch.version.cuda is not None
        why = "cannot use it" if built else "is built without CUDA"
        fix = "update NVIDIA's driver" if built else "install torch's CUDA build"
        found = f"this machine has a GPU, but torch {torch.__version__} {why}"
        yield failed("cuda", found, f"{fix}, or run with --device cpu")
    yield threads(torch.get_num_threads(), cores())


def cores(limit: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Return the number of CPU cores that the CPU affinity and the container's CPU quota give to this process."""
    by_affinity = hasattr(os, "sched_getaffinity")
    bound = len(os.sched_getaffinity(0)) if by_affinity else os.cpu_count() or 1
    with suppress(OSError, ValueError):
        # Without a quota, cpu.max contains "max", which is not an integer.
        quota, period = map(int, limit.read_text().split())
        bound = min(bound, max(1, -(-quota // period)))
    return bound


def threads(count: int, usable: int) -> Check:
    found = f"{count} on {usable} core{'s' * (usable > 1)}"
    if count <= usable:
        return ok("threads", found)
    return failed("threads", f"{found}, which slows every step", f"set OMP_NUM_THREADS={usable}")


def disk(runs: Path) -> Check:
    """Check that the default folder of runs can be written, and that the disk of this folder has MIN_FREE_BYTES of free space."""
    place = runs.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        return failed("disk", f"{place} cannot be written", "work in another folder, or give --out")
    found = f"{human_bytes(free)} free in {place}"
    if free >= MIN_FREE_BYTES:
        return ok("disk", found)
    return failed(
        "disk",
        f"only {found}",
        f"make {human_bytes(MIN_FREE_BYTES)} of space free, or give --out on another disk",
    )


def listening(port: int) -> Check:
    """Check that a server can listen on a port at all addresses of this machine."""
    what, dual = f"port {port}", socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    try:
        socket.create_server(("", port), family=family, dualstack_ipv6=dual).close()
    except PermissionError:
        fix = "give --port with a number of at least 1024"
        return failed(what, "this user is not permitted to listen on this port", fix)
    except OSError as error:
        found = f"another process listens on this port ({os.strerror(error.errno or 0)})"
        fix = f"stop the process that ss -ltnp 'sport = :{port}' shows, or give another --port"
        return failed(what, found, fix)
    return ok(what, "free")


def data_folder(folder: Path) -> Iterator[Check]:
    """Check that the data set of each built-in task can be loaded. A missing data set is skipped, or fails if no data set can be loaded."""
    from ..tasks import available_tasks, load

    tasks = {name.partition("-")[0]: name for name in available_tasks() if name != "digits"}
    checks: dict[str, Check] = {}
    for name, task_name in tasks.items():
        try:
            task = load(task_name, folder)
            train, test = len(task.train()), len(task.test())
            checks[name] = ok("data", f"{name}: {train:,} training and {test:,} test examples")
        except (UserError, MissingExtraError) as error:
            checks[name] = from_error("data", f"{name}: {error}")
    none_loaded = all(check.state == FAILED for check in checks.values())
    for name, check in checks.items():
        if check.state == OK or none_loaded or (folder / name).exists():
            yield check
        else:
            yield Check("data", SKIPPED, f"{name}: not in {folder}")


def keys_folder(folder: Path, enrolment: "Enrolment | None") -> Iterator[Check]:
    """Check the certificates, the registry (list of all keys) and the enrolment files in a folder of keys.

    Also check that the registry accepts `enrolment`, if it is not None.
    """
    from ..keys import key_folder as keys
    from ..keys.certificates import hosts_of, read_certificate

    try:
        registry = keys.read_registry(folder)
        ca, certificate = read_certificate(folder / keys.CA_CRT), keys.check_server_files(folder)
    except KeysError as error:
        yield from_error("keys", error)
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
            "restore the registry from a copy, or make new keys in another folder",
        )
        return
    yield from registered_keys(folder, keys.CLIENTS, registry.entries)
    if registry.relays:
        yield from registered_keys(folder, keys.RELAYS, registry.relays)
    if enrolment is not None:
        yield enrolled(registry, enrolment, ca)


def enrolled(registry: "Registry", enrolment: "Enrolment", ca: "x509.Certificate") -> Check:
    """Check that the registry accepts an enrolment, and that the enrolment trusts the certificate authority `ca`."""
    from ..keys.certificates import parse_certificate

    client, relay, problem = registry.find(enrolment.key_hash)
    if problem:
        return from_error("enrolled", problem)
    kind, id = ("client", client) if relay is None else ("relay", relay)
    copy = f"copy {kind}s/{id}.toml to the {kind} again"
    if enrolment.name != f"{kind} {id}":
        found = f"the registry assigns this key to {kind} {id}"
        return failed("enrolled", f"{found}, but the file is that of {enrolment.name}", copy)
    found = f"{enrolment.name} is accepted"
    if parse_certificate(enrolment.ca) != ca:
        other = "but the enrolment file trusts another CA than the folder"
        return failed("enrolled", f"{found}, {other}", copy)
    return ok("enrolled", found)


def registered_keys(
    folder: Path, place: str, entries: "tuple[RegistryEntry, ...]"
) -> Iterator[Check]:
    """Check the keys of all clients (`place="clients"`) or relays (`place="relays"`) in the registry, and their enrolment files."""
    from ..keys.enrolment import utc_now

    now = utc_now()
    counts = {"accepted": sum(not entry.refusal(now) for entry in entries)}
    counts["revoked"] = sum(entry.state == "revoked" for entry in entries)
    counts["expired"] = len(entries) - sum(counts.values())
    text = ", ".join(f"{count} {state}" for state, count in counts.items() if count) or "none"
    if counts["expired"]:
        yield failed("registry", f"{place}: {text}", keys_command(folder, "renew"))
    else:
        yield ok("registry", f"{place}: {text}")
    yield enrolment_files(folder, place, entries)


def enrolment_files(folder: Path, place: str, entries: "tuple[RegistryEntry, ...]") -> Check:
    """Check that the enrolment files in the subfolder `place` match the registry, and that only their owner can read them.

    Files may be missing, because users move them to the machines of the clients and relays.
    """
    from ..keys.enrolment import Enrolment, openssh

    by_id = {str(entry.id): entry for entry in entries}
    paths = sorted((folder / place).glob("*.toml"))
    for path in paths:
        entry = by_id.get(path.stem)
        if entry is None:
            more = keys_command(folder, "add", *["--relay", "--host", "HOST"] * (place == "relays"))
            found = f"{path} belongs to none of the {place} in the registry"
            return failed(
                "files", found, f"delete this file; to make new enrolment files, run {more}"
            )
        renew = keys_command(folder, "renew", entry.holder)
        try:
            enrolment = Enrolment.read(path)
        except KeysError as error:
            return from_error("files", str(error).rpartition(";")[0] + f"; {renew}")
        if (enrolment.id, openssh(enrolment.key_pair[1])) != (entry.id, entry.public_key):
            return failed("files", f"{path} does not match the registry's {entry.name}", renew)
        if (checked := private(path, "files")).state == FAILED:
            return checked
    found = f"{len(paths)} of {len(entries)} enrolment files in {place}"
    return ok("files", f"{found} are present and match the registry")


def private(path: Path, what: str) -> Check:
    """Check that only the owner of a file can read it."""
    if (mode := stat.S_IMODE(path.stat().st_mode)) & 0o077:
        found = f"{path} can be read by other users (mode {mode:03o})"
        return failed(what, found, f"chmod 600 {path}")
    return ok(what, f"{path} can be read only by its owner")


def validity(what: str, certificate: "x509.Certificate", remedy: str, prefix: str = "") -> Check:
    """Check that a certificate is valid now. `remedy` is the advice if it expires soon or has expired.

    If the certificate is not valid yet, this machine's clock is probably wrong.
    """
    from ..keys.enrolment import format_time, utc_now

    now = utc_now()
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    clock = f"and it is {format_time(now)} by this machine's clock"
    if now < begins:
        fix = "set the clock by NTP: timedatectl set-ntp true"
        return failed(what, f"{prefix}begins on {format_time(begins)}, {clock}", fix)
    if now >= ends:
        fix = f"correct the clock if it is wrong, else {remedy}"
        return failed(what, f"{prefix}expired on {format_time(ends)}, {clock}", fix)
    days = days_left(ends, now)
    found = f"{prefix}valid until {format_time(ends)}, {days} days"
    return ok(what, found, f"renew it soon, {remedy}" if days <= RENEW_DAYS else "")


def reachable(
    where: tuple[str, int], enrolment: "Enrolment | None", keys: Path | None
) -> Iterator[Check]:
    """Connect to a server, and verify its certificate with the CA in the enrolment, or else in the folder of keys."""
    from ..keys.connection import contact, join_address

    name = join_address(*where)
    trust: Enrolment | str | None = enrolment
    if trust is None and keys:
        with suppress(OSError, ValueError):
            trust = (keys / "ca.crt").read_text(encoding="ascii")
    try:
        server = contact(*where, trust)
    except (KeysError, UnreachableError) as error:
        if trust is None and isinstance(error, UnreachableError) and error.cause == "tls":
            found = f"{name} has a certificate that was not checked"
            yield Check("server", SKIPPED, found, "give --client FILE or --keys DIR")
        else:
            yield from_error("server", error)
        return
    without = "" if server.certificate else ", without TLS"
    yield ok("server", f"{name} answers{without}, {1000 * server.seconds:.0f} ms")
    if server.certificate:
        renew = keys_command(keys or KEYS, "renew", "server")
        yield validity("server certificate", server.certificate, f"on the server: {renew}")
