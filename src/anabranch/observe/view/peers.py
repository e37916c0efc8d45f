"""Peers of a run as shown to people: identity, condition and contribution."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from anabranch.observe import events as log
from anabranch.observe.view.tracked_state import TrackedState
from anabranch.observe.wording import ID_DIGITS, NAME_MAX, plain, with_names, without_addresses

#: Most peers that are kept, to bound memory; beyond, those gone longest are forgotten.
NODES_MAX = 4096
#: Committed steps whose shares a rollback can still revert.
STEPS_KEPT = 512
#: Most round trips shown per peer, the shortest ones.
TRIPS_MAX = 64

#: Ways of a link that is neither direct nor carried: iroh over UDP, and through iroh's relay.
WAYS = ("punched", "relayed")

#: States of peers that take part. "lost": a neighbour gets no answer; the log has not removed the peer yet.
PRESENT = ("joining", "active", "suspect", "lost")
#: Role of a member that only audits.
AUDITOR = "auditor"
#: States of peers that take part no longer.
GONE = ("left", "crashed", "moved")


class Peers:
    """Peers of a run as page and terminal show them, kept in the section "nodes" of a `View`'s state: key (a
    small number as text) -> fields.

    Fields: id, name, region, role, stage, state (`PRESENT` or `GONE`), why (reason of the state), since (unix
    s of the state), joined (unix s; 0 while gone), served (s before `joined`), capacity (microbatches),
    forward_s, backward_s (of a microbatch; 0 until the first `Vitals` since it joined), trips (round trips,
    key of the other peer -> ms), ways (key -> way of a link that is not direct: "punched", "relayed", or the
    key of its carrier), share (microbatches of the last step, or slots of the last round), total (those of
    all committed steps), busy (fraction of an iteration spent computing), sent (bytes), right, wrong (audits
    that found its work the same, and different or withheld), program (version).
    """

    def __init__(self, state: TrackedState) -> None:
        self._state = state
        self._keys: dict[str, str] = {}
        self._names: dict[str, str] = {}
        self._suspected_by: dict[str, set[str]] = {}
        self._shares: deque[tuple[int, dict[str, float]]] = deque(maxlen=STEPS_KEPT)
        self._working: set[str] = set()

    def key(self, peer: str) -> str:
        """Key of the record of the peer with id `peer`. A missing record is created, and if there are
        NODES_MAX already, 256 others are dropped: those of peers that are gone longest, or, if none is gone,
        those whose state is oldest."""
        if peer not in self._keys:
            self._make_room()
            self._keys[peer] = key = str(int(next(reversed(self._keys.values()), "0")) + 1)
            self._set(
                peer, id=plain(peer, 64), name=plain(peer, 8), region="", role="", stage=-1,
                state="joining", why="", since=0.0, joined=0.0, served=0.0, capacity=0, forward_s=0.0,
                backward_s=0.0, trips={}, ways={}, share=0.0, total=0.0, busy=0.0, sent=0, right=0,
                wrong=0, program="",
            )  # fmt: skip
            return key
        return self._keys[peer]

    def get(self, peer: str) -> Mapping[str, Any]:
        return self._state.get("nodes", self._keys.get(peer, ""))

    def called(self, peer: str) -> str:
        """Name of a peer in sentences: "ada in London", without a region "ada". Of an unknown peer it is the
        beginning of the id, for "" it is "a peer"."""
        node = self.get(peer)
        if not node:
            return plain(peer, 8) or "a peer"
        return f"{node['name']} in {node['region']}" if node["region"] else str(node["name"])

    def present(self, stage: int | None = None) -> int:
        """Number of peers that take part, admitted and not gone: at one stage, or in all (None)."""
        nodes = self._state.sections.get("nodes", {}).values()
        return sum(node["state"] in PRESENT and stage in (None, node["stage"]) for node in nodes)

    def serving(self, stage: int) -> int:
        """Number of replicas of a stage that are active or merely suspected, without auditors."""
        nodes = self._state.sections.get("nodes", {}).values()
        here = [node for node in nodes if node["stage"] == stage and node["role"] != AUDITOR]
        return sum(node["state"] in ("active", "suspect") for node in here)

    def with_names(self, text: str) -> str:
        """Copy of `text` in which the first ID_DIGITS digits of known peers' ids are replaced by the peers'
        names."""
        return with_names(text, self._names)

    # --- membership ------------------------------------------------------------------------------

    def joined(self, event: log.PeerJoined) -> None:
        self.key(event.subject)
        self._suspected_by.pop(event.subject, None)
        name = plain(event.name, NAME_MAX) or plain(event.subject, 8)
        self._names[event.subject[:ID_DIGITS]] = name
        self._set(
            event.subject, name=name, region=plain(event.region, NAME_MAX), role=plain(event.role, NAME_MAX),
            stage=event.stage, state="joining", why="downloading its state", since=event.time,
            joined=event.time, capacity=event.capacity, forward_s=0.0, backward_s=0.0, share=0.0,
        )  # fmt: skip
        if event.role == AUDITOR:
            self._turn(event.subject, "active", "it only computes others' work again", event.time)

    def active(self, event: log.PeerActive) -> None:
        self.key(event.subject)
        joined = self.get(event.subject)["joined"] or event.time
        self._set(event.subject, stage=event.stage, state="active", why="", since=event.time, joined=joined)

    def removed(self, event: log.PeerRemoved) -> str:
        """Record a removal; returns the peer's new state: "left", "moved" or "crashed"."""
        self.key(event.subject)
        node = self.get(event.subject)
        reason = without_addresses(plain(event.reason))
        left = reason.startswith(("left", "the run was taken up again"))
        state = "left" if left else "moved" if reason.startswith("moves to stage") else "crashed"
        served = node["served"] + (max(0.0, event.time - node["joined"]) if node["joined"] else 0.0)
        self._suspected_by.pop(event.subject, None)
        self._set(
            event.subject, state=state, why=reason, since=event.time, joined=0.0, served=served, share=0.0,
            busy=0.0,
        )  # fmt: skip
        return state

    def suspected(self, event: log.Suspected, says: str = "") -> None:
        """Record a peer's verdict on another one, whose state it may change; nothing if that one is unknown
        or gone. A suspected or lost peer is active again at a verdict after which nobody suspects it. says:
        begin of the text for the reason, which names a stranger that gave it ("": none)."""
        node = self.get(event.subject)
        if not node or node["state"] not in PRESENT:
            return
        observers = self._suspected_by.setdefault(event.subject, set())
        if event.verdict == "refuted":
            observers.discard(event.peer)
        elif event.verdict in ("suspected", "gone"):
            observers.add(event.peer)
        if observers and event.verdict != "refuted":
            self._turn(event.subject, "suspect", says + without_addresses(plain(event.reason)), event.time)
        elif not observers and node["state"] in ("suspect", "lost"):
            self._turn(event.subject, "active", "", event.time)

    def lost(self, peer: str, reason: str, time: float) -> bool:
        """Record that a microbatch of `peer` was sent to another replica, for a `reason`: if its state is
        "active", it is "lost" from `time` (unix s) on, which is still one of PRESENT, and True is returned.
        Nothing is recorded for a peer in another state, or an unknown one."""
        node = self.get(peer)
        if not node or node["state"] != "active":
            return False
        self._turn(peer, "lost", without_addresses(plain(reason)), time)
        return True

    def _turn(self, peer: str, state: str, why: str, time: float) -> None:
        if self.get(peer)["state"] != state:
            self._set(peer, since=time)
        self._set(peer, state=state, why=why)

    # --- contribution ----------------------------------------------------------------------------

    def stepped(self, t: int, shares: Mapping[str, float], time: float) -> None:
        """Record each peer's share (microbatches) of committed step t; the share of peers that computed
        nothing of it becomes 0. A step that is taken again replaces the shares of its former commit. A lost
        or joining peer with a share is active from then on. time: unix seconds."""
        self.subtract_shares_after(t - 1)
        known = {peer: share for peer, share in shares.items() if self.key(peer)}
        self._shares.append((t, known))
        for peer, share in known.items():
            node = self.get(peer)
            self._set(peer, share=share, total=node["total"] + share)
            if node["state"] in ("lost", "joining"):  # its contribution counted: it is present
                self._turn(peer, "active", "", time)
        working = set(known)
        for peer in self._working - working:
            self._set(peer, share=0.0)
        self._working = working

    def subtract_shares_after(self, t: int) -> None:
        """Subtract the shares of steps after t from the peers' totals, as a rollback made them void. Only the
        last STEPS_KEPT steps are known."""
        while self._shares and self._shares[-1][0] > t:
            _, shares = self._shares.pop()
            for peer, share in shares.items():
                if peer in self._keys:
                    self._set(peer, total=max(0.0, self.get(peer)["total"] - share))

    def audited(self, event: log.Audit) -> None:
        """Count an auditor's finding about a known peer as right or wrong work; findings of other kinds are
        not counted."""
        node = self.get(event.subject)
        if node and event.verdict == "same":
            self._set(event.subject, right=node["right"] + 1)
        elif node and event.verdict in ("different", "withheld"):
            self._set(event.subject, wrong=node["wrong"] + 1)

    def timed(self, event: log.Timing) -> None:
        key = self._keys.get(event.peer)
        if key is not None:
            more = max(0, event.bytes_activations + event.bytes_reduce)
            sent = self._state.get("nodes", key)["sent"] + more
            busy = min(1.0, computing_s(event) / event.span_s) if event.span_s > 0 else 0.0
            self._state.set("nodes", key, busy=round(busy, 2), sent=sent)

    def vitals(self, event: log.Vitals) -> None:
        if event.peer not in self._keys:
            return
        trips = sorted(event.trips.items(), key=lambda trip: trip[1])[:TRIPS_MAX]
        self._set(
            event.peer, capacity=event.capacity, forward_s=round(event.forward_s, 6),
            backward_s=round(event.backward_s, 6), program=plain(event.program, NAME_MAX),
            trips={self._keys[peer]: round(1000 * s, 2) for peer, s in trips if peer in self._keys},
            ways={
                self._keys[peer]: way if way in WAYS else self._keys.get(way, "")
                for peer, way in list(event.ways.items())[:TRIPS_MAX]
                if peer in self._keys
            },
        )  # fmt: skip

    # --- inside ----------------------------------------------------------------------------------

    def _set(self, peer: str, **fields: Any) -> None:
        self._state.set("nodes", self._keys[peer], **fields)

    def _make_room(self) -> None:
        if len(self._keys) < NODES_MAX:
            return
        gone = [peer for peer in self._keys if self.get(peer).get("state") in GONE]
        for peer in sorted(gone or list(self._keys), key=lambda p: self.get(p).get("since", 0.0))[:256]:
            self._state.drop("nodes", self._keys.pop(peer))
            self._names.pop(peer[:ID_DIGITS], None)


def computing_s(event: log.Timing) -> float:
    """Seconds for which a peer computed between its previous step and this one, by its report: passes, reduce
    and optimizer step, without waiting."""
    passes = event.forward_s + event.input_gradient_s + event.weight_gradient_s
    return passes + event.reduce_s + event.apply_s
