"""A registry that changes under a server that runs: what it says on both sides, and that the run goes on."""

import re
import signal

import pytest
from deployment import stage

from fedcomp.keys import key_folder as keys
from fedcomp.keys.enrolment import Enrolment
from fedcomp.keys.registry import News

FLAGS = ("--clients", "3", "--participation", "2/3", "--rounds", "100000", "--batch-size", "10")


def rounds(server) -> int:
    return len(re.findall(r"^ +\d+ ", server.said, re.MULTILINE))


def test_what_becomes_of_the_registry_is_said_once(tmp_path):
    keys.make(tmp_path / "keys", 2)
    registry, said = keys.read_registry(tmp_path / "keys"), []
    news, path = News(registry, said.append), tmp_path / "keys" / "registry.toml"
    whole = path.read_text()

    def look() -> list[str]:
        said.clear()
        news.look(), news.look()
        return said

    assert look() == []
    path.write_text(whole + "???\n")
    (sentence,) = look()
    assert re.fullmatch(
        rf"{path} is not TOML: .* line 1[0-9],.*; mend it, .*; until then no client is let in, .*",
        sentence,
    )
    path.write_text(
        whole.replace("id = 1", "id = 0")
    )  # mended in one place, and now wrong in another
    (sentence,) = look()
    assert sentence.startswith(f"{path}: client 0 has two keys; take out one")
    with_one = whole.replace('"enrolled"', '"revoked"', 1)
    path.write_text(with_one)
    assert look() == [f"{path} is whole again: 1 of its clients are let in"]
    path.write_text(whole)
    assert look() == [], "what is no problem is no news"


@pytest.mark.deploy
@pytest.mark.timeout(300)
def test_a_registry_that_breaks_holds_clients_off_and_a_revoked_client_leaves(tmp_path):
    folder = tmp_path / "keys"
    keys.make(folder, 3)
    path = folder / "registry.toml"
    with stage(tmp_path) as on:
        server = on.server("--keys", str(folder), "--host", "127.0.0.1", *FLAGS)
        clients = [
            on.client(i, "--enrolment", str(folder / "clients" / f"{i}.toml")) for i in range(3)
        ]
        server.wait_for(r"^ +2 ")

        whole = path.read_text()
        path.write_text(whole + "???\n")
        server.wait_for(
            r"^warning: .*registry.toml is not TOML: .*; mend it, or restore the file from a copy; until then no client"
        )
        for client in clients:
            client.wait_for("answered 503 .*; trying again")
        path.write_text(whole)
        server.wait_for(r"^warning: .*registry.toml is whole again: 3 of its clients are let in")
        server.wait_for(rf"^ +{rounds(server) + 3} ")

        keys.revoke(folder, 2)
        assert clients[2].end() == 2
        assert re.search(
            r"^fedcomp: .* does not let this client's key in; ask for a new enrolment file",
            clients[2].said,
            re.MULTILINE,
        )
        server.wait_for(rf"^ +{rounds(server) + 3} ")
        assert [client.status for client in clients[:2]] == [None, None]
        assert server.interrupt(signal.SIGTERM) == 128 + signal.SIGTERM
    assert server.said.count("is not TOML") == server.said.count("is whole again") == 1
    assert Enrolment.read(folder / "clients" / "0.toml").id == 0
