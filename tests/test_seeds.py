"""Draws depend on what they are for and on nothing else."""

from fedcomp import seeds


def test_every_part_of_the_key_counts():
    keys = {seeds.key(0, "a"), seeds.key(1, "a"), seeds.key(0, "b"), seeds.key(0, "a", round=1), seeds.key(0, "a", who=1), seeds.key(0, "a", -1)}
    assert len(keys) == 6


def test_the_stream_is_the_same_everywhere_and_always():
    assert seeds.key(7, "batches", 3, 11) == 8437094405204128131
    assert seeds.generator(7, "batches", 3, 11).integers(0, 1000, 5).tolist() == seeds.generator(7, "batches", 3, 11).integers(0, 1000, 5).tolist()
