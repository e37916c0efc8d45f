"""Random schedule of kills, freezes and hostile guests for a swarm: a pure function of a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

RELAY, DATA, VOTER, STAGE = "relay", "data node", "voter", "stage"
#: Target of faults that hit no process of the swarm: a hostile guest comes from outside.
GUEST = "guest"
#: Targets of faults, in the order in which reports list them.
TARGETS = (RELAY, DATA, VOTER, STAGE)

#: Faults per fault that is aimed at a data node, and per fault that is aimed at a voter; a plain choice.
RARE_EVERY = 20
#: A schedule with fewer faults than this aims all of them at relays.
MIN_FOR_RARE = 4
#: Shortest and longest freeze (s), log-uniform: far below to far above the time before a suspicion.
FREEZE_S = (0.5, 30.0)
#: Shortest and longest delay (s) between a loss and the start of the replacement.
REPLACE_S = (0.2, 3.0)


@dataclass(frozen=True)
class PlannedFault:
    """Planned kill (SIGKILL) or freeze (SIGSTOP) of a process or a whole stage, or planned hostile guest.

    at_s: seconds after the schedule begins. target: kind of process to hit, from TARGETS, or GUEST. freeze_s:
    length of the freeze; 0 for a kill. pick: number in [0, 1) that selects the victim among the candidates,
    or the stage of a guest. returns: True if the victim starts again with its key, False if a new peer takes
    its place. replace_s: seconds between the loss and that start. deed: of a guest; "" for other faults.
    """

    at_s: float
    target: str
    freeze_s: float
    pick: float
    returns: bool
    replace_s: float
    deed: str = ""

    @property
    def kind(self) -> str:
        if self.target == GUEST:
            return f"{GUEST}: {self.deed}"
        return f"{self.target} {'frozen' if self.freeze_s else 'killed'}"


def draw_schedule(seed: int, length_s: float, per_minute: float, freeze: float) -> list[PlannedFault]:
    """Draw round(per_minute * length_s / 60) faults, uniform in time and sorted; a share `freeze` of them
    (never the one at a whole stage) are SIGSTOP, the others SIGKILL. The same arguments give the same faults.

    From MIN_FOR_RARE faults on, the one nearest to the middle kills a whole stage, and one in RARE_EVERY is
    aimed at a data node and as many at a voter, at least one each. All others are aimed at relays.
    """
    rng = random.Random(f"anabranch chaos {seed}")
    count = round(per_minute * length_s / 60)
    times = sorted(rng.uniform(0.0, length_s) for _ in range(count))
    targets = [RELAY] * count
    if count >= MIN_FOR_RARE:
        middle = min(range(count), key=lambda i: abs(times[i] - length_s / 2))
        others = [i for i in range(count) if i != middle]
        rare = max(1, count // RARE_EVERY)
        for position, i in enumerate(rng.sample(others, 2 * rare if 2 * rare <= len(others) else 2)):
            targets[i] = (DATA, VOTER)[position % 2]
        targets[middle] = STAGE
    single = [i for i in range(count) if targets[i] != STAGE]
    frozen = set(rng.sample(single, min(len(single), round(freeze * count))))
    low, high = FREEZE_S
    return [
        PlannedFault(
            at_s=times[i],
            target=targets[i],
            freeze_s=low * (high / low) ** rng.random() if i in frozen else 0.0,
            pick=rng.random(),
            returns=rng.random() < 0.5,
            replace_s=rng.uniform(*REPLACE_S),
        )
        for i in range(count)
    ]


def with_guests(
    schedule: Sequence[PlannedFault], seed: int, share: float, deeds: Sequence[str]
) -> list[PlannedFault]:
    """Copy of `schedule` in which round(share * its length) faults of relays (all, if there are fewer), drawn
    with `seed`, are replaced by hostile guests. The `deeds` are spread evenly over the guests."""
    rng = random.Random(f"anabranch guests {seed}")
    relays = [i for i, fault in enumerate(schedule) if fault.target == RELAY]
    chosen = rng.sample(relays, min(len(relays), round(share * len(schedule))))
    guests, left = {}, list[str]()
    for i in chosen:
        left = left or rng.sample(deeds, len(deeds))
        guests[i] = replace(schedule[i], target=GUEST, freeze_s=0.0, returns=False, deed=left.pop())
    return [guests.get(i, fault) for i, fault in enumerate(schedule)]
