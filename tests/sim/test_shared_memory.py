"""Tensors in shared memory are lent once at a time, are others' when others map them, and leave nothing open."""

import os

import torch
from cases import for_each
from torch import nn

from fedcomp.sim.buffers import Buffers
from fedcomp.sim.shared_memory import Pool, Region, opened, ref


def descriptors() -> int:
    return sum(
        "memfd:fedcomp" in os.readlink(f"/proc/self/fd/{name}")
        for name in os.listdir("/proc/self/fd")
        if os.path.lexists(f"/proc/self/fd/{name}")
    )


@for_each(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]
)
def test_who_maps_the_bytes_sees_what_is_written(dtype):
    pool = Pool()
    region = pool.new(8 + 6 * dtype.itemsize)
    here = region.tensor((2, 3), dtype, offset=8)
    there = Region(region.name, region.size, os.dup(region.file))
    same = opened({region.name: there}, ref(region, (2, 3), dtype, 8))
    here.copy_(torch.arange(6).view(2, 3).to(dtype))
    assert same.dtype == dtype and torch.equal(same, here) and same.data_ptr() != here.data_ptr()


def test_a_region_is_lent_again_when_nothing_of_it_is_left():
    pool = Pool()
    region, whole = pool.lend(None, (4, 5), torch.float32)
    row = whole[1]
    del whole
    other, again = pool.lend(region, (4, 5), torch.float32)
    row.fill_(1.0)
    assert other is not region and not again.any()
    del again
    same, small = pool.lend(other, (2, 5), torch.float32)
    assert same is other and small.shape == (2, 5)
    del small
    larger, _ = pool.lend(same, (5, 5), torch.float32)
    assert larger is not same and list(pool.regions.values()) == [larger]


def test_nothing_stays_open():
    before = descriptors()
    pool = Pool()
    for size in (1, 100, 1000):
        pool.new(size)
    tensor = pool.new(0).tensor((0, 7), torch.float32)
    assert descriptors() > before and tensor.shape == (0, 7)
    del pool, tensor
    assert descriptors() == before


def test_buffers_lie_side_by_side():
    model = nn.Sequential(
        nn.BatchNorm1d(3),
        nn.Linear(3, 2),
        nn.BatchNorm1d(2, track_running_stats=False),
        nn.BatchNorm1d(5),
    )
    model.register_buffer("mask", torch.tensor([True, False, True]))
    buffers, values = (
        Buffers.of(model),
        {name: buffer + 1 for name, buffer in model.named_buffers() if "3." in name},
    )
    row = torch.zeros(buffers.places[-1], dtype=torch.uint8)
    which = buffers.write(row, values)
    found = buffers.read(row, which)
    assert found.keys() == values.keys() and all(
        torch.equal(found[name], values[name]) for name in values
    )
    assert (
        all(place % 64 == 0 for place in buffers.places)
        and not buffers.read(row, [0])["mask"].any()
    )
    assert Buffers.of(nn.Linear(2, 2)).places == [0]
