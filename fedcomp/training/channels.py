"""Where convolutions may have their channels last in memory."""

from torch import nn

NOT_CONTIGUOUS = (
    "view size is not compatible"  # in what torch says of a `view` of channels that are last
)


def may_be_last(layer: nn.Conv2d) -> bool:
    """False where torch 2.13 then writes past the end of its memory, as it does on CPUs with AVX2: 1×1, in strides, of 2 to 5 channels."""
    return (
        max(layer.kernel_size) > 1
        or max(layer.stride) == 1
        or layer.in_channels // layer.groups >= 8
    )


def channels_may_be_last(model: nn.Module) -> bool:
    """Whether a model has convolutions, and all of them may have their channels last."""
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    return bool(convolutions) and all(map(may_be_last, convolutions))
