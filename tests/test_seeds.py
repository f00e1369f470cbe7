"""Random draws depend only on the seed, the purpose, the round and the index."""

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
