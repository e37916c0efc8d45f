"""Times of the auction in seconds, and limits on how often it repeats a step.

Five times are independent: TICK_S, TICK_UNCEASING_S, ROUND_TRIP_S, SETTLE_S and QUIET_S. The others are
multiples of them, fitted to the families A-F with link delays of 10-300 ms (`benchmarks/flow`). They trade
datagrams against cost; none of them affects feasibility.
"""

from __future__ import annotations

#: Delay in which changes are collected, so that a node sends each neighbour one letter for all of them.
TICK_S = 0.1
#: The same under constant churn. 0.3 s sends a fifth fewer letters at 250 relays; 0.25 s changed no iteration
#: over ten regions.
TICK_UNCEASING_S = 0.25

#: Upper bound of the round trip to a neighbour with ticks at both ends; the benchmarks' links: up to 0.6 s.
ROUND_TRIP_S = 1.0
#: Longest delay of an acknowledgement, in which a letter with news may carry it. It must be below REPEAT_S.
LINGER_S = ROUND_TRIP_S
#: Time-out before a letter without acknowledgement is repeated; it doubles up to the second value.
REPEAT_S, REPEAT_MAX_S = 2.5 * ROUND_TRIP_S, 12.0 * ROUND_TRIP_S
#: Delay of first bids: with all next hops' prices, for further neighbours; else for the missing prices.
MEET_S, START_S = 0.5 * ROUND_TRIP_S, 3.0 * ROUND_TRIP_S
#: Rest (time without a moved unit) before a repair at a node: after an external change, and at the start,
#: when neighbours are still bidding. It doubles with each repair up to the third value.
LULL_S, LULL_COLD_S, LULL_MAX_S = 4.0 * ROUND_TRIP_S, 32.0 * ROUND_TRIP_S, 512.0 * ROUND_TRIP_S
#: Least rest, as a share of the time since the last external change. Without it a node whose first repair
#: comes late begins with short rests when the others have come to rest.
LULL_SHARE = 0.5
#: Time for which units stay placed after their previous hop died, for another to take them over: two rests.
ORPHAN_S = 2.0 * LULL_S

#: Rest of the working flow at a node before standing units follow it; a letter that is lost twice arrives
#: within it. It doubles each time up to SETTLE_MAX_S, as few moves of a bidding war are worth following.
SETTLE_S = 10.0
SETTLE_MAX_S = 32.0 * SETTLE_S
#: Time for which a standing unit without a next hop, or without a previous hop, keeps its place.
PATIENCE_S = 2.0 * SETTLE_S
#: Time-out of a source for the first confirmation of a unit, which passes all stages and back.
FIRST_S = 6.0 * SETTLE_S
#: Pause of a source after a unit that was never confirmed; it doubles up to PAUSE_MAX_S. PAUSES: most pauses
#: until a unit moves at the source. They are many, as the flow at later stages may still move.
PAUSE_S, PAUSE_MAX_S, PAUSES = 3.0 * SETTLE_S, 24.0 * SETTLE_S, 40

#: Time without an external change that separates two series of changes. A longer series is constant churn: a
#: peer comes or goes every few seconds, and prices never settle.
QUIET_S = 60.0
#: Pause between repairs once the rest has reached LULL_MAX_S; most such repairs; and the same at a relay with
#: more capacity than next hops, as many units move in each. Afterwards a node repairs only after an external
#: change, so that the auction ends.
MORE_S, MORE, MORE_MANY = 2.0 * QUIET_S, 8, 1

#: Rise of a source's price, in epsilons, after which it searches for free capacity. SEARCH_EPSILONS: after an
#: external change. It doubles with each search up to SEARCH_MAX_EPSILONS, which also holds at the start, or
#: under constant churn up to SEARCH_UNCEASING_EPSILONS: a search goes through the whole swarm and nearly
#: always finds a free path then.
SEARCH_EPSILONS, SEARCH_MAX_EPSILONS, SEARCH_UNCEASING_EPSILONS = 6.0, 25.0, 400.0
#: Most searches between two external changes that only announce a higher refusal price to other sources.
EVEN = 3
