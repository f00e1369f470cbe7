"""Entropy coding of symbols by their frequencies, with interleaved rANS.

Duda, "Asymmetric numeral systems: entropy coding combining speed of Huffman coding with compression rate of arithmetic coding", 2013
(arXiv:1311.2540). Giesen, "Interleaved entropy coders", 2014 (arXiv:1402.3392).

Let f_s be the frequency of symbol s: an integer, at least 1 if the symbol occurs, such that all frequencies add up to 2^B. Let F_s be the
sum of the frequencies of all symbols smaller than s. Each chunk of symbols has one or several coder states, called lanes. Symbol
i uses the lane i mod (number of lanes). Encoding goes from the last symbol to the first. All states start at 2²¹, and each symbol takes two
steps:

    If state ≥ f_s·2^(53−B), append the low 32 bits of the state to the code as a word, and shift the state right by 32.
    Replace the state by state // f_s · 2^B + F_s + state mod f_s.

Decoding inverts these steps, from the first symbol to the last. In the end, all states are 2²¹ and all words have been read. The code
contains the frequencies, and the states and words of each chunk, as specified in docs/reference/frame-format.md.

All computations are exact, so the bytes are the same on every machine and for any number of threads. Existing rANS libraries, such as
constriction, are not used, because they have floating-point tables or no stable format.
"""

import struct

import numpy as np

from ..errors import FrameError
from . import rice
from .parallel import starmap

LARGEST = 4096  # maximum number of possible symbols
MAX_BITS = 20  # maximum of B
CHUNK = 1 << 22  # number of symbols in a chunk
# A chunk of at least MIN_LANE_SYMBOLS symbols has LANES lanes, and a smaller chunk has one lane.
LANES, MIN_LANE_SYMBOLS = 8, 1 << 14
# FLOOR: the smallest coder state. WORD: number of bits of a word. Coder states are below FLOOR · 2^WORD = 2⁵³.
FLOOR, WORD = 1 << 21, 32
STATE = 7  # number of bytes of an encoded coder state
# HEAD: B and the number of symbols that occur, or a Rice parameter and the length of a Rice code. LISTED: flag in this number, set if the
# code lists the symbols that occur. SIZE: type of words and of chunk lengths.
HEAD, LISTED, SIZE = struct.Struct("<BH"), 1 << 15, np.dtype("<u4")


def encode(symbols: np.ndarray, size: int) -> bytes:
    """Encode symbols [n], uint8 or uint16, each below `size`, where 2 ≤ size ≤ 4096."""
    if symbols.size == 0:
        return b""
    parts = _chunks(symbols)
    head, frequencies, bits = _head(_counts(parts, size))
    if bits == 0:
        return head
    coded = starmap(_encode_chunk, [(part, frequencies, bits) for part in parts])
    sizes = np.array([words.size for _, words in coded[:-1]], SIZE)
    chunks = [_state_bytes(states) + words.tobytes() for states, words in coded]
    return b"".join([head, sizes.tobytes(), *chunks])


def decode(data: bytes | memoryview, count: int, size: int) -> np.ndarray:
    """Decode `data` into `count` symbols, uint16. Time and memory are O(count + size) for any `data`.

    Raises FrameError unless `data` is exactly what `encode` returns for some symbols [count] below `size`.
    """
    from . import coder_loops

    data = memoryview(data)
    if count == 0:
        _expect(len(data) == 0, "expected no values, but entropy-coded values follow")
        return np.empty(0, np.uint16)
    frequencies, bits, start = _read_head(data, count, size)
    if bits == 0:
        _expect(start == len(data), "bytes follow the entropy-coded values")
        return np.full(count, frequencies.argmax(), np.uint16)
    symbols = np.empty(count, np.uint16)
    parts = _chunks(symbols)
    table = np.arange(size, dtype=np.uint8 if size <= 256 else np.uint16).repeat(frequencies)

    def read(part: np.ndarray, states: np.ndarray, words: np.ndarray) -> None:
        used = coder_loops.decode(words, states, table, frequencies, bits, part)
        is_whole = used == words.size and bool((states == FLOOR).all())
        _expect(is_whole, "the entropy-coded values cannot be decoded")

    chunks = _read_chunks(data[start:], [part.size for part in parts])
    starmap(read, [(part, *chunk) for part, chunk in zip(parts, chunks, strict=True)])
    fits = _head(_counts(parts, size))[0] == data[:start]
    _expect(fits, "the symbol frequencies do not match the entropy-coded values")
    return symbols


def _head(counts: np.ndarray) -> tuple[bytes, np.ndarray, int]:
    """Return the encoded frequencies, the frequency of each symbol [size], and the exponent B of the sum 2^B of the frequencies."""
    total, present = int(counts.sum()), np.flatnonzero(counts)
    if present.size == 1:
        return HEAD.pack(0, present[0]), (counts > 0).astype(np.int64), 0
    bits = _bits(total, present.size)
    frequencies = _scale(counts, total, bits)
    used = frequencies[present]
    # The number of bits of each frequency. For integers of this size, frexp is exact.
    lengths = np.frexp(used.astype(np.float64))[1].astype(np.int64)
    changes = np.diff(lengths, prepend=0)
    owner, shift = _low_bits(lengths)
    low = np.packbits((used[owner] >> shift & 1).astype(np.uint8)).tobytes()
    listed = bool(present[-1] >= present.size)
    head = HEAD.pack(bits, present.size | LISTED * listed)
    symbols = _pack_list(present) if listed else b""
    gaps = np.where(changes < 0, -2 * changes - 1, 2 * changes)
    return head + symbols + _pack_list((gaps + 1).cumsum() - 1) + low, frequencies, bits


def _read_head(data: memoryview, count: int, size: int) -> tuple[np.ndarray, int, int]:
    """Return the frequencies [size], the exponent B of their sum, and the number of bytes of the head.

    The caller must check that the frequencies match the symbols.
    """
    _expect(len(data) >= HEAD.size, "the entropy-coded values end too early")
    bits, used = HEAD.unpack_from(data)
    frequencies, at = np.zeros(size, np.int64), HEAD.size
    if bits == 0:
        _expect(used < size, f"the entropy-coded symbol {used} is out of range")
        frequencies[used] = 1
        return frequencies, 0, at
    used, listed = used & ~LISTED, bool(used & LISTED)
    _expect(
        2 <= used <= size and bits <= _bits(count, size),
        "the header of the entropy-coded values is invalid",
    )
    present, at = _read_list(data, at, used, size) if listed else (np.arange(used), at)
    positions, at = _read_list(data, at, used, 64 * used)
    gaps = np.diff(positions, prepend=-1) - 1
    lengths = np.where(gaps & 1, -(gaps + 1 >> 1), gaps >> 1).cumsum()
    _expect(
        1 <= lengths.min() and lengths.max() <= bits,
        "a symbol frequency of the entropy-coded values is out of range",
    )
    owner, shift = _low_bits(lengths)
    end = at + (owner.size + 7) // 8
    _expect(end <= len(data), "the symbol frequencies of the entropy-coded values end too early")
    low = np.unpackbits(np.frombuffer(data[at:end], np.uint8), count=owner.size).astype(np.int64)
    sums = np.bincount(owner, low << shift, used).astype(np.int64)
    frequencies[present] = (1 << lengths - 1) + sums
    _expect(
        int(frequencies.sum()) == 1 << bits, f"the symbol frequencies do not add up to 2^{bits}"
    )
    return frequencies, bits, end


def _pack_list(positions: np.ndarray) -> bytes:
    """Return the Rice code of positions, preceded by its parameter and its length in bytes."""
    b = min(range(13), key=lambda b: rice.bits(positions, b))
    code = rice.pack(positions, b)
    return HEAD.pack(b, len(code)) + code


def _read_list(data: memoryview, at: int, count: int, limit: int) -> tuple[np.ndarray, int]:
    """Decode `count` positions below `limit` from data[at:]. Return the positions and the index of the next byte."""
    _expect(
        len(data) >= at + HEAD.size,
        "the symbol frequencies of the entropy-coded values end too early",
    )
    b, length = HEAD.unpack_from(data, at)
    end = at + HEAD.size + length
    _expect(len(data) >= end, "the symbol frequencies of the entropy-coded values end too early")
    try:
        return rice.unpack(data[at + HEAD.size : end], count, b, limit), end
    except FrameError as error:
        problem = "the symbol frequencies of the entropy-coded values cannot be decoded"
        raise FrameError(f"damaged frame: {problem}") from error


def _low_bits(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For numbers with `lengths` bits each, enumerate all bits below the leading bits, number by number, from the highest to the lowest.

    Return two arrays with one entry per bit: the index of the number, and the position of the bit in the number (0 = lowest).
    """
    widths = np.maximum(lengths - 1, 0)
    owner = np.arange(lengths.size).repeat(widths)
    return owner, widths.cumsum()[owner] - 1 - np.arange(owner.size)


def _bits(total: int, present: int) -> int:
    """Return B: large enough for a frequency ≥ 1 of each symbol that occurs, and so small that tables of 2^B entries fit in the cache."""
    return min(MAX_BITS, max(total.bit_length(), present.bit_length() + 1))


def _scale(counts: np.ndarray, total: int, bits: int) -> np.ndarray:
    """Scale counts to integers with the sum 2^B, at least 1 for a nonzero count.

    The integers with the largest remainders are rounded up, those of smaller symbols first.
    """
    frequencies, remainders = np.divmod(counts << bits, total)
    frequencies = np.where(counts > 0, np.maximum(frequencies, 1), 0)
    missing = (1 << bits) - int(frequencies.sum())
    if missing >= 0:
        frequencies[np.argsort(-remainders, kind="stable")[:missing]] += 1
        return frequencies
    above = np.maximum(frequencies - 1, 0)
    frequencies -= -missing * above // int(above.sum())
    excess = int(frequencies.sum()) - (1 << bits)
    frequencies[np.argsort(-frequencies, kind="stable")[:excess]] -= 1
    return frequencies


def _chunks(symbols: np.ndarray) -> list[np.ndarray]:
    return [symbols[start : start + CHUNK] for start in range(0, symbols.size, CHUNK)]


def _lanes(count: int) -> int:
    return LANES if count >= MIN_LANE_SYMBOLS else 1


def _counts(parts: list[np.ndarray], size: int) -> np.ndarray:
    """Return the count of each symbol. Raises ValueError if a symbol is not below `size`."""
    each = [np.bincount(part, minlength=size) for part in parts]
    if max(counts.size for counts in each) > size:
        raise ValueError(f"a symbol is not below the size {size} of its alphabet")
    return np.sum(each, axis=0)


def _encode_chunk(
    symbols: np.ndarray, frequencies: np.ndarray, bits: int
) -> tuple[np.ndarray, np.ndarray]:
    from . import coder_loops

    lanes = _lanes(symbols.size)
    room = symbols.size * (bits + 1) // WORD + lanes + 1  # a symbol needs at most `bits` + 1 bits
    states, words = np.empty(lanes, np.int64), np.empty(room, np.uint32)
    start = coder_loops.encode(symbols, frequencies, bits, states, words)
    return states, words[start:].astype(SIZE, copy=False)


def _state_bytes(states: np.ndarray) -> bytes:
    return states.astype("<i8").view(np.uint8).reshape(-1, 8)[:, :STATE].tobytes()


def _read_chunks(data: memoryview, counts: list[int]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the coder states and the words of each chunk. `counts`: number of symbols of each chunk."""
    edge = SIZE.itemsize * (len(counts) - 1)
    _expect(len(data) >= edge, "the chunk lengths of the entropy-coded values end too early")
    ends = [4 * length for length in np.frombuffer(data[:edge], SIZE).tolist()]
    chunks, rest = [], data[edge:]
    for count, end in zip(counts, [*ends, None], strict=True):
        head = STATE * _lanes(count)
        end = len(rest) if end is None else head + end
        _expect(
            head <= end <= len(rest) and (end - head) % 4 == 0,
            "a chunk of the entropy-coded values has the wrong length",
        )
        octets = np.zeros((_lanes(count), 8), np.uint8)
        octets[:, :STATE] = np.frombuffer(rest[:head], np.uint8).reshape(-1, STATE)
        states = octets.view("<i8").ravel().astype(np.int64)
        in_range = (states >= FLOOR) & (states < 1 << 53)
        _expect(bool(in_range.all()), "an initial state of the entropy decoder is out of range")
        chunks.append((states, np.frombuffer(rest[head:end], SIZE).astype(np.uint32)))
        rest = rest[end:]
    return chunks


def _expect(condition: bool, message: str) -> None:
    if not condition:
        raise FrameError(f"damaged frame: {message}")
