"""Processes forked from one that has imported fedcomp, so that each starts at once: FORKS.Process(target=…)."""

import multiprocessing

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "fedcomp.cli.deployment_commands",
        "fedcomp.cli.main",
        "fedcomp.deployment.client_process",
        "fedcomp.keys.key_folder",
        "fedcomp.deployment.start",
        "fedcomp.sim",
    ]
)
