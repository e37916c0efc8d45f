"""Baselines `swarm-published`, `swarm-as-coded` and `swarm-tuned`: SWARM (Ryabinin et al., ICML 2023, arXiv
2301.11913).

A sender keeps an activation until the next peer has computed with it. It chooses another peer when that one
is lost or the call times out (interleaved weighted round robin over running means of call durations). A
replica's backward call does the whole backward. Contributions in the sum of a lost peer are lost. A stage
averages when its peers together have as many microbatches as the batch, so further ones are sent through all
stages in their place. Nothing removes duplicates: if a microbatch restarts, stages that already had its
gradient count it twice.

`swarm-published` is SWARM as GWTF's comparison portrays it: calls time out after 30 s; the list of peers is
refreshed every 30 s; the backward call recomputes the forward; a microbatch whose backward path breaks
restarts at its data node.

`swarm-as-coded` follows SWARM's public code: a failed call, forward or backward, is made again at any live
replica, which gets the input (and the gradient) and recomputes this one stage; no microbatch restarts. Inputs
and gradients of a lost peer come from the data node, where the code's trainers have all of them; that those
pass through the trainers is not modelled, in SWARM's favour. Peers move between stages as the paper says
(`rebalancing`). `swarm-tuned` is the same with 60 s and 2 s, activations that are kept, and no moves.

None has slots: a microbatch waits for memory (`memory_model`) while its call may time out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice

from anabranch.counter_rng import CounterRng
from anabranch.flow.dispatch.swarm_queue import Mean
from anabranch.protocol.interface import tasks
from anabranch.sim.baselines.engine import BACKWARD, FORWARD
from anabranch.sim.baselines.memory_model import RelayMemory, input_slots
from anabranch.sim.baselines.pipeline_model import Kinds, Microbatch, Pipelines
from anabranch.sim.baselines.rebalancing import Rebalancing
from anabranch.sim.cluster.scenario import Fleet, Host


@dataclass(frozen=True)
class Variant:
    """Parameters of a SWARM variant. deadline_s: time-out of a forward call. refresh_s: interval at which the
    list of peers is refreshed. recompute: True if the backward call recomputes the forward. any_replica: True
    if a call to a lost relay is made again at another replica, False if its microbatch restarts. rebalance_s:
    seconds between two moves of a peer (0: none)."""

    deadline_s: float
    refresh_s: float
    recompute: bool
    any_replica: bool
    rebalance_s: float = 0.0


VARIANTS = {
    "swarm-published": Variant(30.0, 30.0, recompute=True, any_replica=False),
    "swarm-as-coded": Variant(30.0, 30.0, recompute=True, any_replica=True, rebalance_s=300.0),
    "swarm-tuned": Variant(60.0, 2.0, recompute=False, any_replica=True),
}


class StochasticWiring:
    """Weighted round robin of one sender over the peers of the next stage. Each call adds the peer's mean
    call duration to its virtual time; the peer with the least is next. banned: peers that are not called
    until the next refresh of the list of peers."""

    def __init__(self, rng: CounterRng) -> None:
        self._dice = rng
        self._time: dict[str, float] = {}
        self._pace: defaultdict[str, Mean] = defaultdict(Mean)
        self.banned: set[str] = set()

    def choose(self, peers: Collection[str]) -> str | None:
        """Choose the peer with the least virtual time, a random one of equals, and add its mean call duration
        to that time. peers: those that are known. None if all of them are banned. A new peer starts with the
        least virtual time of the others."""
        able = sorted(peer for peer in peers if peer not in self.banned)
        if not able:
            return None
        head = min((self._time[peer] for peer in able if peer in self._time), default=0.0)
        for peer in able:
            self._time.setdefault(peer, head)
        chosen = min(able, key=lambda peer: (self._time[peer], self._dice.uniform()))
        self._time[chosen] += self._pace[chosen].seconds
        return chosen

    def took(self, peer: str, seconds: float) -> None:
        """Add the measured seconds of a call to the running mean of a peer."""
        self._pace[peer].add(seconds)

    def lost(self, peer: str) -> None:
        """Ban a peer until the bans are lifted, and forget its measurements."""
        self._time.pop(peer, None)
        self._pace.pop(peer, None)
        self.banned.add(peer)


@dataclass(eq=False)
class _ForwardCall:
    """Call of a microbatch's forward at `receiver`, until the forward is computed. begun_at: time (s) when
    the sender made it, before the transfer."""

    sender: str
    receiver: str
    begun_at: float


class Swarm(Pipelines):
    """SWARM, in the variant (`VARIANTS`) that the policy names. known: relays in the list of peers, as of its
    last refresh. _calls: microbatch -> its current forward call. _inputs: microbatch -> relay that sends the
    activation again, to the replacement of a lost relay. _arrived: microbatches whose newest gradient has
    arrived."""

    backward: Kinds = (tasks.InputGradient, tasks.WeightGradient)
    late: Kinds = ()

    def __init__(self, fleet: Fleet, policy: str, seed: int) -> None:
        self.variant = VARIANTS[policy]
        super().__init__(fleet, policy, seed)
        self.known = self._serving()
        self._wiring = {name: StochasticWiring(CounterRng(seed, at)) for at, name in enumerate(fleet.hosts)}
        self._calls: dict[Microbatch, _ForwardCall] = {}
        self._inputs: dict[Microbatch, str] = {}
        self._arrived: set[Microbatch] = set()
        self._extra = 0
        self.clock.after(self.variant.refresh_s, self._refresh)
        self._rebalancing = Rebalancing(self, self.variant.rebalance_s) if self.variant.rebalance_s else None

    def memory_of(self, host: Host) -> RelayMemory[Microbatch]:
        if not self.variant.recompute:
            return super().memory_of(host)
        scenario = self.fleet.scenario
        return RelayMemory(input_slots(scenario.work, host.stage, host.capacity, scenario.fleet.recompute), 0)

    def _refresh(self) -> None:
        self.known = self._serving()
        for wiring in self._wiring.values():
            wiring.banned.clear()
        self.clock.after(self.variant.refresh_s, self._refresh)

    def committed(self, members: dict[int, list[str]], useful_s: float, counted_twice: int) -> None:
        if self._rebalancing is not None:
            self._rebalancing.committed()
        super().committed(members, useful_s, counted_twice)

    def _holder(self, microbatch: Microbatch, name: str) -> str:
        """Node that takes the part of node `name` as sender of its input or gradient: itself, or if it is
        lost (a relay also while it joins or moves) the microbatch's data node, or "" where microbatches
        restart."""
        if self._serves(name):
            return name
        return microbatch.source if self.variant.any_replica else ""

    def _serving(self) -> set[str]:
        return {relay for names in self.serving.values() for relay in names}

    def _serves(self, name: str) -> bool:
        """True for a live data node, and a live relay with its stage's state: not while it joins or moves."""
        return self.alive(name) and name in self.serving[self.fleet.hosts[name].stage]

    # --- an iteration --------------------------------------------------------------------------

    def begin(self) -> None:
        self._calls, self._inputs, self._arrived, self._extra = {}, {}, set(), 0
        self.admit_batch(islice(cycle(self.data_nodes), self.microbatches))

    def added(self, microbatch: Microbatch) -> None:
        """React to a gradient of `microbatch` that was added to a sum, or has returned. Take the step when
        every stage has enough contributions and no microbatch is in flight. For contributions that were lost
        with a peer, begin further microbatches."""
        if self.admitted < self.microbatches:
            return
        heads = set(self.data_nodes)
        coming = [m for m in self.attempts if not m.over and not (m.returned and m.added & heads)]
        lacking = max(self._lacking(stage, coming) for stage in range(1, self.stages + 1))
        for _ in range(lacking):
            self._extra += 1
            source = self.data_nodes[self._extra % len(self.data_nodes)]
            self.recorder.add("recoveries")
            self.admit(Microbatch(self.microbatches + self._extra, source))
        if not coming and lacking <= 0:
            self.take_step()

    def _lacking(self, stage: int, coming: list[Microbatch]) -> int:
        """Number of contributions that a stage lacks for the batch, beyond those in its sums and those that
        the microbatches in flight (`coming`) will add; negative if there are too many."""
        counted = sum(map(len, self.holders(stage).values()))
        return self.microbatches - counted - sum(not m.added & self.serving[stage] for m in coming)

    # --- forward -------------------------------------------------------------------------------

    def onward(self, microbatch: Microbatch, sender: str) -> None:
        self._call(microbatch, sender, self.fleet.hosts[sender].stage + 1)

    def _call(self, microbatch: Microbatch, sender: str, stage: int) -> None:
        """Let `sender` call a peer of a stage that its wiring chooses: send it the stage's input. The call of
        a lost peer fails at once, and one that takes longer than `deadline_s` times out (`_retry`). If no
        peer can be called, `sender` tries again after a second. After the last stage: send to the
        microbatch's data node."""
        if stage > self.stages:
            self.forward_to(microbatch, sender, microbatch.source)
            return
        wiring = self._wiring[sender]
        peers = [peer for peer in self.known if self.fleet.hosts[peer].stage == stage]
        chosen = wiring.choose(peers)
        if chosen is None:
            if self.variant.any_replica:
                self._look(wiring)
            self.clock.after(1.0, lambda: self._again(microbatch, sender, stage))
            return
        call = self._calls[microbatch] = _ForwardCall(sender, chosen, self.clock.now)
        if not self._serves(chosen):
            self._retry(microbatch, call, lost=True)
            return
        self.clock.after(self.variant.deadline_s, lambda: self._retry(microbatch, call, lost=False))
        self.forward_to(microbatch, sender, chosen)

    def _again(self, microbatch: Microbatch, sender: str, stage: int) -> None:
        begun_anew = microbatch in self._calls or len(microbatch.path) > stage
        if not microbatch.over and not begun_anew and self._serves(sender):
            self._call(microbatch, sender, stage)

    def _look(self, wiring: StochasticWiring) -> None:
        """Refresh the list of peers at once, and lift all bans of `wiring`, whose sender could call
        nobody."""
        self.known = self._serving()
        wiring.banned.clear()

    def arrived(self, microbatch: Microbatch, host: str) -> None:
        call = self._calls.get(microbatch)
        stage = self.fleet.hosts[host].stage
        if not stage or (call is not None and call.receiver == host and host not in microbatch.path):
            super().arrived(microbatch, host)

    def forward_done(self, microbatch: Microbatch, host: str) -> None:
        call = self._calls.get(microbatch)
        if call is None or call.receiver != host or host not in microbatch.path:
            return  # the caller has given up, or has called again and that call has not arrived
        del self._calls[microbatch]
        wiring, begun_at = self._wiring[call.sender], call.begun_at
        self.send_control(host, call.sender, lambda: wiring.took(host, self.clock.now - begun_at))
        self.onward(microbatch, host)

    def _retry(self, microbatch: Microbatch, call: _ForwardCall, lost: bool) -> None:
        """Make a forward call again, to a peer that the wiring chooses. Nothing happens if the call is no
        longer its microbatch's current one, or nobody has the input. lost: True if the called peer is lost,
        which is banned then; False if the call timed out, which changes neither bans nor estimates."""
        sender = self._holder(microbatch, call.sender)
        if self._calls.get(microbatch) is not call or microbatch.over or not sender:
            return
        if lost:
            self._wiring[call.sender].lost(call.receiver)
        self.recorder.add("recoveries")
        del self._calls[microbatch]
        self.leave(microbatch, call.receiver)
        if call.receiver in microbatch.path:
            microbatch.path.remove(call.receiver)
        self._call(microbatch, sender, self.fleet.hosts[call.receiver].stage)

    def _call_again(self, microbatch: Microbatch, relay: str) -> None:
        """Have a forward computed at another replica, once the sender has noticed that `relay` was lost,
        which had computed the forward and not passed it on."""
        self._calls.pop(microbatch, None)
        self.recorder.add("recoveries")
        stage, at = self.fleet.hosts[relay].stage, len(microbatch.path) - 1
        microbatch.path = microbatch.path[:at]
        upstream = microbatch.path[-1]

        def noticed() -> None:
            if not microbatch.over and len(microbatch.path) == at and microbatch not in self._calls:
                self._call(microbatch, self._holder(microbatch, upstream), stage)

        self.clock.after(self.fleet.link(relay, upstream).latency_s, noticed)

    # --- backward ------------------------------------------------------------------------------

    def gradient_arrived(self, microbatch: Microbatch, host: str) -> None:
        self._arrived.add(microbatch)
        super().gradient_arrived(microbatch, host)

    def back(self, microbatch: Microbatch, sender: str) -> None:
        to = self.before(microbatch, sender)
        self._arrived.discard(microbatch)
        if self._serves(to):
            self.back_to(microbatch, sender, to)
        else:
            self._broken(microbatch, sender, to)

    def _broken(self, microbatch: Microbatch, sender: str, gone: str) -> None:
        """Send the gradient of `sender`, and the input again, to another replica in place of the lost peer
        `gone`; if none can be called, try after a second. In a variant without `any_replica` restart the
        microbatch at its data node instead."""
        if not self.variant.any_replica:
            self._start_again(microbatch)
            return
        stage = self.fleet.hosts[gone].stage
        upstream = self._holder(microbatch, microbatch.path[microbatch.path.index(gone) - 1])
        sender = self._holder(microbatch, sender)
        others = [peer for peer in self.serving[stage] if peer in self.known]
        other = self._wiring[sender].choose(others)
        if other is None:
            self._look(self._wiring[sender])
            self._resend_once_noticed(microbatch, sender, gone, 1.0)
            return
        self.recorder.add("recoveries")
        microbatch.path[microbatch.path.index(gone)] = other
        gradient = microbatch.gradient = (sender, other)
        self._inputs[microbatch] = upstream
        self._arrived.discard(microbatch)
        size, missing = self.fleet.scenario.work.activation_bytes, {BACKWARD, FORWARD}

        def arrived(payload: int) -> None:
            missing.discard(payload)
            if not missing and microbatch.gradient is gradient:  # else the call was made again elsewhere
                self._inputs.pop(microbatch, None)
                self._arrived.add(microbatch)
                backward = partial(self.gradient_arrived, microbatch, other)
                self.memories[other].enter(microbatch, microbatch.index, backward, repairs=True)

        self.send(sender, other, size, BACKWARD, lambda: arrived(BACKWARD))
        self.send(upstream, other, size, FORWARD, lambda: arrived(FORWARD))

    def _start_again(self, microbatch: Microbatch) -> None:
        if not microbatch.over:
            microbatch.over = True
            self._calls.pop(microbatch, None)
            self.leave(microbatch, *self.memories)
            self.recorder.add("recoveries")
            self.admit(Microbatch(microbatch.index, microbatch.source))

    # --- churn ---------------------------------------------------------------------------------

    def lost(self, relay: str) -> None:
        """Give up the reduce under way, and make calls to the lost relay again elsewhere. Contributions that
        were lost with it are replaced (`added`)."""
        self.reducing += 1  # the reduce restarts without it
        for microbatch in list(self.attempts):
            if not microbatch.over and not microbatch.returned:
                self._lost_with(microbatch, relay)
        if self.attempts:
            self.added(self.attempts[-1])

    def _lost_with(self, microbatch: Microbatch, relay: str) -> None:
        call, path = self._calls.get(microbatch), microbatch.path
        if call is not None and call.receiver == relay:
            delay_s = self.fleet.link(relay, call.sender).latency_s
            self.clock.after(delay_s, lambda: self._retry(microbatch, call, lost=True))
        elif relay == path[-1]:  # it was sending the newest activation
            if self.variant.any_replica:
                self._call_again(microbatch, relay)
            else:
                self._start_again(microbatch)
        elif relay == self._inputs.get(microbatch):
            self._resend_once_noticed(microbatch, *microbatch.gradient, input_lost=True)
        elif relay in path and relay == microbatch.gradient[1]:
            # Its gradient was on the way to the lost relay, or being computed. Forwards notice later.
            self._resend_once_noticed(microbatch, microbatch.gradient[0], relay)
        elif relay in path and relay == microbatch.gradient[0] and microbatch not in self._arrived:
            self._resend_once_noticed(microbatch, path[path.index(relay) + 1], relay)

    def _resend_once_noticed(
        self,
        microbatch: Microbatch,
        sender: str,
        gone: str,
        delay_s: float | None = None,
        input_lost: bool = False,
    ) -> None:
        """Let `sender` replace the lost relay `gone` and send its gradient again (`_broken`), when it notices
        the loss: after the link's latency, or `delay_s`. Nothing happens if the microbatch's gradient has
        moved on by then. input_lost: True if `gone` is alive and the relay was lost that sends it the
        activation; then nothing happens, either, if activation and gradient have arrived by then."""
        gradient = microbatch.gradient

        def noticed() -> None:
            arrived = input_lost and microbatch in self._arrived
            if not microbatch.over and microbatch.gradient == gradient and not arrived:
                self._broken(microbatch, sender, gone)

        self.clock.after(self.fleet.link(gone, sender).latency_s if delay_s is None else delay_s, noticed)
