"""`fedcomp report`: what is asked for, checked, and where its files are."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ..config import ALTERNATIVES_FILE, RUN_FILE, SPANNING, read_toml
from ..errors import FedcompError, RunFolderError, UserError
from ..runs import Run, load
from .comparison.alternatives import alternatives
from .results import share

REPORT = "report.html"
NEEDS = (
    "a report is drawn by matplotlib, which cannot be imported ({}); pip install 'fedcomp[report]'"
)


def show(folders: Sequence[Path], out: Path | None, target: str | None, pictures: bool) -> None:
    """Write the report on the runs in `folders`, of which any may hold alternatives, and print where it is.

    Raises UserError for what cannot be read or written.
    """
    wanted, only = share(target), folders[0] if len(folders) == 1 else Path()
    folders = [run for folder in folders for run in _runs_in(folder)]
    if twice := [
        folder
        for i, folder in enumerate(folders)
        if folder.resolve() in [other.resolve() for other in folders[:i]]
    ]:
        raise UserError(f"{twice[0]} is named twice; name each run once")
    runs = [load(folder) for folder in folders]
    try:
        from .report.page import write
    except ImportError as error:
        raise UserError(NEEDS.format(str(error).split("\n")[0])) from None
    page, *drawn = write(runs, (out or only) / REPORT, pictures=pictures, target=wanted)
    print(page)
    for picture in drawn:
        print(picture)


def _runs_in(folder: Path) -> list[Path]:
    """Itself, or where it holds alternatives the folders of those that were begun, in their order."""
    file = folder / ALTERNATIVES_FILE
    if not file.is_file():
        return [folder]
    try:
        names = [each.name for each in alternatives(read_toml(file, SPANNING), baseline=True)]
    except UserError as error:
        raise RunFolderError(
            f"{file} cannot be read ({error}); name the run folders in {folder} in its place"
        ) from error
    if begun := [folder / name for name in names if (folder / name / RUN_FILE).is_file()]:
        return begun
    raise RunFolderError(
        f"no alternative in {folder} was begun; leave it out, or go on with fedcomp sim --out {folder} --resume"
    )


def after_run(folder: Path, warn: Callable[[str], None], target: float | None = None) -> None:
    """Write report.html, without pictures beside it, into the folder of a run that is over; nothing where there is no run or no matplotlib.

    `warn` hears why it could not be written: the run is done, and stays so.
    """
    if not (folder / RUN_FILE).is_file():
        return
    try:
        draw([load(folder)], folder / REPORT, warn, target)
    except FedcompError as error:
        warn(f"{REPORT} is not written: {error}")


def draw(
    runs: Sequence[Run],
    page: Path,
    warn: Callable[[str], None],
    target: float | None = None,
    failed: Mapping[str, str] | None = None,
) -> None:
    """Write a page on runs that are over. `failed`: by folder, why one did not end. What fails is told to `warn`."""
    try:
        from .report.page import write
    except ImportError:
        return
    try:
        write(runs, page, pictures=False, target=target, failed=failed)
    except Exception as error:  # whatever matplotlib makes of this machine: the runs are done
        said = (
            str(error).strip().partition("\n")[0]
            if isinstance(error, FedcompError)
            else f"{type(error).__name__}: {error}"
        )
        warn(f"{REPORT} is not written: {said}")
