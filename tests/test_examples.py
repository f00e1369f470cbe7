"""The examples run as they stand and print what they promise: scripts in this process, the notebook in a kernel."""

import re
import runpy
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

pytestmark = [pytest.mark.slow, pytest.mark.deploy]
EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@pytest.fixture
def printed(tmp_path, monkeypatch, capfd):
    """printed(name) → the output of a script that is run as __main__ in the folder tmp_path."""
    monkeypatch.chdir(tmp_path)

    def run(name: str) -> str:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        out, err = capfd.readouterr()
        assert err == ""
        return out

    return run


def number(text: str) -> float:
    return float(text.replace(",", ""))


def test_every_example_is_run_here():
    told = Path(__file__).read_text(encoding="utf-8")
    assert [
        path.name
        for path in EXAMPLES.iterdir()
        if path.suffix in (".py", ".ipynb") and f'"{path.name}"' not in told
    ] == []


def test_a_model_of_ones_own(printed, tmp_path):
    out = printed("own_model.py")
    found = {
        row[0]: row
        for row in re.findall(r"^(\S+)\s+([\d.]+)%\s+([\d,]+) B\s+([\d,]+) B$", out, re.MULTILINE)
    }
    assert set(found) == {"identity", "stc:density=1%", "topk:density=5%,values=fp16"}
    dense = number(found["identity"][3])
    assert number(found["identity"][2]) >= dense > 50 * number(found["stc:density=1%"][2])
    assert all(number(accuracy) > 30 for _, accuracy, _, _ in found.values())
    assert (
        tmp_path / re.search(r"the run is in (\S+)", out).group(1) / "model.safetensors"
    ).is_file()


def test_a_regression(printed):
    out = printed("regression.py")
    rounds = [
        [number(word) for word in row]
        for row in re.findall(r"^ +(\d+) +([\d.]+) +([\d.]+) +([\d,]+) B$", out, re.MULTILINE)
    ]
    assert [row[0] for row in rounds] == [10, 20, 30, 40]
    assert rounds[-1][1] < rounds[0][1] and rounds[-1][2] < rounds[0][2], "loss and error fall"


def test_adapters_travel_alone(printed):
    found = {
        label.strip(): value
        for label, value in re.findall(r"^(.{44}) *(\S+)$", printed("adapters.py"), re.MULTILINE)
    }
    total, trained = (
        number(found["parameters of the model"]),
        number(found["of adapters and head, which are trained"]),
    )
    assert trained < total / 10
    assert (
        number(found["sent by a client in a round, each way"])
        < number(found["of adapters and head"]) / 10
    )
    before, after = (
        float(found[label].removesuffix("%"))
        for label in ("accuracy in the other register, before", "after 30 rounds")
    )
    assert after > before + 20
    assert found["frozen layers are as they were"] == "yes"


@pytest.mark.timeout(300)
def test_the_notebook(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    book = nbformat.read(EXAMPLES / "compare.ipynb", as_version=4)
    assert all(not cell.get("outputs") for cell in book.cells), "it is kept without outputs"
    assert "ROUNDS = 30" in book.cells[1].source
    book.cells[1].source = book.cells[1].source.replace("ROUNDS = 30", "ROUNDS = 5")
    NotebookClient(book, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    shown = [output for output in code[1].outputs if output.output_type == "display_data"]
    assert [output.output_type for output in code[1].outputs] == ["display_data"] * 3, (
        "one display a run, and no line beside it"
    )
    assert all(
        "<svg" in output.data["text/html"] and "accuracy" in output.data["text/html"]
        for output in shown
    )
    assert all(len(output.data["text/html"]) < 10_000 for output in shown)
    assert any("image/png" in output.get("data", {}) for output in code[2].outputs)
    table = code[3].outputs[0].text
    assert len(table.splitlines()) == 3 and "×1.0 less than dense" in table
    assert "stc:density=1/400" in code[4].outputs[0].text
