"""Initial assignment of relays to stages by measured links (`fleet.deal = "links"`).

The real protocol runs in virtual time until the first iteration opens: relays ask for any stage, measure
links, and are assigned (`protocol.fleet.initial_assignment`). Every policy and baseline then uses this
assignment for the scenario and seed. Relays that join later get a stage in turn.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from anabranch.errors import UserError
from anabranch.protocol.placement.join_placement import KEPT_FIRST
from anabranch.sim.cluster.scenario import Fleet, Regions, Scenario, fleet_of
from anabranch.sim.experiment.modelled_world import ModelledWorld, settings_of
from anabranch.sim.network.drift import Drift

#: Heartbeats after which a run that has not begun has failed (a choice).
PATIENCE_HEARTBEATS = 600


def placed(scenario: Scenario, regions: Regions, seed: int) -> Fleet:
    """Fleet of a scenario and seed. With `fleet.deal = "links"` its relays without a given stage are assigned
    by measured links, else in turn. Raises UserError as `fleet_of`, and if the run that measures the links
    does not begin."""
    fleet = fleet_of(scenario, regions, seed)
    if scenario.fleet.deal != "links" or all(host.fixed for host in fleet.hosts.values() if host.stage):
        return fleet
    try:
        assigned = assigned_by_links(fleet, seed)
    except TimeoutError as error:
        raise UserError(f"fleet.deal = 'links': {error}; are the links far too thin?") from None
    return fleet_of(scenario, regions, seed, assigned)


def assigned_by_links(fleet: Fleet, seed: int) -> Mapping[str, int]:
    """{relay: stage} of the relays that are there at the beginning, as the leader of a simulated run assigns
    them before its first iteration. The fleet's drift is left out. Raises TimeoutError if the run does not
    begin."""
    asking = {  # for any stage (-1), if they are relays without a given one
        host.id: host if host.fixed or not host.stage else replace(host, stage=-1)
        for host in fleet.hosts.values()
    }
    settings = replace(settings_of(fleet, "greedy"), deal="links", min_replicas=_least_replicas(fleet))
    world = ModelledWorld(replace(fleet, hosts=asking, drift=Drift()), settings, seed)
    leader = world.nodes[world.genesis.leader].peer
    until_s = PATIENCE_HEARTBEATS * settings.heartbeat_s
    while not leader.ctx.run.membership.begun:
        if not world.clock.step() or world.clock.now > until_s:
            raise TimeoutError(f"the run has not begun after {world.clock.now:.0f} virtual seconds")
    members = leader.ctx.run.membership.members.values()
    return {member.id: member.stage for member in members if member.stage}


def _least_replicas(fleet: Fleet) -> int:
    """Number of replicas that every stage must get: the greatest one up to KEPT_FIRST for which the relays
    that are there at the beginning are enough; 1 at least."""
    stages = range(1, fleet.scenario.model.relay_stages + 1)
    there = [host for host in fleet.hosts.values() if host.stage and host.id not in fleet.trace.absent]
    fixed = {stage: sum(host.fixed and host.stage == stage for host in there) for stage in stages}
    spare = sum(not host.fixed for host in there)
    for least in range(KEPT_FIRST, 1, -1):
        if sum(max(0, least - count) for count in fixed.values()) <= spare:
            return least
    return 1
