"""All codecs with variants of their options, vectors that are hard to encode, and reference implementations of codecs in plain numpy."""

import dataclasses
import itertools
import math
import struct
import typing
import zlib
from functools import cache

import numpy as np
import torch
from torch import Tensor

from fedcomp import Layout, available_codecs, codec
from fedcomp.codecs import Chunked, Codec, LayerWise

DENSITIES = ("1", "1/10", "1/400")
MANY = 12  # above this number of variants, most are tested with only one density
MAX_BF16 = 255 * 2.0**120  # the largest bfloat16
NEAREST = "qsgd:norm=max,rounding=nearest"
PRODUCTS = [
    "topk:density=1/10+fp16",
    "randomk:density=1/10,scaled=true+natural",
    "threshold:tau=0.5+drive",
    "topk:density=1/10+s2",
]


def built_in_codecs() -> dict[str, type[Codec]]:
    """Return the codecs of this repository, without those of other installed packages."""
    found = available_codecs().items()
    return {name: cls for name, cls in found if cls.__module__.startswith("fedcomp.")}


def variants(name: str) -> list[str]:
    """Return spec strings of a codec: its defaults, and all combinations of options that have a list of choices.

    Densities are DENSITIES. If there are more than MANY variants, most are included with only one density.
    """
    cls = available_codecs()[name]
    hints = typing.get_type_hints(cls)
    tried = {
        f.name: DENSITIES if f.name == "density" else typing.get_args(hints[f.name])
        for f in dataclasses.fields(cls)
        if f.name != "norm" and (name, f.name) != ("qsgd", "rounding")  # not every pair is valid
    }
    tried |= {option: ("false", "true") for option in tried if hints[option] is bool}
    tried |= (
        {"rank": ("1",)} if "rank" in tried else {}
    )  # the rank at which the matrices in the tests have factors
    tried = {
        option: values
        for option, values in tried.items()
        if values and all(isinstance(v, str) for v in values)
    }
    made = [dict(zip(tried, values)) for values in itertools.product(*tried.values())]
    if len(made) > MANY:
        made = [
            m
            for m in made
            if m["density"] == DENSITIES[1] or all(m[o] == tried[o][0] for o in m if o != "density")
        ]
    written = [
        ",".join(f"{option}={value}" for option, value in options.items()) for options in made
    ]
    specs = [name, *(f"{name}:{text}" for text in written if text)]
    return list({codec(spec): spec for spec in reversed(specs)}.values())[::-1]


WHOLE = [text for name in available_codecs() for text in variants(name)] + [NEAREST, *PRODUCTS]
LAYERED = [f"{name}@layer" for name in (*available_codecs(), PRODUCTS[0])]
CHUNKED = [f"{name}@chunk=16" for name in (*available_codecs(), *PRODUCTS)]
CHUNKED += [
    "topk:density=1/4,values=2bit@chunk=16",
    "qsgd:norm=max@chunk=16",
    "randomk:by=magnitude@chunk=7",
]
SPECS = WHOLE + LAYERED + CHUNKED
# One of each codec, for properties that do not depend on its options.
ONE_EACH = [*available_codecs(), *PRODUCTS, "stc@layer", "drive@layer", "powersgd@layer"]
ONE_EACH += ["stc@chunk=16", "topk:density=1/4,values=2bit@chunk=16", "identity@chunk=16"]


def with_large_chunks(spec: str) -> str:
    """Return a spec with larger chunks, because encoding long vectors in chunks of 16 is slow."""
    return spec.replace("@chunk=16", "@chunk=4096")


@cache
def layout_of(numel: int) -> Layout:
    """Return a layout of `numel` elements: a matrix, an empty tensor, a tensor of one element, and a tensor with the rest."""
    width, one = numel // 3, min(1, numel % 3)
    return Layout.from_shapes(
        {"w": (2, width), "none": (0, 5), "b": (one,), "rest": (numel - 2 * width - one,)}
    )


@cache
def vectors(numel: int) -> dict[str, Tensor]:
    """Return float32 vectors [numel] that are hard to encode: ties, zeros, spikes, extreme values of float32. Do not change them."""
    normal = np.random.default_rng(numel).standard_normal(numel)
    place = np.arange(numel)
    found = {
        "normal": normal,
        "heavy tails": normal**7,
        "ties": np.round(normal),
        "zero": 0 * place,
        "minus zero": -0.0 * place,
        "constant": np.full(numel, 0.3),
        "alternating": 0.3 * (-1.0) ** place,
        "one spike": -7.5 * (place == numel - 1),
        "spike over noise": np.where(place == numel // 2, 1e4, 1e-3 * normal),
        "one above, many below": np.where(
            place == numel // 2, 1.0, np.where(place == 0, -0.09 * numel, -1e-6)
        ),
        "negative": -abs(normal),
        "one huge": np.where(place == numel // 3, -3.4e38, normal),
        "denormal": np.round(3 * normal) * 2.0**-149,
        "subnormal": 1e-39 * normal,
        "one subnormal": 2.0**-149 * (place == numel // 2),
        "tiny": 1e-30 * normal,
        "huge": 3.4e38 * np.sin(place + 1),
        "all scales": normal * 10.0 ** (37 - 75 * place / max(numel, 1)),
    }
    return {name: torch.from_numpy(v.astype(np.float32)) for name, v in found.items()}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def expected(c: Codec, x: Tensor, layout: Layout) -> np.ndarray:
    """Return C(x), float32, computed with the formulas of the papers and a full sort."""
    v = x.to(torch.float32).numpy()
    if isinstance(c, LayerWise):
        return np.concatenate([ORACLES[c.name](c.inner, v[e.span]) for e in layout])
    if isinstance(c, Chunked):
        parts = (v[at : at + c.size] for at in range(0, v.size, c.size))
        return np.concatenate([v[:0], *(ORACLES[c.name](c.inner, part) for part in parts)])
    return ORACLES[c.name](c, v)


def identity(c: Codec, v: np.ndarray) -> np.ndarray:
    return v


def half(c: Codec, v: np.ndarray) -> np.ndarray:
    """Round to 11 significant bits, or to fewer for values below 2⁻²⁹ times the largest. Computed in float64."""
    top = np.float64(abs(v).max(initial=0))
    unit = 2.0 ** (np.floor(np.log2(top)) - 14) if top else 1.0
    return ((v / unit).clip(-32752, 32752).astype(np.float16) * unit).astype(np.float32)


def bf16(c: Codec, v: np.ndarray) -> np.ndarray:
    """Round to 8 significant bits, ties to even, or to fewer for values far below the largest. Computed in float64."""
    exponents = np.frexp(v.astype(np.float64))[1]
    units = 2.0 ** (np.maximum(exponents, exponents.max(initial=-148) - 253) - 8)
    return (np.round(v / units) * units).clip(-MAX_BF16, MAX_BF16).astype(np.float32)


def topk(c: Codec, v: np.ndarray) -> np.ndarray:
    at = largest(abs(v), count(c, v.size))
    return spread(v, at, {"fp32": identity, "fp16": half, "2bit": four_means}[c.values](c, v[at]))


def four_means(c: Codec, v: np.ndarray) -> np.ndarray:
    """Replace each value by the mean of its bin, rounded to 8 significant bits.

    There are four bins. The second and the third bin are 1.5 standard deviations wide, and the third is centered at the mean of all values.
    """
    centered = v.astype(np.float64) - mean(v)
    deviation = math.sqrt(mean(centered * centered) * v.size / max(v.size - 1, 1))
    places = (np.rint(centered / (1.5 * deviation or 1)) + 2).clip(0, 3)
    means = np.array([mean(v[places == place]) for place in places], np.float32)
    return torch.from_numpy(means).bfloat16().float().clamp(-MAX_BF16, MAX_BF16).numpy()


def stc(c: Codec, v: np.ndarray) -> np.ndarray:
    at = largest(abs(v), count(c, v.size))
    return spread(v, at, np.sign(v[at]) * np.float32(mean(abs(v[at]))))


def sbc(c: Codec, v: np.ndarray) -> np.ndarray:
    up, down = (largest(side.clip(0), count(c, v.size)) for side in (v, -v))
    if mean(v[up]) >= mean(-v[down]):
        return spread(v, up, np.float32(mean(v[up])))
    return spread(v, down, np.float32(mean(v[down])))


def efsign(c: Codec, v: np.ndarray) -> np.ndarray:
    scale = np.float32(math.fsum(abs(v).tolist()) / max(v.size, 1))
    if scale < np.finfo(np.float32).tiny and v.size > 1:
        at = largest(abs(v), 1)
        return spread(v, at, v[at])
    return np.where(v >= 0, scale, -scale)


def threshold(c: Codec, v: np.ndarray) -> np.ndarray:
    tau = np.float32(c.tau)
    at = np.flatnonzero(abs(v) >= tau)
    return spread(
        v, at, {"tau": np.sign(v[at]) * tau, "fp32": v[at], "fp16": half(c, v[at])}[c.values]
    )


def s2(c: Codec, v: np.ndarray) -> np.ndarray:
    """Round to multiples of a power of two.

    The number of bits of a value is limited by the option `values`, and such that the sum of all values has at most 62 bits.
    """
    if hasattr(c, "first"):
        at = largest(abs(v), count(c.first, v.size))
        return s2(c.second, spread(v, at, v[at]))
    if not v.any():
        return np.zeros_like(v)
    bits = min(
        {"fp32": 48, "int24": 23, "int16": 15}[c.values], 62 - len(f"{np.count_nonzero(v):b}")
    )
    unit = 2.0 ** max(-149, np.frexp(abs(v).max())[1] - bits)
    most = np.floor(float(np.finfo(np.float32).max) / unit)
    return (np.round(v / unit).clip(-most, most) * unit).astype(np.float32) + np.float32(0)  # no −0


def count(c: Codec, numel: int) -> int:
    return max(1, int(np.floor(c.density * numel + 0.5)))


def largest(magnitudes: np.ndarray, k: int) -> np.ndarray:
    """Return the positions of the k largest values, in order. Among equal values the first are chosen. Zeros are left out."""
    first = np.argsort(-magnitudes, kind="stable")[:k]
    return np.sort(first[magnitudes[first] > 0])


def mean(values: np.ndarray) -> float:
    """Return the mean, summed in float64 one value after the other; 0 for no values."""
    return float(np.cumsum(values, dtype=np.float64)[-1]) / values.size if values.size else 0.0


def spread(v: np.ndarray, at: np.ndarray, values: np.ndarray) -> np.ndarray:
    out = np.zeros_like(v)
    out[at] = values
    return out


ORACLES = {
    "identity": identity,
    "fp16": half,
    "bf16": bf16,
    "topk": topk,
    "stc": stc,
    "sbc": sbc,
    "threshold": threshold,
    "efsign": efsign,
    "s2": s2,
}


def alike(spec: str, other: str) -> bool:
    """Return whether one codec can decode the frames of the other."""
    return codec(spec).name == codec(other).name and codec(spec).chunk == codec(other).chunk


def same_bits(a: Tensor | np.ndarray, b: Tensor | np.ndarray) -> bool:
    a, b = (np.asarray(v) for v in (a, b))
    return (
        a.dtype == b.dtype == np.float32
        and a.shape == b.shape
        and np.array_equal(a.view(np.int32), b.view(np.int32))
    )


def reseal(data: bytes, numel: int) -> bytes:
    """Return a frame with a correct checksum for its bytes and `numel`, so that a decoder reads past the checksum."""
    checksum = zlib.crc32(data[9:], zlib.crc32(struct.pack("<Q", numel), zlib.crc32(data[:5])))
    return data[:5] + struct.pack("<I", checksum) + data[9:]
