"""The tiny task, with a loss that kills the process in training step KILL_AT, counted from the start of the process."""

import itertools
import os
import signal
from dataclasses import replace

import tiny_task

STEPS = itertools.count(1)


def loss(outputs, targets):
    if next(STEPS) == int(os.environ["KILL_AT"]):
        os.kill(os.getpid(), signal.SIGKILL)
    return tiny_task.task.criterion(outputs, targets)


task = replace(tiny_task.task, loss=loss)
