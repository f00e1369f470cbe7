"""The values of --device."""

import pytest
import torch
from cases import for_each

from fedcomp.errors import ConfigError
from fedcomp.training import devices


def test_cpu_is_the_cpu():
    assert devices.parse_device("cpu") == torch.device("cpu")


def test_auto_is_a_gpu_if_there_is_one_else_the_cpu():
    assert devices.parse_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


@for_each(
    "asked",
    [
        "cpu:",
        "cpu:0",
        "cpu:1",
        "cuda:",
        "cuda:x",
        "cuda:-1",
        "cuda:01",
        "cuda:٣",
        "gpu",
        "CPU",
        " cpu",
    ],
)
def test_an_unknown_device_is_refused_with_the_known_ones(asked):
    with pytest.raises(
        ConfigError, match=f"^--device {asked} is not known; give auto, cpu, cuda or cuda:N$"
    ):
        devices.parse_device(asked)


def test_a_missing_device_is_refused():
    with pytest.raises(ConfigError, match="^--device cuda:9999: "):
        devices.parse_device("cuda:9999")


@pytest.mark.parametrize(
    ("capability", "precision", "told"),
    [
        ("AVX2", "bfloat16", True),
        ("AVX2", "float32", False),
        ("AVX512", "bfloat16", False),
        ("DEFAULT", "bfloat16", False),
    ],
)
def test_there_is_a_warning_if_the_cpu_emulates_the_precision(
    monkeypatch, capability, precision, told
):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert (
        "no arithmetic in bfloat16"
        in devices.slow_precision_warning(precision, torch.device("cpu"))
    ) is told
    assert not devices.slow_precision_warning(precision, torch.device("meta"))
