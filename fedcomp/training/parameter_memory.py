"""Free the memory of a model's parameters while the model is not in use."""

from collections import Counter

import torch
from torch import nn

LARGE_BYTES = 1 << 20  # parameters of fewer bytes stay in memory

Freed = list[tuple[torch.UntypedStorage, int]]  # pairs of a storage and its size in bytes


def free_parameters(model: nn.Module) -> Freed:
    """Free the memory of the large trainable parameters of a model on the CPU. The values of these parameters are lost.

    Call `allocate` before the model is used again. A storage is kept if it also contains other values, or if torch did not allocate it.
    """
    tensors = [*model.parameters(), *model.buffers()]
    owners = Counter(tensor.untyped_storage().data_ptr() for tensor in tensors)
    freed: Freed = []
    for parameter in model.parameters():
        storage = parameter.untyped_storage()
        alone = owners[storage.data_ptr()] == 1 and storage.nbytes() == parameter.nbytes
        large = storage.nbytes() >= LARGE_BYTES
        if parameter.requires_grad and parameter.is_cpu and alone and large and storage.resizable():
            freed.append((storage, storage.nbytes()))
    for storage, _ in freed:
        storage.resize_(0)
    return freed


def allocate(freed: Freed) -> None:
    """Allocate the storages that `free_parameters` freed. The parameters' values are undefined until they are written."""
    for storage, size in freed:
        storage.resize_(size)
