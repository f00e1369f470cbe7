"""The server's part in rounds of sealed ballots: it passes on what it cannot read, checks every signature, and judges complaints.

docs/ballots.md is the protocol; clients/sealed_election.py the other half.
"""

import secrets
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from ..codecs.update import Dense
from ..errors import FrameError, ProtocolError
from ..keys.keyring import Ring, verifier
from ..privacy.ballots import CARD, KEY, Sealed, Slot, card_key, refuse_low_order
from .announcements import ATTEMPT, FEWEST, TERMS, too_few, with_ballots
from .exchange import Accepted
from .local_election import BALLOTS, TALLY, Row
from .local_election import ROW as TOLD_ROW
from .sealed_voter import CARDS, KEY_OF, NO_CARD, PROOF, PROOF_OF, with_complaints

LETTER = Dense(np.empty(0, np.float32))  # what a frame says to a server that only passes it on


class Sealing:
    """The cards and ballots of a round. The attempt is another one whenever a server starts, so that a round repeated shares no key."""

    def __init__(self, ring: Ring):
        self.ring, self.attempt = ring, secrets.token_hex(16)
        self.options = ""  # of the run, as clients are told them
        self.begin(0, {}, 0, "")

    def begin(self, round: int, rows: Mapping[int, Row], numel: int, terms: str) -> None:
        self.round, self.rows, self.numel, self.terms = round, rows, numel, terms
        self.cards: dict[tuple[int, int], bytes] = {}  # by voter and sender
        self.ballots: dict[int, tuple[Sealed, bytes]] = {}  # by sender
        self.proofs: dict[int, bytes] = {}  # by the sender that they convict
        self.there: set[int] = set()  # who takes part after the cards
        self.unknown: dict[int, set[int]] = {}  # by voter, of whom it has another key, or none
        self._keys: dict[int, bytes] = {}

    def announce(
        self, phase: str, client: int, before: Mapping[str, Sequence[Accepted]]
    ) -> dict[str, bytes]:
        told, row = {ATTEMPT: self.attempt.encode(), TERMS: self.terms.encode()}, self.rows[client]
        if phase == CARDS:
            voters = {voter for voter, other in self.rows.items() if client in other.senders}
            concerned = {client, *voters} | (set(row.senders) & self.rows.keys())
            return (
                told
                | {TOLD_ROW: row.pack()}
                | {f"{KEY_OF}{who}": self.key(who) for who in sorted(concerned)}
            )
        if phase == BALLOTS:
            self.there = {a.client for a in before[CARDS]}
            return told | {
                str(v): card
                for (v, s), card in sorted(self.cards.items())
                if s == client and v in self.there
            }
        if phase == TALLY:
            sent = {a.client for a in before[BALLOTS]}
            return told | {str(s): self.ballots[s][1] for s in row.senders if s in sent}
        mine = {s: proof for s, proof in sorted(self.proofs.items()) if s in row.senders}
        witnesses = {PROOF.unpack_from(proof)[0] for proof in mine.values()}
        return (
            told
            | {f"{KEY_OF}{v}": self.key(v) for v in sorted(witnesses)}
            | {f"{PROOF_OF}{s}": p for s, p in mine.items()}
        )

    def key(self, client: int) -> bytes:
        """A client's public key, the same as long as the round lasts."""
        if client not in self._keys:
            self._keys[client] = self.ring.key(client)
        return self._keys[client]

    def strangers(self, there: Collection[int], liars: int) -> dict[int, str]:
        """Of those who sent cards, who is left out since not all know each other's keys, and why.

        Whom more voters do not know than may lie, an honest one does not know: it is left out itself. Else those are who do not know it.
        """
        times = Counter(sender for voter in there for sender in self.unknown.get(voter, ()))
        unknown = {sender for sender, count in times.items() if count > liars and sender in there}
        left = {
            sender: f"{times[sender]} voters have another key of it, from earlier in this run or in their --roster, or none; a client "
            "whose key is renewed takes part again in the next run"
            for sender in unknown
        }
        for voter in sorted(set(there) - unknown):
            if alone := (self.unknown.get(voter, set()) & set(there)) - unknown:
                left[voter] = (
                    f"it has another key of client {min(alone)} than others, from earlier in this run or in its --roster, or "
                    "none; give it the newest list, or let it take part in the next run"
                )
        return left

    def too_few(self, sent: Collection[int]) -> str:
        """Why nobody votes on the ballots of these, but for those that are proven to be bad; "" where they do."""
        row = next(iter(self.rows.values()))
        there = with_ballots(row, set(sent) - self.proofs.keys())
        return too_few(there) if there < FEWEST else ""

    def vet(self, phase: str, client: int, frame: bytes) -> None:
        """Look at what can be seen from outside. Raises FrameError for what nobody sends who is honest."""
        try:
            if phase == CARDS:
                self._take_cards(client, frame)
            elif phase == BALLOTS:
                self._take_ballot(client, frame)
            else:
                with_complaints(frame)
        except ProtocolError as error:
            raise FrameError(str(error)) from error

    def judge(self, answers: Sequence[Accepted]) -> dict[int, str]:
        """Who is proven to lie by the complaints beside these votes, and how: a sender, or a voter whose complaint does not hold."""
        convicted: dict[int, str] = {}
        for answer in answers:
            voter, complaints = answer.client, with_complaints(answer.frame)[0]
            if len(complaints) > len(self.rows[voter].senders):
                convicted[voter] = (
                    f"it complained {len(complaints)} times of {len(self.rows[voter].senders)} ballots; it is left out"
                )
                continue
            for sender, private in complaints:
                card, ballot = self.cards.get((voter, sender)), self.ballots.get(sender)
                public = card and card_key(
                    card, self._slot(sender), voter, verifier(self.key(voter))
                )
                if card and ballot and ballot[0].proven_bad(voter, public, private):
                    convicted.setdefault(
                        sender,
                        f"its ballot does not open for voter {voter}, as that one proved; it is left out",
                    )
                    self.proofs.setdefault(sender, PROOF.pack(voter, card, private) + ballot[1])
                else:
                    convicted[voter] = (
                        f"it complained of the ballot of client {sender}, which it could open; it is left out"
                    )
        return convicted

    def _take_cards(self, voter: int, frame: bytes) -> None:
        senders = self.rows[voter].senders
        if len(frame) != CARD * len(senders):
            raise FrameError(f"{len(frame)} bytes are not the cards for {len(senders)} ballots")
        cards = {
            (voter, sender): frame[i * CARD : (i + 1) * CARD] for i, sender in enumerate(senders)
        }
        made = {pair: card for pair, card in cards.items() if card != NO_CARD}
        for (_, sender), card in made.items():
            refuse_low_order(card_key(card, self._slot(sender), voter, verifier(self.key(voter))))
        self.cards |= made
        self.unknown[voter] = {sender for _, sender in cards.keys() - made.keys()}

    def _take_ballot(self, sender: int, frame: bytes) -> None:
        sealed = Sealed.read(frame, self._slot(sender), verifier(self.key(sender)))
        if sealed.size != (self.numel + 7) // 8:
            raise FrameError(
                f"a ballot of {sealed.size} bytes is not one of {self.numel} coordinates"
            )
        passed_on = {
            voter: card[:KEY]
            for (voter, other), card in self.cards.items()
            if other == sender and voter in self.there
        }
        if {voter: public for voter, (public, _) in sealed.wraps.items()} != passed_on:
            raise FrameError(
                "the ballot is sealed for others than those whose cards were passed on"
            )
        self.ballots[sender] = sealed, frame

    def _slot(self, sender: int) -> Slot:
        return Slot(self.ring.run, self.attempt, self.round, sender, self.terms)
