"""Codecs that select coordinates: batches of frames, and the size of encoded positions."""

import math
import struct
import sys
from pathlib import Path

import numpy as np
import torch
from cases import for_each
from every_codec import ONE_EACH, SPECS, layout_of, reseal, same_bits, vectors

from fedcomp import FrameError, Layout, codec, kernels
from fedcomp.codecs.frame import SECTIONS
from fedcomp.codecs.selection import FORM, Selective
from fedcomp.kernels import positions

SELECTIVE = [
    text for text in SPECS if isinstance(getattr(codec(text), "inner", codec(text)), Selective)
]
KINDS = ("normal", "heavy tails", "zero", "one spike", "ties", "constant")


def frames_of(spec: str, numel: int) -> list[bytes]:
    return [
        codec(spec).encode(vectors(numel)[kind], seed=i, layout=layout_of(numel))
        for i, kind in enumerate(KINDS)
    ]


@for_each("spec", SELECTIVE)
def test_a_frame_does_not_depend_on_the_other_rows_of_a_stack(spec):
    """The other rows may send the same number of values, fewer, or none."""
    c = codec(spec)
    for numel in (1, 101):
        layout = layout_of(numel)
        rows = [vectors(numel)[kind] for kind in (*KINDS, "normal", "normal", "zero")]
        alone = [c.encode(x, seed=i, layout=layout) for i, x in enumerate(rows)]
        for some in (range(9), [6, 7], [8], [0]):
            stack = torch.stack([rows[i] for i in some])
            assert c.encode_batch(stack, some, layout=layout) == [alone[i] for i in some]


@for_each("spec", [s for s in SELECTIVE if s in ONE_EACH])
@for_each("numel", [1, 101])
def test_a_batch_is_opened_like_single_frames(spec, numel):
    c, layout, frames = codec(spec), layout_of(numel), frames_of(spec, numel)
    other = (
        frames_of(str(c.unscoped), numel)
        if c.unscoped is not c
        else frames_of(f"{spec}@layer", numel)
    )
    damaged = [reseal(frame[:-1] + bytes([frame[-1] ^ 1]), numel) for frame in frames]
    batch = [*frames, b"", *other, *damaged, frames[0][:-1], *frames]
    for data, opened in zip(batch, c.open_batch(batch, numel, layout), strict=True):
        try:
            update = c.open(data, numel, layout)
        except FrameError as error:
            assert isinstance(opened, FrameError) and type(opened) is type(error)
        else:
            assert (
                type(opened) is type(update)
                and opened.positions.tolist() == update.positions.tolist()
            )
            assert same_bits(opened.dense(), update.dense())


VALUES = SECTIONS + 2  # start of the values of an STC frame, after the count and the form
DAMAGE = {
    "no magnitude": lambda frame: frame[:VALUES] + bytes(4) + frame[VALUES + 4 :],
    "an infinite one": lambda frame: (
        frame[:VALUES] + struct.pack("<f", math.inf) + frame[VALUES + 4 :]
    ),
    "one that is no number": lambda frame: (
        frame[:VALUES] + struct.pack("<f", math.nan) + frame[VALUES + 4 :]
    ),
    "one below zero": lambda frame: frame[:VALUES] + struct.pack("<f", -1.0) + frame[VALUES + 4 :],
    "a sign too many": lambda frame: (
        frame[: VALUES + 4] + bytes([frame[VALUES + 4] | 1]) + frame[VALUES + 5 :]
    ),
    "another flag": lambda frame: (
        frame[: VALUES - 1] + bytes([frame[VALUES - 1] | 64]) + frame[VALUES:]
    ),
    "cut in its values": lambda frame: frame[: VALUES + 3],
    "no values": lambda frame: frame[: VALUES - 1],
}


@for_each("damage", DAMAGE.values(), ids=DAMAGE)
@for_each("place", [0, 3, 5])
def test_only_the_invalid_frame_of_a_batch_is_an_error(damage, place):
    c = codec("stc:density=1/10")
    frames = c.encode_batch(
        torch.randn(6, 42, generator=torch.Generator().manual_seed(0)), range(6)
    )
    frames[place] = reseal(damage(frames[place]), 42)
    for i, (data, opened) in enumerate(zip(frames, c.open_batch(frames, 42), strict=True)):
        assert (
            isinstance(opened, FrameError)
            if i == place
            else same_bits(opened.dense(), c.decode(data, numel=42))
        )


@for_each("spec", ["stc@layer", "topk"])
def test_a_batch_may_be_empty_or_hold_empty_models(spec):
    c, empty = codec(spec), Layout(())
    assert c.open_batch([], 40, layout_of(40)) == []
    (opened,) = c.open_batch([c.encode(torch.zeros(0), layout=empty)], 0, empty)
    assert opened.dense().shape == (0,)


def binomial_bytes(numel: int, k: int) -> float:
    return (
        (math.lgamma(numel + 1) - math.lgamma(k + 1) - math.lgamma(numel - k + 1)) / math.log(2) / 8
    )


@for_each("density", ["1/25", "1/100", "1/400"])
def test_if_layers_differ_a_frame_is_smaller_than_with_uniform_positions(density):
    c, numel, random = codec(f"stc:density={density}"), 120_000, np.random.default_rng(0)
    scale = np.repeat([0.3, 1.0, 0.6, 1.6], numel // 4)
    x = torch.from_numpy((random.standard_normal(numel) * scale).astype(np.float32))
    k = c.count(numel)
    frame = c.encode(x)
    assert frame[SECTIONS + 2] & FORM == positions.BLOCKS  # the byte after the count
    assert len(frame) < binomial_bytes(numel, k) + k / 8 + 4
    assert c.open(frame, numel).nonzeros == k


@for_each("spec", ["topk:density=1", "stc:density=1", "topk:density=1,values=fp16"])
def test_positions_take_no_bytes_if_all_are_sent(spec):
    c, x = codec(spec), vectors(1001)["normal"]
    values = {
        "topk:density=1": 4004,
        "stc:density=1": 4 + 126,
        "topk:density=1,values=fp16": 2 + 2002,
    }[spec]
    assert x.all() and len(c.encode(x)) == SECTIONS + 2 + 1 + values  # count, form


@for_each("spec", ["stc", "topk", "sbc", "threshold", "randomk", "sign", "efsign", "onebit"])
def test_codecs_that_select_or_send_signs_import_no_numba_for_small_models(spec, monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)  # importing it raises ImportError
    for loops in Path(kernels.__file__).parent.glob("*loops.py"):
        monkeypatch.setitem(sys.modules, f"{kernels.__name__}.{loops.stem}", None)
        monkeypatch.delattr(kernels, loops.stem, raising=False)
    x = torch.randn(90_000) / 300
    codec(spec).accumulate(codec(spec).encode(x), x)
