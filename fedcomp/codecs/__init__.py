"""A codec encodes a vector as a frame (bytes), and decodes a frame into a vector. Most modules of this package implement one paper."""

from .. import spec
from ..errors import SpecError
from ..plugins import PluginRegistry, subclass_of
from .base import Codec, Context, at_density, longest_frame, spans
from .frame import NAMES
from .product import Product
from .s2 import S2, SparseS2
from .scopes import Chunked, LayerWise
from .update import Update, add_all

__all__ = [
    "Chunked",
    "Codec",
    "Context",
    "LayerWise",
    "Update",
    "add_all",
    "at_density",
    "available_codecs",
    "codec",
    "longest_frame",
    "spans",
]


def _reserve_number(name: str, cls: type[Codec]) -> None:
    """Reserve the `id` of a codec, a number in its frames. Raise SpecError if it is not from 1 to 255, or belongs to another codec."""
    number = getattr(cls, "id", None)
    if type(number) is not int or not 0 < number < 256:
        raise SpecError(f"codec '{name}' has id {number!r}; give it an id from 1 to 255")
    if NAMES.setdefault(number, name) != name:
        raise SpecError(
            f"the codecs '{NAMES[number]}' and '{name}' have the same id {number}; give the new codec another id"
        )


_CODECS: PluginRegistry[type[Codec]] = PluginRegistry(
    __name__, "fedcomp.codecs", subclass_of(Codec), _reserve_number
)


def available_codecs() -> dict[str, type[Codec]]:
    """Return all codecs, including those of other packages, as a dict from name to class."""
    return _CODECS.available()


def codec(text: str) -> Codec:
    """Return the codec for a spec string such as `stc:density=1/400`, `topk:density=1%@layer` or `topk:density=1%+fp16`.

        codec = fedcomp.codec("stc:density=1/400")
        frame = codec.encode(x)  # x: a vector [numel]; frame: bytes
        decoded = codec.decode(frame, numel=x.numel())  # float32 [numel]

    In a spec string, `+` joins a codec that selects coordinates and a codec that encodes their values. The scope after `@` is `layer` to
    encode each tensor separately, or for example `chunk=4096` to encode every 4096 coordinates separately. Raises SpecError for an unknown
    codec, option or scope, and for an option value that is out of range.
    """
    if not isinstance(text, str):
        raise SpecError(
            f"a codec is specified by a string such as 'stc:density=1/400'; given {text!r}"
        )
    with spec.error_context(text):
        return _build(text)


def _build(text: str) -> Codec:
    parsed = spec.parse(text)
    if len(parsed.parts) > 2:
        raise SpecError(
            f"'{text}' has {len(parsed.parts)} parts; give at most two: a codec that selects coordinates, and a codec for their values, "
            "such as topk+fp16"
        )
    parts = [spec.build(part, _CODECS, "codec") for part in parsed.parts]
    built = parts[0]
    if len(parts) == 2:
        built = SparseS2(*parts) if isinstance(parts[1], S2) else Product(*parts)
    scope, equals, size = parsed.scope.partition("=")
    if scope == "chunk":
        if not size:
            raise SpecError("@chunk has no size; write @chunk=4096")
        return Chunked(built, spec.convert(size, int, "@chunk"))
    if equals or scope not in ("", "model", "layer"):
        raise SpecError(
            f"'{text}' has the unknown scope '{parsed.scope}'; write @model, @layer or @chunk=4096"
        )
    return LayerWise(built) if scope == "layer" else built
