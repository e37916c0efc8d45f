"""Buffer of messages about an iteration that this peer has not opened yet, within a budget for each
sender, and one for all strangers together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from anabranch.protocol.interface.tasks import Payload
from anabranch.protocol.messages import FencedMessage, ReducedPart, ReducePart, encode
from anabranch.protocol.messages.table import PER_CONNECTION

#: Most messages kept for each sender, and most of them with a payload that is no part of a reduce: enough for
#: a neighbour's credits and requests of one iteration, and a few tensors. Also most payloads of any kind of a
#: sender that is no member: it may be anybody who has a ticket.
EARLY_MAX, EARLY_PAYLOADS_MAX = 256, 4
#: Most parts of reduces kept for each sender: as many of a sum as an attempt may have (`partial_sums.PARTS`),
#: and as many reduced ones. Parts that were refused would not be sent again. Numbers from half of it on are
#: those of an even reduce of a large stage, where a peer sends another one part of each kind: they count as
#: other payloads do.
EARLY_PARTS_MAX = 32
#: Most memory of the payloads kept for each sender, in largest payloads of the run (the limit of the links):
#: that of EARLY_PAYLOADS_MAX, and of the parts of an attempt, a stage's sum and its reduced gradient.
EARLY_LARGEST = EARLY_PAYLOADS_MAX + 2
#: Iterations after the last commit from which on a message is not kept, and from which on it is refused as
#: implausible.
EARLY_AHEAD, FAR_AHEAD = 3, 1000

#: Most bytes of the messages kept for each sender, encoded and without payloads: EARLY_MAX of 1 KiB. A
#: choice: credits and requests take about 100 bytes; decoded, a message may take thirty times its bytes.
EARLY_BYTES = EARLY_MAX << 10
#: Most of all senders together that are no members, in bytes and in largest payloads: as of four such
#: senders. A choice: keys are free, few peers are admitted at the same moment, and each of them asks again.
STRANGERS_BYTES, STRANGERS_LARGEST = 4 * EARLY_BYTES, 4 * EARLY_PAYLOADS_MAX

Kept = tuple[str, FencedMessage, object, float]
Part = ReducePart | ReducedPart


@dataclass(frozen=True)
class _Entry:
    """Stored message. number: in order of arrival from all senders. share: memory of the payload, in largest
    ones. size_bytes: of the encoded message, without its payload."""

    number: int
    message: FencedMessage
    payload: Payload
    share: float
    size_bytes: int


@dataclass
class _Sender:
    """Messages kept of one sender. member: True if it was one when it sent the last. entries: in order of
    arrival. counts: three numbers of messages: all; those with a payload, without the parts of a reduce that
    have low numbers (below half of EARLY_PARTS_MAX); those parts. share, size_bytes: sums of those of the
    entries."""

    member: bool
    entries: list[_Entry] = field(default_factory=list)
    counts: list[int] = field(default_factory=lambda: [0, 0, 0])
    share: float = 0.0
    size_bytes: int = 0

    def add(self, entry: _Entry) -> None:
        self.entries.append(entry)
        self._count(entry)

    def keep_only(self, entries: list[_Entry]) -> None:
        """Keep these entries of the sender's, and drop all others."""
        self.entries, self.counts, self.share, self.size_bytes = entries, [0, 0, 0], 0.0, 0
        for entry in entries:
            self._count(entry)

    def _count(self, entry: _Entry) -> None:
        self.counts[0] += 1
        if of_kind := _of_kind(entry.message, entry.payload)[0]:
            self.counts[of_kind] += 1
        self.share += entry.share
        self.size_bytes += entry.size_bytes


class EarlyBuffer:
    """Buffer of messages that are too early for this peer, about iterations that it has not opened, within a
    budget for each sender. They come out in order of arrival, each as (sender, message, payload, the
    payload's memory in largest payloads)."""

    def __init__(self) -> None:
        self._senders: dict[str, _Sender] = {}
        self._number = 0

    def __len__(self) -> int:
        if not self._senders:
            return 0
        return sum(len(sender.entries) for sender in self._senders.values())

    def keep(
        self,
        peer: str,
        message: FencedMessage,
        payload: object,
        ahead: int,
        member: bool = True,
        share: float = 0.0,
    ) -> str | None:
        """Store a message about an iteration that is not open yet; returns the reason if it is refused:
        beyond FAR_AHEAD, or its sender's budget. ahead: number of iterations after the last committed one.
        One beyond EARLY_AHEAD, a part of an older reduce attempt than is stored, or a part that is stored
        already, is dropped without refusal; a part of a newer attempt replaces those of older ones. member:
        True if the sender is a member of the run; all others together have a budget, too: beyond it all
        messages of the one with the most are dropped, be it this sender. share: memory of the payload, in
        largest ones."""
        if ahead > FAR_AHEAD:
            return f"about an iteration {ahead} ahead of the last commit"
        if ahead > EARLY_AHEAD:
            return None
        sender = self._senders.setdefault(peer, _Sender(member))
        sender.member = member
        if payload is not None and isinstance(message, Part) and not _newest(sender, message):
            return None
        count, size_bytes = sender.counts, len(encode(message))
        of_kind, most = _of_kind(message, payload)
        crowd = of_kind and not member and count[1] + count[2] >= EARLY_PAYLOADS_MAX
        full = bool(of_kind) and share + sender.share > EARLY_LARGEST
        full |= size_bytes + sender.size_bytes > EARLY_BYTES
        if crowd or full or count[0] >= EARLY_MAX or (of_kind and count[of_kind] >= most):
            return "too much about a later iteration"
        self._number += 1
        sender.add(_Entry(self._number, message, payload, share, size_bytes))
        if not member:
            self._make_room()
        return None

    def _make_room(self) -> None:
        """Drop what strangers sent, all of one with the most first, until the others' is within the budget of
        all: an honest stranger has little in this buffer."""
        strangers = {peer: sender for peer, sender in self._senders.items() if not sender.member}
        size_bytes = sum(sender.size_bytes for sender in strangers.values())
        share = sum(sender.share for sender in strangers.values())
        while size_bytes > STRANGERS_BYTES or share > STRANGERS_LARGEST:
            by_share = share > STRANGERS_LARGEST
            most = max(strangers, key=lambda p: strangers[p].share if by_share else strangers[p].size_bytes)
            gone = strangers.pop(most)
            size_bytes, share = size_bytes - gone.size_bytes, share - gone.share
            del self._senders[most]

    def forget(self, void: Callable[[FencedMessage], bool]) -> None:
        """Drop the messages for which `void` returns True."""
        for peer in list(self._senders):
            self._drop(peer, void)

    def link_down(self, peer: str) -> None:
        """Drop the messages of a disconnected peer that are valid only on their connection (credits), and all
        of one that was no member: keys are free. Others stay."""
        if peer in self._senders:
            stranger = not self._senders[peer].member
            self._drop(peer, lambda message: stranger or type(message) in PER_CONNECTION)

    def _drop(self, peer: str, void: Callable[[FencedMessage], bool]) -> None:
        sender = self._senders[peer]
        sender.keep_only([entry for entry in sender.entries if not void(entry.message)])
        if not sender.entries:
            del self._senders[peer]

    def take(self) -> list[Kept]:
        """Remove and return all stored messages, in order of arrival."""
        kept, self._senders = self._kept, {}
        return kept

    @property
    def _kept(self) -> list[Kept]:
        """All stored messages, in order of arrival."""
        entries = ((entry, peer) for peer, sender in self._senders.items() for entry in sender.entries)
        ordered = sorted(entries, key=lambda each: each[0].number)
        return [(peer, entry.message, entry.payload, entry.share) for entry, peer in ordered]


def _newest(sender: _Sender, part: Part) -> bool:
    """Drop the sender's parts of older attempts of the same reduce; False if parts of a newer attempt, or
    this one, are stored. A replica that is behind receives the same parts again with each attempt."""
    stay: list[_Entry] = []
    for entry in sender.entries:
        was = entry.message
        if entry.payload is not None and isinstance(was, Part):
            alike = (was.fence, was.stage) == (part.fence, part.stage)
            if alike and (was.attempt > part.attempt or was == part):
                return False
            if alike and was.attempt < part.attempt:
                continue
        stay.append(entry)
    if len(stay) < len(sender.entries):
        sender.keep_only(stay)
    return True


def _of_kind(message: FencedMessage, payload: object) -> tuple[int, int]:
    """(index of the message's kind in `_Sender.counts`, most messages of that kind that are kept of one
    sender); (0, EARLY_MAX) without a payload."""
    if payload is None:
        return 0, EARLY_MAX
    few = not isinstance(message, Part) or message.part >= EARLY_PARTS_MAX // 2
    return (1, EARLY_PAYLOADS_MAX) if few else (2, EARLY_PARTS_MAX)
