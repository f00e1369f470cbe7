"""Many clients in one process: one host with many shards of data.

Each has its own key, its own state folder and its own connection, in a thread of its own that mostly sleeps. They share the data, the
compiled code and the model that is trained in, so that training is one after the other and one more client costs its weights and its
memory. What goes wrong for one is said, and the others go on.
"""

import threading
import time
from collections.abc import Callable, Mapping

from ..callbacks import Said
from ..clients.session import reason
from ..errors import FedcompError
from .client_process import Process

LISTEN_S = 0.2  # between looks at what was said
END_S = 30.0  # that threads have to end: as long as an answer of a server may take


class Crowd:
    """Clients by their logical ids. `say` hears what they say, equal sentences once, with who said them; always from one thread."""

    def __init__(self, processes: Mapping[int, Process], say: Callable[[str], None]):
        self.processes, self.say = dict(processes), say
        self.failed: dict[int, FedcompError] = {}
        self._said: list[tuple[int, str]] = []
        self._lock = threading.Lock()
        for who, process in self.processes.items():
            process.say = lambda sentence, who=who: self._hear(who, sentence)

    def run(self) -> None:
        """Until each is done with. Raises what the first that failed did, in one sentence for all; whatever is raised, all have ended."""
        threads = [
            threading.Thread(target=self._attend, args=(who,), name=f"client-{who}", daemon=True)
            for who in self.processes
        ]
        for thread in threads:
            thread.start()
        try:
            while any(thread.is_alive() for thread in threads):
                time.sleep(LISTEN_S)
                self._tell()
        finally:
            self._end(threads)
        if self.failed:
            first = next(iter(self.failed.values()))
            some = f"{len(self.failed)} of {len(self.processes)} clients could not go on: {named(self.failed)}"
            raise type(first)(f"{some}; {first}")

    def _attend(self, who: int) -> None:
        try:
            self.processes[who].run()
        except FedcompError as error:
            self._fail(who, error)
        except Exception as error:
            self._fail(who, FedcompError(reason(error)))

    def _fail(self, who: int, error: FedcompError) -> None:
        with self._lock:
            self.failed[who] = error
        self._hear(who, Said(f"ended: {error}", "failed", reason=str(error)))

    def _hear(self, who: int, sentence: str) -> None:
        with self._lock:
            self._said.append((who, sentence))

    def _tell(self) -> None:
        with self._lock:
            said, self._said = self._said, []
        by_sentence: dict[str, list[tuple[int, str]]] = {}
        for who, sentence in said:
            by_sentence.setdefault(str(sentence), []).append((who, sentence))
        for sentence, told in by_sentence.items():
            who = [one for one, _ in told]
            event = getattr(told[0][1], "event", "said")
            values = {
                name: value
                for name, value in getattr(told[0][1], "values", {}).items()
                if name != "client"
            }
            self.say(Said(f"{named(who)}: {sentence}", event, clients=sorted(set(who)), **values))

    def _end(self, threads: list[threading.Thread]) -> None:
        for process in self.processes.values():
            process.end()
        deadline = time.monotonic() + END_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._tell()


def named(clients: Mapping[int, object] | list[int]) -> str:
    """`client 3`, `clients 0 to 49`, `clients 0, 3 to 5`."""
    ids = sorted(set(clients))
    spans: list[list[int]] = []
    for one in ids:
        if spans and spans[-1][1] == one - 1:
            spans[-1][1] = one
        else:
            spans.append([one, one])
    parts = [f"{a}" if a == b else f"{a} to {b}" if b > a + 1 else f"{a}, {b}" for a, b in spans]
    return f"client{'s' * (len(ids) > 1)} {', '.join(parts)}"
