"""Rate at which honest contributions are chosen for an audit as far off, and steps until a liar's is.

    python -m benchmarks.byzantine.far_off [--seeds 1 2] [--steps 200]

One honest training of the tiny model for each seed. The monitor of the protocol sees the contributions of
each step, dealt to owners in several ways; and, from LIES_FROM on, those of six owners of whom the first one
lies. A liar that is chosen is out with that step in a run, which goes back: so the trajectory is the honest
one, and a liar is followed no further. Each seed is kept in build/ until the program changes.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, pairwise

import msgspec
import torch
from torch import Tensor

from anabranch.config import RunConfig
from anabranch.data.corpus import materialise
from anabranch.protocol.audit.contribution_monitor import Contribution, FarOff
from anabranch.protocol.interface.tasks import part_bounds
from anabranch.train.numerics.moments import moments
from anabranch.train.numerics.numerics_class import configure
from anabranch.train.stage.audit import payload_hash
from benchmarks import harness
from benchmarks.byzantine.attacks import ATTACKS, View
from benchmarks.byzantine.gradient_attacks import CORPUS, LIAR, OWNERS, Job, Trainer, units, wide

STEPS, LIES_FROM = 200, 61
#: Elements of the vectors on which the cost of moments is measured.
TIMED = 1 << 23
#: Microbatches of each owner of the six of a step.
SHAPES = ((1, 1, 1, 1, 1, 1), (2, 2, 2), (3, 2, 1), (4, 1, 1))


class Found(msgspec.Struct, frozen=True):
    """Choices of one seed. honest: shape -> (chosen, contributions) without a liar. waits: attack -> for each
    stage the number of lies that counted until the liar was chosen, -1: it never was. framed: attack ->
    honest contributions chosen meanwhile."""

    seed: int
    honest: dict[str, tuple[int, int]]
    waits: dict[str, list[int]]
    framed: dict[str, int]


class Cost(msgspec.Struct, frozen=True):
    """CPU time in one thread, in ns per element: of the moments of one contribution, and of the hash that its
    seal signs."""

    moments_ns: float
    hash_ns: float


class Watched(Trainer):
    """Honest trainer whose contributions the monitors see."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.choices = {key: FarOff() for key in (*SHAPES, *(name for name in ATTACKS if name != "none"))}
        self.chosen, self.seen, self.framed = Counter[object](), Counter[object](), Counter[object]()
        self.waits: dict[tuple[str, int], int] = {}

    def _aggregate(self, t: int, stage: int, honest: list[Tensor]) -> Tensor:
        sums = {
            shape: reported(
                stage,
                [torch.stack(honest[a:b]).sum(0) for a, b in pairwise(accumulate(shape, initial=0))],
                shape,
            )
            for shape in SHAPES
        }
        for shape in SHAPES:
            self.chosen[shape] += bool(self.choices[shape].choose(t, stage, sums[shape])[0])
            self.seen[shape] += len(shape)
        floats, lies = [wide(part) for part in honest], t >= LIES_FROM
        view = View(floats[LIAR], floats[1:], self.first.setdefault(stage, floats[LIAR].clone()))
        for name, attack in ATTACKS.items():
            if name == "none" or (name, stage) in self.waits:
                continue
            sent = [units(attack(view)), *honest[1:]] if lies else honest
            peer, _ = self.choices[name].choose(
                t, stage, reported(stage, sent, SHAPES[0], lies) if lies else sums[SHAPES[0]]
            )
            if peer == name_of(stage, LIAR) and lies:
                self.waits[name, stage] = t - LIES_FROM
            else:
                self.framed[name] += bool(peer)
        return torch.stack(honest).sum(0)


def reported(
    stage: int, sent: Sequence[Tensor], shape: Sequence[int], lies: bool = False
) -> dict[str, Contribution]:
    """Contributions to a stage as their owners report them, each of whom sums one part. lies: True if the
    liar reports the moments of another owner as its own."""
    reports = [list(moments([part[a:b] for part in sent])) for a, b in part_bounds(len(sent[0]), len(sent))]
    if lies:
        reports[LIAR][LIAR] = reports[LIAR][1]
    names, found = tuple(name_of(stage, owner) for owner in range(len(sent))), {}
    for owner, name in enumerate(names):
        squares, dots = zip(*(part[owner] for part in reports), strict=True)
        found[name] = Contribution(shape[owner], squares, dots, names)
    return found


def name_of(stage: int, owner: int) -> str:
    return f"r{stage}.{owner}"


def watch(seed: int, steps: int) -> Found:
    """Choices in the honest training of one seed."""
    trainer = Watched(Job("none", "none", seed, steps))
    for t in range(1, steps + 1):
        trainer._step(t)
    attacks = [name for name in ATTACKS if name != "none"]
    return Found(
        seed,
        {named(shape): (trainer.chosen[shape], trainer.seen[shape]) for shape in SHAPES},
        {name: [trainer.waits.get((name, stage), -1) for stage in trainer.stages] for name in attacks},
        {name: trainer.framed[name] for name in attacks},
    )


def cost() -> Cost:
    """Least CPU time of several measurements, with three owners."""
    parts = [torch.arange(TIMED, dtype=torch.int64) * (1 << 20) for _ in range(3)]
    times: dict[str, list[float]] = {"moments": [], "hash": []}
    for _ in range(7):
        begin = time.process_time()
        moments(parts)
        times["moments"].append(time.process_time() - begin)
        begin = time.process_time()
        for part in parts:
            payload_hash(part.view(-1))  # another object: hashes are remembered
        times["hash"].append(time.process_time() - begin)
    return Cost(*(min(some) / TIMED / len(parts) * 1e9 for some in times.values()))


def kept(seed: int, steps: int) -> Found:
    path = harness.CACHE / "far_off" / harness.program() / f"{seed}.{steps}.json"
    if not path.exists():
        harness.write_whole(path, msgspec.json.encode(watch(seed, steps)))
    return msgspec.json.decode(path.read_bytes(), type=Found)


def named(shape: Sequence[int]) -> str:
    return " + ".join(map(str, shape))


def written(found: Sequence[Found], steps: int) -> str:
    """Tables of wrong choices and of the liars' lies that counted."""
    honest = [
        [shape, sum(each.honest[shape][0] for each in found), sum(each.honest[shape][1] for each in found)]
        for shape in found[0].honest
    ]
    liars = []
    for attack in found[0].waits:
        waits = [wait for each in found for wait in each.waits[attack]]
        caught = sorted(wait for wait in waits if wait >= 0)
        between = f"{caught[0]} to {caught[-1]}" if caught else "-"
        framed = sum(each.framed[attack] for each in found)
        liars.append([attack, f"{len(caught)} of {len(waits)}", between, framed])
    head = ["attack", "liars chosen", "lies that counted before", "honest contributions chosen"]
    tables = (
        harness.table(["units of the owners", "honest contributions chosen", "of"], honest),
        harness.table(head, liars),
    )
    return f"Lies begin in step {LIES_FROM} of {steps}, one liar in each stage.\n\n" + "\n\n".join(tables)


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=int, nargs="*", default=[1])
    args = parser.parse_args()
    materialise(RunConfig().data, CORPUS)
    configure(1)
    taken = cost()
    found = [kept(seed, args.steps) for seed in args.seeds]
    setting = (
        f"llama-tiny, 3 relay stages, {OWNERS} microbatches of 2 x 64 tokens a step, {args.steps} steps for "
        f"each of the seeds {', '.join(map(str, args.seeds))}. "
        "An honest contribution that is chosen costs one audit. "
        f"Moments of a contribution take {taken.moments_ns:.1f} ns of CPU time per element, its hash "
        f"{taken.hash_ns:.1f} ns (one thread)."
    )
    harness.write(
        "far-off",
        "Contributions that are audited as they are far off",
        f"{setting} {written(found, args.steps)}",
        data={"cost": taken, "seeds": found},
        dry=args.dry,
    )


if __name__ == "__main__":
    main()
