"""One-line descriptions of errors in a user's code."""

import os
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ..errors import FedcompError, OutOfMemoryError, TaskError

TRACEBACK_VARIABLE = "FEDCOMP_TRACEBACK"  # environment variable
SEE_TRACEBACK = f"set {TRACEBACK_VARIABLE}=1 to see the full traceback"
# Advice if a task's code fails and its data folder is None.
GIVE_FOLDER = "if the task reads a data folder, give the folder with --data DIR or FEDCOMP_DATA; else correct the task"
# Beginnings of the file names of code that is not the user's: code without a file, fedcomp and the standard library.
LIBRARY_PREFIXES = (
    *("<frozen", "<__array_function__"),  # file names that Python gives to code without a file
    str(Path(__file__).parents[1]) + os.sep,
    *{sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")},
)
PACKAGE_FOLDERS = {"site-packages", "dist-packages"}
# Parts of torch's error messages on a GPU, and of its messages after a failed allocation of memory.
GPU_MESSAGES = ("CUDA", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
MEMORY_MESSAGES = (
    "out of memory",
    "not enough memory",
    "can't allocate memory",
    "DefaultCPUAllocator",
    *GPU_MESSAGES[1:],
)
MAX_MESSAGE_CHARS = 200  # maximum number of characters that are quoted from torch's message


def describe(error: BaseException) -> str:
    """Return a one-line description of an error, such as "my_task.py, line 12, in forward: ValueError: wrong shape".

    File, line and function are those of the innermost stack frame outside of fedcomp and installed packages, if there is one. If
    FEDCOMP_TRACEBACK is set, also print the traceback to standard error.
    """
    if os.environ.get(TRACEBACK_VARIABLE):
        traceback.print_exception(error)
    message = str(error)
    place = _user_frame(error)
    if isinstance(error, SyntaxError):
        message = error.msg
        if error.filename and not _is_library(error.filename):
            place = f"{Path(error.filename).name}, line {error.lineno}"
    first = next(iter(message.strip().splitlines()), "").removesuffix(".")
    parts = (place, type(error).__name__, first)
    return ": ".join(part for part in parts if part)


@contextmanager
def task_errors(
    call: str, fix: str = "correct the task", without_folder: str = ""
) -> Iterator[None]:
    """Convert errors of a task's code in a `with` block to TaskError, whose message names the call and the fix.

    A FedcompError is passed on unchanged. An error that mentions "NoneType" probably means that the data folder is None. In this case, the
    message contains `without_folder`, if given, instead of `fix`.
    """
    try:
        yield
    except (FedcompError, KeyboardInterrupt):
        raise
    except BaseException as error:
        if without_folder and "NoneType" in str(error):
            fix = without_folder
        raise out_of_memory(error) or TaskError(
            f"{call} failed: {describe(error)}; {fix}, or {SEE_TRACEBACK}"
        ) from error


def client_error(error: BaseException) -> FedcompError:
    """Return the error of a client as a FedcompError.

    An exception of another type is replaced, because the stack frames in its traceback would keep tensors in memory.
    """
    if isinstance(error, FedcompError):
        return error
    return out_of_memory(error) or TaskError(describe(error))


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory of the CPU or a GPU is exhausted."""
    return isinstance(error, torch.cuda.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and any(sign in str(error) for sign in MEMORY_MESSAGES)
    )


def out_of_memory(error: BaseException) -> OutOfMemoryError | None:
    """If `error` means that memory ran out, return an error that names CPU or GPU and the options that save memory, else None."""
    if not is_out_of_memory(error):
        return None
    cuda = isinstance(error, torch.cuda.OutOfMemoryError) or any(
        sign in str(error) for sign in GPU_MESSAGES
    )
    message = next(iter(str(error).splitlines()), "")[:MAX_MESSAGE_CHARS].strip()
    return OutOfMemoryError(
        f"memory ran out on the {'GPU' if cuda else 'CPU'}{f' ({message})' if message else ''}; give a smaller --batch-size, "
        "train fewer clients at once (--engine serial, a smaller --cohort-batch or --side-by-side), or choose another --device"
    )


def _user_frame(error: BaseException) -> str:
    """Return file, line and function of the innermost stack frame outside of libraries, or "" if there is none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not _is_library(frame.filename):
            where = f"{Path(frame.filename).name}, line {frame.lineno}"
            return where if frame.name == "<module>" else f"{where}, in {frame.name}"
    return ""


def _is_library(file: str) -> bool:
    return file.startswith(LIBRARY_PREFIXES) or not PACKAGE_FOLDERS.isdisjoint(Path(file).parts)
