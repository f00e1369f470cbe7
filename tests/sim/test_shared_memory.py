"""Other processes can read tensors in shared memory, which leave no open file."""

import os
import pickle

import torch
from cases import for_each

from fedcomp.sim.processes import SharedTensor


def descriptors() -> int:
    return sum(
        "memfd:fedcomp" in os.readlink(f"/proc/self/fd/{name}")
        for name in os.listdir("/proc/self/fd")
        if os.path.lexists(f"/proc/self/fd/{name}")
    )


@for_each(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]
)
def test_an_unpickled_tensor_shares_the_memory(dtype):
    shared = SharedTensor((2, 3), dtype)
    same = pickle.loads(pickle.dumps(shared))
    shared.tensor.copy_(torch.arange(6).view(2, 3).to(dtype))
    assert same.dtype == dtype and torch.equal(same, shared.tensor)
    assert same.data_ptr() != shared.tensor.data_ptr()


def test_no_file_stays_open():
    before = descriptors()
    shared = [SharedTensor((size, 7)) for size in (0, 1, 100)]
    kept = SharedTensor.copy_of(torch.ones(3)).tensor
    assert descriptors() > before and shared[0].tensor.shape == (0, 7) and kept.sum() == 3
    del shared, kept
    assert descriptors() == before
