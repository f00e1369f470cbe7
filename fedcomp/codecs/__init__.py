"""Vector → bytes → vector. One paper, one file; one line here."""

from .. import spec
from ..errors import SpecError
from . import identity, sbc, stc, topk
from .base import Codec, Context, LayerWise
from .frame import CodecId
from .update import Update

__all__ = ["Codec", "CodecId", "Context", "LayerWise", "Update", "available_codecs", "codec"]

_CODECS: dict[str, type[Codec]] = {
    cls.name: cls
    for cls in (
        identity.Identity,
        identity.Half,
        topk.TopK,
        stc.STC,
        sbc.SBC,
    )
}

if len({cls.id for cls in _CODECS.values()}) != len(_CODECS):
    raise AssertionError("two codecs of the registry have one id on the wire")


def available_codecs() -> dict[str, type[Codec]]:
    """Every codec that a spec string may name: name → class."""
    return dict(_CODECS)


def codec(text: str) -> Codec:
    """The codec of a spec string such as `stc:density=1/400` or `topk:density=1%@layer`. Raises SpecError."""
    if not isinstance(text, str):
        raise SpecError(f"a codec is named by a text such as 'stc:density=1/400'; given {text!r}")
    parsed = spec.parse(text)
    if len(parsed.parts) > 1:
        raise SpecError(f"'{text}': products of codecs are not available; name one codec")
    built = spec.build(parsed.parts[0], _CODECS, "codec")
    if parsed.scope not in ("", "model", "layer"):
        raise SpecError(f"'{text}' has the scope '{parsed.scope}'; write @model or @layer")
    return LayerWise(built) if parsed.scope == "layer" else built
