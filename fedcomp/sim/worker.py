"""What a worker process does: train the client that it is told to, in memory that it shares with who tells it, and say so.

Started by sim.workers, in an interpreter of its own. It ends when the other end of its socket is closed, whatever it is doing.
"""

import json
import os
import select
import signal
import socket
import threading
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from ..errors import FedcompError
from ..layout import Layout
from ..tasks import initial_model, load
from ..tasks.base import Data
from ..tasks.user_errors import client_error
from ..training import devices
from ..training.engine import Done, Job, trained
from ..training.local_sgd import LocalSGD, SerialEngine, Traces
from .buffers import Buffers
from .engines import likeness
from .shared_memory import Region, opened

LARGEST = (
    1 << 18
)  # bytes of an order, more than a socket takes at once: what is large is in shared memory
LOOK_S = 2.0  # between looks at whether the parent is still there
LONGEST = 500  # characters of a reason


def main(channel: int, parent: int) -> None:
    """Obey what comes through the socket with descriptor `channel`, from the process `parent`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to act on
    torch.set_num_threads(1)
    devices.keep_freed_memory()
    link = socket.socket(fileno=channel)
    orders: SimpleQueue[tuple[dict[str, Any], list[int]]] = SimpleQueue()
    threading.Thread(target=_listen, args=(link, orders, parent), daemon=True).start()
    try:
        worker = Worker(orders.get()[0])
    except Exception as error:
        link.send(json.dumps({"broken": _said(error)}).encode())
        return
    link.send(json.dumps({"ready": worker.layout.fingerprint}).encode())
    while True:
        if answer := worker.obey(*orders.get()):
            link.send(json.dumps(answer).encode())


def _listen(link: socket.socket, orders: SimpleQueue, parent: int) -> None:
    """In a thread, so that the end of the parent is heard while a client is trained."""
    try:
        while os.getppid() == parent:
            if select.select([link], [], [], LOOK_S)[0]:
                order, files, _, _ = socket.recv_fds(link, LARGEST, 1)
                if not order:
                    break
                orders.put((json.loads(order), files))
    finally:
        os._exit(0)


class Worker:
    """The engine of a worker process. `hello` says what to load."""

    def __init__(self, hello: dict[str, Any]):
        torch.set_default_dtype(getattr(torch, hello["dtype"]))
        task = load(hello["task"], Path(hello["folder"]) if hello["folder"] else None)
        model = initial_model(task, hello["seed"])
        self.layout = Layout.of(model)
        self.engine, self.buffers = SerialEngine(task, model, self.layout, "cpu"), Buffers.of(model)
        self.regions: dict[int, Region] = {}

    def obey(self, order: dict[str, Any], files: list[int]) -> dict[str, Any] | None:
        if "map" in order:
            name, size = order["map"]
            self.regions[name] = Region(name, size, files[0])
            self.regions[name].close()
            return None
        if "drop" in order:
            del self.regions[order["drop"]]
            return None
        if "like" in order:
            start, inputs, targets = (
                opened(self.regions, order["like"][name]) for name in ("start", "inputs", "targets")
            )
            return {"like": likeness(self.engine, start, Data(inputs, targets))}
        return self._train(order)

    def _train(self, order: dict[str, Any]) -> dict[str, Any]:
        whole = ("start", "update", "inputs", "targets", "plan")
        start, update, inputs, targets, plan = (opened(self.regions, order[name]) for name in whole)
        held = opened(self.regions, order["buffers"]) if order["buffers"] else None
        kept = self.buffers.read(held, order["given"]) if held is not None else None
        traces = [opened(self.regions, named) for named in order["traces"]]
        momentum = traces.pop(0) if order["momentum"] else None
        pull = traces.pop() if order["pull"] else None
        batches = plan[: order["examples"]].split(plan[order["examples"] :].tolist())
        job = Job(
            order["round"],
            order["who"],
            [batch.numpy() for batch in batches],
            kept or None,
            Traces(momentum, tuple(traces) if traces else None, pull),
        )
        try:
            result = trained(
                self.engine,
                start,
                Data(inputs, targets),
                job,
                LocalSGD(**order["sgd"]),
                order["seed"],
                update,
            )
        except KeyboardInterrupt as error:  # Ctrl-C is not heard here: it is the task's own
            result = client_error(error)
        if not isinstance(result, Done):
            return {"failed": _said(result)}
        return {
            "loss": result.loss,
            "changed": self.buffers.write(held, result.buffers or {}) if held is not None else [],
        }


def _said(error: Exception) -> list[str]:
    """An exception for the other side: whose it is, its name, and its first line."""
    return [
        "fedcomp" if isinstance(error, FedcompError) else "",
        type(error).__name__,
        str(error).strip().split("\n")[0][:LONGEST],
    ]
