"""Where a run computes."""

import torch

from ..errors import ConfigError


def choose(asked: str) -> torch.device:
    """The device that `--device` means: auto is CUDA where there is one. Raises ConfigError for a device that is not here."""
    if asked == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, index = asked.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdecimal()):
        raise ConfigError(f"--device {asked} is not known; give auto, cpu, cuda or cuda:N")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"--device {asked}: no CUDA device is here; give --device cpu")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"--device {asked}: this machine has {torch.cuda.device_count()} CUDA devices; give --device cuda:0")
    return torch.device(asked)


def name(device: torch.device) -> str:
    """The device for a header: the model of a GPU, the threads of a CPU."""
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return f"cpu ({torch.get_num_threads()} threads)"
