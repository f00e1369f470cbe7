"""`fedcomp report`, and the report that a run writes when it ends."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from .. import durable_files
from ..config import ALTERNATIVE_OPTIONS, ALTERNATIVES_FILE, RUN_FILE, read_toml
from ..errors import FedcompError, RunFolderError, UserError
from ..runs import groups, load
from .comparison.alternatives import alternatives
from .report.page import html
from .results import share

REPORT = "report.html"


def show(folders: Sequence[Path], out: Path | None, target: str | None) -> None:
    """Write the report on the runs in `folders`, each a run folder or a folder of alternatives, and print its absolute path.

    Raises UserError for runs that cannot be read and files that cannot be written.
    """
    wanted, only = share(target), folders[0] if len(folders) == 1 else Path()
    folders = [run for folder in folders for run in _runs_in(folder)]
    places = [folder.resolve() for folder in folders]
    for i, folder in enumerate(folders):
        if places[i] in places[:i]:
            raise UserError(f"{folder} is named twice; name each run once")
    page = (out or only) / REPORT
    write(folders, page, wanted)
    print(page.absolute())


def _runs_in(folder: Path) -> list[Path]:
    """Return the folder itself or, of a folder of alternatives, the folders of those that were begun, in their order."""
    file = folder / ALTERNATIVES_FILE
    if not file.is_file():
        return [folder]
    try:
        names = [
            each.name for each in alternatives(read_toml(file, ALTERNATIVE_OPTIONS), baseline=True)
        ]
    except UserError as error:
        raise RunFolderError(
            f"{file} cannot be read ({error}); name the run folders in {folder} in its place"
        ) from error
    if begun := [folder / name for name in names if (folder / name / RUN_FILE).is_file()]:
        return begun
    raise RunFolderError(
        f"no alternative in {folder} was begun; leave it out, or go on with fedcomp sim --out {folder} --resume"
    )


def write(
    folders: Sequence[Path],
    page: Path,
    target: float | None = None,
    failed: Mapping[str, str] | None = None,
) -> None:
    """Write the report on the runs in `folders`. `failed`: the error of each failed run, by folder. Raises FedcompError."""
    text = html(groups([load(folder) for folder in folders]), target, failed)
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
        durable_files.replace(page, [text.encode()], 0o666)  # as the umask allows
    except OSError as error:
        raise RunFolderError(
            f"{page} cannot be written ({error.strerror}); give another --out"
        ) from error


def after_run(folder: Path, warn: Callable[[str], None], target: float | None = None) -> None:
    """Write report.html into the folder of a run that has ended, if it was begun. Pass an error to `warn`."""
    if (folder / RUN_FILE).is_file():
        try:
            write([folder], folder / REPORT, target)
        except FedcompError as error:
            warn(f"{REPORT} is not written: {error}")
