"""What the guard in front of a SuperLink costs: requests per second and megabytes per second, beside the server without it.

    python benchmarks/guard.py [--requests 2000] [--clients 8] [--body-mb 44] [--repeats 5]

The server is uvicorn, as a SuperLink's is, and answers a request with the length of its body, or with a body of the length asked for.
Server, guard and clients are processes of their own on loopback. Medians of interleaved repeats, with the slowest and the fastest.
"""

import argparse
import http.client
import multiprocessing
import socket
import ssl
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import uvicorn

from fedcomp.deployment.guard import Guard
from fedcomp.keys import key_folder as keys

HERE = "127.0.0.1"
UP, DOWN = "/v1/fleet/push-object", "/v1/fleet/pull-object"
SMALL = bytes(200)


async def application(scope, receive, send) -> None:
    count, kept = 0, b""
    while (message := await receive())["type"] == "http.request":
        count, kept = count + len(message.get("body", b"")), message.get("body", b"")
        if not message.get("more_body"):
            break
    body = bytes(int(kept)) if scope["path"] == DOWN else b"%d" % count
    await send(
        {
            "type": "http.response.start",
            "status": 200,
            "headers": [(b"content-length", b"%d" % len(body))],
        }
    )
    await send({"type": "http.response.body", "body": body})


def serve(port: int) -> None:
    uvicorn.run(application, host=HERE, port=port, log_level="error", lifespan="off", ws="none")


def guard(port: int, upstream: int, certificate: Path | None, key: Path | None) -> None:
    with Guard(HERE, port, upstream, certificate=certificate, key=key):
        threading.Event().wait()


def free_port() -> int:
    with socket.create_server((HERE, 0)) as free:
        return free.getsockname()[1]


def connection(port: int, trust: Path | None) -> http.client.HTTPConnection:
    if trust is None:
        return http.client.HTTPConnection(HERE, port, timeout=60)
    return http.client.HTTPSConnection(
        HERE, port, timeout=60, context=ssl.create_default_context(cafile=trust)
    )


def post(to: http.client.HTTPConnection, path: str, body: bytes) -> bytes:
    to.request("POST", path, body)
    return to.getresponse().read()


def client(port: int, trust: Path | None, requests: int, begin, done) -> None:
    to = connection(port, trust)
    post(to, UP, SMALL)
    begin.wait()
    for _ in range(requests):
        post(to, UP, SMALL)
    done.wait()


def requests_per_s(port: int, trust: Path | None, requests: int, clients: int) -> float:
    begin, done = multiprocessing.Barrier(clients + 1), multiprocessing.Barrier(clients + 1)
    each = requests // clients
    processes = [
        multiprocessing.Process(target=client, args=(port, trust, each, begin, done))
        for _ in range(clients)
    ]
    for process in processes:
        process.start()
    begin.wait()
    began = time.perf_counter()
    done.wait()
    seconds = time.perf_counter() - began
    for process in processes:
        process.join()
    return each * clients / seconds


def mb_per_s(port: int, trust: Path | None, path: str, count: int) -> float:
    to = connection(port, trust)
    post(to, UP, SMALL)
    body = bytes(count) if path == UP else b"%d" % count
    began = time.perf_counter()
    answer = post(to, path, body)
    seconds = time.perf_counter() - began
    assert answer == b"%d" % count if path == UP else len(answer) == count
    return count / seconds / 1e6


def wait_for(port: int) -> None:
    while True:
        try:
            socket.create_connection((HERE, port)).close()
            return
        except ConnectionRefusedError:
            time.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--body-mb", type=int, default=44)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder, "keys")
        keys.make(made, clients=1, hosts=[HERE])
        direct, plain, secured = free_port(), free_port(), free_port()
        certified = made / "server.crt", made / "server.key"
        starts = [
            (serve, (direct,)),
            (guard, (plain, direct, None, None)),
            (guard, (secured, direct, *certified)),
        ]
        processes = [
            multiprocessing.Process(target=target, args=args, daemon=True)
            for target, args in starts
        ]
        for process in processes:
            process.start()
        ways = {
            "direct": (direct, None),
            "guard": (plain, None),
            "guard, TLS": (secured, made / "ca.crt"),
        }
        for port, _ in ways.values():
            wait_for(port)
        count = given.body_mb * 1_000_000
        measures: dict[str, Callable[..., float]] = {
            "requests/s, 1 client": lambda port, trust: requests_per_s(
                port, trust, given.requests // 4, 1
            ),
            f"requests/s, {given.clients} clients": lambda port, trust: requests_per_s(
                port, trust, given.requests, given.clients
            ),
            f"MB/s up, {given.body_mb} MB": lambda port, trust: mb_per_s(port, trust, UP, count),
            f"MB/s down, {given.body_mb} MB": lambda port, trust: mb_per_s(
                port, trust, DOWN, count
            ),
        }
        print(f"{'':24}" + "".join(f"{way:>24}" for way in ways))
        for name, measure in measures.items():
            found: dict[str, list[float]] = {way: [] for way in ways}
            for _ in range(given.repeats):
                for way, to in ways.items():
                    found[way].append(measure(*to))
            cells = (
                f"{statistics.median(v):.0f} ({min(v):.0f}–{max(v):.0f})" for v in found.values()
            )
            print(f"{name:24}" + "".join(f"{cell:>24}" for cell in cells))
        for process in processes:
            process.terminate()
            process.join()


if __name__ == "__main__":
    main()
