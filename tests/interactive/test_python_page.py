"""docs/how-to/use-from-python.md: its code blocks run one after the other, as a reader would type them."""

import re
from pathlib import Path

import pytest

from fedcomp import runs

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "use-from-python.md"


@pytest.mark.slow
def test_the_code_blocks_run_in_their_order(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    snippets = re.findall(
        r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    names: dict = {}
    for snippet in snippets:
        exec(compile(snippet, str(PAGE), "exec"), names)
    assert re.search(
        r"^\d+% after [\d,]+ bytes, \d+ times less than dense$",
        capsys.readouterr().out,
        re.MULTILINE,
    )
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == [
        "disc",
        "disc-1",
        "first",
    ]
    assert len(names["run"].records) == 30 and names["outputs"].shape == (3, 2)
    assert (
        names["again"].metrics["accuracy"].tolist()
        == runs.load("runs/disc").metrics["accuracy"].tolist()[:20]
    )
