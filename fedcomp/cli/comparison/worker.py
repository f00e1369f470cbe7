"""A process that does what worker_pool.py asks for, one order after the other: checks alternatives, runs them, compares them.

Orders and answers are lines of JSON through a socket. It ends when the other end is closed, whatever it is doing; SIGINT ends the run
that goes on as Ctrl-C does. Started in an interpreter of its own, so that a run that dies takes no other with it.
"""

import dataclasses
import json
import os
import queue
import socket
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...callbacks import Callback, Header, RoundRecord, Summary
from ...config import RunConfig, settings
from ...errors import FedcompError
from .progress import FIGURES

Tell = Callable[..., None]


def main(channel: int) -> None:
    """Obey what comes through the socket with descriptor `channel`."""
    link = socket.socket(fileno=channel)
    orders: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(link, orders), daemon=True).start()

    def tell(**answer: Any) -> None:
        link.sendall(json.dumps(answer).encode() + b"\n")

    try:
        from ...sim import run  # noqa: F401 — while the first order is under way

        while True:
            _obey(orders.get(), tell)
    except KeyboardInterrupt:
        os._exit(130)


def _listen(link: socket.socket, orders: queue.SimpleQueue) -> None:
    with link.makefile("r", encoding="utf-8") as lines:
        for line in lines:
            orders.put(json.loads(line))
    os._exit(0)


def _obey(order: dict[str, Any], tell: Tell) -> None:
    """One order; its last answer is told with `end`, what else is heard before that without."""
    try:
        tell(end=ORDERS[order.pop("order")](tell=tell, **order))
    except FedcompError as error:
        tell(end={"failed": str(error), "status": error.exit_status})
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        tell(
            end={
                "failed": f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}",
                "status": 1,
            }
        )


def check(tell: Tell, values: dict[str, Any]) -> dict[str, Any]:
    """What there is to know of an alternative before it is trained. Raises what refuses it."""
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
    """Train an alternative; `threads` are those that it may compute with, 0 = all."""
    import torch

    from ...sim import simulate
    from .. import reports

    if threads:
        torch.set_num_threads(threads)
    teller = Teller(tell)
    simulate(RunConfig(**values), teller)
    reports.after_run(Path(teller.out), teller.warning)
    return {"done": teller.out}


class Teller(Callback):
    """Passes on what is shown of a run that goes on."""

    def __init__(self, tell: Tell):
        self.tell, self.out = tell, ""

    def started(self, header: Header) -> None:
        from ...server.run_folder import METRICS, records_in

        self.out = header.out
        earlier = [_figures(record) for record in records_in(Path(header.out) / METRICS)]
        self.tell(
            started={
                "first_round": header.first_round,
                "rounds": header.rounds,
                "cohort": header.cohort,
            },
            earlier=earlier,
        )

    def round_done(self, record: RoundRecord) -> None:
        self.tell(round=_figures(record))

    def warning(self, sentence: str) -> None:
        self.tell(warning=sentence)

    def finished(self, summary: Summary, out: str) -> None: ...


def _figures(record: RoundRecord) -> dict[str, Any]:
    return {name: getattr(record, name) for name in FIGURES}


def compare(
    tell: Tell, folders: list[str], failed: dict[str, str], target: float | None, page: str
) -> dict[str, Any]:
    """The results of what was run in `folders`, and a report on them. `failed`: by folder, why it did not end."""
    from ...config import RUN_FILE
    from ...runs import groups, load
    from .. import reports
    from ..results import Result, results

    runs = [load(folder) for folder in folders if (Path(folder) / RUN_FILE).is_file()]
    there = {str(run.folder) for run in runs}
    found = results(groups(runs), target, failed) if runs else []
    found += [
        Result.nothing(folder, failed.get(folder, "")) for folder in folders if folder not in there
    ]
    if runs:
        reports.draw(runs, Path(page), lambda sentence: tell(warning=sentence), target, failed)
    return {"results": [dataclasses.asdict(result) for result in found]}


ORDERS: dict[str, Callable[..., dict[str, Any]]] = {"check": check, "run": run, "compare": compare}
