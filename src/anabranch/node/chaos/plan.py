"""Which faults strike a swarm of processes, and when: a pure function of a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

RELAY, DATA, VOTER, STAGE = "relay", "data node", "voter", "stage"
#: In the order in which they are told.
TARGETS = (RELAY, DATA, VOTER, STAGE)

#: Of so many strikes one is aimed at a data node, and one at a voter.
RARE_EVERY = 20
#: Fewer strikes than this are all aimed at relays.
LEAST_FOR_RARE = 4
#: A frozen process sleeps between these (s); short sleeps are as likely as long ones (log-uniform).
FREEZE_S = (0.5, 30.0)
#: A replacement starts between these after the loss (s).
REPLACE_S = (0.2, 3.0)


@dataclass(frozen=True)
class Strike:
    """One fault. at_s: seconds after the storm begins. freeze_s: 0 is SIGKILL, else SIGSTOP for so long.
    pick: in [0, 1), which of those that qualify is struck. returns: a machine that died starts again with its
    key, else a stranger comes in its place, replace_s after the loss."""

    at_s: float
    target: str
    freeze_s: float
    pick: float
    returns: bool
    replace_s: float

    @property
    def kind(self) -> str:
        return f"{self.target} {'frozen' if self.freeze_s else 'killed'}"


def plan(seed: int, length_s: float, per_minute: float, freeze: float) -> list[Strike]:
    """The strikes of a storm, in their order: Poisson in time given their number, `freeze` of them SIGSTOP.

    The one nearest to the middle takes a whole stage; one in twenty is aimed at a data node and as many at a
    voter, at least one each.
    """
    dice = random.Random(f"anabranch chaos {seed}")
    count = round(per_minute * length_s / 60)
    times = sorted(dice.uniform(0.0, length_s) for _ in range(count))
    targets = [RELAY] * count
    if count >= LEAST_FOR_RARE:
        middle = min(range(count), key=lambda i: abs(times[i] - length_s / 2))
        others = [i for i in range(count) if i != middle]
        rare = max(1, count // RARE_EVERY)
        for position, i in enumerate(dice.sample(others, 2 * rare if 2 * rare <= len(others) else 2)):
            targets[i] = (DATA, VOTER)[position % 2]
        targets[middle] = STAGE
    single = [i for i in range(count) if targets[i] != STAGE]
    frozen = set(dice.sample(single, min(len(single), round(freeze * count))))
    low, high = FREEZE_S
    return [
        Strike(
            at_s=times[i],
            target=targets[i],
            freeze_s=low * (high / low) ** dice.random() if i in frozen else 0.0,
            pick=dice.random(),
            returns=dice.random() < 0.5,
            replace_s=dice.uniform(*REPLACE_S),
        )
        for i in range(count)
    ]
