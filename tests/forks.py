"""FORKS.Process(target=…) starts a process quickly, because it is forked from a process that has already imported fedcomp."""

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
