"""A worker process of WorkerPool: it checks and runs alternatives.

Orders and answers are JSON. The process exits when the other end of the connection is closed. SIGINT interrupts its run, like Ctrl-C.
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
from .progress import SENT_FIELDS

Send = Callable[..., None]


def main(channel: int) -> None:
    """Execute the orders that are received on the connection with file descriptor `channel`."""
    link = Connection(channel)
    orders: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(link, orders), daemon=True).start()

    def send(**answer: Any) -> None:
        link.send_bytes(json.dumps(answer).encode())

    try:
        from ...sim import run  # noqa: F401 — load torch while the first order arrives

        while True:
            _execute(orders.get(), send)
    except KeyboardInterrupt:
        os._exit(130)


def _listen(link: Connection, orders: queue.SimpleQueue[Any]) -> None:
    with suppress(EOFError, OSError):
        while True:
            orders.put(json.loads(link.recv_bytes()))
    os._exit(0)


def _execute(order: dict[str, Any], send: Send) -> None:
    """Execute an order. Its last answer has the key `end`."""
    try:
        send(end=ORDERS[order.pop("order")](send=send, **order))
    except FedcompError as error:
        send(end={"failed": str(error), "status": error.exit_status})
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        first_line = str(error).strip().partition("\n")[0]
        send(end={"failed": f"{type(error).__name__}: {first_line}", "status": 1})


def check(send: Send, values: dict[str, Any]) -> dict[str, Any]:
    """Return settings, engine, device and model size of an alternative without training it. Raises UserError for invalid options."""
    from ...sim.run import PreparedRun

    prepared = PreparedRun(RunConfig(**values), Callback())
    return {
        "settings": settings(prepared.config),
        "engine": prepared.machine.engine,
        "device": prepared.device.type,
        "on": prepared.machine.device,
        "parameters": prepared.layout.numel,
    }


def run(send: Send, values: dict[str, Any], threads: int) -> dict[str, Any]:
    """Train an alternative. `threads`: threads of torch, 0 for the default of torch."""
    import torch

    from ...sim import simulate
    from ..report import writer

    if threads:
        torch.set_num_threads(threads)
    sender = ProgressSender(send)
    simulate(RunConfig(**values), sender)
    writer.after_run(Path(sender.out), sender.on_warning)
    return {"done": sender.out}


class ProgressSender(Callback):
    """Sends the progress of a run to the parent process."""

    def __init__(self, send: Send):
        self.send, self.out = send, ""

    def on_run_start(self, header: Header) -> None:
        from ...server.run_folder import METRICS, read_records

        self.out = header.out
        self.send(earlier=[_figures(record) for record in read_records(Path(self.out) / METRICS)])

    def on_round_end(self, record: RoundRecord) -> None:
        self.send(round=_figures(record))

    def on_warning(self, sentence: str) -> None:
        self.send(warning=sentence)


def _figures(record: RoundRecord) -> dict[str, Any]:
    figures = {name: getattr(record, name) for name in SENT_FIELDS}
    return figures | {"accuracy": record.measured_accuracy, "loss": record.measured_loss}


ORDERS: dict[str, Callable[..., dict[str, Any]]] = {"check": check, "run": run}
