"""Parsing of `--device`, the CPU or GPUs of a run."""

import re

import torch

from ..errors import ConfigError


def parse_devices(text: str) -> list[torch.device]:
    """Return the devices that a simulation's `--device` lists, such as "cuda:0,cuda:1". Raises ConfigError."""
    parsed = [parse_device(word) for word in text.split(",")]
    if len(parsed) > 1 and (
        len(set(parsed)) < len(parsed) or any(device.index is None for device in parsed)
    ):
        raise ConfigError(
            f"--device {text}: a list of devices must name each GPU by its number, and only once; give a list such as cuda:0,cuda:1"
        )
    return parsed


def parse_device(text: str) -> torch.device:
    """Return the device that `text` names. "auto" is the first CUDA device if there is one, else the CPU. Raises ConfigError."""
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
    """Return a description of a device, with the GPU's model or the number of CPU threads, such as "cpu (2 threads)"."""
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    threads = torch.get_num_threads()
    return f"cpu ({threads} thread{'s' * (threads != 1)})"


def slow_precision_warning(precision: str, device: torch.device) -> str:
    """Return a warning if the device can only emulate arithmetic of this precision, which is slow, else an empty string."""
    if (
        precision == "bfloat16"
        and device.type == "cpu"
        and torch.backends.cpu.get_cpu_capability() == "AVX2"
    ):
        return "this CPU has no arithmetic in bfloat16, so bfloat16 is many times slower here than float32; leave --precision out"
    return ""
