"""Kill a process at a chosen call. Imports only modules that the processes of forks.py have already imported."""

import os
import signal

from fedcomp.keys import key_folder as keys


def die_at_call(act: str, after: int) -> None:
    """Evaluate `act`, a call of a function of key_folder.py. Kill this process after `after` calls that change files, in the next one."""
    left = after

    def counted(real):
        def call(*args, **kwargs):
            nonlocal left
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return call

    for name in ("replace", "rename", "open", "unlink"):
        setattr(os, name, counted(getattr(os, name)))
    eval(f"keys.{act}", {"keys": keys})
