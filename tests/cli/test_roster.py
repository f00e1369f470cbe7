"""`fedcomp client --roster`: the file with the public keys of all clients is read before the client connects."""

import pytest
from command_line import fedcomp

TRIAL = "client --insecure --server 127.0.0.1:9 --partition-id 0 --patience 0".split()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "cannot be read"),
        ("[[client]]\nid = 1\n", "'public_key' is missing"),
    ],
)
def test_a_user_error_is_one_sentence(tmp_path, text, says):
    path = tmp_path / "registry.toml"
    if text is not None:
        path.write_text(text)
    result = fedcomp(*TRIAL, "--state-dir", tmp_path / "state", "--roster", path)
    assert result.exit_code == 2 and says in result.output.replace("\n", " ")
