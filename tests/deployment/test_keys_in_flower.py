"""Flower's own node authentication lets in the key of an enrolment file that was registered, and nobody else's."""

import json
import os
import subprocess
import sysconfig
import time
from pathlib import Path

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from tls_servers import free_port

from fedcomp.errors import UnreachableError
from fedcomp.keys import key_folder as keys
from fedcomp.keys.connection import check_server
from fedcomp.keys.key_folder import Enrolment, pem, read_registry

pytestmark = pytest.mark.deploy
SCRIPTS = Path(sysconfig.get_path("scripts"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("with keys") / "keys"
    keys.make(folder, 2)
    return folder


@pytest.fixture(scope="module")
def superlink(folder, tmp_path_factory):
    """The port of a SuperLink with our certificate that wants keys, and the environment of commands to it."""
    home, port = tmp_path_factory.mktemp("superlink"), free_port()
    variables = os.environ | {"FLWR_HOME": str(home), "PATH": f"{SCRIPTS}:{os.environ['PATH']}"}
    here = f'address = "127.0.0.1:{port}"\nroot-certificates = "{folder / keys.CA_CRT}"\n'
    (home / "config.toml").write_text(f'[superlink]\ndefault = "here"\n[superlink.here]\n{here}')
    command = [
        SCRIPTS / "flower-superlink",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--isolation",
        "process",
        "--enable-supernode-auth",
        "--ssl-ca-certfile",
        folder / keys.CA_CRT,
        "--ssl-certfile",
        folder / keys.SERVER_CRT,
        "--ssl-keyfile",
        folder / keys.SERVER_KEY,
        "--disable-runtime-dependency-installation",
    ]
    with (
        (home / "log").open("wb") as log,
        subprocess.Popen(command, env=variables, stdout=log, stderr=log) as process,
    ):
        try:
            for _ in range(300):
                try:
                    check_server("127.0.0.1", port, (folder / keys.CA_CRT).read_bytes(), 1.0)
                    break
                except UnreachableError:
                    assert process.poll() is None, (home / "log").read_text()
                    time.sleep(0.1)
            yield port, variables
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def flwr(variables: dict[str, str], *words: object) -> dict:
    """What `flwr supernode` answers."""
    command = [SCRIPTS / "flwr", "supernode", words[0], str(words[1]), "here", "--format", "json"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    return json.loads(done.stdout[done.stdout.index("{") :])


def node_of(port: int, ca: str, pair) -> int:
    """The node id that a client who signs with these keys gets. Raises httpx.HTTPStatusError when it is refused."""
    from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL
    from flwr.proto.fleet_pb2 import ActivateNodeRequest
    from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
    from flwr.supernode.fleet_http_client import FleetHttpClient
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

    signed = [
        RuntimeVersionHttpInterceptor(component_name="SuperNode"),
        NodeAuthHttpInterceptor(*pair),
    ]
    with FleetHttpClient.from_server_address(
        f"127.0.0.1:{port}", False, ca.encode(), signed
    ) as client:
        return client.ActivateNode(
            ActivateNodeRequest(
                public_key=pem(pair[1]), heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL
            )
        ).node_id


def test_only_what_was_registered_comes_in(folder, superlink, tmp_path):
    port, variables = superlink
    registry = read_registry(folder)
    keys.revoke(folder, 1)
    files = registry.write_public_keys(tmp_path)
    assert list(files) == [0]
    answer = flwr(variables, "register", files[0])

    enrolments = [Enrolment.read(folder / "clients" / f"{id}.toml") for id in (0, 1)]
    ca, (first, second) = enrolments[0].ca, (enrolment.pair for enrolment in enrolments)
    stranger = ec.generate_private_key(ec.SECP384R1())
    assert int(answer["node-id"]) == node_of(port, ca, first)
    for pair, status in (
        (second, None),
        ((stranger, stranger.public_key()), None),
        ((stranger, first[1]), 401),
    ):
        with pytest.raises(httpx.HTTPStatusError) as raised:
            node_of(port, ca, pair)
        assert status in (None, raised.value.response.status_code)
        assert (
            status or "2004" in raised.value.response.text
        )  # Flower's code for a node that may not come in
