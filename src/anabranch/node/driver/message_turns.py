"""Turns in which the messages of a peer's links are handled, so that one link's flood holds up itself.

Not here: budgets and bans (`protocol.context.rate_limits_and_bans`), and unpacking (`connections`).
"""

from __future__ import annotations

import asyncio
import weakref
from collections import Counter, deque
from collections.abc import Callable

from anabranch.net.link import Link
from anabranch.protocol.context.rate_limits_and_bans import TokenBucket
from anabranch.protocol.messages.table import Allowance

#: Messages of a member's link that are handled before others'. A choice: in small runs honest links were seen
#: to bring 450 without payload in a second, where a microbatch takes 20 ms, and a fifth as many payloads.
PROMPT = Allowance(2560.0, 640.0)
#: Seconds for which messages are handled before the event loop does something else, and seconds for which
#: messages of links that are not prompt wait after each second that they took. Choices: far below what a
#: heartbeat may take, and a quarter of the loop's time.
TURN_S, REST = 0.002, 3.0
#: Longest such wait (s) after one turn. A choice: a process that is stopped for a minute in the middle of a
#: turn does not rest for three.
MOST_REST_S = 1.0
#: Messages of one link, and their bytes, that wait to be handled before it is read no further; a member's
#: single message may have more bytes. Choices: two seconds of a prompt link's, and a quarter of the largest
#: message without payload, as many strangers may have such links. A member's large payloads would take a
#: quarter longer if its link were held for each of them.
WAITING_MESSAGES, WAITING_BYTES = 1024, 256 << 10


class Turns:
    """Turns of links whose messages, with payload and without, wait to be handled, one message of each at a
    time. So one that sends as many as the protocol's budgets permit holds up itself, and not others.

    Links to members come first, up to PROMPT messages; what these send beyond that, and what strangers send,
    takes a part of the event loop's time (REST), however many they are. seated(peer): True if the peer is a
    member.
    """

    def __init__(self, seated: Callable[[str], bool]) -> None:
        self._seated = seated
        self._loop = asyncio.get_running_loop()
        #: Work that waits, by link; the link whose turn is next is first.
        self._members: dict[Link, deque[tuple[Callable[[], None], int]]] = {}
        self._strangers: dict[Link, deque[tuple[Callable[[], None], int]]] = {}
        self._bytes: Counter[Link] = Counter()
        """Bytes of messages that wait, by link."""
        self._held = set[Link]()
        """Links that are read no further until half of what may wait is handled."""
        self._buckets: weakref.WeakKeyDictionary[Link, TokenBucket] = weakref.WeakKeyDictionary()
        self._planned: asyncio.Handle | None = None
        self._soon = False
        """True if the planned turn comes without a rest."""
        self._rests_until = 0.0

    def put(self, link: Link, work: Callable[[], None], size_bytes: int = 0) -> None:
        """Call `work` once it is the link's turn, and all that was put for the link before is done.
        size_bytes: of the message that it handles, with its payload."""
        seated = link in self._members or self._seated(link.peer_id)
        if seated and link in self._strangers:
            self._members[link] = self._strangers.pop(link)  # a member since
        waiting = (self._members if seated else self._strangers).setdefault(link, deque())
        waiting.append((work, size_bytes))
        self._bytes[link] += size_bytes
        much = self._bytes[link] >= WAITING_BYTES and (len(waiting) > 1 or not seated)
        if much or len(waiting) >= WAITING_MESSAGES:
            self._hold(link)
        if self._planned is None or not self._soon:
            self._plan(seated and self._is_prompt(link))

    def _hold(self, link: Link) -> None:
        """Read the link no further, until `_took` lets it go on."""
        if link not in self._held:
            self._held.add(link)
            link.hold_messages(True)

    def _took(self, link: Link, left: int, size_bytes: int) -> None:
        """Note that a message of `size_bytes` of the link waits no more, and `left` still do: a link that is
        held goes on once at most half of what may wait is left."""
        self._bytes[link] -= size_bytes
        half = left <= WAITING_MESSAGES // 2 and self._bytes[link] <= WAITING_BYTES // 2
        if not left:
            del self._bytes[link]
        if half and link in self._held:
            self._held.discard(link)
            link.hold_messages(False)

    def _plan(self, soon: bool) -> None:
        """Plan the next turn, in place of one that comes after a rest. soon: without a rest."""
        if self._planned is not None and soon:
            self._planned.cancel()
            self._planned = None
        if self._planned is None and (soon or self._members or self._strangers):
            self._soon = soon
            rests_until = self._rests_until
            self._planned = (
                self._loop.call_soon(self._take) if soon else self._loop.call_at(rests_until, self._take)
            )

    def _is_prompt(self, link: Link) -> bool:
        """True if this link to a member has brought no more than PROMPT messages."""
        bucket = self._buckets.get(link)
        if bucket is None:
            bucket = self._buckets[link] = TokenBucket(PROMPT.burst, self._loop.time())
        bucket.fill(PROMPT.burst, PROMPT.per_s, self._loop.time())
        return bucket.left >= 1.0

    def _take(self) -> None:
        self._planned = None
        try:
            self._serve(prompt=True)
            began = self._loop.time()
            if began >= self._rests_until:
                self._serve(prompt=False)
                now = self._loop.time()
                self._rests_until = now + min(MOST_REST_S, REST * (now - began))
        finally:  # the handling of a message may have failed
            self._plan(any(map(self._is_prompt, self._members)))

    def _serve(self, prompt: bool) -> None:
        """Handle messages of links that are prompt, or of the others, for TURN_S seconds."""
        until = self._loop.time() + TURN_S
        while links := self._next(prompt):
            for link in links:
                if self._loop.time() >= until:
                    return
                if prompt:
                    self._buckets[link].left -= 1.0
                kept = self._members if link in self._members else self._strangers
                waiting = kept.pop(link)
                work, size_bytes = waiting.popleft()
                if waiting:
                    kept[link] = waiting  # last in turn
                self._took(link, len(waiting), size_bytes)
                work()

    def _next(self, prompt: bool) -> list[Link]:
        """Links of which a message waits that are prompt, or the others."""
        found = [link for link in self._members if self._is_prompt(link) == prompt]
        return found if prompt else [*found, *self._strangers]
