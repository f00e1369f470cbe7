"""The memory `adacomp`: the coordinates and the magnitude that it sends, and its residual."""

import numpy as np
import pytest
import torch
from cases import for_each
from every_codec import layout_of, same_bits, vectors

from fedcomp import codec, memory
from fedcomp.errors import ConfigError, SpecError

NUMEL = 301
LAYOUT = layout_of(NUMEL)


def update(seed: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))


def chosen(g: np.ndarray, x: np.ndarray, size: int) -> np.ndarray:
    """Compute algorithm 2 of the paper, one coordinate at a time."""
    bins = [slice(i, i + size) for i in range(0, g.size, size)]
    maxima = [float(abs(g[b]).max()) for b in bins]
    scale, out = np.float32(sum(maxima) / len(maxima)), np.zeros_like(g)
    for b, largest in zip(bins, maxima, strict=True):
        for i in range(b.start, min(b.stop, g.size)):
            if abs(g[i] + x[i]) >= largest and g[i] != 0:
                out[i] = np.copysign(scale, g[i])
    return out


@for_each("spec", ["stc", "topk", "stc@layer", "topk@layer"])
@for_each("size", [1, 7, 50, 301, 500])
def test_frames_and_residuals_equal_those_of_the_paper(spec, size):
    c = codec(spec)
    m, e = memory(f"adacomp:bin={size}", c, NUMEL, LAYOUT), np.zeros(NUMEL, np.float32)
    spans = [entry.span for entry in LAYOUT if entry.numel] if "@" in spec else [slice(0, NUMEL)]
    for round, taken in enumerate([True, True, False, True, True]):
        x = update(round)
        g = e + x.numpy()
        sent = np.concatenate([chosen(g[s], x.numpy()[s], size) for s in spans])
        y = c.decode(m.propose(x, seed=round), numel=NUMEL, layout=LAYOUT).numpy()
        assert np.array_equal(y, sent)
        (m.commit if taken else m.rollback)()
        e = g - sent if taken else g
        assert same_bits(m.residual, e)


def test_the_number_of_sent_coordinates_depends_on_the_values():
    sent = {}
    for name in ("one spike", "normal", "constant"):
        m = memory("adacomp:bin=100", codec("stc"), NUMEL)
        m.propose(vectors(NUMEL)[name])
        sent[name] = m.sent_positions.size
    assert sent["one spike"] == 1 < sent["normal"] < sent["constant"] == NUMEL


@for_each("name", vectors(NUMEL))
def test_sent_values_and_residual_add_up_to_the_updates(name):
    m, x, accepted = (
        memory("adacomp:bin=30", codec("stc"), NUMEL),
        vectors(NUMEL)[name],
        np.zeros(NUMEL),
    )
    x = x.clamp(-1e37, 1e37)
    for _ in range(5):
        accepted += m.codec.decode(m.propose(x), numel=NUMEL).double().numpy()
        m.commit()
    moved = (
        5 * abs(x.double().numpy())
        + abs(accepted)
        + abs(m.residual.double().numpy())
        + 6 * float(x.abs().max())
    )
    assert (
        abs(accepted + m.residual.double().numpy() - 5 * x.double().numpy()) <= 1e-6 * moved
    ).all()


def test_with_a_one_sided_codec_the_other_side_stays_in_the_residual():
    c = codec("sbc")
    m = memory("adacomp:bin=30", c, NUMEL)
    y = c.decode(m.propose(update(1)), numel=NUMEL)
    m.commit()
    assert (y >= 0).all() or (y <= 0).all()
    assert torch.equal(m.residual, update(1) - y)


def test_frames_do_not_exceed_a_scheduled_density():
    m = memory("adacomp:bin=10", codec("stc"), NUMEL)
    m.set_density(0.02)
    m.propose(update(1))
    assert m.sent_positions.size == 6
    m.rollback()
    m.set_density(0.0)
    m.propose(update(2))
    assert m.sent_positions.size > 30


@for_each("spec", ["identity", "fp16@layer", "randomk", "threshold"])
def test_codecs_that_cannot_send_a_given_selection_are_refused(spec):
    with pytest.raises(ConfigError, match="use .*stc"):
        memory("adacomp", codec(spec), NUMEL, LAYOUT)


def test_options_out_of_range_are_refused():
    with pytest.raises(SpecError, match="bin is 0; give at least 1"):
        memory("adacomp:bin=0", codec("stc"), NUMEL)
