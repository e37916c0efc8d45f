"""Recent use of credits by each upstream peer, kept across iterations. (A credit permits its holder to send
one microbatch.)
"""

from __future__ import annotations

from dataclasses import dataclass, field

#: Decay of the usage per iteration, and number of credits below which it is forgotten (plain choices).
FADES, FADED = 0.75, 0.5


@dataclass
class CreditUsage:
    """Recent use of credits. of: upstream peer -> number of credits that it used for new microbatches,
    decaying with each iteration."""

    of: dict[str, float] = field(default_factory=dict)

    def fade(self) -> None:
        """Decay all numbers; called when an iteration opens."""
        self.of = {peer: used * FADES for peer, used in self.of.items() if used * FADES > FADED}

    def add(self, peer: str, slots: int) -> None:
        self.of[peer] = self.of.get(peer, 0.0) + slots
