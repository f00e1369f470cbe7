"""The layout of a model: how its trainable tensors are stored in one flat float32 vector."""

import hashlib
import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import nn


def model_fingerprint(model: "nn.Module") -> str:
    """Return the hash of a model's layout, followed by "+" and the hash of the frozen parameters if there are any (16 hex digits each).

    Frozen parameters have `requires_grad=False` and are never sent. Therefore, the server and all clients must construct the model with
    equal frozen parameters.
    """
    import torch

    layout = Layout.of(model).fingerprint
    frozen = [(name, p) for name, p in model.named_parameters() if not p.requires_grad]
    digest = hashlib.sha256()
    for name, parameter in frozen:
        flat = parameter.detach().cpu().contiguous().reshape(-1).view(dtype=torch.uint8)
        digest.update(f"{name}:{tuple(parameter.shape)}:{parameter.dtype}".encode())
        digest.update(flat.numpy().data)
    return f"{layout}+{digest.hexdigest()[:16]}" if frozen else layout


@dataclass(frozen=True)
class Entry:
    """A tensor in a layout."""

    name: str
    shape: tuple[int, ...]
    offset: int  # index of the tensor's first element in the vector

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def span(self) -> slice:
        return slice(self.offset, self.offset + self.numel)

    def as_layout(self) -> "Layout":
        """Return a layout that contains only this tensor."""
        return Layout((Entry(self.name, self.shape, 0),))


@dataclass(frozen=True)
class Layout:
    """Names, shapes and offsets of tensors that are stored in one vector of `numel` elements.

        layout = fedcomp.Layout.of(model)
        vector = layout.gather(model)  # float32 [layout.numel], on the model's device
        layout.scatter(vector, model)
        layout.views(vector)["0.weight"]  # a view with the shape of this parameter

    The tensors are the trainable parameters of a model, in the order of `named_parameters()`. A tied parameter is included once, under its
    first name.
    """

    entries: tuple[Entry, ...]

    @classmethod
    def of(cls, model: "nn.Module") -> "Layout":
        """Return the layout of a module's trainable parameters."""
        trained = ((name, p) for name, p in model.named_parameters() if p.requires_grad)
        return cls.from_shapes({name: tuple(p.shape) for name, p in trained})

    @classmethod
    def from_shapes(cls, shapes: dict[str, tuple[int, ...]]) -> "Layout":
        """Return the layout of tensors with the names and shapes in `shapes`, in this order."""
        entries, offset = [], 0
        for name, shape in shapes.items():
            entries.append(Entry(name, tuple(shape), offset))
            offset += entries[-1].numel
        return cls(tuple(entries))

    @staticmethod
    @lru_cache(256)
    def flat(numel: int) -> "Layout":
        """Return the layout of one unnamed tensor with `numel` elements. Codecs use this layout if none is given."""
        return Layout((Entry("", (numel,), 0),))

    @cached_property
    def numel(self) -> int:
        return self.entries[-1].span.stop if self.entries else 0

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the names and shapes of all tensors, in order, as 16 hex digits."""
        text = "\n".join(f"{e.name}:{e.shape}" for e in self.entries)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def doubled(self, prefix: str) -> "Layout":
        """Return a layout with the tensors of this layout, followed by tensors of the same shapes with `prefix` before their names."""
        shapes = {e.name: e.shape for e in self.entries}
        return Layout.from_shapes(shapes | {prefix + name: shape for name, shape in shapes.items()})

    def entry_at(self, position: int) -> Entry:
        """Return the entry of the tensor that contains element `position` of the vector."""
        return self.entries[bisect_right([e.offset for e in self.entries], position) - 1]

    def gather(self, model: "nn.Module") -> "torch.Tensor":
        """Copy the model's parameters to a new float32 vector of shape [numel], on the model's device."""
        import torch

        parameters = dict(model.named_parameters())
        parts = [parameters[e.name].detach().reshape(-1).to(torch.float32) for e in self.entries]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.float32)

    def scatter(self, vector: "torch.Tensor", model: "nn.Module") -> None:
        """Copy a vector of shape [numel] to the model's parameters, and convert it to the dtype of each parameter."""
        import torch

        parameters = dict(model.named_parameters())
        with torch.no_grad():
            for e in self.entries:
                parameters[e.name].copy_(vector[e.span].view(e.shape))

    def views(self, vector: "torch.Tensor") -> dict[str, "torch.Tensor"]:
        """Return views of the tensors in a vector of shape [numel], by name. For a stack [m, numel], the views have shape [m, *shape]."""
        lead = vector.shape[:-1]
        return {e.name: vector[..., e.span].view((*lead, *e.shape)) for e in self.entries}
