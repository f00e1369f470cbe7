"""--roster and --sealed: the keys of the others, read before the client goes anywhere; and no part in anything but sealed ballots."""

import pytest
from typer.testing import CliRunner

from fedcomp.cli.main import app

TRIAL = [
    "client",
    "--insecure",
    "--server",
    "127.0.0.1:9",
    "--partition-id",
    "0",
    "--patience",
    "0",
]


@pytest.mark.parametrize(
    ("text", "words", "says"),
    [
        (None, [], "cannot be read"),
        ("[[client]]\nid = 1\n", [], "'public_key' is missing"),
        ("", ["--stock"], "leave one out"),
    ],
)
def test_a_mistake_is_one_sentence(tmp_path, text, words, says):
    path = tmp_path / "registry.toml"
    if text is not None:
        path.write_text(text)
    result = CliRunner().invoke(
        app,
        [*TRIAL, *words, "--state-dir", str(tmp_path / "state"), "--roster", str(path)],
        prog_name="fedcomp",
    )
    assert result.exit_code == 2 and says in result.output.replace("\n", " ")


def test_who_seals_alone_is_no_client_of_stock(tmp_path):
    result = CliRunner().invoke(
        app, [*TRIAL, "--stock", "--sealed", "--state-dir", str(tmp_path)], prog_name="fedcomp"
    )
    assert (
        result.exit_code == 2
        and "--sealed is for elections with sealed ballots" in result.output.replace("\n", " ")
    )
