"""The code that processes one update, from the client's assignment to the updated model, is in few files."""

import sys
from pathlib import Path

import fedcomp
from fedcomp.clients.session import ClientSession
from fedcomp.server.exchange import Exchange
from fedcomp.server.round_loop import RoundLoop

MAX_FILES = 30
ROUND = 5  # not an earlier round, in which clients and memories are new
PATH = {function.__code__ for function in (ClientSession.handle, Exchange.receive, RoundLoop.close)}
PACKAGE = Path(fedcomp.__file__).parent
STOPWATCH = "profiling.py"  # not counted, because it only measures times


def test_an_update_passes_through_at_most_30_files(tmp_path):
    files: set[str] = set()
    round, depth = 0, 0

    def record(frame, event, argument):
        nonlocal round, depth
        code = frame.f_code
        if code is RoundLoop.run_round.__code__ and event == "call":
            round = frame.f_locals["round"]
        depth += (code in PATH) * ((event == "call") - (event == "return"))
        if depth and round == ROUND and event == "call":
            files.add(code.co_filename)

    sys.setprofile(record)
    try:
        fedcomp.simulate(
            "digits",
            clients=4,
            rounds=ROUND,
            participation=1.0,
            engine="serial",
            out=tmp_path / "run",
            progress=False,
        )
    finally:
        sys.setprofile(None)
    ours = {Path(file).relative_to(PACKAGE) for file in files if Path(file).is_relative_to(PACKAGE)}
    passed = {file.as_posix() for file in ours} - {STOPWATCH}
    assert {"clients/session.py", "codecs/stc.py", "server/round_loop.py"} <= passed
    assert len(passed) <= MAX_FILES, "\n".join(sorted(passed))
