"""The clients that the flags of `fedcomp client` describe."""

from pathlib import Path

import pytest
from cases import for_each

from fedcomp.cli.deployment_commands import identities
from fedcomp.errors import ConfigError, UserError
from fedcomp.keys.key_folder import make


def of(
    server="h:1",
    enrolment=None,
    insecure=False,
    client_id=None,
    partition_id=None,
    state_dir=None,
    count=None,
):
    return identities(server, enrolment, insecure, client_id, partition_id, state_dir, count)


def fields_of(found):
    return [(one.id, one.partition_id, str(one.folder)) for one in found]


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys") / "keys"
    make(folder, 3)
    return folder / "clients"


def test_a_client_uses_the_given_state_folder():
    assert fields_of(of(insecure=True, partition_id=4)) == [(4, 4, "fedcomp-client-4")]
    assert fields_of(of(insecure=True, client_id=2, state_dir=Path("here"))) == [(2, None, "here")]


def test_several_clients_have_consecutive_ids():
    assert fields_of(of(insecure=True, partition_id=3, count=2)) == [
        (3, 3, "fedcomp-client-3"),
        (4, 4, "fedcomp-client-4"),
    ]
    assert fields_of(
        of(insecure=True, client_id=7, partition_id=0, count=2, state_dir=Path("s"))
    ) == [
        (7, 0, "s/fedcomp-client-7"),
        (8, 1, "s/fedcomp-client-8"),
    ]


def test_a_folder_of_enrolments_makes_several_clients_with_their_own_keys(keys):
    found = of(enrolment=keys, partition_id=1)
    assert fields_of(found) == [(i, i + 1, f"fedcomp-client-{i}") for i in range(3)]
    assert len({one.target.enrolment.key_pair[0].private_numbers() for one in found}) == 3
    assert [one.id for one in of(enrolment=keys, partition_id=1, count=2)] == [0, 1]
    assert [one.id for one in of(enrolment=keys / "2.toml")] == [2]
    assert fields_of(of(enrolment=keys.parent, partition_id=1)) == fields_of(found)


def test_an_enrolment_at_the_default_path_is_found(monkeypatch, tmp_path, keys):
    monkeypatch.setenv("FEDCOMP_ENROLMENT", str(keys / "1.toml"))
    assert fields_of(of()) == [(1, None, "fedcomp-client-1")]
    monkeypatch.delenv("FEDCOMP_ENROLMENT")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".config" / "fedcomp").mkdir(parents=True)
    (tmp_path / ".config" / "fedcomp" / "enrolment.toml").write_bytes(
        (keys / "2.toml").read_bytes()
    )
    assert fields_of(of()) == [(2, None, "fedcomp-client-2")]


@for_each(
    "given, error, sentence",
    [
        ({"insecure": True, "client_id": 0, "count": 2}, ConfigError, "give --partition-id K"),
        ({"insecure": True, "count": 2}, ConfigError, "give --partition-id K"),
        ({"insecure": True}, UserError, "give --partition-id, or --client-id"),
        (
            {"insecure": True, "partition_id": 0, "server": None},
            UserError,
            "give --server host:port",
        ),
        (
            {},
            UserError,
            "no enrolment file nobody.toml; copy .*ID.toml .*or name it with --enrolment FILE",
        ),
    ],
)
def test_errors_name_missing_options(monkeypatch, given, error, sentence):
    monkeypatch.setenv("FEDCOMP_ENROLMENT", "nobody.toml")
    with pytest.raises(error, match=sentence):
        of(**given)


def test_a_folder_with_too_few_or_duplicate_enrolments_is_refused(keys, tmp_path):
    with pytest.raises(
        UserError,
        match=r"contains 3 enrolment files \(ID.toml\), but 4 are needed; give a folder",
    ):
        of(enrolment=keys, partition_id=0, count=4)
    with pytest.raises(UserError, match="contains 0 enrolment files"):
        of(enrolment=tmp_path, partition_id=0)
    for name in "ab":
        (tmp_path / f"{name}.toml").write_text((keys / "0.toml").read_text())
    with pytest.raises(UserError, match="two enrolments of the same client"):
        of(enrolment=tmp_path, partition_id=0)
    with pytest.raises(UserError, match="contains 1 enrolment files .*; give a folder"):
        of(enrolment=keys / "0.toml", partition_id=0, count=2)


def test_an_id_together_with_an_enrolment_is_refused(keys):
    for enrolment in (keys / "0.toml", keys, None):
        with pytest.raises(ConfigError, match="--client-id needs --insecure"):
            of(enrolment=enrolment, client_id=1, partition_id=0)


@for_each(
    "given, flag",
    [
        ({"client_id": 10**20}, "--client-id"),
        ({"partition_id": 2**31}, "--partition-id"),
        ({"client_id": 2**31 - 1, "partition_id": 0, "count": 2}, "--client-id"),
    ],
)
def test_ids_that_are_too_large_are_refused(given, flag):
    with pytest.raises(
        ConfigError, match=f"is above the maximum .*; give a lower {flag} or --count"
    ):
        of(insecure=True, **given)


def test_the_largest_id_is_accepted():
    assert fields_of(of(insecure=True, client_id=2**31 - 1))[0][0] == 2**31 - 1
