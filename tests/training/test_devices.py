"""Where a run computes: what --device may say."""

import pytest
import torch
from cases import for_each

from fedcomp.errors import ConfigError
from fedcomp.training import devices


def test_the_processor():
    assert devices.parse_device("cpu") == torch.device("cpu")


def test_auto_is_a_device_that_is_here():
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
def test_another_word_is_a_sentence(asked):
    with pytest.raises(
        ConfigError, match=f"^--device {asked} is not known; give auto, cpu, cuda or cuda:N$"
    ):
        devices.parse_device(asked)


def test_a_device_that_is_not_here():
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
def test_arithmetic_that_is_not_the_processors_own(monkeypatch, capability, precision, told):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert (
        "no arithmetic in bfloat16"
        in devices.slow_precision_warning(precision, torch.device("cpu"))
    ) is told
    assert not devices.slow_precision_warning(precision, torch.device("meta"))
