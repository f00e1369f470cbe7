"""Warnings about a registry that changes while the server runs. tests/deployment/test_whole_runs.py tests the effect on clients."""

import re

from fedcomp.keys import key_folder as keys


def test_a_problem_of_the_registry_and_its_repair_are_logged_once(tmp_path):
    keys.make(tmp_path / "keys", 2)
    registry, output = keys.read_registry(tmp_path / "keys"), []
    path = tmp_path / "keys" / "registry.toml"
    whole = path.read_text()

    def check() -> list[str]:
        output.clear()
        registry.poll(output.append), registry.poll(output.append)
        return output

    assert check() == []
    path.write_text(whole + "???\n")
    (sentence,) = check()
    assert re.fullmatch(
        rf"{path} is not TOML: .* line 1[0-9],.*; correct it, .*; until then, no client is accepted, but .*",
        sentence,
    )
    path.write_text(
        whole.replace("id = 1", "id = 0")
    )  # the first fault is repaired, but there is another
    (sentence,) = check()
    assert sentence.startswith(f"{path}: client 0 has two keys; remove one")
    with_one = whole.replace('"enrolled"', '"revoked"', 1)
    path.write_text(with_one)
    assert check() == [f"{path} is valid again: 1 of its clients may join"]
    path.write_text(whole)
    assert registry.poll(output.append), "the server checks the connected clients again"
    assert check() == [], "a valid change causes no warning"
