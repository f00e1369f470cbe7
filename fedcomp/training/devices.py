"""Where a run computes."""

import ctypes
import re

import torch

from ..errors import ConfigError

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt, in bytes
M_ARENA_MAX = -8  # and a number
LARGE_BYTES, KEPT_BYTES = (
    256 << 10,
    32 << 20,
)  # of a vector that is worth a mapping of its own; of what is kept at most


def keep_freed_memory(threads: bool = False, vector_bytes: int = 0) -> None:
    """Have the C library keep what is freed: given back to the system after every step, memory is faulted in anew for the next.

    `threads`: they work one after the other, so what one has freed is for all of them; else each would keep its own. `vector_bytes`:
    vectors of this size, or larger, are given back, if they are large: they come and go between small things that stay, and in the hole
    that one leaves there is no room for the next, which glibc looks for with its alignment.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(
            M_MMAP_THRESHOLD,
            min(KEPT_BYTES, vector_bytes if vector_bytes >= LARGE_BYTES else KEPT_BYTES),
        )
        libc.mallopt(M_TRIM_THRESHOLD, 512 << 20)
        if threads:
            libc.mallopt(M_ARENA_MAX, 1)


def several(asked: str) -> list[torch.device]:
    """The devices that `--device` means in a simulation: cuda:0,cuda:1 are two, any other word one. Raises ConfigError."""
    found = [choose(word) for word in asked.split(",")]
    if len(found) > 1 and (
        len(set(found)) < len(found) or any(device.index is None for device in found)
    ):
        raise ConfigError(
            f"--device {asked}: several devices are different GPUs, each with its number; give them like cuda:0,cuda:1"
        )
    return found


def choose(asked: str) -> torch.device:
    """The device that `--device` means: auto is the first CUDA device where there is one. Raises ConfigError for one that is not here."""
    if asked == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, index = asked.partition(":")
    if not re.fullmatch(r"cpu|cuda(:(0|[1-9][0-9]{0,3}))?", asked):
        raise ConfigError(f"--device {asked} is not known; give auto, cpu, cuda or cuda:N")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"--device {asked}: no CUDA device is here; give --device cpu")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"--device {asked}: this machine has {torch.cuda.device_count()} CUDA devices; give --device cuda:0"
        )
    return torch.device(asked)


def name(device: torch.device) -> str:
    """The device for a header: the model of a GPU, the threads of a CPU."""
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return f"cpu ({torch.get_num_threads()} threads)"


def without(precision: str, device: torch.device) -> str:
    """What to be told where arithmetic of this precision is not the device's own; "" where it is, or it is not known."""
    if (
        precision == "bfloat16"
        and device.type == "cpu"
        and torch.backends.cpu.get_cpu_capability() == "AVX2"
    ):
        return "this CPU has no arithmetic in bfloat16, which is many times slower here than float32; leave --precision out"
    return ""
