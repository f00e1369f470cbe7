"""Small values as JSON without spaces, many thousand times a round."""

import json
from collections.abc import Callable
from json import encoder
from typing import Any


def _encoder() -> Callable[[Any], str]:
    """json.JSONEncoder makes an encoder of C anew for every text, which takes longer than a small value does."""
    if encoder.c_make_encoder is None:  # another Python than CPython
        return json.JSONEncoder(separators=(",", ":")).encode
    encode = encoder.c_make_encoder(
        None, None, encoder.encode_basestring_ascii, None, ":", ",", False, False, True
    )
    return lambda value: "".join(encode(value, 0))


compact = _encoder()
