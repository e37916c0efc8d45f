"""Other systems' rules of recovery, as they are modelled beside the protocol."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from msgspec import structs

from anabranch.counter_rng import CounterRng
from anabranch.net.wan.profile import find_profile
from anabranch.protocol.context.task_queue import TaskPriority
from anabranch.protocol.interface import tasks
from anabranch.sim.baselines.memory_model import RelayMemory, input_slots
from anabranch.sim.baselines.pipeline_model import Done, Kinds, Microbatch
from anabranch.sim.baselines.rebalancing import Rebalancing
from anabranch.sim.baselines.restart import Restart
from anabranch.sim.baselines.swarm import VARIANTS, StochasticWiring, Swarm
from anabranch.sim.cluster.machine_spec import MachinePart
from anabranch.sim.cluster.scenario import Fleet, fleet_of, load_scenario
from anabranch.sim.experiment.run import simulate
from anabranch.sim.metrics.iteration_metrics import Outcome
from support.swarms.small_scenario import SMALL

WAN10 = find_profile("wan10")

FLEET = SMALL | {"model.microbatches": 12, "fleet.relays": 6, "run.iterations": 8, "churn.return_s": 1.0}


def fleet(seed: int = 0, **changes: object) -> Fleet:
    named = {key.replace("__", "."): value for key, value in changes.items()}
    return fleet_of(load_scenario("wan10", FLEET | named), WAN10, seed)


def total(outcomes: list[Outcome], key: str) -> float:
    assert not any(outcome.failure for outcome in outcomes)
    return float(sum(getattr(row, key) for outcome in outcomes for row in outcome.rows))


def swarm(policy: str, crash: float) -> list[Outcome]:
    return [Swarm(fleet(seed, churn__crash=crash), policy, seed).run() for seed in range(4)]


def test_one_microbatch_takes_what_its_way_takes() -> None:
    """A single pipeline, worked out by hand: there and back, the slower of the last hop and the last weight
    gradient, and the step of a stage with one member."""
    alone = fleet(model__microbatches=1, fleet__relays=2, fleet__data_nodes=1, run__iterations=2)
    data, one, two = (alone.hosts[name].machine for name in ("d0", "r1.0", "r2.0"))
    size = alone.scenario.work.activation_bytes

    def hop(sender: str, receiver: str) -> float:
        return alone.link(sender, receiver).seconds(size)

    there = data.seconds(0, tasks.Embed) + hop("d0", "r1.0") + one.seconds(1, tasks.Forward)
    there += hop("r1.0", "r2.0") + two.seconds(2, tasks.Forward)
    there += hop("r2.0", "d0") + data.seconds(0, tasks.Head)
    back = there + hop("d0", "r2.0") + two.seconds(2, tasks.InputGradient)
    back += hop("r2.0", "r1.0") + one.seconds(1, tasks.InputGradient)
    done = max(back + hop("r1.0", "d0"), back + one.seconds(1, tasks.WeightGradient))
    kinds = (tasks.Freeze, tasks.SumPart, tasks.Assemble)
    steps = [sum(host.machine.seconds(host.stage, k) for k in kinds) for host in alone.hosts.values()]
    rows = Restart(alone, "restart", 0).run().rows
    assert rows[0].seconds == pytest.approx(done + max(steps), rel=1e-9)
    applied = data.seconds(0, tasks.Apply)
    assert rows[1].seconds == pytest.approx(rows[0].seconds + applied, rel=1e-9)


def pipeline(**changes: object) -> Fleet:
    """Fleet of a data node and two stages of one relay."""
    return fleet(fleet__relays=2, fleet__data_nodes=1, run__iterations=1, run__warm_up=0, **changes)


def test_whoever_finds_a_relay_full_waits_until_a_gradient_is_added() -> None:
    """Slots for one microbatch: the second starts where the first one's weight gradient ends."""
    alone = pipeline(model__microbatches=2, fleet__capacity=[1])
    data, one, two = (alone.hosts[name].machine for name in ("d0", "r1.0", "r2.0"))
    size = alone.scenario.work.activation_bytes

    def hop(sender: str, receiver: str) -> float:
        return alone.link(sender, receiver).seconds(size)

    first = data.seconds(0, tasks.Embed) + hop("d0", "r1.0")
    through = one.seconds(1, tasks.Forward) + hop("r1.0", "r2.0") + two.seconds(2, tasks.Forward)
    through += hop("r2.0", "d0") + data.seconds(0, tasks.Head) + hop("d0", "r2.0")
    through += two.seconds(2, tasks.InputGradient)
    kinds = (tasks.Freeze, tasks.SumPart, tasks.Assemble)
    step = max(sum(host.machine.seconds(host.stage, k) for k in kinds) for host in alone.hosts.values())
    whole = through + one.seconds(1, tasks.InputGradient) + one.seconds(1, tasks.WeightGradient)
    for kind, policy, before in (
        (Restart, "restart", hop("r2.0", "r1.0")),
        # Its backward call has the weight gradient too: the gradient goes on after that.
        (Swarm, "swarm-tuned", hop("r2.0", "r1.0") + two.seconds(2, tasks.WeightGradient)),
    ):
        added = first + 2 * (whole + before)
        home = hop("r1.0", "d0") - (one.seconds(1, tasks.WeightGradient) if kind is Restart else 0.0)
        row = kind(alone, policy, 0).run().rows[0]
        assert row.seconds == pytest.approx(added + max(home, 0.0) + step, rel=1e-9)


def test_beyond_memory_the_forward_is_computed_again() -> None:
    """A relay with three microbatches keeps the activations of two (its own place, and the one of the repair
    slot); as published, of none."""
    roomy, short = (pipeline(model__microbatches=3, fleet__capacity=[c], fleet__recompute=r)
                    for c, r in ((3, 0.0), (1, 2.0)))  # fmt: skip
    relays = roomy.stage(1) + roomy.stage(2)
    forwards = sum(relay.machine.seconds(relay.stage, tasks.Forward) for relay in relays)
    for kind, policy in ((Restart, "restart"), (Swarm, "swarm-tuned")):
        least, more = (kind(each, policy, 0).run().rows[0].computed_s for each in (roomy, short))
        assert more - least == pytest.approx(forwards, rel=1e-9)
    published = Swarm(short, "swarm-published", 0).run().rows[0].computed_s
    assert published - least == pytest.approx(3 * forwards, rel=1e-9)


@pytest.mark.parametrize(("capacity", "recompute"), [(1, 0.0), (4, 0.0), (2, 5.0), (3, 0.5)])
def test_as_published_the_same_bytes_hold_more_inputs(capacity: int, recompute: float) -> None:
    work = fleet().scenario.work
    ours = (capacity + 1) * work.kept_bytes(1) + int(capacity * recompute) * work.input_bytes
    inputs = input_slots(work, 1, capacity, recompute)
    theirs = work.kept_bytes(1) + (inputs - 1) * work.input_bytes
    assert theirs <= ours < theirs + work.input_bytes
    assert inputs > capacity + int(capacity * recompute)


def test_no_relay_holds_more_than_its_places() -> None:
    """... and one repair, whoever crashes."""
    most: dict[str, int] = {}

    class Watched(Swarm):
        def _forward(self, microbatch: Microbatch, host: str) -> None:
            super()._forward(microbatch, host)
            most[host] = max(most.get(host, 0), len(self.memories[host].held))

    scarce = fleet(3, churn__crash=0.3, fleet__capacity=[2])
    outcome = Watched(scarce, "swarm-tuned", 3).run()
    assert total([outcome], "recoveries") > 0
    assert set(most.values()) <= {2, 3}


def test_repairs_go_before_others_and_have_one_place_more() -> None:
    room: RelayMemory[str] = RelayMemory(1, 2)
    entered: list[str] = []

    def enter(who: str, index: int, repairs: bool = False) -> None:
        room.enter(who, index, lambda: entered.append(who), repairs)

    enter("a", 5)
    enter("late", 9)
    enter("early", 7)
    enter("repair", 8, repairs=True)
    assert entered == ["a", "repair"]
    assert room.keeps_activations_of("a") and not room.keeps_activations_of("repair")
    room.leave("a")
    assert entered == ["a", "repair"]
    room.leave("repair")
    room.leave("early")
    assert entered == ["a", "repair", "early", "late"]


def test_a_crash_makes_restart_do_the_whole_iteration_again() -> None:
    calm = Restart(fleet(), "restart", 0).run()
    assert total([calm], "wasted_s") == total([calm], "recoveries") == 0.0
    churned = [Restart(fleet(seed, churn__crash=0.2), "restart", seed).run() for seed in range(4)]
    crashes = total(churned, "crashes")
    assert crashes > 5
    assert 0 < total(churned, "recoveries") <= 12 * crashes
    assert total(churned, "wasted_s") > 0.0
    assert total(churned, "twice") == 0
    for outcome in churned:
        for row in outcome.rows:
            whole = calm.rows[-1].computed_s
            assert row.computed_s - row.wasted_s == pytest.approx(whole, rel=1e-6)


def test_swarm_counts_doubly_what_starts_again() -> None:
    """As published, a broken way back starts the microbatch again; tuned, another replica takes it up."""
    published, tuned = swarm("swarm-published", 0.3), swarm("swarm-tuned", 0.3)
    assert total(published, "twice") > 4 * total(tuned, "twice")
    assert total(published, "recoveries") > 0 and total(tuned, "recoveries") > 0
    assert total(published, "seconds") > total(tuned, "seconds")
    for calm in (swarm("swarm-published", 0.0), swarm("swarm-tuned", 0.0)):
        assert total(calm, "twice") == total(calm, "wasted_s") == total(calm, "recoveries") == 0


def test_swarm_computes_the_forward_again_only_as_published() -> None:
    published, tuned = (total(swarm(policy, 0.0), "busy_s") for policy in ("swarm-published", "swarm-tuned"))
    assert published / tuned == pytest.approx(4 / 3, rel=0.05)


def test_quicker_peers_come_up_more_often_in_swarms_wiring() -> None:
    wiring = StochasticWiring(CounterRng(0))
    count = {"quick": 0, "slow": 0}
    for _ in range(400):
        peer = wiring.choose(count)
        assert peer is not None
        count[peer] += 1
        wiring.took(peer, {"quick": 1.0, "slow": 3.0}[peer])
    assert count["quick"] == pytest.approx(300, abs=5)
    wiring.lost("quick")
    assert wiring.choose(count) == "slow"


def test_the_same_seed_gives_the_same_run() -> None:
    for kind, policy in ((Restart, "restart"), (Swarm, "swarm-tuned")):
        runs = [kind(fleet(2, churn__crash=0.3), policy, 2).run() for _ in range(2)]
        assert structs.asdict(runs[0]) == structs.asdict(runs[1])


@pytest.mark.costly
def test_as_coded_a_broken_call_is_made_again_and_nothing_begins_anew() -> None:
    """Crashes of neighbours included: no contribution is counted twice, and every iteration ends."""
    coded, published = swarm("swarm-as-coded", 0.3), swarm("swarm-published", 0.3)
    assert total(coded, "twice") == 0 < total(published, "twice")
    assert total(coded, "recoveries") > 0
    assert total(coded, "seconds") < total(published, "seconds")
    calm = [total(swarm(policy, 0.0), "seconds") for policy in ("swarm-as-coded", "swarm-published")]
    assert calm[0] == calm[1]


def test_as_coded_an_idle_peer_moves_to_the_loaded_stage() -> None:
    """Stage 1 has three replicas and stage 2 one that is as slow as all three: the moved peer serves there
    after it has the state, and iterations become shorter."""
    machines = [("data", 0, 1.0), *[("relay", 1, 1.0)] * 3, ("relay", 2, 0.3)]
    parts = tuple(MachinePart(role=role, stage=stage, speed=speed) for role, stage, speed in machines)
    scenario = load_scenario("wan10", SMALL | {"fleet.data_nodes": 1, "run.iterations": 12})
    uneven = fleet_of(replace(scenario, machines=parts), WAN10, 0)
    moving = Swarm(uneven, "swarm-as-coded", 0)
    moving._rebalancing = once = Rebalancing(moving, math.inf)
    once._next_at_s = 10.0
    rows = moving.run().rows
    assert len(moving.serving[1]) == len(moving.serving[2]) == 2
    assert rows[-1].seconds < 0.7 * rows[0].seconds


@pytest.mark.parametrize("policy", ["restart", "swarm-tuned"])
def test_fewer_bytes_on_the_wire_change_sizes_and_no_computing(policy: str) -> None:
    sizes = {f"precision__{key}_bytes": 2.0 for key in ("activation", "sum", "reduced")}
    whole, half = fleet(), fleet(**sizes)
    rows = [simulate(each.scenario, WAN10, policy, 0).rows for each in (whole, half)]
    assert [row.computed_s for row in rows[0]] == pytest.approx([row.computed_s for row in rows[1]])
    assert all(other.seconds < one.seconds for one, other in zip(*rows, strict=True))
    sent = 12 * 2 * 3 * half.scenario.work.activation_bytes
    reduced = sum(
        4.0 * (len(half.stage(stage)) - 1) * half.scenario.work.parameters(stage) for stage in range(3)
    )
    assert rows[1][0].payload_bytes == pytest.approx(sent + reduced)


def test_a_call_that_was_made_again_elsewhere_is_not_carried_out_twice() -> None:
    """The input had arrived when its sender was lost, and the gradient arrived after another replica was
    called: such runs ended with a relay that is on no path."""
    lines = {"network__up_bps": [5e7], "network__down_bps": [5e7], "churn__crash": 0.5}
    crowded = {"model__stages": 3, "fleet__relays": 9, "model__microbatches": 24, "run__iterations": 10}
    outcome = Swarm(fleet(10, **crowded, **lines), "swarm-as-coded", 10).run()
    assert total([outcome], "twice") == 0 < total([outcome], "recoveries")


@pytest.mark.costly
def test_an_input_whose_sender_is_lost_after_it_arrived_is_not_sent_again() -> None:
    """The replacement of a lost relay computes with it; it is not replaced itself, which once ended this run
    with an error."""
    changes = {"churn.crash": 0.1, "run.iterations": 24, "run.heartbeat_s": 5.0, "fleet.park": 1.0}
    wire = {"precision.activation_bytes": 1.0 + 4.0 / 4096.0, "precision.sum_bytes": 2.0}
    more = {"precision.reduced_bytes": 2.0, "fleet.deal": "links"}
    outcome = simulate(load_scenario("wan10", changes | wire | more), WAN10, "swarm-as-coded", 2)
    assert not outcome.failure and len(outcome.rows) == 24


@pytest.mark.parametrize("policy", VARIANTS)
def test_a_relay_that_came_back_computes_nothing_before_it_has_its_state(policy: str) -> None:
    """Its old address was still in the list of peers, and was called; a paced run as coded never ended."""

    class Watched(Swarm):
        def _compute(
            self, microbatch: Microbatch, host: str, priority: TaskPriority, kinds: Kinds, then: Done
        ) -> None:
            assert not self.alive(host) or host in self.serving[self.fleet.hosts[host].stage]
            super()._compute(microbatch, host, priority, kinds, then)

    outcomes = [Watched(fleet(seed, churn__crash=0.3), policy, seed).run() for seed in range(4)]
    assert total(outcomes, "crashes") > 0
