"""`fedcomp report`, and the report that a run writes when it ends."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ... import durable_files
from ...config import ALTERNATIVE_OPTIONS, ALTERNATIVES_FILE, RUN_FILE, read_toml
from ...errors import FedcompError, RunFolderError, UserError
from ...runs import groups, load
from ..comparison.alternatives import alternatives
from ..results import parse_accuracy
from .page import html

REPORT = "report.html"


def write_and_print_path(folders: Sequence[Path], out: Path | None, target: str | None) -> None:
    """Write the report on the runs in `folders`, each a run folder or the folder of a comparison, and print its absolute path.

    Raises UserError for runs that cannot be read and files that cannot be written.
    """
    accuracy = parse_accuracy(target)
    default = folders[0] if len(folders) == 1 else Path()
    folders = [run for folder in folders for run in _runs_in(folder)]
    resolved = [folder.resolve() for folder in folders]
    for i, folder in enumerate(folders):
        if resolved[i] in resolved[:i]:
            raise UserError(f"{folder} is named twice; name each run once")
    page = (out or default) / REPORT
    write(folders, page, accuracy)
    print(page.absolute())


def _runs_in(folder: Path) -> list[Path]:
    """Return the folder itself, or the run folders of the alternatives in it that were started, in their order."""
    file = folder / ALTERNATIVES_FILE
    if not file.is_file():
        return [folder]
    try:
        names = [
            each.name for each in alternatives(read_toml(file, ALTERNATIVE_OPTIONS), baseline=True)
        ]
    except UserError as error:
        raise RunFolderError(
            f"{file} cannot be read ({error}); name the run folders in {folder} instead"
        ) from error
    if started := [folder / name for name in names if (folder / name / RUN_FILE).is_file()]:
        return started
    raise RunFolderError(
        f"no alternative in {folder} was started; leave the folder out, or continue with: fedcomp sim --out {folder} --resume"
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
    """Write report.html into the folder of a run that has ended, if it was started. Pass the message of an error to `warn`."""
    if (folder / RUN_FILE).is_file():
        try:
            write([folder], folder / REPORT, target)
        except FedcompError as error:
            warn(f"{REPORT} is not written: {error}")
