"""Vector → bytes → vector. One paper, one file; one line here."""

from .. import spec
from ..errors import SpecError
from . import (
    adaptive,
    atomo,
    eden,
    efsign,
    identity,
    natural,
    onebit,
    powersgd,
    qsgd,
    randomk,
    s2,
    sbc,
    sign,
    sketch,
    srq,
    stc,
    terngrad,
    threshold,
    topk,
    vlc,
)
from .base import Codec, Context, LayerWise
from .frame import CodecId
from .product import Product
from .update import Update

__all__ = ["Codec", "CodecId", "Context", "LayerWise", "Update", "available_codecs", "codec"]

_CODECS: dict[str, type[Codec]] = {
    cls.name: cls
    for cls in (
        identity.Identity,
        identity.Half,
        identity.BFloat16,
        topk.TopK,
        stc.STC,
        sbc.SBC,
        sign.Sign,
        efsign.EFSign,
        onebit.OneBit,
        randomk.RandomK,
        threshold.Threshold,
        qsgd.QSGD,
        terngrad.TernGrad,
        natural.Natural,
        adaptive.Adaptive,
        srq.SRQ,
        vlc.VLC,
        eden.Drive,
        eden.Eden,
        atomo.Atomo,
        powersgd.PowerSGD,
        sketch.Sketch,
        s2.S2,
    )
}

if len({cls.id for cls in _CODECS.values()}) != len(_CODECS):
    raise AssertionError("two codecs of the registry have one id on the wire")


def available_codecs() -> dict[str, type[Codec]]:
    """Every codec that a spec string may name: name → class."""
    return dict(_CODECS)


def codec(text: str) -> Codec:
    """The codec of a spec string such as `stc:density=1/400`, `topk:density=1%@layer` or `topk:density=1%+fp16`. Raises SpecError."""
    if not isinstance(text, str):
        raise SpecError(f"a codec is named by a text such as 'stc:density=1/400'; given {text!r}")
    parsed = spec.parse(text)
    if len(parsed.parts) > 2:
        raise SpecError(
            f"'{text}' has {len(parsed.parts)} parts; give two, a codec that selects and one for its values, such as topk+fp16"
        )
    halves = [spec.build(part, _CODECS, "codec") for part in parsed.parts]
    built = (
        halves[0]
        if len(halves) == 1
        else halves[1].behind(halves[0])
        if isinstance(halves[1], s2.S2)
        else Product(*halves)
    )
    if parsed.scope not in ("", "model", "layer"):
        raise SpecError(f"'{text}' has the scope '{parsed.scope}'; write @model or @layer")
    return LayerWise(built) if parsed.scope == "layer" else built
