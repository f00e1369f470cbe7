"""Processes forked from one that has imported what fedcomp needs, which each of them would do for seconds: FORKS.Process(target=…)."""

import multiprocessing

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "fedcomp.cli.deployed",
        "fedcomp.cli.main",
        "fedcomp.clients.many",
        "fedcomp.server.keys",
        "fedcomp.server.start",
        "fedcomp.sim",
    ]
)
