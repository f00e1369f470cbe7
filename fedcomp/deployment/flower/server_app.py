"""The ServerApp of a deployment, which runs the rounds and writes the events that `fedcomp server start` shows."""

import functools
import json
import os
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from ...config import RunConfig
from ...errors import FedcompError
from ...keys.enrolment import parse_public_key
from ...keys.keyring import point_of
from ...transports.flower.joining import JoiningTransport
from ..start import Deployment, Endpoint
from .events import ENDED, EventWriter

FOLDER = "fedcomp-folder"  # key in Flower's run config for the path of the folder with SETTINGS and EVENTS
SETTINGS, EVENTS = "settings.json", "events.jsonl"

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    folder = Path(str(context.run_config[FOLDER]))
    settings = json.loads((folder / SETTINGS).read_text())
    os.chdir(settings["cwd"])
    keys = Path(settings["keys"]) if settings["keys"] else None
    endpoint = Endpoint(settings["port"], settings["host"], keys)
    enrolled = settings["enrolled"] and {
        node: (client, point_of(parse_public_key(key)))
        for node, client, key in settings["enrolled"]
    }
    with (folder / EVENTS).open("a", encoding="utf-8") as file:
        events = EventWriter(file)
        try:
            make = functools.partial(JoiningTransport, grid, endpoint.port, enrolled)
            Deployment(RunConfig(**settings["options"]), endpoint, events, make).run()
            events.forward(ENDED)
        except FedcompError as error:
            events.failed(error)
            raise
