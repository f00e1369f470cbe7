"""Sealed ballots: who can open them, what a sender commits to, what a complaint proves, and that nothing is valid in another slot."""

import dataclasses
import hashlib
import itertools
import os

import pytest
from cases import for_each
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from fedcomp.errors import ProtocolError
from fedcomp.privacy import ballots
from fedcomp.privacy.ballots import (
    CARD,
    HEAD,
    NONCE,
    SALT,
    WRAP,
    Card,
    SealedBallot,
    Slot,
    UnopenableBallot,
    card_key,
    seal,
)

KEYS = [ec.generate_private_key(ec.SECP384R1()) for _ in range(4)]
SLOT = Slot("run", "attempt", 3, 0)
BITS = bytes(range(251)) * 4
VOTERS = (1, 2)


def counter(name: str):
    """Entropy that a test can reproduce."""
    numbers = itertools.count()
    return lambda size: hashlib.shake_256(f"{name} {next(numbers)}".encode()).digest(size)


def reproducible(name: str, make, *arguments):
    """Return make(*arguments), where the operating system's random bytes are replaced."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "urandom", counter(name))
        return make(*arguments)


@pytest.fixture
def cards() -> dict[int, Card]:
    return {voter: Card.make(SLOT, voter, KEYS[voter]) for voter in VOTERS}


@pytest.fixture
def publics(cards) -> dict[int, bytes]:
    return {
        voter: card_key(card.data, SLOT, voter, KEYS[voter].public_key())
        for voter, card in cards.items()
    }


@pytest.fixture
def data(publics) -> bytes:
    return seal(BITS, SLOT, publics, KEYS[0])


def read(data: bytes, slot: Slot = SLOT) -> SealedBallot:
    return SealedBallot.read(data, slot, KEYS[slot.sender].public_key())


@pytest.mark.parametrize("voter", VOTERS)
def test_each_voter_can_open_the_ballot(data, cards, voter):
    assert read(data).open(voter, cards[voter].private) == BITS


@for_each("voters", [1, 2, 15])
def test_a_ballot_costs_its_bits_once_and_a_fixed_amount_for_each_voter(voters):
    publics = {v: Card.make(SLOT, v, KEYS[1]).data[: ballots.KEY] for v in range(voters)}
    assert len(seal(BITS, SLOT, publics, KEYS[0])) == len(BITS) + 210 + 84 * voters
    assert len(seal(b"", SLOT, publics, KEYS[0])) == 210 + 84 * voters


def test_a_client_without_a_card_cannot_open_a_ballot(data, cards):
    for voter, private in ((3, Card.make(SLOT, 3, KEYS[3]).private), (1, cards[2].private)):
        with pytest.raises(ProtocolError, match="not encrypted with the public key") as caught:
            read(data).open(voter, private)
        assert not isinstance(caught.value, UnopenableBallot), (
            "this does not prove a fault of the sender"
        )


def test_a_sealed_ballot_contains_neither_the_bits_nor_a_key(data, cards):
    travels = data + b"".join(card.data for card in cards.values())
    assert BITS[:16] not in travels and all(card.private not in travels for card in cards.values())


def test_a_ballot_does_not_contain_the_hash_of_its_bits(data):
    """The salt prevents a server from guessing ballots of few bits."""
    assert hashlib.sha256(SLOT.bytes("ballot", bytes(SALT), BITS)).digest() != read(data).commitment


@pytest.mark.parametrize(
    "change", [{"run": "other"}, {"attempt": "other"}, {"round": 4}, {"sender": 1}]
)
def test_cards_and_ballots_are_invalid_in_another_slot(data, cards, change):
    other = dataclasses.replace(SLOT, **change)
    with pytest.raises(ProtocolError, match="not signed"):
        SealedBallot.read(data, other, KEYS[0].public_key())
    with pytest.raises(ProtocolError, match="not signed"):
        card_key(cards[1].data, other, 1, KEYS[1].public_key())


def test_slots_with_different_parts_have_different_bytes():
    assert Slot("a", "bc", 1, 2).bytes() != Slot("ab", "c", 1, 2).bytes()
    assert Slot("a", "b", 1, 23).bytes() != Slot("a", "b", 12, 3).bytes()


def test_a_card_is_valid_only_for_its_voter(cards):
    with pytest.raises(ProtocolError, match="of voter 2 for the ballot"):
        card_key(cards[1].data, SLOT, 2, KEYS[2].public_key())
    with pytest.raises(ProtocolError, match="of voter 1 for the ballot"):
        card_key(cards[1].data, SLOT, 1, KEYS[2].public_key())


def test_a_flipped_bit_at_any_position_is_detected(data):
    for place in range(0, len(data), 7):
        bad = bytearray(data)
        bad[place] ^= 1 << place % 8
        with pytest.raises(ProtocolError):
            read(bytes(bad))


@pytest.mark.parametrize(
    "size", [0, 1, HEAD.size - 1, HEAD.size, HEAD.size + WRAP.size, HEAD.size + 2 * WRAP.size + 47]
)
def test_a_ballot_that_is_cut_off_is_refused(data, size):
    with pytest.raises(ProtocolError):
        read(data[:size])


@for_each("size", [0, 1, CARD - 1, CARD + 1])
def test_a_card_of_another_size_is_refused(size):
    with pytest.raises(ProtocolError):
        card_key(bytes(size), SLOT, 1, KEYS[1].public_key())


def test_a_point_of_low_order_is_refused():
    with pytest.raises(ProtocolError, match="low order"):
        seal(BITS, SLOT, {1: bytes(32)}, KEYS[0])


def test_sealing_twice_uses_new_keys():
    """Sealing the same bits for the same voters again, as after a resume, shares no key, salt or text with the first time."""
    publics = {v: Card.make(SLOT, v, KEYS[v]).data[: ballots.KEY] for v in VOTERS}
    first, second = (read(seal(BITS, SLOT, publics, KEYS[0])) for _ in range(2))
    assert (
        first.point != second.point
        and first.commitment != second.commitment
        and first.content != second.content
    )
    assert {wrap for _, wrap in first.wraps.values()}.isdisjoint(
        wrap for _, wrap in second.wraps.values()
    )


def test_attempts_have_different_keys_even_with_the_same_random_bytes():
    attempts = [dataclasses.replace(SLOT, attempt=name) for name in ("1", "2")]
    publics = {1: Card.make(SLOT, 1, KEYS[1]).data[: ballots.KEY]}
    one, two = (
        SealedBallot.read(
            reproducible("ballot", seal, BITS, slot, publics, KEYS[0]), slot, KEYS[0].public_key()
        )
        for slot in attempts
    )
    assert (
        one.point == two.point and one.wraps[1] != two.wraps[1] and one.commitment != two.commitment
    )


def test_the_same_random_bytes_give_the_same_ballot():
    made = [reproducible("card", Card.make, SLOT, 1, KEYS[1]) for _ in range(2)]
    assert made[0] == made[1]
    publics = {1: made[0].data[: ballots.KEY]}
    sealed = [reproducible("ballot", seal, BITS, SLOT, publics, KEYS[0]) for _ in range(2)]
    assert sealed[0] == sealed[1]


def crooked(publics: dict[int, bytes], for_second: bytes) -> bytes:
    """Return a validly signed ballot whose wrap for voter 2 contains another key than that of the content."""
    entropy = counter("crooked")
    key, _, own = entropy(32), entropy(32), ballots.X25519PrivateKey.from_private_bytes(entropy(32))
    whole = bytearray(reproducible("crooked", seal, BITS, SLOT, publics, KEYS[0]))
    point = own.public_key().public_bytes_raw()
    assert point == bytes(whole[:32]) and key != for_second
    wrapping = ballots._wrapping_key(SLOT, 2, own, publics[2], point, publics[2])
    at = HEAD.size + WRAP.size
    whole[at : at + WRAP.size] = WRAP.pack(
        2, publics[2], ChaCha20Poly1305(wrapping).encrypt(NONCE, for_second, None)
    )
    held, end = bytes(whole[32:64]), HEAD.size + 2 * WRAP.size
    text = ballots.signed_text(SLOT, held, point, bytes(whole[HEAD.size : end]), bytes(whole[end:]))
    whole[64 : 64 + ballots.SIGNATURE] = ballots.sign(KEYS[0], text)
    return bytes(whole)


def test_a_voter_can_prove_that_its_wrapped_key_is_wrong(publics, cards):
    sealed = read(crooked(publics, bytes(32)))
    assert sealed.open(1, cards[1].private) == BITS
    with pytest.raises(UnopenableBallot):
        sealed.open(2, cards[2].private)
    assert sealed.proven_bad(2, publics[2], cards[2].private)


def test_bits_that_differ_from_the_commitment_do_not_open(publics, cards):
    """The ballot can be decrypted, but its bits do not match the signed hash."""
    whole = bytearray(seal(BITS, SLOT, publics, KEYS[0]))
    end = HEAD.size + 2 * WRAP.size
    whole[32:64] = hashlib.sha256(b"another ballot").digest()
    text = ballots.signed_text(
        SLOT,
        bytes(whole[32:64]),
        bytes(whole[:32]),
        bytes(whole[HEAD.size : end]),
        bytes(whole[end:]),
    )
    whole[64 : 64 + ballots.SIGNATURE] = ballots.sign(KEYS[0], text)
    sealed = read(bytes(whole))
    with pytest.raises(UnopenableBallot, match="differs from the commitment"):
        sealed.open(1, cards[1].private)
    assert sealed.proven_bad(1, publics[1], cards[1].private)


def test_a_voter_cannot_accuse_an_honest_sender(data, publics, cards):
    """The right key opens the ballot, and a wrong key does not belong to the card."""
    sealed = read(data)
    assert not sealed.proven_bad(1, publics[1], cards[1].private)
    assert not sealed.proven_bad(1, publics[1], cards[2].private)
    assert not sealed.proven_bad(1, publics[1], b"")


def test_a_card_that_the_ballot_does_not_name_proves_nothing(data, publics, cards):
    """Neither does the card of a voter for which the ballot was not sealed."""
    second, stranger = Card.make(SLOT, 1, KEYS[1]), Card.make(SLOT, 3, KEYS[3])
    assert not read(data).proven_bad(1, second.data[: ballots.KEY], second.private)
    assert not read(data).proven_bad(3, stranger.data[: ballots.KEY], stranger.private)


def test_the_signature_of_a_ballot_covers_the_card_that_it_names(data):
    at = HEAD.size + 4
    other = Card.make(SLOT, 1, KEYS[1]).data[: ballots.KEY]
    with pytest.raises(ProtocolError, match="not signed"):
        read(data[:at] + other + data[at + ballots.KEY :])


def test_a_ballot_that_names_a_voter_twice_is_refused(publics):
    """Two wraps for one voter could contain different keys."""
    whole = seal(BITS, SLOT, {1: publics[1]}, KEYS[0])
    at = HEAD.size + WRAP.size
    point, held, _, _ = HEAD.unpack_from(whole)
    wraps = whole[HEAD.size : at] * 2
    signature = ballots.sign(KEYS[0], ballots.signed_text(SLOT, held, point, wraps, whole[at:]))
    with pytest.raises(ProtocolError, match="twice"):
        read(HEAD.pack(point, held, signature, 2) + wraps + whole[at:])
