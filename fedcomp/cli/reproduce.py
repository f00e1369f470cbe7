"""`fedcomp reproduce`: test claims of papers with the scripts in the source checkout, which the installed package does not contain."""

import importlib
import sys
from pathlib import Path

import typer

from ..errors import UserError
from .flags import DATA, Device, option, switch

CHECKOUT = Path(__file__).parents[2]


def reproduce(
    name: str | None = typer.Argument(
        None,
        metavar="NAME",
        help="Name of a reproduction. Without NAME, all reproductions are listed.",
        show_default=False,
    ),
    full: bool = switch(
        "--full",
        "Use the setting of the paper, or a similar one. This takes hours; a GPU is recommended.",
    ),
    seeds: int | None = option(
        "N",
        "Number of runs with different seeds for each compared method. Default: set by the reproduction.",
        min=1,
        max=1000,
    ),
    data: Path | None = DATA,
    out: Path | None = option(
        "DIR",
        "Folder in which the run folders are created. Default: runs/reproduce-NAME. Finished runs in it are not repeated.",
    ),
    device: Device = "auto",
    write: bool = switch(
        "--write", "Write the result to docs/reproductions.md in the source checkout."
    ),
) -> None:
    """Test claims of papers: run the methods that a paper compares, and report whether the claim of the paper holds in fedcomp.

    Without --full, a reproduction takes minutes on two cores. After an interruption, repeat the command to continue.
    """
    if not (CHECKOUT / "reproductions" / "command.py").is_file():
        raise UserError(
            "reproductions are not part of the installed package; get the source of fedcomp, run pip install --editable . "
            "in its folder, and repeat the command"
        )
    sys.path.append(str(CHECKOUT))
    command = importlib.import_module("reproductions.command")
    command.run(name, full, seeds, data, out, device, write)
