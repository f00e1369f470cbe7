"""Whether a model's convolutions can use torch's channels_last memory format, which is faster on CPUs."""

import torch
from torch import nn

# Part of torch's error message for a `view` of activations in the channels_last format.
NOT_CONTIGUOUS = "view size is not compatible"


def may_be_last(layer: nn.Conv2d) -> bool:
    """Return whether a convolution is safe in the channels_last format.

    In torch 2.13 on CPUs with AVX2, a strided 1×1 convolution of 2 to 5 input channels writes beyond its memory in that format.
    """
    return (
        max(layer.kernel_size) > 1
        or max(layer.stride) == 1
        or layer.in_channels // layer.groups >= 8
    )


def channels_may_be_last(model: nn.Module) -> bool:
    """Return whether a model has convolutions, all of which are safe in the channels_last format."""
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    return bool(convolutions) and all(map(may_be_last, convolutions))


def set_memory_format(model: nn.Module, channels_last: bool) -> None:
    """Convert the parameters of a model to the channels_last or to the contiguous format."""
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    model.to(memory_format=memory_format)  # type: ignore[call-overload]
