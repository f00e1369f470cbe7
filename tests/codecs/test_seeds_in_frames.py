"""Codecs that need the seed to decode: the frame contains the seed, and each tensor has its own seed."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from every_codec import layout_of, reseal, same_bits

from fedcomp import FrameError
from fedcomp.codecs import Codec, LayerWise
from fedcomp.codecs.base import expect
from fedcomp.codecs.frame import SECTIONS, Section
from fedcomp.codecs.update import Sparse

SEEDS = (0, 1, 2**63, 2**64 - 1, 2**64, 2**70 + 3, -1)


@dataclass(frozen=True)
class Mask(Codec):
    """A codec that sends about half of the coordinates, drawn from the seed, without their positions."""

    name: ClassVar[str] = "mask"
    id: ClassVar[int] = 1
    seeded: ClassVar[bool] = True

    def positions(self, numel, seed):
        return np.flatnonzero(np.random.Generator(np.random.Philox(key=seed)).random(numel) < 0.5)

    def _encode_row(self, x, seed, context):
        values = x.float().numpy()[self.positions(x.numel(), seed)]
        return Section(values.size, values.tobytes())

    def _decode_row(self, section, layout, seed):
        at = self.positions(layout.numel, seed)
        expect(section.count == at.size and len(section.body) == 4 * at.size, "another length")
        return Sparse(layout.numel, at, np.frombuffer(section.body, np.float32))


@pytest.mark.parametrize("c", [Mask(), LayerWise(Mask())], ids=str)
@pytest.mark.parametrize("seed", SEEDS)
def test_decoding_uses_the_seed_of_encoding(c, seed):
    x, layout = torch.randn(401, generator=torch.Generator().manual_seed(1)), layout_of(401)
    frame = c.encode(x, seed=seed, layout=layout)
    y = c.decode(frame, numel=401, layout=layout)
    assert 130 < int(y.count_nonzero()) < 270 and same_bits(y, x.where(y != 0, 0))
    assert frame[SECTIONS : SECTIONS + 8] == (seed % 2**64).to_bytes(8, "little")
    assert c.encode_batch(torch.stack([x, x]), [seed, 5], layout=layout) == [
        frame,
        c.encode(x, seed=5, layout=layout),
    ]
    total = torch.zeros(401)
    assert c.encode_batch([x], [seed], onto=[total], layout=layout) == [frame]
    assert same_bits(total, x)
    assert Mask().decode(frame, numel=401, layout=layout).equal(y)


def test_every_tensor_has_its_own_seed():
    """Two equal tensors send different coordinates."""
    c, layout = LayerWise(Mask()), layout_of(400)
    y = c.decode(c.encode(torch.ones(400), layout=layout), numel=400, layout=layout)
    w, rest = (y[e.span][:100] for e in layout if e.numel >= 100)
    assert not torch.equal(w, rest)


def test_a_frame_with_a_changed_seed_is_refused():
    frame = Mask().encode(torch.ones(401), seed=3)
    for changed in (frame[:SECTIONS] + bytes(8) + frame[SECTIONS + 8 :], frame[: SECTIONS + 5]):
        with pytest.raises(FrameError):
            Mask().decode(changed, numel=401)
        with pytest.raises(FrameError):
            Mask().decode(reseal(changed, 401), numel=401)
