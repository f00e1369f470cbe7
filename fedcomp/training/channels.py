"""Where convolutions may have their channels last in memory."""

from torch import nn


def may_be_last(layer: nn.Conv2d) -> bool:
    """False where torch 2.13 then writes past the end of its memory, as it does on CPUs with AVX2: 1×1, in strides, of 2 to 5 channels."""
    return (
        max(layer.kernel_size) > 1
        or max(layer.stride) == 1
        or layer.in_channels // layer.groups >= 8
    )
