"""Random draws depend only on the seed, the purpose, the round and the index."""

import numpy as np

from fedcomp import seeds


def test_every_part_of_the_key_changes_it():
    base, others = (
        seeds.key(0, "a"),
        [
            seeds.key(1, "a"),
            seeds.key(0, "b"),
            seeds.key(0, "a", round=1),
            seeds.key(0, "a", index=1),
        ],
    )
    assert len({base, *others}) == 5


def test_keys_and_draws_have_fixed_values():
    assert seeds.key(7, "batches", 3, 11) == 18352753715795590985
    assert seeds.generator(7, "batches", 3, 11).integers(0, 1000, 5).tolist() == [
        714,
        703,
        968,
        320,
        20,
    ]


def test_a_flower_node_id_is_not_too_large():
    """Flower's node ids have 64 bits."""
    large = [
        seeds.key(0, "encode", 1, 2**64 - 1),
        seeds.key(0, "encode", 1, 2**63),
        seeds.key(0, "encode", 1, 2**63 - 1),
    ]
    assert len(set(large)) == 3


def test_the_generator_is_numpys_philox_with_that_key():
    for index in (0, 3, 11):
        drawn, plain = (
            seeds.generator(7, "batches", 3, index),
            np.random.Generator(np.random.Philox(key=seeds.key(7, "batches", 3, index))),
        )
        assert (drawn.bit_generator.random_raw(9) == plain.bit_generator.random_raw(9)).all()
        assert (drawn.permutation(50) == plain.permutation(50)).all()


def test_a_reused_generator_draws_like_a_new_one():
    """Earlier draws have no effect, not even an unused half of a 64-bit word."""
    asked = [(1, 0), (1, 5), (2, 5), (2, 2**64 - 1), (1, 0)]
    for (round, index), drawn in zip(asked, seeds.generators(7, "batches", asked), strict=True):
        plain = seeds.generator(7, "batches", round, index)
        assert (
            drawn.choice(90, 40, replace=False).tolist()
            == plain.choice(90, 40, replace=False).tolist()
        )
        assert (
            drawn.integers(0, 9, 3, np.uint32).tolist()
            == plain.integers(0, 9, 3, np.uint32).tolist()
        )
        assert drawn.normal() == plain.normal()
