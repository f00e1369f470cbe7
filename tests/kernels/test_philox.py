"""Random words by coordinate."""

import numpy as np
import pytest
from cases import for_each

from fedcomp.kernels import philox

KNOWN = [  # from the authors' library: key, counter, block
    ((0, 0), (0, 0, 0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 4, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        (0xA4093822, 0x299F31D0),
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


@for_each("key, counter, block", KNOWN)
def test_blocks_equal_those_of_the_authors_library(key, counter, block):
    from fedcomp.kernels import loops

    c0, c1 = (np.array([c], np.uint64) for c in counter[:2])
    assert " ".join(f"{w:08x}" for w in philox._blocks(*key, c0, c1, *counter[2:])[0]) == block
    assert " ".join(f"{w:08x}" for w in loops.philox(*map(np.uint32, key + counter))) == block


@pytest.mark.parametrize("start", [0, 1, 3, 4, 1001, 2**34 + 2])
def test_a_word_depends_only_on_its_position(start):
    whole = philox.words(2**63 + 5, 2000, start, stream=3)
    for offset, count in [(0, 1), (1, 7), (5, 0), (4, 1996), (1999, 1)]:
        assert np.array_equal(
            philox.words(2**63 + 5, count, start + offset, stream=3), whole[offset : offset + count]
        )
    places = start + np.arange(0, 2000, 7)
    assert np.array_equal(philox.words_at(2**63 + 5, places, stream=3), whole[::7])


def test_words_of_different_seeds_and_streams_are_independent():
    drawn = [
        philox.words(seed, 20_000, 0, stream)
        for seed, stream in [(1, 0), (2, 0), (1 << 32, 0), (1, 1)]
    ]
    for i, words in enumerate(drawn):
        bits = np.unpackbits(words.view(np.uint8))
        assert abs(bits.mean() - 0.5) < 5 * 0.5 / bits.size**0.5
        assert np.unique(words).size > 19_990
        for other in drawn[:i]:
            assert (words == other).sum() < 3


def test_a_large_draw_has_the_same_words():
    count = 100_005
    assert np.array_equal(
        philox.words(9, count),
        np.concatenate([philox.words(9, 60_000), philox.words(9, count - 60_000, 60_000)]),
    )
