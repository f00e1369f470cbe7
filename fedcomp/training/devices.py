"""The devices that `--device` names, and the memory settings of a process that trains."""

import ctypes
import re

import torch

from ..errors import ConfigError

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # parameters of glibc's mallopt
LARGE_BYTES = 256 << 10  # a vector of at least this size has its own memory mapping
MAX_KEPT_BYTES = 32 << 20  # freed allocations above this size are always returned to the system


def keep_freed_memory(threads: bool = False, vector_bytes: int = 0) -> None:
    """Let the C library keep freed memory, so that the next training step does not request it from the system again.

    With `threads`, all threads of the process use one malloc arena, so that a thread can reuse memory that another thread freed.
    `vector_bytes` is the size of a vector with all parameters of the model. Each large vector gets a memory mapping of its own, which is
    returned to the system when the vector is freed. Large vectors among small allocations would fragment the heap.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        mapped_from = vector_bytes if vector_bytes >= LARGE_BYTES else MAX_KEPT_BYTES
        libc.mallopt(M_MMAP_THRESHOLD, min(MAX_KEPT_BYTES, mapped_from))
        libc.mallopt(M_TRIM_THRESHOLD, 512 << 20)
        if threads:
            libc.mallopt(M_ARENA_MAX, 1)


def parse_devices(text: str) -> list[torch.device]:
    """Return the devices of a simulation's `--device`, such as "cuda:0,cuda:1". Raises ConfigError."""
    parsed = [parse_device(word) for word in text.split(",")]
    if len(parsed) > 1 and (
        len(set(parsed)) < len(parsed) or any(device.index is None for device in parsed)
    ):
        raise ConfigError(
            f"--device {text}: a list of devices must name different GPUs by their numbers; give a list such as cuda:0,cuda:1"
        )
    return parsed


def parse_device(text: str) -> torch.device:
    """Return the device that `--device` names. "auto" is the first CUDA device if there is one, else the CPU. Raises ConfigError."""
    if text == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, index = text.partition(":")
    if not re.fullmatch(r"cpu|cuda(:(0|[1-9][0-9]{0,3}))?", text):
        raise ConfigError(f"--device {text} is not known; give auto, cpu, cuda or cuda:N")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"--device {text}: this machine has no CUDA device; give --device cpu")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"--device {text}: this machine has {torch.cuda.device_count()} CUDA devices; give --device cuda:0"
        )
    return torch.device(text)


def describe(device: torch.device) -> str:
    """Return a text for a run's header: the device, and the model of the GPU or the number of CPU threads."""
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    threads = torch.get_num_threads()
    return f"cpu ({threads} thread{'s' * (threads != 1)})"


def slow_precision_warning(precision: str, device: torch.device) -> str:
    """Return a warning if the device only emulates arithmetic of this precision, which is slow, else an empty string."""
    if (
        precision == "bfloat16"
        and device.type == "cpu"
        and torch.backends.cpu.get_cpu_capability() == "AVX2"
    ):
        return "this CPU has no arithmetic in bfloat16, so bfloat16 is many times slower here than float32; leave --precision out"
    return ""
