"""The scope @chunk=N: frames whose chunks are encoded separately or jointly."""

import numpy as np
import pytest
import torch
from cases import for_each
from every_codec import CHUNKED, reseal, same_bits, vectors

from fedcomp import FrameError, Layout, codec
from fedcomp.codecs.frame import CHUNK, Section, seal, varint
from fedcomp.codecs.levels import packed_bytes

SPARSE_LOCO = "topk:density=64/4096,values=2bit@chunk=4096"


@for_each("spec", CHUNKED)
@for_each("numel", [1, 50])
def test_a_chunk_is_encoded_by_its_codec(spec, numel):
    x, c = vectors(numel)["heavy tails"], codec(spec)
    parts = []
    for i, part in enumerate(x.split(c.size)):
        layout = Layout.flat(part.numel())
        frame = c.inner.encode(part, seed=7 + i, layout=layout)
        parts.append(c.inner.decode(frame, numel=part.numel(), layout=layout))
    assert same_bits(c.decode(c.encode(x, seed=7), numel=numel), torch.cat(parts))


@for_each("spec", ["topk:values=2bit", "sign"])
def test_chunks_decode_to_the_same_values_in_pieces(spec):
    """The encoder processes 1,000 chunks in two pieces. A frame of the first 500 chunks is decoded to the same values."""
    x, c = vectors(401)["normal"].repeat(1300)[: 512 * 1000], codec(f"{spec}@chunk=512")
    y, half = c.decode(c.encode(x), numel=x.numel()), x[: x.numel() // 2]
    assert same_bits(y[: half.numel()], c.decode(c.encode(half), numel=half.numel()))


def test_exactly_k_of_every_chunk_are_sent():
    x = torch.randn(10_000, generator=torch.Generator().manual_seed(0)) * torch.linspace(
        1, 9, 10_000
    )
    y = codec("topk:density=1%@chunk=1000").open(
        codec("topk:density=1%@chunk=1000").encode(x), 10_000
    )
    assert np.bincount(y.positions // 1000).tolist() == [10] * 10
    assert codec("topk:density=1%@chunk=1000").contraction(10_000) == 1 / 100


def test_the_settings_of_sparse_loco_take_9_5_bits_per_value():
    """64 of every 4,096 values are sent. With 12-bit indices and 2-bit values, each would take 14 bits."""
    numel, c = 1 << 20, codec(SPARSE_LOCO)
    x = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    update = c.open(c.encode(x), numel)
    chunks = np.split(update.values, 256)
    means = sum(len(np.unique(chunk)) for chunk in chunks)
    assert update.positions.size == 64 * 256
    assert 8 * (len(c.encode(x)) - 2 * means) <= 9.5 * update.positions.size


@for_each("spec", ["stc@chunk=16", "identity@chunk=16", "qsgd@chunk=16", SPARSE_LOCO])
def test_only_the_same_chunk_size_decodes_a_frame(spec):
    frame, plain = codec(spec).encode(vectors(50)["normal"]), spec.split("@")[0]
    for other in (plain, f"{plain}@layer", f"{plain}@chunk=17"):
        with pytest.raises(FrameError, match="chunk"):
            codec(other).decode(frame, numel=50, layout=Layout.flat(50))
        with pytest.raises(FrameError, match="chunk"):
            codec(spec).decode(
                codec(other).encode(vectors(50)["normal"], layout=Layout.flat(50)), numel=50
            )


@for_each(
    "body",
    [
        b"",
        varint(51),
        varint(2**62) + b"\0" + varint(2**62),
        varint(1) + b"\0",
        varint(1) + b"\0" + varint(2**60) + b"\x80",
        varint(1) + b"\x3e\x01\x80",
        varint(3) + b"\x80\x01\xff",
        varint(1) + b"\x80\x01\x80" + varint(2**40),
        varint(0) + b"\0",
    ],
)
def test_impossible_counts_and_lengths_are_rejected(body):
    for spec in ("topk@chunk=16", "topk:values=2bit@chunk=16", "qsgd@chunk=16", "sign@chunk=16"):
        c = codec(spec)
        frame = seal(c.id, CHUNK, 50, [Section(16, body)])
        with pytest.raises(FrameError):
            c.decode(frame, numel=50)


def test_means_that_are_not_finite_are_rejected():
    c = codec("topk:density=1/4,values=2bit@chunk=16")
    frame = c.encode(vectors(50)["normal"])
    with pytest.raises(FrameError, match="NaN or infinity"):
        c.decode(reseal(frame[:-2] + b"\x80\x7f", 50), numel=50)


@for_each("spec", ["identity@chunk=16", "randomk:density=1/4@chunk=16", "sketch@chunk=16"])
def test_frames_of_a_linear_codec_are_merged_chunk_by_chunk(spec):
    c, (a, b) = codec(spec), (vectors(50)[name] for name in ("normal", "ties"))
    frames = [c.encode(x, seed=3) for x in (a, b)]
    total = c.decode(c.merge(frames), numel=50)
    if c.name != "sketch":
        assert torch.allclose(total, sum(c.decode(frame, numel=50) for frame in frames))
    assert same_bits(total, c.decode(c.merge(frames, numel=50), numel=50))
    with pytest.raises(FrameError):
        c.merge([frames[0], c.encode(a[:49], seed=3)])


def test_the_largest_value_is_a_level_of_the_norm_max():
    x = torch.tensor([0.0, 0.5, -1.0, 8.0])
    c = codec("qsgd:levels=8,norm=max")
    y = c.decode(c.encode(x), numel=4)
    assert y[2:].tolist() == [-1.0, 8.0] and y[1] in (0.0, 1.0)
    assert len(c.encode(x)) <= 10 + 5 + packed_bytes(4, 17)
