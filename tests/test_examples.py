"""The examples run unchanged and print the promised output: scripts in this process, the notebook in a kernel."""

import re
import runpy
import sys
import warnings
from pathlib import Path

import nbformat
import pytest
import torch
from nbclient import NotebookClient
from safetensors.torch import load_file

pytestmark = [pytest.mark.slow, pytest.mark.deploy]
EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@pytest.fixture
def printed(tmp_path, monkeypatch, capfd):
    """Return a function that runs a script as __main__ in the folder tmp_path and returns its output."""
    monkeypatch.chdir(tmp_path)
    # torchvision may be built for another version of torch.
    monkeypatch.setitem(sys.modules, "torchvision", None)

    def run(name: str) -> str:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # in transformers
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


def test_every_example_has_fewer_than_60_lines():
    lines = {path.name: len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.py")}
    assert {name: count for name, count in lines.items() if count >= 60} == {}


def test_the_example_own_model_runs(printed, tmp_path):
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


def test_the_example_regression_reduces_loss_and_error(printed):
    out = printed("regression.py")
    rounds = [
        [number(word) for word in row]
        for row in re.findall(r"^ +(\d+) +([\d.]+) +([\d.]+) +([\d,]+) B$", out, re.MULTILINE)
    ]
    assert [row[0] for row in rounds] == [10, 20, 30, 40]
    assert rounds[-1][1] < rounds[0][1] and rounds[-1][2] < rounds[0][2], "loss and error must fall"


def test_the_example_image_classifier_reaches_its_accuracy(printed):
    assert accuracy_of(printed("image_classifier.py")) > 80


def test_the_example_two_inputs_reaches_its_accuracy(printed):
    assert accuracy_of(printed("two_inputs.py")) > 85


def test_the_example_own_loop_reaches_its_accuracy(printed):
    assert accuracy_of(printed("own_loop.py")) > 85


def test_the_example_transformers_classifier_reaches_its_accuracy(printed):
    assert accuracy_of(printed("transformers_classifier.py")) > 90


def test_a_gan_comes_nearer_to_the_circle(printed):
    found = re.search(r"distance ([\d.]+) → ([\d.]+), radius ([\d.]+)", printed("gan.py"))
    first, last, radius = map(float, found.groups())
    assert last < 0.6 * first and 1 < radius < 3


@pytest.mark.filterwarnings(
    "ignore:.*is_gradient_checkpointing:FutureWarning"
)  # peft uses this deprecated attribute of transformers
def test_only_lora_adapters_are_trained_and_sent_and_peft_loads_them(printed, tmp_path):
    out = printed("lora.py")
    first, last = map(float, re.search(r"loss ([\d.]+) → ([\d.]+)", out).groups())
    trained, total = map(number, re.search(r"([\d,]+) of ([\d,]+) parameters", out).groups())
    assert last < 0.6 * first and trained < total / 10
    from peft import PeftModel  # after `printed` has hidden torchvision
    from transformers import LlamaForCausalLM

    folder = tmp_path / re.search(r"; (\S+)/adapter$", out, re.MULTILINE).group(1)
    base = LlamaForCausalLM(runpy.run_path(str(EXAMPLES / "lora.py"))["CONFIG"])
    loaded = PeftModel.from_pretrained(base, folder / "adapter").state_dict()
    averaged = load_file(folder / "model.safetensors")
    assert sum(value.numel() for value in averaged.values()) == trained
    assert all(torch.equal(loaded[name], value) for name, value in averaged.items())


def accuracy_of(out: str) -> float:
    return float(re.search(r"accuracy ([\d.]+)%", out).group(1))


@pytest.mark.timeout(300)
def test_the_notebook_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    book = nbformat.read(EXAMPLES / "compare.ipynb", as_version=4)
    assert all(not cell.get("outputs") for cell in book.cells), (
        "the notebook must be stored without outputs"
    )
    assert "ROUNDS = 30" in book.cells[1].source
    book.cells[1].source = book.cells[1].source.replace("ROUNDS = 30", "ROUNDS = 5")
    NotebookClient(book, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    shown = [output for output in code[1].outputs if output.output_type == "display_data"]
    assert [output.output_type for output in code[1].outputs] == ["display_data"] * 3, (
        "each run must show one display and print no line"
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
