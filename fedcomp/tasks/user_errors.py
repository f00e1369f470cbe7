"""Errors raised by a user's own code, in one sentence: file, line and function of the user's frame, then the error."""

import os
import sysconfig
import traceback
from pathlib import Path

import torch

from ..errors import FedcompError, OutOfMemoryError, TaskError

TRACEBACK = "FEDCOMP_TRACEBACK"  # environment variable
SEE_TRACEBACK = f"set {TRACEBACK}=1 to see the full traceback"
LIBRARIES = (
    str(Path(__file__).parents[1]) + os.sep,
    *{sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")},
)
INSTALLED = {"site-packages", "dist-packages"}
GPU_SIGNS = ("CUDA", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
SIGNS = (
    "out of memory",
    "not enough memory",
    "can't allocate memory",
    "DefaultCPUAllocator",
    *GPU_SIGNS[1:],
)
LONGEST = 200  # characters of the allocator's message


def describe(error: BaseException) -> str:
    """Return a sentence such as "my_task.py, line 12, in forward: RuntimeError: mat1 and mat2 shapes cannot be multiplied".

    The frame is the innermost one outside of fedcomp and installed packages; without one, the error alone is described. Only the first
    line of its message is kept. With FEDCOMP_TRACEBACK set, also print the traceback to standard error.
    """
    if os.environ.get(TRACEBACK):
        traceback.print_exception(error)
    message = str(error)
    place = _user_frame(error)
    if isinstance(error, SyntaxError):
        message = error.msg
        if error.filename and not _installed(error.filename):
            place = f"{Path(error.filename).name}, line {error.lineno}"
    first = next(iter(message.strip().splitlines()), "")
    parts = (place, type(error).__name__, first)
    return ": ".join(part for part in parts if part)


def client_error(error: BaseException) -> FedcompError:
    """Return the error of a client as a FedcompError, without its traceback, whose frames hold tensors."""
    if isinstance(error, FedcompError):
        return error
    return out_of_memory(error) or TaskError(describe(error))


def ran_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that the memory of a device did not suffice."""
    return isinstance(error, torch.cuda.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and any(sign in str(error) for sign in SIGNS)
    )


def out_of_memory(error: BaseException) -> OutOfMemoryError | None:
    """Return an error that names the device and the flags that need less memory, or None if memory did not run out."""
    if not ran_out_of_memory(error):
        return None
    cuda = isinstance(error, torch.cuda.OutOfMemoryError) or any(
        sign in str(error) for sign in GPU_SIGNS
    )
    said = next(iter(str(error).splitlines()), "")[:LONGEST].strip()
    return OutOfMemoryError(
        f"memory ran out on the {'GPU' if cuda else 'CPU'}{f' ({said})' if said else ''}; give a smaller --batch-size, "
        "train fewer clients at once (--engine serial, a smaller --cohort-batch or --side-by-side), or choose another --device"
    )


def _user_frame(error: BaseException) -> str:
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not _installed(frame.filename):
            where = f"{Path(frame.filename).name}, line {frame.lineno}"
            return where if frame.name == "<module>" else f"{where}, in {frame.name}"
    return ""


def _installed(file: str) -> bool:
    if file.startswith(("<frozen", "<__array_function__")):
        return True
    return file.startswith(LIBRARIES) or not INSTALLED.isdisjoint(Path(file).parts)
