"""Sealed ballots: one client's signs for the voters that tally them, past a server that cannot read them. docs/ballots.md is the protocol.

    card     R, σ              a one-time X25519 key of voter v for the ballot of sender s; σ over (slot, v, R)
    ballot   E, h, σ, wraps, c
             c  = ChaCha20-Poly1305 under K of salt ‖ bits           K fresh, used once
             h  = SHA-256(slot, salt, bits)                          what the sender is held to
             wrap of K for v: ChaCha20-Poly1305 under HKDF-SHA256(X25519(e, R), E ‖ R, (slot, v))
             σ  over (slot, h, SHA-256 of all the rest), wraps included, each with the R that it was made for
    slot     run, attempt, round, sender, terms                       in every derivation and under every signature

Every key encrypts one text, so the nonce is a constant. What a voter cannot open it can prove to anybody by the private half of its card,
which opens this one ballot and no other.
"""

import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from hmac import compare_digest

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import (
    decode_dss_signature,
    encode_dss_signature,
)
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from ..errors import ProtocolError

KEY, TAG, SALT, HASH, HALF = (
    32,
    16,
    32,
    32,
    48,
)  # bytes; HALF: of a P-384 signature, which is two numbers
SIGNATURE = 2 * HALF
CARD = KEY + SIGNATURE
HEAD = struct.Struct(f"<{KEY}s{HASH}s{SIGNATURE}sH")  # E, h, σ, number of wraps
WRAP = struct.Struct(f"<I{KEY}s{KEY + TAG}s")  # voter, the R of its card, its wrap of K
ONCE = bytes(12)  # the nonce of keys that are used once

Entropy = Callable[[int], bytes]  # so many bytes that nobody can foretell


class Unopenable(ProtocolError):
    """A ballot, signed by its sender, that does not open to what the sender is held to."""


@dataclass(frozen=True)
class Slot:
    """Where a ballot belongs; nothing that was made for one is taken for another."""

    run: str
    attempt: str  # another one whenever a server begins anew, so that a round that is repeated has other keys
    round: int
    sender: int
    terms: str = ""  # a digest of what all who take part train by: the model that they start from, and the options

    def bytes(self, *parts: bytes | int | str) -> bytes:
        """The slot and more, each with its length, so that no two different lists are the same bytes."""
        whole = (self.run, self.attempt, self.round, self.sender, self.terms, *parts)
        raw = [part if isinstance(part, bytes) else str(part).encode() for part in whole]
        return b"".join(struct.pack("<I", len(part)) + part for part in raw)


def sign(key: ec.EllipticCurvePrivateKey, text: bytes) -> bytes:
    """An ECDSA signature with SHA-256 as two numbers, big-endian [96 bytes]; the same text has the same one."""
    r, s = decode_dss_signature(key.sign(text, ec.ECDSA(SHA256(), deterministic_signing=True)))
    return r.to_bytes(HALF) + s.to_bytes(HALF)


def signed(key: ec.EllipticCurvePublicKey, signature: bytes, text: bytes) -> bool:
    try:
        r, s = int.from_bytes(signature[:HALF]), int.from_bytes(signature[HALF:])
        key.verify(encode_dss_signature(r, s), text, ec.ECDSA(SHA256()))
    except InvalidSignature:
        return False
    return len(signature) == SIGNATURE


@dataclass(frozen=True)
class Card:
    """A voter's one-time key for one ballot: the private half stays with the voter."""

    private: bytes  # X25519
    data: bytes  # what is sent: the public half and the voter's signature

    @classmethod
    def make(
        cls,
        slot: Slot,
        voter: int,
        signer: ec.EllipticCurvePrivateKey,
        entropy: Entropy = os.urandom,
    ) -> "Card":
        private = entropy(KEY)
        public = X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()
        return cls(private, public + sign(signer, slot.bytes("card", voter, public)))


def card_key(data: bytes, slot: Slot, voter: int, verifier: ec.EllipticCurvePublicKey) -> bytes:
    """The public half on a voter's card. Raises ProtocolError unless the voter made it for this slot."""
    public = data[:KEY]
    if len(data) != CARD or not signed(verifier, data[KEY:], slot.bytes("card", voter, public)):
        raise ProtocolError(
            f"the card of voter {voter} for the ballot of client {slot.sender} is not signed by that voter"
        )
    return public


def refuse_low_order(public: bytes) -> None:
    """Raise ProtocolError for a point with which nobody has a key in common: on a card it would keep honest senders from sealing."""
    try:
        X25519PrivateKey.generate().exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError as error:
        raise ProtocolError("a card holds a point of low order") from error


def seal(
    bits: bytes,
    slot: Slot,
    voters: Mapping[int, bytes],
    signer: ec.EllipticCurvePrivateKey,
    entropy: Entropy = os.urandom,
) -> bytes:
    """A ballot for voters with these public halves: len(bits) + 210 + 84 bytes for each voter.

    Raises ProtocolError for a key that is none.
    """
    key, salt, own = entropy(KEY), entropy(SALT), X25519PrivateKey.from_private_bytes(entropy(KEY))
    point = own.public_key().public_bytes_raw()
    content = ChaCha20Poly1305(key).encrypt(ONCE, salt + bits, slot.bytes())
    wraps = b"".join(
        WRAP.pack(
            voter,
            public,
            ChaCha20Poly1305(_wrapping(slot, voter, own, public, point, public)).encrypt(
                ONCE, key, None
            ),
        )
        for voter, public in sorted(voters.items())
    )
    held = _held(slot, salt, bits)
    signature = sign(signer, signed_text(slot, held, point, wraps, content))
    return HEAD.pack(point, held, signature, len(voters)) + wraps + content


@dataclass(frozen=True)
class Sealed:
    """A ballot as it travels: signed by its sender, for these voters."""

    slot: Slot
    point: bytes
    held: bytes  # h
    wraps: Mapping[
        int, tuple[bytes, bytes]
    ]  # by voter: the R of the card that it was sealed for, the wrap of K
    content: bytes

    @classmethod
    def read(cls, data: bytes, slot: Slot, verifier: ec.EllipticCurvePublicKey) -> "Sealed":
        """What anybody can check. Raises ProtocolError unless it is whole and its sender signed it for this slot."""
        if len(data) < HEAD.size:
            raise ProtocolError(f"the ballot of client {slot.sender} is cut off")
        point, held, signature, count = HEAD.unpack_from(data)
        end = HEAD.size + count * WRAP.size
        wraps, content = data[HEAD.size : end], data[end:]
        if len(wraps) != count * WRAP.size or len(content) < SALT + TAG:
            raise ProtocolError(f"the ballot of client {slot.sender} is cut off")
        if not signed(verifier, signature, signed_text(slot, held, point, wraps, content)):
            raise ProtocolError(
                f"the ballot of client {slot.sender} is not signed by it for this round"
            )
        each = {voter: (public, wrap) for voter, public, wrap in WRAP.iter_unpack(wraps)}
        if len(each) != count:
            raise ProtocolError(f"the ballot of client {slot.sender} names a voter twice")
        return cls(slot, point, held, each, content)

    @property
    def size(self) -> int:
        """Bytes of the bits in it."""
        return len(self.content) - SALT - TAG

    def open(self, voter: int, private: bytes) -> bytes:
        """The bits, by the private half of the voter's card. Raises Unopenable when they are not what the sender is held to.

        ProtocolError for a ballot that is not sealed for this card, which is no fault of its sender: it knew no such card.
        """
        own = X25519PrivateKey.from_private_bytes(private)
        public = own.public_key().public_bytes_raw()
        sealed_for, wrap = self.wraps.get(voter, (b"", b""))
        if sealed_for != public:
            raise ProtocolError(
                f"the ballot of client {self.slot.sender} is not sealed for the card that voter {voter} made for it"
            )
        try:
            key = ChaCha20Poly1305(
                _wrapping(self.slot, voter, own, self.point, self.point, public)
            ).decrypt(ONCE, wrap, None)
            text = ChaCha20Poly1305(key).decrypt(ONCE, self.content, self.slot.bytes())
        except (InvalidTag, ProtocolError) as error:
            raise Unopenable(
                f"the ballot of client {self.slot.sender} does not open for voter {voter}"
            ) from error
        salt, bits = text[:SALT], text[SALT:]
        if not compare_digest(_held(self.slot, salt, bits), self.held):
            raise Unopenable(
                f"client {self.slot.sender} sent voter {voter} another ballot than the one that it signed"
            )
        return bits

    def proven_bad(self, voter: int, public: bytes, private: bytes) -> bool:
        """Whether `private`, which a voter gives away, is the half of its card and shows that the ballot does not open.

        The card has to be the one that the ballot names, or an honest sender could be convicted with one that it never saw.
        """
        if voter not in self.wraps or self.wraps[voter][0] != public or len(private) != KEY:
            return False
        if X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw() != public:
            return False
        try:
            self.open(voter, private)
        except Unopenable:
            return True
        return False

    def contradicts(self, other: "Sealed") -> bool:
        """Whether the sender signed two different ballots for one slot; both together prove it."""
        return self.slot == other.slot and self.held != other.held


def _held(slot: Slot, salt: bytes, bits: bytes) -> bytes:
    return sha256(slot.bytes("ballot", salt, bits)).digest()


def signed_text(slot: Slot, held: bytes, point: bytes, wraps: bytes, content: bytes) -> bytes:
    """What a sender signs."""
    return slot.bytes("sealed", held, sha256(slot.bytes(point, wraps, content)).digest())


def _wrapping(
    slot: Slot, voter: int, own: X25519PrivateKey, other: bytes, point: bytes, public: bytes
) -> bytes:
    """The key that wraps K for a voter, as both sides derive it from their own half and the other's."""
    try:
        shared = own.exchange(X25519PublicKey.from_public_bytes(other))
    except ValueError as error:
        raise ProtocolError(
            f"client {slot.sender} and voter {voter} have no key in common: one sent a point of low order"
        ) from error
    return HKDF(SHA256(), KEY, salt=point + public, info=slot.bytes("wrap", voter)).derive(shared)
