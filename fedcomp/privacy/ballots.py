"""Sealed ballots: encrypted signs of client updates.

A ballot contains the signs of the update of one client, its sender. It is encrypted for other clients (voters), so that the server cannot
read it.

docs/explanation/elections.md specifies the protocol, and strategies/sealed_election.py has a glossary. In the following list, ‖ means
concatenation.

    Card     (R, σ) from voter v: R is a one-time X25519 public key for the ballot of one sender. Voter v's signature σ covers (slot, v, R).
    Ballot   (E, h, σ, wraps, c):
             E is a one-time X25519 public key of the sender, with the private key e.
             The content c is a random salt ‖ the bits of the signs, encrypted by ChaCha20-Poly1305 with a key K that is used once.
             The commitment h of the sender is SHA-256(slot, salt, bits).
             The wrap for voter v contains v, the key R on the voter's card, and the encrypted key K.
             K is encrypted by ChaCha20-Poly1305 with the key HKDF-SHA256(X25519(e, R), E ‖ R, (slot, v)).
             The sender's signature σ covers (slot, h, d), where d is SHA-256(slot, E, wraps, c).
    Slot     (run, attempt, round, sender, terms): the identity of a ballot. Every key derivation and every signed text includes the slot.
             The terms are a hash of everything that determines how clients train in the round.

If a voter cannot open (decrypt) a ballot, it reveals the private key of its card. With this key, others can check that the ballot does not
open. The key cannot open any other ballot.
"""

import os
import struct
from collections.abc import Mapping
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

KEY, TAG, SALT, HASH = 32, 16, 32, 32  # bytes
HALF = 48  # size in bytes of each of the two numbers in a P-384 signature
SIGNATURE = 2 * HALF
CARD = KEY + SIGNATURE
# Fields at the start of a ballot: key E, commitment h, signature, number of wraps
HEAD = struct.Struct(f"<{KEY}s{HASH}s{SIGNATURE}sH")
WRAP = struct.Struct(f"<I{KEY}s{KEY + TAG}s")  # fields of a wrap: voter, key R, encrypted K
NONCE = bytes(12)  # a constant nonce is safe, because every key encrypts only one message


class UnopenableBallot(ProtocolError):
    """Raised if a ballot cannot be decrypted, or if its bits do not match the commitment that its sender signed."""


@dataclass(frozen=True)
class Slot:
    """The identity of one ballot. Every signature and every key is made for one slot, and is invalid for all other ballots."""

    run: str
    # A random name that a server draws when it starts. If a restarted server repeats a round, clients thus use new keys.
    attempt: str
    round: int
    sender: int
    terms: str = ""  # hash of everything that determines how clients train in the round

    def bytes(self, *parts: bytes | int | str) -> bytes:
        """Concatenate the fields of the slot and `parts`. Each is preceded by its length, so that different values give different bytes."""
        whole = (self.run, self.attempt, self.round, self.sender, self.terms, *parts)
        raw = [part if isinstance(part, bytes) else str(part).encode() for part in whole]
        return b"".join(struct.pack("<I", len(part)) + part for part in raw)


def sign(key: ec.EllipticCurvePrivateKey, text: bytes) -> bytes:
    """Return a deterministic ECDSA signature of `text` with SHA-256, as two big-endian numbers of 48 bytes."""
    r, s = decode_dss_signature(key.sign(text, ec.ECDSA(SHA256(), deterministic_signing=True)))
    return r.to_bytes(HALF) + s.to_bytes(HALF)


def is_signed(key: ec.EllipticCurvePublicKey, signature: bytes, text: bytes) -> bool:
    """Return whether `signature` is a valid signature of `text` by the owner of the public key `key`."""
    try:
        r, s = int.from_bytes(signature[:HALF]), int.from_bytes(signature[HALF:])
        key.verify(encode_dss_signature(r, s), text, ec.ECDSA(SHA256()))
    except InvalidSignature:
        return False
    return len(signature) == SIGNATURE


@dataclass(frozen=True)
class Card:
    """A voter's one-time key pair for one ballot. The voter keeps the private key and sends `data`."""

    private: bytes  # X25519
    data: bytes  # the message that the voter sends: the public key and the voter's signature

    @classmethod
    def make(cls, slot: Slot, voter: int, signer: ec.EllipticCurvePrivateKey) -> "Card":
        private = os.urandom(KEY)
        public = X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()
        return cls(private, public + sign(signer, slot.bytes("card", voter, public)))


def card_key(data: bytes, slot: Slot, voter: int, verifier: ec.EllipticCurvePublicKey) -> bytes:
    """Return the public key on the card `data` of a voter. Raises ProtocolError if the voter did not sign the card for this slot."""
    public = data[:KEY]
    if len(data) != CARD or not is_signed(verifier, data[KEY:], slot.bytes("card", voter, public)):
        raise ProtocolError(
            f"the card (one-time key) of voter {voter} for the ballot of client {slot.sender} is not signed by voter {voter}"
        )
    return public


def refuse_low_order(public: bytes) -> None:
    """Raise ProtocolError for an X25519 public key of low order, which gives no shared secret and so cannot encrypt a ballot."""
    try:
        X25519PrivateKey.generate().exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError as error:
        raise ProtocolError(
            "the public key on a voter's card is invalid (a point of low order), so no ballot can be encrypted for it"
        ) from error


def seal(
    bits: bytes,
    slot: Slot,
    voters: Mapping[int, bytes],
    signer: ec.EllipticCurvePrivateKey,
) -> bytes:
    """Return an encrypted and signed ballot. `bits`: the signs; `voters`: dict from voter to the public key on its card.

    Raises ProtocolError for an invalid public key.
    """
    key, salt = os.urandom(KEY), os.urandom(SALT)
    own = X25519PrivateKey.from_private_bytes(os.urandom(KEY))
    point = own.public_key().public_bytes_raw()
    content = ChaCha20Poly1305(key).encrypt(NONCE, salt + bits, slot.bytes())
    wraps = b""
    for voter, public in sorted(voters.items()):
        wrapping = ChaCha20Poly1305(_wrapping_key(slot, voter, own, public, point, public))
        wraps += WRAP.pack(voter, public, wrapping.encrypt(NONCE, key, None))
    commitment = _commitment(slot, salt, bits)
    signature = sign(signer, signed_text(slot, commitment, point, wraps, content))
    return HEAD.pack(point, commitment, signature, len(voters)) + wraps + content


@dataclass(frozen=True)
class SealedBallot:
    """An encrypted ballot that its sender has signed."""

    slot: Slot
    point: bytes  # the public key E
    commitment: bytes  # the commitment h
    # For each voter that can decrypt the ballot: the public key R on its card, and the encrypted key K.
    wraps: Mapping[int, tuple[bytes, bytes]]
    content: bytes  # the content c

    @classmethod
    def read(cls, data: bytes, slot: Slot, verifier: ec.EllipticCurvePublicKey) -> "SealedBallot":
        """Parse the bytes of a ballot. Raises ProtocolError if the ballot is malformed, or if its sender did not sign it for this slot."""
        if len(data) < HEAD.size:
            raise ProtocolError(f"the ballot of client {slot.sender} is cut off")
        point, commitment, signature, count = HEAD.unpack_from(data)
        end = HEAD.size + count * WRAP.size
        wraps, content = data[HEAD.size : end], data[end:]
        if len(wraps) != count * WRAP.size or len(content) < SALT + TAG:
            raise ProtocolError(f"the ballot of client {slot.sender} is cut off")
        if not is_signed(verifier, signature, signed_text(slot, commitment, point, wraps, content)):
            raise ProtocolError(
                f"the ballot of client {slot.sender} is not signed by that client for this round"
            )
        each = {voter: (public, wrap) for voter, public, wrap in WRAP.iter_unpack(wraps)}
        if len(each) != count:
            raise ProtocolError(f"the ballot of client {slot.sender} names a voter twice")
        return cls(slot, point, commitment, each, content)

    @property
    def size(self) -> int:
        """The size of the decrypted bits, in bytes."""
        return len(self.content) - SALT - TAG

    def open(self, voter: int, private: bytes) -> bytes:
        """Decrypt the ballot and return its bits. `private`: private key of the voter's card.

        Raises UnopenableBallot if the sender is at fault: the ballot cannot be decrypted, or its bits differ from the sender's commitment.
        Raises ProtocolError if the ballot is not encrypted for the voter's card. This does not prove that the sender is at fault, because
        the sender may never have received the card.
        """
        own = X25519PrivateKey.from_private_bytes(private)
        public = own.public_key().public_bytes_raw()
        sealed_for, wrap = self.wraps.get(voter, (b"", b""))
        if sealed_for != public:
            raise ProtocolError(
                f"the ballot of client {self.slot.sender} is not encrypted with the public key on the card of voter {voter}"
            )
        try:
            wrapping = _wrapping_key(self.slot, voter, own, self.point, self.point, public)
            key = ChaCha20Poly1305(wrapping).decrypt(NONCE, wrap, None)
            text = ChaCha20Poly1305(key).decrypt(NONCE, self.content, self.slot.bytes())
        except (InvalidTag, ProtocolError) as error:
            raise UnopenableBallot(
                f"the ballot of client {self.slot.sender} cannot be decrypted with the private key of voter {voter}'s card"
            ) from error
        salt, bits = text[:SALT], text[SALT:]
        if not compare_digest(_commitment(self.slot, salt, bits), self.commitment):
            raise UnopenableBallot(
                f"the decrypted ballot of client {self.slot.sender} for voter {voter} differs from the commitment that the client signed"
            )
        return bits

    def proven_bad(self, voter: int, public: bytes, private: bytes) -> bool:
        """Return whether the sender is provably at fault: the private key of the voter's card cannot open the ballot.

        `public`, `private`: the keys of the card. Returns False if the ballot was encrypted for another public key.
        """
        if voter not in self.wraps or self.wraps[voter][0] != public or len(private) != KEY:
            return False
        if X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw() != public:
            return False
        try:
            self.open(voter, private)
        except UnopenableBallot:
            return True
        return False


def _commitment(slot: Slot, salt: bytes, bits: bytes) -> bytes:
    return sha256(slot.bytes("ballot", salt, bits)).digest()


def signed_text(slot: Slot, commitment: bytes, point: bytes, wraps: bytes, content: bytes) -> bytes:
    """Return the bytes that the sender of a ballot signs."""
    return slot.bytes("sealed", commitment, sha256(slot.bytes(point, wraps, content)).digest())


def _wrapping_key(
    slot: Slot, voter: int, own: X25519PrivateKey, other: bytes, point: bytes, public: bytes
) -> bytes:
    """Return the key that encrypts the key K for a voter. `point` is E, and `public` is R.

    The sender calls this function with `own` = e and `other` = R. The voter calls it with the private key of R and `other` = E.
    """
    try:
        shared = own.exchange(X25519PublicKey.from_public_bytes(other))
    except ValueError as error:
        raise ProtocolError(
            f"client {slot.sender} and voter {voter} have no shared key: one of them sent an invalid public key (a point of low order)"
        ) from error
    return HKDF(SHA256(), KEY, salt=point + public, info=slot.bytes("wrap", voter)).derive(shared)
