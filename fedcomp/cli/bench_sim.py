"""What `fedcomp bench sim` prints: a table, JSON, a trace."""

import dataclasses
import json
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from .. import __version__
from ..config import RunConfig
from ..errors import UserError
from ..formatting import NOTHING
from ..profiling import trace
from .measure_sim import USUAL, Measured, measure

WAYS = ("", "client updates/s", "a cohort", "usual loop", "GFLOP/s", "of the device")
PARTS = ("a round's time", "ms", "share")
LEGEND = """usual loop: a copy of the model, a DataLoader and torch.optim for each client;  lean loop: one model, examples by index
one big batch: one model on the same examples, each step one batch, the limit of the arithmetic;  the loops send and keep nothing
of the device: operations of the forward and backward passes a second, as a share of what a large matrix product reaches here"""


def sim(config: RunConfig, rounds: int, as_json: bool, trace_file: Path | None) -> None:
    """Measure rounds of a simulation and show what came out."""
    if trace_file is not None and (trace_file.is_dir() or not trace_file.parent.is_dir()):
        raise UserError(
            f"--trace {trace_file} cannot be written; name a file in a folder that is there"
        )
    measured = measure(config, rounds)
    if as_json:
        print(json.dumps(as_values(measured), indent=2))
    else:
        print_tables(measured)
    if trace_file is not None:
        _write_trace(measured, trace_file)  # last: what cannot be written takes nothing along


def as_values(measured: Measured) -> dict[str, object]:
    """What --json prints. Times in seconds."""
    header, round_s = measured.header, sum(measured.parts.values())
    return {
        "task": header.task,
        "clients": header.clients,
        "cohort": header.cohort,
        "parameters": header.parameters,
        "strategy": header.strategy,
        "uplink": header.uplink,
        "memory": header.memory,
        "device": header.device,
        "engine": header.engine,
        "precision": measured.precision,
        "threads": measured.threads,
        "torch": torch.__version__,
        "fedcomp": __version__,
        "rounds": measured.rounds,
        "accepted": measured.accepted,
        "accuracy": measured.accuracy,
        "client_flops": measured.client_flops,
        "peak_flops_per_s": measured.peak_flops_per_s,
        "parts": {name: {"seconds": s, "share": s / round_s} for name, s in measured.parts.items()},
        "ways": [dataclasses.asdict(way) for way in measured.ways],
    }


def print_tables(measured: Measured) -> None:
    """Tables on a terminal, lines with tabs elsewhere."""
    usual = next(way.seconds for way in measured.ways if way.name == USUAL)
    ways = [
        (
            way.name,
            _rate(way.client_updates_per_s),
            f"{1e3 * way.seconds:,.1f} ms",
            f"{usual / way.seconds:.2f} ×",
            NOTHING if way.flops_per_s is None else f"{way.flops_per_s / 1e9:,.2f}",
            NOTHING if way.share_of_peak is None else f"{way.share_of_peak:.1%}",
        )
        for way in measured.ways
    ]
    round_s = sum(measured.parts.values())
    parts = [(name, f"{1e3 * s:,.1f}", f"{s / round_s:.1%}") for name, s in measured.parts.items()]
    if not sys.stdout.isatty():
        print("\n".join("\t".join(line) for line in [WAYS, *ways, PARTS, *parts]))
        return
    console, h = Console(highlight=False, markup=False), measured.header
    console.print(
        f"{h.task}, {h.cohort} of {h.clients} clients, {h.parameters:,} parameters; {h.strategy}, {h.uplink}, {h.memory}"
    )
    console.print(
        f"{h.device}, {measured.threads} threads, {measured.precision}, engine {h.engine}; "
        f"{measured.rounds} rounds, medians; a large matrix product reaches {measured.peak_flops_per_s / 1e9:,.0f} GFLOP/s\n"
    )
    for head, lines in ((WAYS, ways), (PARTS, parts)):
        console.print(_table(head, lines), "")
    console.print(LEGEND, style="dim")


def _rate(per_s: float) -> str:
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.3g}"


def _table(head: tuple[str, ...], lines: list[tuple[str, ...]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for place, name in enumerate(head):
        table.add_column(name, justify="right" if place else "left", style="" if place else "bold")
    for line in lines:
        table.add_row(*line)
    return table


def _write_trace(measured: Measured, path: Path) -> None:
    h = measured.header
    try:
        path.write_text(
            json.dumps(trace(measured.events, f"{h.task}, {h.engine}, {h.device}")),
            encoding="utf-8",
        )
    except OSError as error:
        raise UserError(
            f"--trace {path} cannot be written ({error.strerror}); name another file"
        ) from None
