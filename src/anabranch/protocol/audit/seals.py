"""Seals of one iteration at one peer: signatures of the hashes of what it sends, and checks of what it
received.

A seal makes a transfer undeniable: a peer that sent other bytes than its receipt states is convicted by its
own signature.
"""

from __future__ import annotations

from anabranch.protocol.context.peer_context import PeerContext
from anabranch.protocol.messages.audit import Transfer

ACTIVATION, GRADIENT, PART, REDUCED = "activation", "gradient", "part", "reduced part"
#: Results of one microbatch, from different inputs, that a relay signs in an iteration. An honest sender has
#: one activation and one gradient of it; the others are for liars' that came first. A plain choice.
STATED_MAX = 4
#: Transfer of a gradient that has not come.
NOTHING = Transfer("", "", 0, b"")


#: Result of a relay: activation and gradient received, hashes of the activation and the gradient sent on ("":
#: not computed).
Stated = tuple[Transfer, Transfer, str, str]


def hashes_of(stated: Stated) -> tuple[str, ...]:
    """Hashes of the activation and the gradient from which a result was computed, then of its own activation
    and gradient ("": none)."""
    return stated[0].hash, stated[1].hash, *stated[2:]


def seal_text(run: str, base: str, stage: int, kind: str, name: str, payload_hash: str) -> bytes:
    """Text that a seal signs. base: hash of the log entry before the iteration. stage: stage of the sender.
    name: name of the microbatch, or of the reduce attempt and part."""
    return f"anabranch seal|{run}|{base}|{stage}|{kind}|{name}|{payload_hash}".encode()


class Seals:
    """Seals that this peer made and received in one iteration, by kind of payload and microbatch. Empty in a
    run without audits."""

    def __init__(self, ctx: PeerContext, base: str) -> None:
        self._ctx = ctx
        self._base = base
        self.on = ctx.run.settings.audits
        self.received: dict[tuple[str, int], Transfer] = {}
        self.computed: dict[tuple[str, int], str] = {}
        """(kind, microbatch) -> hash of what this peer computed."""
        self.stated: dict[int, list[Stated]] = {}
        """Microbatch -> all results of it that this relay may have sealed, units of others included."""
        self.statements = 0
        """Number of changes of `stated`."""
        self._seals: dict[tuple[str, int], bytes] = {}

    def arrived(self, kind: str, index: int, sender: str, stage: int, seal: bytes) -> None:
        """Note sender, stage and seal of a payload that arrived, in place of an earlier one; `check` looks at
        the seal once the hash is known. Nothing in a run without audits."""
        if self.on:
            self.received[kind, index] = Transfer("", sender, stage, seal)

    def check(self, kind: str, index: int, payload_hash: str) -> str | None:
        """Check the seal of the payload that arrived last for this microbatch, whose hash is `payload_hash`.
        Returns None if the seal is valid; else the reason, and the sender is marked as a forger, which gets
        no more work from this peer. A further input of a microbatch with STATED_MAX results is refused, too.
        None also if nothing arrived, and in a run without audits."""
        came = self.received.get((kind, index))
        if not self.on or came is None:
            return None
        if came.hash == payload_hash:
            return None
        if len(self.stated.get(index, ())) >= STATED_MAX:
            return f"one more input of microbatch {index}, of which {STATED_MAX} came already"
        text = seal_text(self._run, self._base, came.stage, kind, str(index), payload_hash)
        if not self._ctx.signer.verify(came.sender, text, came.seal):
            self._ctx.links.forged(came.sender)
            return f"the {kind} of microbatch {index} does not have the seal of its sender"
        self.received[kind, index] = Transfer(payload_hash, came.sender, came.stage, came.seal)
        return None

    def made(self, kind: str, index: int, payload_hash: str) -> None:
        """Note the hash of a payload of this kind (`ACTIVATION` or `GRADIENT`) that this peer computed for
        microbatch `index`: its seal signs it, and the receipt states it. Called only in runs with audits; at
        a relay the input must have come (KeyError else)."""
        self.computed[kind, index] = payload_hash
        self._seals.pop((kind, index), None)
        if self._ctx.run.stage:
            self._state(kind, index)

    def _state(self, kind: str, index: int) -> None:
        """Enter the newest result of a microbatch into `stated`. A result with a gradient replaces that of
        its forward alone; a known one is not entered again."""
        forward = self.received[ACTIVATION, index], NOTHING, self.computed[ACTIVATION, index], ""
        newest = forward
        if kind == GRADIENT:
            newest = forward[0], self.received[GRADIENT, index], forward[2], self.computed[GRADIENT, index]
        results, known = self.stated.setdefault(index, []), set[tuple[str, ...]]()
        for each in results:
            known |= {hashes_of(each), (each[0].hash, "", each[2], "")}
        if hashes_of(newest) not in known:
            results[:] = [each for each in results if hashes_of(each) != hashes_of(forward)] + [newest]
            self.statements += 1

    def seal(self, kind: str, index: int) -> bytes:
        """This peer's signature for a payload that it computed; b"" if it computed none, and in a run without
        audits."""
        payload_hash = self.computed.get((kind, index))
        if payload_hash is None:
            return b""
        if (kind, index) not in self._seals:
            self._seals[kind, index] = self.sign(kind, str(index), payload_hash)
        return self._seals[kind, index]

    def sign(self, kind: str, name: str, payload_hash: str) -> bytes:
        """This peer's signature for a payload with this hash that it made, or for a part of its own sum (kind
        `PART`) or of the reduced gradient that it summed (`REDUCED`); b"" in a run without audits. name:
        microbatch, or `part_name`."""
        text = seal_text(self._run, self._base, self._ctx.run.stage, kind, name, payload_hash)
        return self._ctx.signer.sign(text) if self.on else b""

    def part_is_sealed(self, kind: str, sender: str, name: str, payload_hash: str, seal: bytes) -> bool:
        """True if `seal` is the signature of `sender`, a replica of this peer's stage, for a part with this
        hash. name: `part_name`."""
        text = seal_text(self._run, self._base, self._ctx.run.stage, kind, name, payload_hash)
        return self._ctx.signer.verify(sender, text, seal)

    @property
    def _run(self) -> str:
        return self._ctx.run.settings.run


def part_name(term: int, number: int, part: int) -> str:
    """Name that a seal uses for a part of a reduce attempt."""
    return f"{term}.{number}.{part}"
