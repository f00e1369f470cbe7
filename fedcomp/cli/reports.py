"""`fedcomp report`, and the report that a run writes when it ends."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ..config import ALTERNATIVES_FILE, RUN_FILE, SPANNING, read_toml
from ..errors import FedcompError, RunFolderError, UserError
from ..runs import load
from .comparison.alternatives import alternatives
from .report.page import write
from .results import share

REPORT = "report.html"


def show(folders: Sequence[Path], out: Path | None, target: str | None) -> None:
    """Write the report on the runs in `folders`, each a run folder or a folder of alternatives, and print its path.

    Raises UserError for runs that cannot be read and files that cannot be written.
    """
    wanted, only = share(target), folders[0] if len(folders) == 1 else Path()
    folders = [run for folder in folders for run in _runs_in(folder)]
    if twice := [
        folder
        for i, folder in enumerate(folders)
        if folder.resolve() in [other.resolve() for other in folders[:i]]
    ]:
        raise UserError(f"{twice[0]} is named twice; name each run once")
    page = (out or only) / REPORT
    write([load(folder) for folder in folders], page, target=wanted)
    print(page)


def _runs_in(folder: Path) -> list[Path]:
    """Return the folder itself or, of a folder of alternatives, the folders of those that were begun, in their order."""
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
    """Write report.html into the folder of a run that has ended, if it was begun; pass an error to `warn`."""
    if (folder / RUN_FILE).is_file():
        draw([folder], folder / REPORT, warn, target)


def draw(
    folders: Sequence[Path],
    page: Path,
    warn: Callable[[str], None],
    target: float | None = None,
    failed: Mapping[str, str] | None = None,
) -> None:
    """Write a page on the runs in `folders`; pass an error to `warn`. `failed`: the error of each failed run, by folder."""
    try:
        write([load(folder) for folder in folders], page, target=target, failed=failed)
    except FedcompError as error:
        warn(f"{REPORT} is not written: {error}")
