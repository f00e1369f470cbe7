"""The memory of a cohort's updates is reused, but never while a tensor refers to it."""

import torch

from fedcomp.sim.processes import UpdateMemory


def test_memory_is_used_again_after_the_last_tensor_is_gone():
    memory = UpdateMemory()
    first = memory.stack(2, 3)[1].fill_(1.0)
    assert first.shape == (2, 3) and first.dtype == torch.float32
    row, place = first[1], first.data_ptr()
    del first
    second = memory.stack(2, 3)[1].fill_(2.0)  # `row` still refers to the first stack
    assert second.data_ptr() != place and torch.equal(row, torch.ones(3))
    del row
    assert memory.stack(2, 3)[1].data_ptr() == place


def test_a_stack_of_another_size_gets_other_memory():
    memory = UpdateMemory()
    small = memory.stack(1, 2)[1].fill_(1.0)
    kept = small.clone()
    del small
    large = memory.stack(3, 2)[1].fill_(2.0)
    assert large.shape == (3, 2) and torch.equal(kept, torch.ones(1, 2))
    assert memory.stack(0, 2)[1].shape == (0, 2)
