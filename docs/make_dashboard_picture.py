"""A picture of the dashboard, docs/dashboard.svg, from the folder of a finished run:

python docs/make_dashboard_picture.py runs/NAME [PICTURE.svg]
"""

import dataclasses
import io
import json
import re
import sys
from itertools import accumulate
from pathlib import Path

from rich.console import Console
from safetensors import safe_open

from fedcomp.callbacks import Header, Summary
from fedcomp.cli.dashboard import Dashboard
from fedcomp.config import read_run
from fedcomp.server.run_folder import METRICS, MODEL, SUMMARY, parse_record
from fedcomp.sim.run import EngineChoice

WIDTH, HEIGHT = 100, 40


def main(run: Path, picture: Path) -> None:
    config = read_run(run)
    records = [
        parse_record(json.loads(line))
        for line in (run / METRICS).read_text(encoding="utf-8").splitlines()
    ]
    summary = Summary(**json.loads((run / SUMMARY).read_text(encoding="utf-8")))
    with safe_open(run / MODEL, framework="numpy") as model:
        parameters = sum(model.get_tensor(name).size for name in model.keys())  # noqa: SIM118 (not a dict)

    machine = EngineChoice.read(config["resolved"], run)
    known = {f.name: config[f.name] for f in dataclasses.fields(Header) if f.name in config}
    decided = {"device": machine.device, "engine": str(machine)}
    seen = {
        "cohort": max(r.cohort for r in records),
        "parameters": parameters,
        "first_round": 1,
        "rounds": len(records),
    }
    header = Header(**known | decided | seen)

    console = Console(
        record=True,
        width=WIDTH,
        height=HEIGHT,
        file=io.StringIO(),
        force_terminal=True,
        color_system="truecolor",
    )
    ends = accumulate((r.seconds for r in records), initial=0.0)
    dashboard = Dashboard(console, clock=lambda: next(ends))
    dashboard.on_run_start(header)
    for record in records:
        dashboard.on_round_end(record)
    dashboard.on_run_end(summary, config["out"])
    console.print(dashboard.picture(WIDTH, HEIGHT - 12))
    console.print(dashboard.verdict())
    svg = console.export_svg(title="fedcomp sim")
    picture.write_text(
        re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL), encoding="utf-8"
    )  # a picture that fetches nothing


if __name__ == "__main__":
    main(
        Path(sys.argv[1]),
        Path(sys.argv[2]) if len(sys.argv) > 2 else Path(__file__).with_name("dashboard.svg"),
    )
