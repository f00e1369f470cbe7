"""Entropy coding of symbols by their measured frequencies: interleaved rANS.

Duda: Asymmetric numeral systems: entropy coding combining speed of Huffman coding with compression rate of arithmetic coding. 2013
(arXiv:1311.2540). Giesen: Interleaved entropy coders. 2014 (arXiv:1402.3392).

Of n symbols the frequencies f_s are measured, scaled to the sum 2^B and at least 1 where s occurs; F_s = f_0 + … + f_(s−1). Symbol i of a
chunk belongs to state i mod lanes. Encoding goes from the last symbol to the first, and starts with all states at 2²¹:

    word out   if state ≥ f_s·2^(53−B): its low 32 bits leave
    state      state // f_s · 2^B + F_s + state mod f_s

Decoding does the inverse of each step from the first symbol to the last, and ends with all states at 2²¹ and no word left.

    head      one byte, B; uint16: how many distinct symbols there are, and 2¹⁵ more if these are not 0, 1, 2, …
    symbols   only if these are not 0, 1, 2, …: their positions in the alphabet
    lengths   of each f_s that is not 0, how much longer in bits it is than the one before, as a gap: 2c for c ≥ 0, −2c − 1 for c < 0
    low bits  of each f_s the bits below its leading one, the most significant first, padded with zero bits
    sizes     uint32 for each chunk of 2²² symbols but the last: its words
    chunks    states, 7 bytes each: 8 of them, or 1 where a chunk has fewer than 2¹⁴ symbols; words, 4 bytes each

Symbols and lengths are Rice codes (kernels/rice.py) behind a byte, the parameter, and a uint16, the length of the code.

No symbols are no bytes; one distinct symbol is 0 in the place of B, and itself as uint16. Numbers are little-endian. B follows from n,
the frequencies from the counts, in integers: the bytes are the same on every machine, by any number of threads. Written here because
libraries that do this (constriction, for one) make their tables from floating point numbers, or have no stable format.
"""

import struct

import numpy as np

from ..errors import FrameError
from . import rice
from .parallel import starmap

LARGEST = 4096  # symbols of an alphabet
FINEST = 20  # frequencies add up to 2^20 at most
CHUNK = 1 << 22  # symbols that are coded by themselves
LANES, FEW = 8, 1 << 14  # states of a chunk; with fewer symbols there is one
FLOOR, WORD = 1 << 21, 32  # the least state; bits of a word: a state is below 2⁵³
STATE = 7  # bytes
GROUP = 256  # symbols that grouped digits have at most
HEAD, LISTED, SIZE = struct.Struct("<BH"), 1 << 15, np.dtype("<u4")


def encode(symbols: np.ndarray, size: int) -> bytes:
    """Return the code of symbols [n], uint8 or uint16, each below `size`, 2 ≤ size ≤ 4096. The same symbols give the same bytes."""
    if symbols.size == 0:
        return b""
    parts = _chunks(symbols)
    head, frequencies, bits = _head(_counts(parts, size))
    if bits == 0:
        return head
    made = starmap(_encode_chunk, [(part, frequencies, bits) for part in parts])
    sizes = np.array([words.size for _, words in made[:-1]], SIZE)
    chunks = [_state_bytes(states) + words.tobytes() for states, words in made]
    return b"".join([head, sizes.tobytes(), *chunks])


def decode(data: bytes | memoryview, count: int, size: int) -> np.ndarray:
    """Return the `count` symbols, uint16, of a code. Time and memory are O(count + size), whatever is claimed.

    Raises FrameError unless `encode` makes exactly `data` of some symbols [count] below `size`.
    """
    from . import coder_loops

    data = memoryview(data)
    if count == 0:
        _expect(len(data) == 0, "bytes follow a code of no symbols")
        return np.empty(0, np.uint16)
    frequencies, bits, start = _read_head(data, count, size)
    if bits == 0:
        _expect(start == len(data), "bytes follow a code of one distinct symbol")
        return np.full(count, frequencies.argmax(), np.uint16)
    symbols = np.empty(count, np.uint16)
    parts = _chunks(symbols)
    table = np.arange(size, dtype=np.uint8 if size <= 256 else np.uint16).repeat(frequencies)

    def read(part: np.ndarray, states: np.ndarray, words: np.ndarray) -> None:
        used = coder_loops.decode(words, states, table, frequencies, bits, part)
        _expect(
            used == words.size and bool((states == FLOOR).all()),
            "a code is cut off, goes on, or was changed",
        )

    chunks = _read_chunks(data[start:], [part.size for part in parts])
    starmap(read, [(part, *chunk) for part, chunk in zip(parts, chunks, strict=True)])
    _expect(
        _head(_counts(parts, size))[0] == data[:start],
        "the frequencies are not those of the symbols",
    )
    return symbols


def group_width(base: int) -> int:
    """Return how many digits below `base`, 2 ≤ base ≤ 256, fit into one symbol of at most 256."""
    width = 1
    while base ** (width + 1) <= GROUP:
        width += 1
    return width


def group(digits: np.ndarray, base: int) -> np.ndarray:
    """Symbols of several digits: faster to code, and what neighbours have in common is not sent twice.

    digits [n] are uint8 below `base`; w = group_width(base) of them, the first counting least, are a symbol below baseʷ. The last is filled
    up with zeros: uint8 [ceil(n / w)].
    """
    width = group_width(base)
    symbols = np.zeros(-(-digits.size // width), np.uint8)
    for place in range(width):
        column = digits[place::width]
        symbols[: column.size] += column * np.uint8(base**place)
    return symbols


def ungroup(symbols: np.ndarray, base: int, count: int) -> np.ndarray:
    """Return the digits [count], uint8, of grouped symbols. Raises FrameError unless `group` makes exactly these symbols of them."""
    width = group_width(base)
    if symbols.size != -(-count // width):
        raise FrameError(
            f"{symbols.size} symbols are not {count} digits in groups of {width}; the frame is damaged"
        )
    if symbols.size and int(symbols.max()) >= base**width:
        raise FrameError(f"a symbol of {width} digits is {symbols.max()}; the frame is damaged")
    if count % width and int(symbols[-1]) >= base ** (count % width):
        raise FrameError("digits go on after the last one; the frame is damaged")
    table = (np.arange(base**width)[:, None] // base ** np.arange(width) % base).astype(np.uint8)
    return np.take(table, symbols, axis=0).ravel()[:count]


def _head(counts: np.ndarray) -> tuple[bytes, np.ndarray, int]:
    """Return the head, the frequencies [size], and the logarithm B of their sum; 0 where only one symbol occurs."""
    total, present = int(counts.sum()), np.flatnonzero(counts)
    if present.size == 1:
        return HEAD.pack(0, present[0]), (counts > 0).astype(np.int64), 0
    bits = _bits(total, present.size)
    frequencies = _scale(counts, total, bits)
    used = frequencies[present]
    lengths = np.frexp(used.astype(np.float64))[1].astype(np.int64)  # of integers in bits, exactly
    changes = np.diff(lengths, prepend=0)
    owner, place = _low_bits(lengths)
    low = np.packbits((used[owner] >> place & 1).astype(np.uint8)).tobytes()
    listed = present[-1] >= present.size
    first = HEAD.pack(bits, present.size | LISTED * listed) + (
        _pack_list(present) if listed else b""
    )
    return (
        first
        + _pack_list((np.where(changes < 0, -2 * changes - 1, 2 * changes) + 1).cumsum() - 1)
        + low,
        frequencies,
        bits,
    )


def _read_head(data: memoryview, count: int, size: int) -> tuple[np.ndarray, int, int]:
    """Return frequencies [size], B and the length of the head. Whether they are those of the symbols is checked later."""
    _expect(len(data) >= HEAD.size, "a code is cut short in its head")
    bits, used = HEAD.unpack_from(data)
    frequencies, at = np.zeros(size, np.int64), HEAD.size
    if bits == 0:
        _expect(used < size, "a symbol is out of range")
        frequencies[used] = 1
        return frequencies, 0, at
    used, listed = used & ~LISTED, bool(used & LISTED)
    _expect(2 <= used <= size and bits <= _bits(count, size), "the head of a code cannot be")
    present, at = _read_list(data, at, used, size) if listed else (np.arange(used), at)
    positions, at = _read_list(data, at, used, 64 * used)
    gaps = np.diff(positions, prepend=-1) - 1
    lengths = np.where(gaps & 1, -(gaps + 1 >> 1), gaps >> 1).cumsum()
    _expect(1 <= lengths.min() and lengths.max() <= bits, "a frequency cannot be")
    owner, place = _low_bits(lengths)
    end = at + (owner.size + 7) // 8
    _expect(end <= len(data), "a code is cut short in its frequencies")
    low = (
        np.unpackbits(np.frombuffer(data[at:end], np.uint8), count=owner.size).astype(np.int64)
        << place
    )
    frequencies[present] = (1 << lengths - 1) + np.bincount(owner, low, used).astype(np.int64)
    _expect(int(frequencies.sum()) == 1 << bits, "frequencies do not add up")
    return frequencies, bits, end


def _pack_list(positions: np.ndarray) -> bytes:
    b = min(range(13), key=lambda b: rice.bits(positions, b))
    code = rice.pack(positions, b)
    return HEAD.pack(b, len(code)) + code


def _read_list(data: memoryview, at: int, count: int, limit: int) -> tuple[np.ndarray, int]:
    """`count` positions below `limit` from data[at:], and where they end."""
    _expect(len(data) >= at + HEAD.size, "a code is cut short in its head")
    b, length = HEAD.unpack_from(data, at)
    end = at + HEAD.size + length
    _expect(len(data) >= end, "a code is cut short in its head")
    return rice.unpack(data[at + HEAD.size : end], count, b, limit), end


def _low_bits(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """List the bits below the leading one of numbers of these lengths, in order: the index of the number, and the bit's place in it."""
    widths = np.maximum(lengths - 1, 0)
    owner = np.arange(lengths.size).repeat(widths)
    return owner, widths.cumsum()[owner] - 1 - np.arange(owner.size)


def _bits(total: int, present: int) -> int:
    """B: so that up to a million symbols none is rounded up to 2^−B, and tables stay in a core's cache."""
    return min(FINEST, max(total.bit_length(), present.bit_length() + 1))


def _scale(counts: np.ndarray, total: int, bits: int) -> np.ndarray:
    """counts·2^B/total, rounded so that the sum is 2^B: by largest remainder, of equals the lower symbol; at least 1 where there is one."""
    frequencies, remainders = np.divmod(counts << bits, total)
    frequencies = np.where(counts > 0, np.maximum(frequencies, 1), 0)
    left = (1 << bits) - int(frequencies.sum())
    if left >= 0:
        frequencies[np.argsort(-remainders, kind="stable")[:left]] += 1
        return frequencies
    above = np.maximum(frequencies - 1, 0)
    frequencies -= -left * above // int(above.sum())
    frequencies[
        np.argsort(-frequencies, kind="stable")[: int(frequencies.sum()) - (1 << bits)]
    ] -= 1
    return frequencies


def _chunks(symbols: np.ndarray) -> list[np.ndarray]:
    return [symbols[start : start + CHUNK] for start in range(0, symbols.size, CHUNK)]


def _lanes(count: int) -> int:
    return LANES if count >= FEW else 1


def _counts(parts: list[np.ndarray], size: int) -> np.ndarray:
    """Return how often each symbol occurs. Raises ValueError if one is out of range."""
    counts = sum(np.bincount(part, minlength=size) for part in parts)
    if counts.size > size:
        raise ValueError(f"a symbol is not below the size {size} of its alphabet")
    return counts


def _encode_chunk(
    symbols: np.ndarray, frequencies: np.ndarray, bits: int
) -> tuple[np.ndarray, np.ndarray]:
    """States, int64, and words."""
    from . import coder_loops

    lanes = _lanes(symbols.size)
    room = symbols.size * (bits + 1) // WORD + lanes + 1  # a symbol adds at most B + 1 bits
    states, words = np.empty(lanes, np.int64), np.empty(room, np.uint32)
    start = coder_loops.encode(symbols, frequencies, bits, states, words)
    return states, words[start:].astype(SIZE, copy=False)


def _state_bytes(states: np.ndarray) -> bytes:
    return states.astype("<i8").view(np.uint8).reshape(-1, 8)[:, :STATE].tobytes()


def _read_chunks(data: memoryview, counts: list[int]) -> list[tuple[np.ndarray, np.ndarray]]:
    """States and words of each chunk, `counts` symbols long."""
    edge = SIZE.itemsize * (len(counts) - 1)
    _expect(len(data) >= edge, "a code is cut short in its lengths")
    ends = [4 * length for length in np.frombuffer(data[:edge], SIZE).tolist()]
    chunks, rest = [], data[edge:]
    for count, end in zip(counts, [*ends, None], strict=True):
        head = STATE * _lanes(count)
        end = len(rest) if end is None else head + end
        _expect(head <= end <= len(rest) and (end - head) % 4 == 0, "a code is cut short")
        states = np.zeros((_lanes(count), 8), np.uint8)
        states[:, :STATE] = np.frombuffer(rest[:head], np.uint8).reshape(-1, STATE)
        states = states.view("<i8").ravel().astype(np.int64)
        _expect(bool(((states >= FLOOR) & (states < 1 << 53)).all()), "a state of a code cannot be")
        chunks.append((states, np.frombuffer(rest[head:end], SIZE).astype(np.uint32)))
        rest = rest[end:]
    return chunks


def _expect(condition: bool, sentence: str) -> None:
    if not condition:
        raise FrameError(f"{sentence}; the frame is damaged or of another size")
