"""Buffer of messages about an iteration that this peer has not opened yet, within a budget for each
sender."""

from __future__ import annotations

from collections.abc import Callable

from anabranch.protocol.messages import FencedMessage, ReducedPart, ReducePart
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

Kept = tuple[str, FencedMessage, object, float]
Part = ReducePart | ReducedPart


class EarlyBuffer:
    """Messages that are too early for this peer, about iterations that it has not opened, in order of
    arrival: (sender, message, payload, its memory in largest payloads)."""

    def __init__(self) -> None:
        self._kept: list[Kept] = []
        self._by_peer: dict[str, list[int]] = {}
        """Sender -> number of its messages; of those with a payload: others than parts with parts of high
        numbers, other parts."""

    def __len__(self) -> int:
        return len(self._kept)

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
        True if the sender is a member of the run. share: memory of the payload, in largest ones."""
        if ahead > FAR_AHEAD:
            return f"about an iteration {ahead} ahead of the last commit"
        if ahead > EARLY_AHEAD:
            return None
        if payload is not None and isinstance(message, Part) and not self._newest(peer, message):
            return None
        count = self._by_peer.setdefault(peer, [0, 0, 0])
        of_kind, most = _of_kind(message, payload)
        crowd = of_kind and not member and count[1] + count[2] >= EARLY_PAYLOADS_MAX
        full = of_kind and share + sum(s for sender, *_, s in self._kept if sender == peer) > EARLY_LARGEST
        if crowd or full or count[0] >= EARLY_MAX or (of_kind and count[of_kind] >= most):
            return "too much about a later iteration"
        count[0] += 1
        if of_kind:
            count[of_kind] += 1
        self._kept.append((peer, message, payload, share))
        return None

    def _newest(self, peer: str, part: Part) -> bool:
        """Drop the sender's parts of older attempts of the same reduce; False if parts of a newer attempt, or
        this one, are stored. A replica that is behind receives the same parts again with each attempt."""
        stay: list[Kept] = []
        gone: list[Part] = []
        for kept in self._kept:
            sender, was, payload, _ = kept
            if sender == peer and payload is not None and isinstance(was, Part):
                alike = (was.fence, was.stage) == (part.fence, part.stage)
                if alike and (was.attempt > part.attempt or was == part):
                    return False
                if alike and was.attempt < part.attempt:
                    gone.append(was)
                    continue
            stay.append(kept)
        self._kept = stay
        for was in gone:
            self._by_peer[peer][0] -= 1
            self._by_peer[peer][_of_kind(was, was)[0]] -= 1
        return True

    def forget(self, void: Callable[[FencedMessage], bool]) -> None:
        """Drop the messages for which `void` returns True."""
        self._drop(lambda peer, message: void(message))

    def link_down(self, sender: str) -> None:
        """Drop the messages of a disconnected peer that are valid only on their connection (credits); its
        other ones stay."""
        if sender in self._by_peer:
            self._drop(lambda peer, message: peer == sender and type(message) in PER_CONNECTION)

    def _drop(self, void: Callable[[str, FencedMessage], bool]) -> None:
        for peer, message, payload, share in self.take():
            if not void(peer, message):
                self.keep(peer, message, payload, 0, share=share)

    def take(self) -> list[Kept]:
        """Remove and return all stored messages, in order of arrival."""
        kept, self._kept = self._kept, []
        self._by_peer.clear()
        return kept


def _of_kind(message: FencedMessage, payload: object) -> tuple[int, int]:
    """(index of its count in those of its sender, most of its kind) of a message with a payload; (0, _) if it
    has none."""
    if payload is None:
        return 0, EARLY_MAX
    few = not isinstance(message, Part) or message.part >= EARLY_PARTS_MAX // 2
    return (1, EARLY_PAYLOADS_MAX) if few else (2, EARLY_PARTS_MAX)
