"""ResNet-18 for small images, with group normalisation instead of batch normalisation.

He, Zhang, Ren, Sun: Deep residual learning for image recognition. CVPR 2016. The stem for CIFAR-10 is one 3x3 convolution.
GroupNorm (Wu & He: Group normalization. ECCV 2018) has no running statistics, which differ between clients with different data: Hsieh,
Phanishayee, Mutlu, Gibbons: The non-IID data quagmire of decentralized machine learning. ICML 2020. It has 2 groups, as in Reddi et al.:
Adaptive federated optimization. ICLR 2021.

    y = ReLU(x' + N(conv3(ReLU(N(conv3(x))))))    x' = x, or N(conv1(x)) where the shape changes
"""

import torch
from torch import Tensor, nn

GROUPS = 2
# For each stage, its width as a multiple of the first stage's, and the stride of the first of its two blocks.
STAGES = ((1, 1), (2, 2), (4, 2), (8, 2))


class Block(nn.Module):
    """Two convolutions with a shortcut: [B, i, h, w] → [B, o, h / stride, w / stride]."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.first = _normalised(inputs, outputs, 3, stride)
        self.second = _normalised(outputs, outputs, 3)
        self.past = (
            nn.Identity()
            if (inputs, stride) == (outputs, 1)
            else _normalised(inputs, outputs, 1, stride)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.past(x) + self.second(torch.relu(self.first(x))))


class ResNet18(nn.Module):
    """ResNet-18: inputs [B, 3, h, w] → [B, classes]. With width 64 and 10 classes, it has 11,173,962 parameters.

    `width`: channels of the first stage, an even number.
    """

    def __init__(self, width: int = 64, classes: int = 10):
        super().__init__()
        blocks, channels = [], width
        for multiple, stride in STAGES:
            blocks += [
                Block(channels, multiple * width, stride),
                Block(multiple * width, multiple * width, 1),
            ]
            channels = multiple * width
        self.stem = _normalised(3, width, 3)
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(torch.relu(self.stem(x))).mean((2, 3)))


def _normalised(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Sequential:
    """Return a convolution, initialised as in He et al. 2015 by fan-out, and its GroupNorm."""
    convolution = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
    return nn.Sequential(convolution, nn.GroupNorm(GROUPS, outputs))
