"""Public keys are pinned at their first announcement or read from a roster; a server cannot change them."""

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from fedcomp.errors import KeysError, ProtocolError
from fedcomp.keys.enrolment import openssh
from fedcomp.keys.keyring import (
    PinnedKeys,
    ServerKeys,
    point_of,
    read_roster,
    verifier,
)
from fedcomp.keys.signature_log import SignatureLog
from fedcomp.state_folder import StateFolder

KEYS = [ec.generate_private_key(ec.SECP384R1()) for _ in range(3)]
POINTS = [point_of(key.public_key()) for key in KEYS]


def test_a_point_and_its_public_key_convert_into_each_other():
    assert {len(point) for point in POINTS} == {49} and point_of(verifier(POINTS[0])) == POINTS[0]
    with pytest.raises(ProtocolError, match="not a point"):
        verifier(b"\x02" + bytes(48)[:47] + b"\xff" * 2)


def test_the_first_announced_key_is_pinned_over_restarts_of_a_run(tmp_path):
    folder = StateFolder(tmp_path)
    ring = PinnedKeys("run", 0, KEYS[0], log=SignatureLog(folder))
    assert ring.key(1, POINTS[1]) == ring.key(1) == POINTS[1]
    assert (
        PinnedKeys("another run", 0, KEYS[0], log=SignatureLog(folder)).key(1, POINTS[2])
        == POINTS[2]
    )
    for again in (ring, PinnedKeys("run", 0, KEYS[0], log=SignatureLog(folder))):
        with pytest.raises(
            ProtocolError, match="a key of client 1 that differs from the key from earlier"
        ):
            again.key(1, POINTS[2])
    folder.close()


def test_a_client_keeps_its_own_key_and_signs_only_for_itself():
    ring = PinnedKeys("run", 0, KEYS[0])
    assert ring.key(0) == POINTS[0] and ring.signer(0) is KEYS[0]
    with pytest.raises(ProtocolError, match="differs from the key of this client"):
        ring.key(0, POINTS[1])
    with pytest.raises(ProtocolError, match="treats this client as client 1"):
        ring.signer(1)
    with pytest.raises(ProtocolError, match="did not announce a key of client 1"):
        ring.key(1)


def test_an_announced_key_that_is_not_a_point_is_not_pinned():
    ring = PinnedKeys("run", 0, KEYS[0])
    with pytest.raises(ProtocolError, match="not a point"):
        ring.key(1, bytes(49))
    assert ring.key(1, POINTS[1]) == POINTS[1]


def test_a_client_with_a_roster_accepts_only_its_keys(tmp_path):
    path = tmp_path / "registry.toml"
    lines = (
        f'[[client]]\nid = {i}\nstate = "enrolled"\nnot_after = "2099-01-01T00:00:00Z"\npublic_key = "{openssh(KEYS[i].public_key())}"\n'
        for i in (0, 1)
    )
    path.write_text('server = "here:1"\n' + "".join(lines))
    ring = PinnedKeys("run", 0, KEYS[0], roster=read_roster(path))
    assert ring.key(1) == ring.key(1, POINTS[1]) == POINTS[1]
    with pytest.raises(ProtocolError, match="differs from the key in --roster"):
        ring.key(1, POINTS[2])
    with pytest.raises(ProtocolError, match="--roster contains no key of client 2"):
        ring.key(2, POINTS[2])


@pytest.mark.parametrize(
    "text", ["[", "client = 3", '[[client]]\nid = "a"', '[[client]]\nid = 1\npublic_key = "x"']
)
def test_a_malformed_roster_is_an_error(tmp_path, text):
    path = tmp_path / "registry.toml"
    path.write_text(text)
    with pytest.raises(KeysError, match="registry.toml"):
        read_roster(path)


def test_a_server_knows_the_public_keys_with_which_clients_joined():
    ring = ServerKeys("run", lambda client: point_of(KEYS[client].public_key()))
    assert ring.key(2) == POINTS[2]
    with pytest.raises(ProtocolError):
        ring.signer(2)
