"""Open links of a transport: their making, checks for progress, and orderly end. Not here: connections."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from anabranch.background import background
from anabranch.net import errors
from anabranch.net.connection_limits import STALL_CHECKS
from anabranch.net.lane import Lane
from anabranch.net.link import LineBuckets, Link, Way
from anabranch.net.resource_manager import Reservation
from anabranch.net.tcp.endpoint import Endpoint
from anabranch.net.ticket import Grant, MembershipCertificate


class LinkTable:
    """Open links of a transport. line: caps of the payload rate, which all links share. on_offer: called with
    the link and token of each circuit that a carrier offers; only a carrier that this side dialled directly
    may offer one."""

    def __init__(self, end: Endpoint, line: LineBuckets, on_offer: Callable[[Link, bytes], None]) -> None:
        self.line = line
        self.links: set[Link] = set()
        self._end = end
        self._on_offer = on_offer
        self._closing: set[asyncio.Task[None]] = set()
        self._progress_check: asyncio.TimerHandle | None = None

    def limit_payloads(self, max_payload_bytes: int) -> None:
        """Change the largest payload (bytes) that each link open now accepts (`Link.limit_payloads`). Later
        links have the endpoint's limits."""
        for link in self.links:
            link.limit_payloads(max_payload_bytes)

    def make(
        self,
        peer_id: str,
        incarnation: int,
        credential: Grant | MembershipCertificate | None,
        lanes: tuple[Lane, Lane],
        reservation: Reservation,
        way: Way,
    ) -> Link:
        """Make a link of a control and a bulk connection (`lanes`, in this order), and keep it in this table;
        it reads nothing until it is started. Links to lower incarnations of the peer are closed, one to the
        same incarnation is not. reservation: charged with the link's payloads."""
        for older in list(self.links):
            if older.peer_id == peer_id and older.incarnation < incarnation:
                older.close(f"incarnation {incarnation} of this peer has taken over")
        link = Link(
            peer_id=peer_id,
            incarnation=incarnation,
            credential=credential,
            control=lanes[0],
            bulk=lanes[1],
            limits=self._end.limits,
            on_gone=self._gone,
            reservation=reservation,
            way=way,
            line=self.line,
            on_offer=self._on_offer if way.address is not None and not way.via and not way.iroh else None,
        )
        self.links.add(link)
        self._plan_progress_check()
        return link

    def dialled_by(self, peer: str) -> Link | None:
        """Open link that a peer dialled directly, without carrier or iroh; None: there is none. A carrier
        offers the peer its circuits over this link."""
        for link in self.links:
            open_and_theirs = link.closed_reason is None and link.way.address is None
            if link.peer_id == peer and open_and_theirs and not link.way.via and not link.way.iroh:
                return link
        return None

    async def close(self, reason: str) -> None:
        """Close every link with a reason for its peer; returns once the links are gone."""
        for link in list(self.links):
            link.close(reason)
        if self._closing:
            await asyncio.wait(self._closing)
        if self._progress_check is not None:
            self._progress_check.cancel()

    def _plan_progress_check(self) -> None:
        if self._progress_check is None:
            later = asyncio.get_running_loop().call_later
            self._progress_check = later(self._end.limits.stall_s / STALL_CHECKS, self._check_progress)

    def _check_progress(self) -> None:
        self._progress_check = None
        for link in list(self.links):
            link.check_progress()
        if self.links:
            self._plan_progress_check()

    def _gone(self, link: Link) -> None:
        self.links.discard(link)
        if link.broke_framing:
            self._end.refusals[errors.FRAME] += 1
        task = background(self._drop_after_closing(link))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _drop_after_closing(self, link: Link) -> None:
        """Let a closing link send its reason for at most `shutdown_timeout_s`, then drop its connections."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(link.wait_gone(), self._end.limits.shutdown_timeout_s)
        link.abort()
