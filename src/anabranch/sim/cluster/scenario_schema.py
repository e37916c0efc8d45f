"""Sections of a scenario file: type, default and constraint of each key (docs/reference/scenario.md).

A constraint of a list holds for each value. Not here: machines named one by one (`machine_spec`).
"""

from __future__ import annotations

import typing
from dataclasses import dataclass
from typing import Annotated, Any

from anabranch.config.constraints import OneOf, Range
from anabranch.sim.cluster.device_model import CONTRIBUTION_BYTES, RESULT_BYTES, WIDTHS

#: Additional microbatches, as a multiple of the capacity.
ExtraShare = Annotated[float, Range(0.0, 16.0)]
#: Bytes of a value on the wire; 0 for the usual number.
ValueBytes = Annotated[float, Range(0.0, 16.0)]
#: Bandwidth of an access line (bits per second).
LineRate = Annotated[float, Range(1e5, 1e13)]
#: Standard deviation of the logarithm of a speed.
Deviation = Annotated[float, Range(0.0, 2.0)]


@dataclass(frozen=True)
class ModelPart:
    """Model and batch of a scenario. size: a named model. stages: relay stages into which the blocks are cut,
    beside stage 0 of the data nodes (0: every relay holds the whole model). rows: sequences of a microbatch.
    sequence: tokens of a row. microbatches: per iteration. dtype: precision of computing and of payloads.
    subspace: values per token that a cut carries (0: the model's width)."""

    size: str = "llama-350m"
    stages: Annotated[int, Range(0, 64)] = 6
    rows: Annotated[int, Range(1, 4096)] = 4
    sequence: Annotated[int, Range(2, 1 << 20)] = 1024
    microbatches: Annotated[int, Range(1, 1 << 16)] = 48
    dtype: Annotated[str, OneOf(*WIDTHS)] = "fp32"
    subspace: Annotated[int, Range(0, 1 << 16)] = 0

    @property
    def relay_stages(self) -> int:
        """Number of stages that relays hold: 1 if every relay holds the whole model."""
        return max(1, self.stages)


@dataclass(frozen=True)
class RoundPart:
    """Rounds of islands, as in a run file: of machines that hold the whole model (model.stages = 0), or of
    pipelines with one machine of each stage. slots: most islands (0: no rounds), which divide
    model.microbatches. steps: inner steps of a round. start: synchronous iterations before the first
    round. first_steps: inner steps of the first round, doubled from round to round up to `steps` (0: all
    rounds have `steps`). overlap: steps of the next round that a machine takes during the exchange, on
    average; machines carry the state of their slots then. contributions, results: rounding of what an island
    sends and gets. late: late slots are left out ("drop") or waited for; grace: time that they have, as a
    share of the time until three quarters are ready. private: machines have data of their own, and get no
    token ids in a round."""

    slots: Annotated[int, Range(0, 4096)] = 0
    steps: Annotated[int, Range(1, 100_000)] = 20
    start: Annotated[int, Range(1, 100_000)] = 1
    first_steps: Annotated[int, Range(0, 100_000)] = 0
    overlap: Annotated[int, Range(0, 100_000)] = 0
    contributions: Annotated[str, OneOf(*CONTRIBUTION_BYTES)] = "int4"
    results: Annotated[str, OneOf(*RESULT_BYTES)] = "int8"
    late: Annotated[str, OneOf("drop", "wait")] = "drop"
    grace: Annotated[float, Range(0.05, 100.0)] = 0.5
    private: bool = False


@dataclass(frozen=True)
class PrecisionPart:
    """Sizes on the line that replace the modelled ones, for whatever system. activation_bytes: bytes of one
    value of an activation or its gradient (0: by `wire` and `model.dtype`). sum_bytes, reduced_bytes: bytes
    of one parameter in a reduce, to the peer that sums and back (0: by `wire.reduce`, in a round by
    `round.contributions` and `round.results`). Only sizes change: packing costs no time."""

    activation_bytes: ValueBytes = 0.0
    sum_bytes: ValueBytes = 0.0
    reduced_bytes: ValueBytes = 0.0


@dataclass(frozen=True)
class FleetPart:
    """Machines that a seed draws, and options of the protocol.

    device: devices of the machines, drawn for each. devices: file with further ones. achieved: share of the
    peak. speed: factor, drawn for each relay. capacity: microbatches in flight, drawn for each relay (empty:
    computed from its memory). park: additional microbatches, as a share of the capacity, whose activations
    are offloaded to host memory (host_memory_bytes, half of which may be used). recompute: additional slots,
    as a share of the capacity, whose forward is recomputed. rebalance: iterations for which a stage must have
    been slowest before a relay moves there (0: never). neighbours: peers of an adjacent stage that each peer
    is linked to. deal: assignment of relays without a stage, in turn ("arrival") or by the leader ("links").
    spread: use of helpers in a reduce, by links ("links"), "never", or at random ("always"), or shares of the
    averaging program ("program"). spare: use of standbys, by links, "never", or at random.
    """

    data_nodes: Annotated[int, Range(1, 64)] = 2
    relays: Annotated[int, Range(1, 4096)] = 16
    device: tuple[str, ...] = ("t4",)
    devices: str = ""
    achieved: Annotated[float, Range(0.01, 1.0)] = 0.4
    speed: tuple[Annotated[float, Range(0.01, 100.0)], ...] = (1.0,)
    capacity: tuple[Annotated[int, Range(1, 1024)], ...] = ()
    park: ExtraShare = 0.0
    host_memory_bytes: Annotated[float, Range(1e8, 1e13)] = 32e9
    recompute: ExtraShare = 0.0
    rebalance: Annotated[int, Range(0, 100_000)] = 0
    neighbours: Annotated[int, Range(1, 64)] = 4
    deal: Annotated[str, OneOf("arrival", "links")] = "arrival"
    spread: Annotated[str, OneOf("links", "program", "never", "always")] = "links"
    spare: Annotated[str, OneOf("links", "never", "always")] = "never"


@dataclass(frozen=True)
class NetworkPart:
    """Network of a scenario. profile: shipped profile of regions, or a file. up_bps, down_bps: access lines
    (bits per second), drawn for each host. loss: share of lost packets. burst_trips: TCP's pacing
    (`network.shared_link.SharedLink`). hidden: share of the machines of relays that nobody can dial."""

    profile: str = "wan10"
    up_bps: tuple[LineRate, ...] = (2e9,)
    down_bps: tuple[LineRate, ...] = (2e9,)
    loss: Annotated[float, Range(0.0, 0.2)] = 0.0
    burst_trips: Annotated[float, Range(0.0, 1.0)] = 0.0
    hidden: Annotated[float, Range(0.0, 1.0)] = 0.0


@dataclass(frozen=True)
class ChurnPart:
    """Crashes and returns of relays. crash: probability that a relay crashes during an iteration. return_s:
    seconds from such a crash until its machine, or a replacement, begins to join. spare_last: True if the
    last serving replica of a stage never crashes (GWTF assumes this). trace: file with a churn trace, which
    says itself when relays crash and return ("": none); `crash` must be 0 with it."""

    crash: Annotated[float, Range(0.0, 0.9)] = 0.0
    return_s: Annotated[float, Range(0.0, 1e6)] = 10.0
    spare_last: bool = True
    trace: str = ""


@dataclass(frozen=True)
class DriftPart:
    """Drift of machine and link speeds (`network.drift`). speed, links: standard deviations of their
    logarithms (0: no drift). period_s: correlation time (s)."""

    speed: Deviation = 0.0
    links: Deviation = 0.0
    period_s: Annotated[float, Range(1.0, 1e6)] = 600.0


@dataclass(frozen=True)
class RunPart:
    """Length of a simulated run. iterations: number of iterations. warm_up: the first of these, which are not
    counted; fewer than `iterations`. heartbeat_s: seconds between two heartbeats of a peer. delay: 1 for two
    iterations in flight, only with relay stages. snapshot_every: iterations between snapshots of the stages
    (0: so many that copies add at most a quarter to the traffic). snapshot_copies: peers that keep each
    snapshot (0: no snapshots)."""

    iterations: Annotated[int, Range(1, 100_000)] = 12
    warm_up: Annotated[int, Range(0, 100_000)] = 2
    heartbeat_s: Annotated[float, Range(0.05, 60.0)] = 1.0
    delay: Annotated[int, Range(0, 1)] = 0
    snapshot_every: Annotated[int, Range(0, 100_000)] = 0
    snapshot_copies: Annotated[int, Range(0, 64)] = 2


def type_and_constraint(hint: Any) -> tuple[type[Any], Range | OneOf | None]:
    """(plain type, constraint or None) of the values of a key whose field has the annotated type `hint`; of a
    list, of its items."""
    if typing.get_origin(hint) is tuple:
        hint = typing.get_args(hint)[0]
    return getattr(hint, "__origin__", hint), getattr(hint, "__metadata__", (None,))[0]
