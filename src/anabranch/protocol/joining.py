"""From a stranger to a serving replica (R14): enquire, describe oneself, be welcomed, get the state, serve.

The leader of a run goes the same way with itself, without the messages.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from anabranch import PROTOCOL_VERSION
from anabranch.protocol.backoff import Backoff
from anabranch.protocol.control import Course
from anabranch.protocol.download import Download, State
from anabranch.protocol.events import Admitted, BuildStage, Describe, Described, Dial, Event, StageBuilt
from anabranch.protocol.log import Position
from anabranch.protocol.messages import (
    About,
    Behind,
    Elsewhere,
    Enquire,
    Holders,
    JoinRequest,
    Ready,
    Steps,
    Welcome,
    WhoHas,
)
from anabranch.protocol.neighbours import ALL_TIMES
from anabranch.protocol.records import NO_ENTRY, Genesis, Members, Rollback, entry_hash
from anabranch.protocol.steps import commit_of
from anabranch.protocol.tasks import InitState, LoadState, Result
from anabranch.protocol.work import Rank

if TYPE_CHECKING:
    from anabranch.protocol.peer import Peer

#: First and longest wait before a request that was not answered is repeated (s), and how often it is.
ASK_AGAIN = (2.0, 30.0, 30)
#: The same for a state that cannot be had.
FETCH_AGAIN = (2.0, 60.0, 60)
#: Seconds between two doors that a stranger knocks at.
KNOCK_S = 2.0
#: Seconds between reports of a joiner that has its state and is to be told when it serves.
REPORT_S = 2.0


class Step(Enum):
    STRANGER = "not connected to the leader"
    ENQUIRED = "asked what the run is"
    DESCRIBING = "measuring this machine"
    REQUESTED = "asked to be admitted"
    BUILDING = "making the stage"
    FETCHING = "fetching the state"
    LOADING = "loading the state"
    READY = "has the state"


@dataclass(frozen=True)
class Announced:
    """A state that the leader or the log has named: after iteration t, with this base; the fingerprint of my
    stage's, if that was said."""

    t: int = 0
    base: str = ""
    fingerprint: str = ""


class Joining:
    """Where this peer is on its way in, and the base of the state that it has."""

    def __init__(self, peer: Peer, stage_wanted: int) -> None:
        self.peer = peer
        self.step = Step.STRANGER
        self.download: Download | None = None
        self.state_base = ""
        self._genesis: Genesis | None = None
        self._stage_wanted = stage_wanted
        self._welcome: Welcome | None = None
        self._request: JoinRequest | None = None
        self._again_at = float("inf")
        self._asks = Backoff(peer.core.dice, *ASK_AGAIN)
        self._failure, self._fetches = "", Backoff(peer.core.dice, *FETCH_AGAIN)
        self._announced = Announced()
        self._initial = ""
        self._wanted_t = self._least_t = -1
        self.model_hash = ""
        self.doors: dict[str, str] = {}
        self._knock_at, self._knocks, self._shut = float("inf"), 0, ""
        self._led = False

    @property
    def done(self) -> bool:
        """Whether this peer follows the log."""
        return self._welcome is not None or self._led

    @property
    def began_as(self) -> str:
        """Fingerprint of my stage's state as the seed gives it ("": nothing is known of that)."""
        return self._initial

    @property
    def begins_at(self) -> tuple[int, str]:
        """The line of the log from which on this peer follows it, and the hash of the one before."""
        welcome = self._welcome
        return (welcome.next_index, welcome.last_hash) if welcome is not None else (0, NO_ENTRY)

    @property
    def genesis(self) -> Genesis:
        if self._genesis is None:
            raise RuntimeError("the run's genesis is not known yet")
        return self._genesis

    def set_genesis(self, genesis: Genesis) -> None:
        self._genesis = genesis
        self.peer.core.founder = genesis.leader

    # --- the steps -----------------------------------------------------------------------------

    def start(self) -> None:
        """The leader builds its stage when the log has admitted it; others wait for the link, and do not wait
        for one door's answer before they knock at the next."""
        if self.peer.lead is not None:
            self.leads()
        elif self.doors:
            self._knock_at = self.peer.core.now + KNOCK_S

    def leads(self) -> None:
        """This peer leads without having been welcomed: it admits itself."""
        self._led = True
        self.step = Step.REQUESTED
        self._again_at = self._knock_at = float("inf")

    def led_in_vain(self) -> None:
        """The lead was lost before the log had admitted this peer: it is a stranger again."""
        self._led = False
        self.step = Step.STRANGER
        self._again_at, self._knock_at = float("inf"), self.peer.core.now + KNOCK_S

    def leader_up(self) -> None:
        self._asks.reset()
        self.peer.wishes.repeat()
        if self.step in (Step.STRANGER, Step.ENQUIRED):
            self._enquire()
        elif self.step is Step.REQUESTED and self._request is not None:
            self.peer.core.send(self.peer.core.leader, self._request)
            self._again()
        elif self.step is Step.READY:
            self._report()
        self._knock_at = float("inf")

    def leader_down(self, reason: str) -> None:
        self.peer.core.note("waiting", reason=f"the link to the leader is down: {reason}")
        if not self.done and self.doors:
            self._knock_at = self.peer.core.now + KNOCK_S

    def elsewhere(self, message: Elsewhere) -> None:
        """Another peer leads the log: ask there."""
        core = self.peer.core
        self._asks.reset()
        if self.done or core.leads or message.leader == core.leader:
            return  # it is asked again in a while
        if message.leader in ("", core.me):  # it knows of nobody: another door may
            self._shut, self._knock_at = core.leader, core.now + KNOCK_S
            return
        self.doors.setdefault(message.leader, message.address)
        core.leader = message.leader
        if core.leader in core.links:
            self.leader_up()
        elif message.address:
            core.effects.append(Dial(core.leader, message.address))

    def _knock(self) -> None:
        """Nobody answered at the last door: try the next one."""
        core = self.peer.core
        doors = sorted(self.doors.keys() - {core.me})
        self._knock_at = core.now + KNOCK_S
        if not doors:
            return
        core.leader = doors[self._knocks % len(doors)]
        self._knocks, self._shut = self._knocks + 1, ""
        if core.leader in core.links:
            self.leader_up()
        else:
            core.effects.append(Dial(core.leader, self.doors[core.leader]))

    def _enquire(self) -> None:
        self.step = Step.ENQUIRED
        self.peer.core.send(self.peer.core.leader, Enquire())
        self._again()

    def about(self, message: About) -> None:
        genesis = message.genesis
        self.doors.update(message.doors)
        if self.step is not Step.ENQUIRED:
            return
        self.set_genesis(genesis)
        self._answered()
        if genesis.protocol_version != PROTOCOL_VERSION:
            self.peer._stop(
                f"the run speaks protocol version {genesis.protocol_version}, this release "
                f"{PROTOCOL_VERSION}: install the release that the run uses",
                ok=False,
            )
            return
        self.step = Step.DESCRIBING
        self.peer.core.effects.append(Describe(genesis))

    def answered(self, event: Event) -> None:
        core = self.peer.core
        if isinstance(event, Described) and self.step is Step.DESCRIBING:
            core.use_settings(event.settings)
            core.schedule, self.model_hash = event.schedule, event.model_hash
            self._request = JoinRequest(
                event.member, self._stage_wanted, PROTOCOL_VERSION, event.model_hash, event.corpus_fingerprint
            )
            self.step = Step.REQUESTED
            core.send(core.leader, self._request)
            self._again()
        elif isinstance(event, StageBuilt) and self.step is Step.BUILDING:
            self._built(event.fingerprint)

    def welcomed(self, welcome: Welcome) -> None:
        if self.step is not Step.REQUESTED:
            return
        peer, core = self.peer, self.peer.core
        self._welcome = welcome
        self._answered()
        core.stage = welcome.stage
        for member in welcome.members:
            core.membership.restore(member)
        peer.contacts.fellows = {}
        core.membership.serve(welcome.active_from)
        core.membership.number = welcome.number
        peer.committed = welcome.t
        core.voters = welcome.voters
        peer.leadership.following.admitted(welcome.term)
        core.course = Course(welcome.steps, welcome.held)
        peer.leadership.adam_step, peer.leadership.skips = welcome.adam_step, welcome.skips
        core.membership.open(welcome.t + 1, core.settings.stages)
        peer.position = Position(welcome.next_index, welcome.last_hash)
        peer.base = welcome.base
        core.taken.begun(welcome.t, welcome.base)
        self._announced = Announced(welcome.t, welcome.base, welcome.fingerprint)
        self.step = Step.BUILDING
        core.effects.append(Admitted(welcome.stage, welcome.certificate))
        core.effects.append(BuildStage(welcome.stage))
        peer.connect()

    def _built(self, fingerprint: str) -> None:
        lead = self.peer.lead
        self._initial = fingerprint
        if lead is not None and fingerprint == self.genesis.fingerprints[self.peer.core.stage]:
            lead.keeping.begun_as_seeded()
        if fingerprint and fingerprint == self._announced.fingerprint:
            self._have_state(self._announced.t, self._announced.base, fingerprint)
        else:
            self.fetch_state()

    def fetch_state(self) -> None:
        """Pull the state of my stage: the latest that its replicas have, or the one gone back to from who has
        it; where no snapshots are kept, from the leader's checkpoint."""
        core = self.peer.core
        self.step = Step.FETCHING
        live = [p for p in core.membership.live(core.stage, ALL_TIMES) if p != core.me]
        if self._fetches.tries % 2 == 0:  # of many replicas those who are linked, at first
            live = [p for p in core.near.beside(core.stage, core.stage, ALL_TIMES) if p != core.me] or live
        # Those who are left of a lost stage may all be behind: the leader knows of kept gradients.
        behind = core.settings.redo == "gradients" and self._fetches.tries % 2 == 1
        if core.settings.snapshot_every and (self._wanted_t >= 0 or not live or behind):
            core.send(core.leader, WhoHas(core.stage, self._wanted_t))
            self._again_at = core.now + ASK_AGAIN[0]
        else:
            self._pull(-1, live or [core.leader])

    def fell_behind(self, step: int) -> None:
        """Nobody gave me the gradient of a step: take the whole state of those who took it. One from before
        the step is of no use, unless its gradient is kept."""
        core = self.peer.core
        if self.peer.replica.keepers:
            core.send(core.leader, Behind(self.peer.committed, core.stage, step))
        self._least_t = step
        self.fetch_state()

    def told_steps(self, message: Steps) -> str | None:
        """What was done since a state that can be had: my stage takes these steps again, with kept gradients.
        Returns why that is refused, if it is."""
        replica, mine = self.peer.replica, self.peer.core.stage
        if self.step is not Step.FETCHING or self.download is not None or message.stage != mine:
            return None
        if self._wanted_t >= 0:
            return None  # said before the log went back
        try:
            steps = [(commit_of(line), entry_hash(line)) for line in message.lines]
        except ValueError as error:
            return str(error)
        self._announced, self._least_t = Announced(message.t, message.base), -1
        replica.pending.update({commit.t: (commit, base) for commit, base in steps})
        replica.keepers = message.holders
        return None

    def told_holders(self, message: Holders) -> None:
        """Whom the state can be had from."""
        core = self.peer.core
        if self.step is not Step.FETCHING or self.download is not None or message.stage != core.stage:
            return
        own = self.peer.states.find(core.stage, message.t)
        if own is not None and own.fingerprint == message.fingerprint:
            self._fetched(own)
        elif message.t == 0 and message.fingerprint == self._initial != "":
            base = self._base_after(0)
            if base is None:  # it overtook the steps since
                self._fetch_failed(self._too_old(0))
            else:
                self._begin_anew(base)
        elif not message.peers:
            self._fetch_failed(f"nobody has the state of stage {core.stage} after iteration {message.t} yet")
        elif self._wanted_t in (-1, message.t):
            self._pull(message.t, list(message.peers), message.fingerprint)

    def _pull(self, t: int, sources: list[str], fingerprint: str = "") -> None:
        core = self.peer.core
        self._again_at = float("inf")
        self.download = Download(core, core.stage, t, sources, self._fetched, self._fetch_failed, fingerprint)
        self.download.start()

    def _fetched(self, state: State) -> None:
        if state.t < self._least_t:
            self._fetch_failed(self._too_old(state.t))
            return
        self.step = Step.LOADING

        def loaded(result: Result) -> None:
            base = self._base_after(state.t)
            if result.error or result.fingerprint != state.fingerprint:
                self._fetch_failed(result.error or "the pieces do not have the fingerprint that was offered")
            elif base is None:
                self._fetch_failed(self._too_old(state.t))
            else:
                self.peer.snapshots.loaded(state)
                self._have_state(state.t, base, state.fingerprint)

        self.peer.core.submit(Rank.STEP, LoadState(state.t), state.pieces, loaded)

    def roll_back(self, record: Rollback, base: str) -> None:
        """The run goes on from the state after record.t: take my own snapshot of it back, or fetch one."""
        core, t = self.peer.core, record.t
        wanted = record.fingerprints[core.stage]
        self._announced = Announced(t, base, wanted)
        if self.step not in (Step.FETCHING, Step.LOADING, Step.READY):
            return
        if self.download is not None:
            self.download.cancel()
            self.download = None
        self._wanted_t, self._least_t = t, -1
        self._fetches.reset()
        own = self.peer.states.find(core.stage, t)
        if own is not None and own.fingerprint == wanted:
            self._fetched(own)
        elif t == 0 and self._initial == wanted:
            self._begin_anew(base)
        else:
            self.fetch_state()

    def _begin_anew(self, base: str) -> None:
        """The state that is wanted is the one that the seed gives."""
        self.step = Step.LOADING
        initial = self._initial
        self.peer.core.submit(Rank.STEP, InitState(0), (), lambda result: self._have_state(0, base, initial))

    def move(self) -> None:
        """The log gave this peer another stage: begin there like a joiner."""
        core = self.peer.core
        if self.download is not None:
            self.download.cancel()
            self.download = None
        self._wanted_t, self._least_t, self._initial = -1, -1, ""
        first = self.genesis.fingerprints[core.stage] if self.peer.committed == 0 else ""
        self._announced = Announced(self.peer.committed, self.peer.base, first)
        self._again_at = float("inf")
        self.step = Step.BUILDING
        core.effects.append(BuildStage(core.stage))

    def _base_after(self, t: int) -> str | None:
        """The base of the state after iteration t, if the log was followed from there."""
        if t + 1 < min(self.peer.replica.pending, default=0):
            return None
        if t == self._announced.t:
            return self._announced.base
        following = self.peer.replica.pending.get(t)
        return following[1] if following is not None else None

    def _too_old(self, t: int) -> str:
        core = self.peer.core
        text = f"the state of stage {core.stage} that there is is that after iteration {t}, which is too old"
        if not any(peer != core.me for peer in core.membership.live(core.stage, 1 << 40)):
            text += (
                "; no replica of the stage is left: unless one comes back, stop the run where it is led "
                "and go on with `anabranch resume`"
            )
        return text

    def _fetch_failed(self, reason: str) -> None:
        """Try again, less and less often; say why when the reason is new."""
        core = self.peer.core
        if reason != self._failure:
            core.note("note", text=f"{reason}; trying again")
        self._failure, self.download = reason, None
        self.step = Step.FETCHING
        if core.me in core.membership.active_from:
            core.send(core.leader, Behind(self.peer.committed, core.stage))
        wait_s = self._fetches.next()
        if wait_s is None:
            self.peer._stop(f"{reason}, after {self._fetches.tries} tries: join again later", ok=False)
        else:
            self._again_at = core.now + wait_s

    def _have_state(self, t: int, base: str, fingerprint: str) -> None:
        replica = self.peer.replica
        self.step = Step.READY
        self.download = None
        self._failure, self._wanted_t, self._least_t = "", -1, -1
        self._fetches.reset()
        replica.t, replica.fingerprint = t, fingerprint
        self.state_base = base
        replica.pending = {k: v for k, v in replica.pending.items() if k > t}
        self._report()
        self._tell_applied()
        replica.advance()
        self.peer._open()

    def applied(self) -> None:
        if self.step is Step.READY:
            self._report()

    def _report(self) -> None:
        """Tell the leader that the state is here, until the log says from when it serves."""
        core = self.peer.core
        if core.me in core.membership.active_from:
            self._again_at = float("inf")
            return
        replica = self.peer.replica
        core.send(core.leader, Ready(replica.t, core.stage, replica.fingerprint, core.apart()))
        self._again_at = core.now + REPORT_S * core.dice.uniform(0.75, 1.0)

    def _tell_applied(self) -> None:
        """Whoever serves and has the state after a step stands for that step, however it got it: where others
        of its stage are gone, the step may not be released yet (R9)."""
        core = self.peer.core
        if self.step is Step.READY and core.me in core.membership.active_from and self.peer.replica.t > 0:
            self.peer.tell_applied({})

    def members_changed(self, record: Members) -> None:
        core = self.peer.core
        if core.me in record.active_from:
            self._again_at = float("inf")
            self._tell_applied()
        lead = self.peer.lead if self.step is Step.REQUESTED else None
        if lead is not None and any(member.id == core.me for member in record.joined):
            self.peer.contacts.fellows = {}
            self._announced = Announced(lead.t, lead.base, lead.tip.fingerprints[0])
            self.step = Step.BUILDING
            core.effects.append(BuildStage(0))

    # --- time ----------------------------------------------------------------------------------

    def _again(self) -> None:
        """Ask once more after a while; an end comes to that, too."""
        wait_s = self._asks.next()
        if wait_s is None:
            asked = "what the run is" if self.step is Step.ENQUIRED else "to be admitted"
            reason = f"the run's leader is linked and did not answer {self._asks.tries} times (asked {asked})"
            self.peer._stop(f"{reason}: see whether the run goes on, and join again", ok=False)
        else:
            self._again_at = self.peer.core.now + wait_s

    def _answered(self) -> None:
        self._again_at = float("inf")
        self._asks.reset()

    def tick(self) -> None:
        if self.download is not None:
            self.download.tick()
        core = self.peer.core
        if core.now >= self._knock_at:
            self._knock_at = float("inf")
            shut = core.leader not in core.links or core.leader == self._shut
            if shut and not self.done and not core.leads:
                self._knock()
        if core.now < self._again_at:
            return
        self._again_at = float("inf")
        if self.step is Step.ENQUIRED:
            self._enquire()
        elif self.step is Step.REQUESTED and self._request is not None:
            core.send(core.leader, self._request)
            self._again()
        elif self.step in (Step.FETCHING, Step.LOADING):
            self.fetch_state()
        elif self.step is Step.READY:
            self._report()

    def deadline(self) -> float:
        fetched = self.download.deadline() if self.download else float("inf")
        return min(self._again_at, self._knock_at, fetched)
