"""`fedcomp reproduce`: its list, its errors, and a reproduction from the command to the page."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import fedcomp

from reproductions import CAVEAT, available_reproductions, command


def reproduce(*words, status: int = 0) -> str:
    done = fedcomp("reproduce", *words)
    assert done.exit_code == status, done.output
    return done.stderr if status else done.stdout


def test_all_reproductions_are_listed_with_their_claims_and_minutes():
    output = reproduce()
    for name, chosen in available_reproductions().items():
        assert f"\n{name}" in f"\n{output}" and f"{chosen.minutes:g} min" in output
        assert all(claim.text in output for claim in chosen.claims)
    assert output.endswith(f"{CAVEAT}\n")


def test_the_page_mentions_that_verdicts_can_differ_between_processors():
    top = command.PAGE.read_text(encoding="utf-8").partition("<!--")[0]
    assert CAVEAT in " ".join(top.split())


def test_help_and_list_import_nothing_heavy():
    probe = (
        "import sys; from fedcomp.cli.main import main; sys.argv = ['fedcomp', 'reproduce']\n"
        "try: main()\nexcept SystemExit: pass\n"
        "print({'torch', 'numpy', 'numba', 'flwr'} & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert done.stderr.strip() == "set()", done.stderr


@pytest.mark.parametrize(("words", "sentence"), [
    (["stc-mnits"], "unknown reproduction 'stc-mnits'; did you mean 'stc-mnist'?"),
    (["election", "--data", "nowhere"], "--data nowhere is not a folder; give the folder with the data of the tasks"),
    (["stc-mnist", "--data", "."], "reproduction 'stc-mnist' needs the data folder mnist/, which is not in .; give the folder that "
                                   "contains it with --data"),
    (["election", "--device", "tpu"], "--device"),
])  # fmt: skip
def test_user_errors_are_one_sentence(words, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    output = reproduce(*words, status=2)
    assert output.startswith("fedcomp: ") and sentence in output and "Traceback" not in output


def test_a_long_cell_is_wrapped_within_its_column():
    drawn = command._table(("claim", "ours"), [("a claim of some length", "5 %")], (10, 4))
    assert drawn == "claim       ours\na claim of  5 %\nsome\nlength\n"


def test_without_a_checkout_the_error_says_where_to_get_the_reproductions(tmp_path):
    (tmp_path / "fedcomp").symlink_to(Path(__file__).parents[2] / "fedcomp")
    done = subprocess.run(
        [sys.executable, "-m", "fedcomp", "reproduce"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith("fedcomp: reproductions are not part of the installed package; ")
