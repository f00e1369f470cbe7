"""`fedcomp client --stock`: a client under Flower's own SuperNode, in place of one that speaks the Fleet API itself.

Flower's SuperNode asks for a message every 3 s, starts a process for each, and runs the ClientApp that the server's bundle names.
The bundle of a fedcomp server holds no code and names the installed `fedcomp.deployment.client_app`; another server's bundle could
hold code, and a SuperNode would run it.
"""

import json
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import tomli_w

from ..callbacks import Said
from ..clients.flower import Fleet
from ..errors import UnreachableError, UserError
from ..keys import connection
from ..keys.enrolment import Enrolment
from ..state_folder import StateFolder
from . import children
from .client_app import FOLDER, OVER, REFUSED, SAID, SETUP
from .client_process import RETRY_S, Target

HOME, LOG = "supernode", "supernode.log"  # in the state folder
LOOK_S = 0.2  # between looks at what the client says
LAST_S = 10.0  # for the answer to the farewell to leave
GIVEN_UP = "--stock: Flower's SuperNode runs what the server names, and hears every user of this machine on a loopback port"


@dataclass(frozen=True)
class Setup:
    """What the client's processes need to know, as SETUP holds it."""

    task: str
    data: str | None
    device: str
    client: int
    partition_id: int | None
    partitions: int | None


class Stock:
    """A SuperNode and what it needs, in the state folder `path`. `say` hears the client's sentences."""

    def __init__(
        self,
        target: Target,
        enrolled: Enrolment | None,
        setup: Setup,
        path: Path,
        say: Callable[[str], None],
        *,
        patience_s: float | None = None,
        stay: bool = False,
    ):
        self.target = target
        self.enrolled = enrolled
        self.setup = setup
        self.path = path.absolute()
        self.say = say
        self.patience_s, self.stay = patience_s, stay
        self.home, self.log = self.path / HOME, self.path / LOG
        self.refused = ""  # why this client cannot take part
        self._heard = 0  # characters of what was said

    def run(self) -> None:
        """Until the run is over. Raises UserError when the server does not let the client in, or is not reached in time."""
        self.say(Said(GIVEN_UP, "stock"))
        lock = StateFolder(self.home)
        try:
            self._prepare()
            lost_at, attempt = time.monotonic(), 0
            while not self._over():
                try:
                    self._admit()
                    lost_at, attempt = self._attend(), 0
                    if self.refused:
                        raise UserError(self.refused)
                    if not self._over():
                        self.say(
                            Said(
                                f"Flower's SuperNode ended; {self.log} has what it said", "cut_off"
                            )
                        )
                except UnreachableError as error:
                    if error.cause not in UnreachableError.passing:
                        raise
                    if (
                        self.patience_s is not None
                        and time.monotonic() - lost_at >= self.patience_s
                    ):
                        raise
                    self.say(
                        Said(
                            f"{error}; trying again",
                            "cut_off",
                            reason=str(error),
                            cause=error.cause,
                        )
                    )
                if not self._over():
                    time.sleep(RETRY_S[min(attempt, len(RETRY_S) - 1)])
                    attempt += 1
        finally:
            lock.close()

    def _prepare(self) -> None:
        for name in (OVER, SAID):
            (self.path / name).unlink(missing_ok=True)
        (self.path / SETUP).write_text(json.dumps(vars(self.setup)))

    def _over(self) -> bool:
        return not self.stay and (self.path / OVER).exists()

    def _admit(self) -> None:
        """See that the server is the one, and make an enrolled key known to its SuperLink: a SuperNode with a key expects that."""
        connection.check_server(self.target.host, self.target.port, self.target.ca)
        if self.enrolled is not None:
            fleet = Fleet(self.target.address, self.target.key, self.target.ca, enrolled=True)
            try:
                fleet.enter()
                fleet.leave()
            finally:
                fleet.close()

    def _attend(self) -> float:
        """Run the SuperNode until it ends or the run is over. Returns when it was seen last."""
        with self.log.open("ab") as log:
            node = children.start(self._command(), children.environment(self.home / "flwr"), log)
        try:
            self.say(
                Said(
                    f"Flower's SuperNode runs for {self.target.address}",
                    "connected",
                    server=self.target.address,
                )
            )
            while node.poll() is None and not self._over() and not self.refused:
                self._listen()
                time.sleep(LOOK_S)
            self._linger(node)
            return time.monotonic()
        finally:
            children.end(node)
            self._listen()

    def _linger(self, node: subprocess.Popen) -> None:
        """Leave the SuperNode the time to send its last answer."""
        deadline, size = time.monotonic() + LAST_S, self.log.stat().st_size
        while node.poll() is None and time.monotonic() < deadline:
            if any(
                end in self.log.read_bytes()[size:]
                for end in (b"Sent successfully", b"Failed to send")
            ):
                return
            time.sleep(LOOK_S)

    def _command(self) -> list[str]:
        own = self.home / "node"
        shutil.rmtree(own, ignore_errors=True)
        own.mkdir(0o700)
        config = own / "node.toml"
        config.write_text(tomli_w.dumps({FOLDER: str(self.path)}))
        if self.enrolled is None:
            trust = ["--insecure"]
        else:
            ca, key = self.enrolled.unpack(own)
            trust = ["--root-certificates", str(ca), "--auth-supernode-private-key", str(key)]
        return [
            children.script("flower-supernode"),
            "--superlink",
            self.target.address,
            "--host",
            children.LOOPBACK,
            "--port",
            str(children.free_port()),
            "--node-config",
            str(config),
            *trust,
        ]

    def _listen(self) -> None:
        """Say on what the client's processes have said."""
        try:
            said = (self.path / SAID).read_text(encoding="utf-8")
        except FileNotFoundError:
            return
        whole = said[: said.rfind("\n") + 1]
        for line in whole[self._heard :].splitlines():
            sentence, event, values = json.loads(line)
            self.say(Said(sentence, event, **values))
            self.refused = sentence if event == REFUSED else self.refused
        self._heard = len(whole)
