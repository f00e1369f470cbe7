"""A SuperLink hears processes of its own user and no others, through a real loopback port; and short requests have the usual answers."""

import asyncio
import os
import socket
import subprocess
import sys

import httpx
import pytest
from cases import for_each
from loopback import ask, head, post, status, wait_until
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route

from fedcomp.deployment import peer_credentials as own_user
from fedcomp.deployment.superlink import LOOPBACK, SuperLink

told = pytest.mark.skipif(
    not own_user.told_here(), reason="this system does not tell whose a connection is"
)
STRANGER = """
import encodings.idna, os, socket, sys  # all before its rights are gone
os.setgroups([]), os.setgid(65534), os.setuid(65534)
for _ in range(10):
    with socket.create_connection(('127.0.0.1', int(sys.argv[1])), timeout=30) as there:
        there.sendall(sys.argv[2].encode())
        if sys.argv[3] == "hasty":
            continue
        try:
            assert there.recv(99) == b""
        except ConnectionResetError:
            pass
"""
ASKED = post(b"", "Content-Type: application/protobuf", path="/v1/control/list-runs")


@pytest.fixture(scope="module")
def superlink(tmp_path_factory):
    with SuperLink(tmp_path_factory.mktemp("run")) as link:
        wait_until(link._healthy, 60)
        yield link


@told
def test_whose_an_end_is():
    with socket.create_server((LOOPBACK, 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
        with one, other:
            assert own_user.owner(one.getsockname(), one.getpeername()) == os.geteuid()
            assert own_user.owner(other.getsockname(), other.getpeername()) == os.geteuid()
            ends = one.getsockname(), one.getpeername()
            one.close()
            assert own_user.owner(*ends) is None, "who has let go of an end is nobody"
        assert own_user.owner((LOOPBACK, 1), (LOOPBACK, 2)) is None


@pytest.mark.deploy
@told
def test_the_own_user_is_heard(superlink):
    assert status(ask(superlink.port, head("GET", "/health", "Connection: close"))) == 200


@pytest.mark.deploy
@told
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
@for_each("how", ["patient", "hasty"])
def test_another_user_is_closed_unheard(superlink, how):
    """`hasty`: it lets go of its end at once, which is then nobody's: the system shows 0 for that, as for root."""
    subprocess.run(
        [sys.executable, "-c", STRANGER, str(superlink.port), ASKED.decode(), how],
        check=True,
        timeout=60,
    )
    assert status(ask(superlink.port, head("GET", "/health", "Connection: close"))) == 200
    assert "list-runs" not in superlink.log.read_text()


@pytest.mark.deploy
@told
def test_what_the_own_user_asks_is_in_the_log(superlink):
    """So that its absence, above, says something."""
    assert status(ask(superlink.port, ASKED.replace(b"Host", b"Connection: close\r\nHost"))) == 200
    wait_until(lambda: "list-runs" in superlink.log.read_text(), 30)


@pytest.mark.parametrize("fails", [OSError, AttributeError])
def test_a_system_that_does_not_tell_lets_everybody_in_and_says_so(monkeypatch, capsys, fails):
    def untold(end, other):
        raise fails

    class Program:
        @staticmethod
        def load():
            return lambda: 0

    run = own_user.uvicorn.run
    monkeypatch.setattr(own_user, "owner", untold)
    monkeypatch.setattr(own_user, "entry_points", lambda **what: [Program])
    with pytest.raises(SystemExit, match="0"):
        own_user.main()
    assert own_user.uvicorn.run is run
    assert "every user of this machine can stop the run" in capsys.readouterr().err


class Upper(BaseHTTPMiddleware):
    """Reads the body before the others do, and marks the answer."""

    async def dispatch(self, request, call_next):
        request.state.seen = (await request.body()).upper()
        answer = await call_next(request)
        answer.headers["upper"] = "yes"
        return answer


class Errors(BaseHTTPMiddleware):
    """Answers for what went wrong below, and for what it does not let through."""

    async def dispatch(self, request, call_next):
        if "forbidden" in request.headers:
            return PlainTextResponse("no", 403)
        try:
            return await call_next(request)
        except ValueError as error:
            return PlainTextResponse(str(error), 418)


async def endpoint(request):
    if request.url.path.startswith("/broken"):
        raise ValueError("broken below")
    return PlainTextResponse(
        request.state.seen + b"|" + await request.body(), 201, headers={"own": "1"}
    )


async def streamed(request):
    return StreamingResponse(iter([b"a", b"b"]), headers={"own": "2"})


@pytest.fixture
def layers():
    routes = [
        Route(f"/{name}/push-messages", endpoint, methods=["POST"]) for name in ("whole", "broken")
    ]
    routes += [Route(f"/{name}/other", endpoint, methods=["POST"]) for name in ("whole", "broken")]
    routes += [
        Route("/flow/pull-object", streamed, methods=["POST"]),
        Route("/flow/other", streamed, methods=["POST"]),
    ]
    app = Starlette(
        routes=routes, middleware=[Middleware(Errors), Middleware(Upper), Middleware(Errors)]
    )

    async def answers(requests):
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://superlink"
        ) as client:
            return [
                await client.post(path, content=body, headers=headers)
                for path, body, headers in requests
            ]

    return lambda *requests: asyncio.run(answers(requests))


@pytest.mark.parametrize(
    ("name", "short", "other"),
    [
        ("whole", "push-messages", "other"),
        ("broken", "push-messages", "other"),
        ("flow", "pull-object", "other"),
        ("whole", "missing", "gone"),
    ],
)
def test_short_requests_go_through_the_same_layers_with_the_same_answers(
    layers, monkeypatch, name, short, other
):
    bodies, heads = (b"", b"text", bytes(300_000)), ({}, {"forbidden": "1"})
    requests = [
        (f"/{name}/{path}", body, headers)
        for path in (short, other)
        for body in bodies
        for headers in heads
    ]
    usual = layers(*requests)
    monkeypatch.setattr(BaseHTTPMiddleware, "__call__", BaseHTTPMiddleware.__call__)
    own_user.shorten_layers()
    for one, two in zip(usual, layers(*requests), strict=True):
        assert (one.status_code, one.content, dict(one.headers)) == (
            two.status_code,
            two.content,
            dict(two.headers),
        )
