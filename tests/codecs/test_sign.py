"""The codec `sign`: one bit per coordinate, and random signs for zeros."""

import numpy as np
import pytest
import torch
from cases import for_each
from every_codec import layout_of, normal, reseal, same_bits, vectors

from fedcomp import FrameError, codec
from fedcomp.codecs import longest_frame
from fedcomp.codecs.frame import SECTIONS, varint
from fedcomp.codecs.update import Bits
from fedcomp.kernels import bits, philox

SIGN = codec("sign")


def coins(seed: int, numel: int) -> np.ndarray:
    drawn = (
        philox.words(seed, -(-numel // 32), stream=bits.ZERO_STREAM).astype("<u4").view(np.uint8)
    )
    return np.where(np.unpackbits(drawn, count=numel), 1, -1).astype(np.float32)


def test_a_frame_decodes_to_signs_and_random_signs_for_zeros():
    for numel in (0, 1, 7, 400, 1001):
        for name, x in vectors(numel).items():
            for seed in (0, 2**64 - 1):
                y = SIGN.decode(SIGN.encode(x, seed=seed), numel=numel)
                v = x.numpy()
                assert same_bits(y, np.where(v == 0, coins(seed, numel), np.sign(v))), (numel, name)


@pytest.mark.parametrize("numel", [1, 8, 9, 1000, 10**6])
def test_a_frame_has_one_bit_per_coordinate(numel):
    frame = SIGN.encode(normal(numel))
    assert (
        len(frame) == longest_frame(SIGN, layout_of(numel))
        and len(frame) <= SECTIONS + 3 + (numel + 7) // 8
    )
    assert numel < 10**6 or 8 * len(frame) / numel < 1.0001


def test_the_random_sign_of_a_zero_depends_only_on_seed_and_coordinate():
    x = normal(1001)
    x[::3] = 0
    y = SIGN.decode(SIGN.encode(x, seed=5), numel=1001)
    assert same_bits(y[::3].contiguous(), coins(5, 1001)[::3])
    assert same_bits(SIGN.decode(SIGN.encode(x[:500], seed=5), numel=500), y[:500])
    other = SIGN.decode(SIGN.encode(x, seed=6), numel=1001)
    assert 0.3 < (other[::3] == y[::3]).float().mean() < 0.7 and torch.equal(
        other[x != 0], y[x != 0]
    )


def test_zeros_of_many_clients_cancel_if_each_has_its_own_seed():
    """Ten clients have 1 and ninety have 0. With own seeds, most sums are positive. With one seed, their signs are random."""
    numel, right = 4000, {}
    for name, seed_of in {"own": lambda client: client, "shared": lambda client: 7}.items():
        tally = torch.zeros(numel)
        for client in range(100):
            SIGN.accumulate(
                SIGN.encode(torch.full((numel,), float(client < 10)), seed=seed_of(client)), tally
            )
        right[name] = ((tally > 0) + 0.5 * (tally == 0)).mean().item()
    assert right["own"] > 0.8 and 0.45 < right["shared"] < 0.55


def test_every_tensor_has_its_own_random_signs():
    layout = layout_of(1200)
    y = codec("sign@layer").decode(
        codec("sign@layer").encode(torch.zeros(1200), seed=3, layout=layout),
        numel=1200,
        layout=layout,
    )
    for i, entry in enumerate(layout):
        assert same_bits(y[entry.span], coins(3 + i, entry.numel))


def test_a_large_vector_stays_bits_until_it_is_added():
    numel = 100_077
    x, into = torch.round(normal(numel)), normal(numel, seed=1)
    frame, total = SIGN.encode(x, seed=9), into.clone()
    update = SIGN.open(frame, numel)
    assert (
        isinstance(update, Bits) and update.positions is None and update.raw.nbytes < numel / 8 + 4
    )
    update.add_to(total, 0.3)
    assert same_bits(total, into + np.float32(0.3) * SIGN.decode(frame, numel=numel))


def test_sign_declares_no_contraction_or_variance():
    assert SIGN.contraction(9) is None and SIGN.variance(9) is None and not SIGN.seeded


@for_each("numel", [1, 8, 9, 401])
def test_a_wrong_count_or_length_and_bits_after_the_end_are_refused(numel):
    frame = SIGN.encode(normal(numel))
    signs = frame[-((numel + 7) // 8) :]
    changed = [
        frame[:SECTIONS] + b"\0",
        frame + b"\0",
        frame[:-1],
        frame[:SECTIONS] + varint(numel - 1) + signs,
    ]
    if numel % 8:
        changed.append(frame[:-1] + bytes([frame[-1] | 1]))
    for data in changed:
        with pytest.raises(FrameError):
            SIGN.decode(reseal(data, numel), numel=numel)
