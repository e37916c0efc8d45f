"""Fleet and network of a scenario, for the commands that simulate one; errors name the scenario's file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anabranch.errors import UserError

if TYPE_CHECKING:
    from anabranch.net.wan.profile import Profile
    from anabranch.sim.cluster.scenario import Fleet, Scenario


def open_fleet(scenario: Scenario, name: str) -> Fleet:
    """The scenario's fleet as seed 0 draws it. name: the scenario as the user gave it. Raises UserError,
    naming its file, if the network or the fleet cannot be made."""
    from anabranch.sim.experiment.initial_placement import placed

    regions = _profile_of(scenario, name)
    try:
        return placed(scenario, regions, 0)
    except UserError as error:
        raise UserError(f"{file_of(name)}: {error}") from None


def _profile_of(scenario: Scenario, name: str) -> Profile:
    from anabranch.net.wan.profile import find_profile, shipped_profiles
    from anabranch.net.wan.shape import WanError

    profile = scenario.network.profile
    try:
        return find_profile(profile)
    except WanError as error:
        known = "" if "/" in profile or "." in profile else f"; shipped: {', '.join(shipped_profiles())}"
        raise UserError(f"{file_of(name)}: network.profile: {error}{known}") from None


def file_of(name: str) -> str:
    """File name of a scenario for messages: NAME.toml of a shipped one, else `name`, the path that the user
    gave."""
    from anabranch.sim.cluster.scenario import shipped_scenarios

    return f"{name}.toml" if name in shipped_scenarios() else name
