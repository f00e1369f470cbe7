"""`fedcomp client --transport flower`: a client that runs in a SuperNode (Flower's client program)."""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from ...callbacks import LogMessage
from ...errors import UnreachableError, UserError
from ...state_folder import StateFolder
from ..client_process import RETRY_S, Target
from . import processes
from .device_app import FOLDER, MESSAGES, REFUSED, SETUP
from .events import new_lines

HOME, LOG = "supernode", "supernode.log"  # Flower's home folder and log file in the state folder
POLL_S = 0.2  # time between two reads of the ClientApp's messages
FAREWELL_S = 5.0  # time for the SuperNode to send the client's last answer
TRUST_WARNING = (
    "--transport flower: Flower's SuperNode runs the Apps that the server sends; connect only to servers that you trust, or use "
    "--transport grpc"
)


class FlowerClient:
    """A client in a SuperNode, with its files in the state folder `path`.

    `options`: the client's options, which device_app.py reads from a file. `patience_s`: for how many seconds the SuperNode tries to reach
    the server, or None for no limit. `stay`: whether to wait for the next run when a run is over.
    """

    def __init__(
        self,
        target: Target,
        options: dict[str, str | int | None],
        path: Path,
        log_message: Callable[[str], None],
        *,
        patience_s: float | None = None,
        stay: bool = False,
    ):
        self.target, self.options, self.log_message = target, options, log_message
        self.path = path.absolute()
        self.patience_s, self.stay = patience_s, stay
        self.home, self.log = self.path / HOME, self.path / LOG
        self._refused = ""  # why this client cannot take part, or "" if it can
        self._over = False  # whether the run is over and the client does not wait for another run
        self._new_messages = new_lines(self.path / MESSAGES)

    def run(self) -> None:
        """Start the SuperNode and return when the run is over, or never if `stay` is True.

        If the SuperNode ends early, start it again if `patience_s` is None, and raise UnreachableError otherwise. Raises UserError if the
        client cannot take part.
        """
        lock = StateFolder(self.home)
        try:
            self.log_message(LogMessage(TRUST_WARNING, "flower"))
            (self.path / MESSAGES).unlink(missing_ok=True)
            (self.path / SETUP).write_text(json.dumps(self.options))
            attempts = 0
            while True:
                self._serve()
                if self._refused:
                    raise UserError(self._refused)
                if self._over:
                    return
                sentence = f"Flower's SuperNode ended; {self.log} has its log"
                if self.patience_s is not None:
                    raise UnreachableError(sentence, "closed")
                self.log_message(LogMessage(sentence, "cut_off"))
                time.sleep(RETRY_S[min(attempts, len(RETRY_S) - 1)])
                attempts += 1
        finally:
            lock.close()

    def _serve(self) -> None:
        node = processes.start(self._command(), self.home / "flwr", self.log)
        try:
            address = self.target.address
            self.log_message(
                LogMessage(f"Flower's SuperNode connects to {address}", "started", server=address)
            )
            while node.poll() is None and not (self._refused or self._over):
                time.sleep(POLL_S)
                self._log_new_messages()
            if node.poll() is None:
                time.sleep(FAREWELL_S)
        finally:
            processes.end(node)
            self._log_new_messages()

    def _command(self) -> list[str]:
        key_folder = self.home / "node"
        shutil.rmtree(key_folder, ignore_errors=True)
        key_folder.mkdir(0o700)
        words = ["flower-supernode", "--superlink", self.target.address]
        words += processes.supernode_options(self.home)
        words += ["--node-config", f"{FOLDER}={json.dumps(str(self.path))}"]
        if self.patience_s is not None:
            words += ["--max-wait-time", str(self.patience_s)]
        if self.target.enrolment is None:
            return [*words, "--insecure"]
        ca, key = self.target.enrolment.unpack(key_folder)
        return [*words, "--root-certificates", str(ca), "--auth-supernode-private-key", str(key)]

    def _log_new_messages(self) -> None:
        """Log the messages that the ClientApp's processes have written since the last call."""
        for line in self._new_messages():
            sentence, event, values = json.loads(line)
            self.log_message(LogMessage(sentence, event, **values))
            if event == REFUSED:
                self._refused = sentence
            if event == "over":
                self._over = not self.stay
