"""Run folders: each run has its own, and any JSON parser can read its files."""

import json
import math
from concurrent.futures import ThreadPoolExecutor

from fedcomp.callbacks import RoundRecord
from fedcomp.cli.comparison.folder import ComparisonFolder
from fedcomp.config import RunConfig
from fedcomp.server.run_folder import RunFolder


def opened_together(folders):
    """Open all folders at the same moment. Return their paths."""
    with ThreadPoolExecutor(len(folders)) as threads:
        list(threads.map(lambda folder: folder.open(), folders))
    return {folder.path for folder in folders}


def test_runs_that_start_in_the_same_second_get_different_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders = [RunFolder(RunConfig(task="mine.py:task")) for _ in range(8)]
    paths = opened_together(folders)
    assert len(paths) == 8 and paths == set((tmp_path / "runs").relative_to(tmp_path).iterdir())
    assert all(path.name.startswith("mine-") for path in paths)
    for folder in folders:
        folder.close()


def test_comparisons_that_start_in_the_same_second_get_different_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders = [ComparisonFolder({"seed": [0, 1]}) for _ in range(4)]
    assert len(opened_together(folders)) == 4
    for folder in folders:
        folder.close()


def test_numbers_that_are_not_finite_are_null(tmp_path):
    folder = RunFolder(RunConfig(out=str(tmp_path / "run")))
    folder.open()
    record = RoundRecord(1, 0.5, math.nan, math.inf, *[0] * 8, metrics={"f1": math.nan, "auc": 0.5})
    folder.append(record)
    folder.close()

    def refuse(constant: str):
        raise ValueError(f"{constant} is not JSON")

    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert (line["loss"], line["train_loss"]) == (None, None)
    assert line["metrics"] == {"f1": None, "auc": 0.5}
