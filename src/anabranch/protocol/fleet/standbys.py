"""Standbys: replicas that get no microbatches while others of their stage are present, because their slow
access lines would lengthen the reduce, or because they hold up steps.

A replica with a single microbatch must send its whole gradient sum in the reduce; one without any sends
nothing, receives the reduced gradient, and can replace a replica that fails (R7). Once per iteration the
leader chooses the standbys with which an iteration is shortest (`placement.cost_model`) and announces them to
all members. The choice affects time only: a standby grants credits like any replica, and a sender without
another replica in reach sends to it at once.

A relay that takes microbatches, is heard, and gives nothing back is found by each sender for itself
(`pipeline.repair`), and each waits for it. The coordinator sees the whole: a step was late, and the relay
owns nothing of it. It becomes a standby for so long that steps wait for it in a small share of the time, and
keeps its seat: a machine that hangs for a moment does the same.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from anabranch.counter_rng import CounterRng
from anabranch.protocol.context.run_view import MOST_S
from anabranch.protocol.messages import Spared
from anabranch.protocol.placement.cost_model import Deal, cost_model_of
from anabranch.protocol.placement.rates import SEARCHED
from anabranch.protocol.telemetry.link_table import LinkMeasurements

if TYPE_CHECKING:
    from anabranch.protocol.context.peer_context import PeerContext
    from anabranch.protocol.log.records import Commit

#: Least share by which standbys must shorten an iteration, and by which a change of them must. Choices:
#: measured rates are not exact.
PAYS, GAIN = 0.25, 0.1
#: Least time (s) by which standbys must shorten an iteration.
LESS_S = 1.0
#: Least time (s) that senders wait for other replicas before they use a standby.
LEAST_S = 5.0
#: Steps running of which a relay owns nothing, the last of them late, after which it withholds. A choice: by
#: chance a quick relay gets nothing of one step or two, and one that claims late profits if it is spared.
IDLE_STEPS = 3
#: Greatest share of the time for which steps wait for a relay that withholds. A plain choice.
WITHHELD_SHARE = 0.05
#: Longest time (s) for which a relay gets no microbatches since it withholds. A choice: a step may have been
#: late by hours for another reason, such as a leader's line that was down.
LONGEST_S = 3600.0


def searchable(ctx: PeerContext) -> bool:
    """True if standbys can be chosen in this swarm. In a large one they cannot: all neighbours of a peer at
    the next stage might be standbys."""
    return len(ctx.run.membership.members) <= SEARCHED and not ctx.run.near.crowded


def by_chance(
    relays: Sequence[str], t: int, before: Mapping[str, float], rng: CounterRng
) -> Mapping[str, float]:
    """Random standbys (peer -> seconds that a sender waits before it uses it) of iteration t, for tests
    (`spare = "always"`): drawn anew in even iterations, and those of the iteration before (`before`) in odd
    ones."""
    if t % 2:
        return before
    return {peer: float(1 + rng.below(8)) for peer in relays if rng.below(3) == 0}


class Withholders:
    """Relays that held up steps lately, and until when they get no microbatches for that; kept by the
    coordinator."""

    def __init__(self, ctx: PeerContext) -> None:
        self.ctx = ctx
        self._idle: dict[str, int] = {}
        """Relay -> last steps running in which it served and owned nothing, although others of its stage
        did. Steps for some of which it was a standby are not counted."""
        self._spared: tuple[frozenset[str], ...] = ()
        """Standbys when the last two steps were committed; a delayed one begins before the first of these
        commits."""
        self._until: dict[str, float] = {}
        """Relay -> time (s) from which it gets microbatches again."""

    def committed(self, record: Commit, waited_s: float, silent: Collection[str]) -> None:
        """Note which relays owned nothing of the step that `record` ended. If the step was late, those that
        were heard and owned nothing of the last IDLE_STEPS steps are taken to have held it up: they get no
        microbatches for a while (`waits`). waited_s: seconds for which the step was waited for; 0 if it was
        not late. silent: members that are not heard. Nothing for a skipped step. Not to be called for rounds
        of islands, which have their own rules for late machines."""
        if record.verdict != "step":
            return
        membership, former, self._idle = self.ctx.run.membership, self._idle, {}
        now_spared = frozenset(self.ctx.standby_view.waits)
        before = self._spared if self.ctx.run.settings.delay.has(record.t) else self._spared[-1:]
        spared, self._spared = now_spared.union(*before), (*self._spared[-1:], now_spared)
        for stage, part in enumerate(record.stages[1:], 1):
            owners = {part.members[owner] for owner in part.owners if owner >= 0}
            for peer in membership.live(stage, record.t) if owners else ():
                if peer in spared:
                    self._idle[peer] = min(former.get(peer, 0), IDLE_STEPS - 1)
                elif peer not in owners:
                    self._idle[peer] = former.get(peer, 0) + 1
        now, wait_s = self.ctx.clock.now, min(waited_s / WITHHELD_SHARE, LONGEST_S)
        for peer, steps in self._idle.items():
            if wait_s and steps >= IDLE_STEPS and peer not in silent and self._until.get(peer, 0.0) <= now:
                self._until[peer] = now + wait_s
                text = f"iteration {record.t} was late, and {peer[:8]} has done nothing in {steps} iterations"
                self.ctx.outbox.note("note", text=f"{text}: others get its microbatches for {wait_s:.0f} s")

    def removed(self, peer: str) -> None:
        """Let a former member, if it comes back, get microbatches at once: its machine may have been
        mended."""
        self._until.pop(peer, None)

    def waits(self) -> Mapping[str, float]:
        """Relays that get no microbatches now while others of their stage can take them -> seconds that a
        sender waits for those others. At most as many as an announcement may name: those whose time is over
        last."""
        now = self.ctx.clock.now
        self._until = {peer: until for peer, until in self._until.items() if until > now}
        return dict.fromkeys(sorted(self._until, key=lambda p: (self._until[p], p))[-SEARCHED:], LEAST_S)


class Standbys:
    """Choice of standbys by the coordinator, and its announcement to all members (`Spared`). By the run's
    settings they are replicas with slow lines, without whose work iterations are shorter, or replicas drawn
    by chance, or none; relays that held up steps (`Withholders`) are standbys in any case. `look` chooses,
    once per iteration and membership. ways: measurements of members' links."""

    def __init__(self, ctx: PeerContext, ways: LinkMeasurements) -> None:
        self.ctx = ctx
        self.ways = ways
        self._number = ctx.standby_view.number  # this peer may have led before
        self.withholders = Withholders(ctx)
        self._looked: tuple[int, int, bool, frozenset[str]] | None = None
        """Arguments and membership of the last choice, and relays that withheld then."""
        self._t = 0
        self._withheld: frozenset[str] = frozenset()
        """Standbys, as announced last, for no other reason than that they withheld."""
        self._heard: set[str] = set()
        """Members that have reported links."""

    def told(self, peer: str) -> None:
        """Note that `peer` reported its links; its first report triggers a new choice of standbys."""
        if peer not in self._heard:
            self._heard.add(peer)
            self._looked = None

    def removed(self, peer: str) -> None:
        """Forget that a former member reported its links, or held up steps."""
        self._heard.discard(peer)
        self.withholders.removed(peer)

    def look(self, t: int, released: bool) -> None:
        """Choose the standbys from the open iteration t on, once per iteration and membership, and once more
        when the last step is released (`released`): those by links, where the settings allow them, and relays
        that held up steps (`Withholders`). They are announced in each iteration even if they stay the same,
        since a member may have missed the announcement or follow another coordinator's."""
        ctx, before, withheld = self.ctx, self.ctx.standby_view.waits, self.withholders.waits()
        key = (t, ctx.run.membership.version, released, frozenset(withheld))
        never = ctx.run.settings.spare == "never"
        if self._looked == key or (never and not withheld and not before):
            return
        begins = self._t != t
        self._looked, self._t = key, t
        members = ctx.run.membership.members
        relays = sorted(peer for peer, m in members.items() if m.stage and not m.is_auditor)
        chance = ctx.run.settings.spare == "always"
        waits = {} if never else by_chance(relays, t, before, ctx.rng) if chance else self._by_links()
        names = " ".join(sorted(peer[:8] for peer in waits)) or "nobody"
        changed = not never and waits.keys() - withheld.keys() != before.keys() - withheld.keys()
        self._withheld = frozenset(withheld.keys() - waits.keys())
        waits = {**withheld, **waits}
        if begins or waits != before:
            self._tell(waits)
        if changed:
            ctx.outbox.note(
                "note", text=f"spared from iteration {t} on, for the lines that they have: {names}"
            )

    def repeat(self, peer: str) -> None:
        """Send the announcement of the standbys again to a peer whose link is new; nothing before this
        coordinator has announced any."""
        if self._t:
            self._number += 1
            self.ctx.outbox.send(peer, Spared(self._number, dict(self.ctx.standby_view.waits)))

    def _tell(self, waits: Mapping[str, float]) -> None:
        self._number += 1
        message = Spared(self._number, dict(waits))
        for peer in list(self.ctx.run.membership.members):
            self.ctx.outbox.send(peer, message)

    def _by_links(self) -> Mapping[str, float]:
        """Standbys with which an iteration is shortest by measured links (replicas with slow lines) ->
        seconds that a sender waits for another replica before it uses this one. Empty in large swarms, and if
        the size of activations is not known. The standbys stay as they are unless a change clearly pays, and
        while no link is measured or a stage has no replica; so do those of a stage with a replica that has
        not reported its links."""
        ctx, settings = self.ctx, self.ctx.run.settings
        t, members = ctx.run.membership.opening.t, ctx.run.membership.members
        live = [
            member for member in members.values() if ctx.run.membership.is_live(member.id, member.stage, t)
        ]
        if not searchable(ctx) or not settings.activation_bytes:
            return {}
        chosen = {p: s for p, s in ctx.standby_view.waits.items() if p not in self._withheld}
        waits = {peer: s for peer, s in chosen.items() if peer in members and members[peer].stage}
        stages = range(settings.stages + 1)
        whole = all(ctx.run.membership.count(stage, t) for stage in stages)
        model = cost_model_of(live, settings, self.ways, spares=True) if whole else None
        if model is None:  # no link is measured, or a stage has no replica
            return waits
        deal: Deal = model.deal
        before = waits.keys() & deal.keys()
        known = [peer for peer in deal if next(self.ways.rates(peer))]
        not_known = {deal[peer] for peer in deal.keys() - set(known)}
        kept = frozenset(peer for peer in before if deal[peer] in not_known)
        spared = model.spared(deal, before, known)
        seconds, before_s = model.with_mean(spared, deal), model.with_mean(before, deal)
        all_work_s = model.with_mean((), deal)
        if before and seconds > (1.0 - GAIN) * before_s and before_s < (1.0 - PAYS + GAIN) * all_work_s:
            spared = frozenset(before)
        elif seconds > min((1.0 - PAYS) * all_work_s, all_work_s - LESS_S):
            spared = kept
        return {
            peer: waits[peer] if peer in kept else _wait_s(model.costs_s(peer, spared, deal))
            for peer in sorted(spared)
        }


def _wait_s(reduce_s: float) -> float:
    """Seconds that a sender waits for another replica before it uses a standby that would lengthen the reduce
    by `reduce_s`: about as long, at least LEAST_S and at most MOST_S. Rounded to a power of two, so that
    small changes are not announced."""
    return min(max(LEAST_S, 2.0 ** round(math.log2(max(reduce_s, LEAST_S)))), MOST_S)
