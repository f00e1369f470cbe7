"""A worker process of worker_pool.py, which checks alternatives and runs them.

Orders and answers are JSON. The process ends when the other end of the connection is closed; SIGINT ends its run as Ctrl-C does.
"""

import json
import os
import queue
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ...callbacks import Callback, Header, RoundRecord
from ...config import RunConfig, settings
from ...errors import FedcompError
from .progress import FIGURES

Tell = Callable[..., None]


def main(channel: int) -> None:
    """Carry out the orders that come through the connection with descriptor `channel`."""
    link = Connection(channel)
    orders: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(link, orders), daemon=True).start()

    def tell(**answer: Any) -> None:
        link.send_bytes(json.dumps(answer).encode())

    try:
        from ...sim import run  # noqa: F401 — while the first order is under way

        while True:
            _obey(orders.get(), tell)
    except KeyboardInterrupt:
        os._exit(130)


def _listen(link: Connection, orders: queue.SimpleQueue[Any]) -> None:
    with suppress(EOFError, OSError):
        while True:
            orders.put(json.loads(link.recv_bytes()))
    os._exit(0)


def _obey(order: dict[str, Any], tell: Tell) -> None:
    """Carry out an order. Its last answer has the key `end`."""
    try:
        tell(end=ORDERS[order.pop("order")](tell=tell, **order))
    except FedcompError as error:
        tell(end={"failed": str(error), "status": error.exit_status})
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        first_line = str(error).strip().partition("\n")[0]
        tell(end={"failed": f"{type(error).__name__}: {first_line}", "status": 1})


def check(tell: Tell, values: dict[str, Any]) -> dict[str, Any]:
    """Return what is known of an alternative before it is trained. Raises UserError if it is refused."""
    from ...sim.run import Preparation

    made = Preparation(RunConfig(**values), Callback())
    return {
        "settings": settings(made.config),
        "engine": made.machine.engine,
        "device": made.device.type,
        "on": made.machine.device,
        "parameters": made.layout.numel,
    }


def run(tell: Tell, values: dict[str, Any], threads: int) -> dict[str, Any]:
    """Train an alternative. `threads`: of torch, 0 for its default."""
    import torch

    from ...sim import simulate
    from .. import reports

    if threads:
        torch.set_num_threads(threads)
    teller = ProgressSender(tell)
    simulate(RunConfig(**values), teller)
    reports.after_run(Path(teller.out), teller.on_warning)
    return {"done": teller.out}


class ProgressSender(Callback):
    """Passes the progress of a run on."""

    def __init__(self, tell: Tell):
        self.tell, self.out = tell, ""

    def on_run_start(self, header: Header) -> None:
        from ...server.run_folder import METRICS, read_records

        self.out = header.out
        self.tell(earlier=[_figures(record) for record in read_records(Path(self.out) / METRICS)])

    def on_round_end(self, record: RoundRecord) -> None:
        self.tell(round=_figures(record))

    def on_warning(self, sentence: str) -> None:
        self.tell(warning=sentence)


def _figures(record: RoundRecord) -> dict[str, Any]:
    figures = {name: getattr(record, name) for name in FIGURES}
    return figures | {"accuracy": record.measured_accuracy, "loss": record.measured_loss}


ORDERS: dict[str, Callable[..., dict[str, Any]]] = {"check": check, "run": run}
