"""The GWTF authors' own flow protocol on our instances, beside which our `gwtf` stands.

    git clone https://github.com/NikolayBlagoev/DecCom-Python && git -C DecCom-Python checkout f804a45
    pip install --target DecCom-Python fe25519==1.5.0 ge25519==1.5.1
    python -m benchmarks.flow.gwtf_authors --authors DecCom-Python

Their `FlowProtocol` runs as it is, in virtual time: one event loop for all nodes, and in place of their
sockets, gossip and encryption a layer that hands each datagram over after the link's delay (10-300 ms, none
lost) and lets every node know all peers of the stage before, its own and the next. They stop by themselves
after 134 rounds of 2 s. A unit counts if it can be followed from a data node through every stage back to one.
Writes the result `flow-authors`.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import io
import os
import random
import selectors
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anabranch.flow.graph.problem import Flow, Instance
from anabranch.flow.graph.problem import Path as Hops
from benchmarks import harness
from benchmarks.flow.feasibility import violations
from benchmarks.flow.tables import mean
from benchmarks.flow.trial_cache import Cache
from benchmarks.flow.trials import CALM, Trial, against, instance_of, run
from benchmarks.harness import table

#: After 134 rounds of 2 s they stop changing anything; they are also given longer. A few rounds more let what
#: is under way arrive.
ROUNDS, ROUND_S, MORE_ROUNDS = (134, 1000), 2.0, 6


@dataclass(frozen=True)
class Result:
    flow_share: float
    cost_ratio: float
    per_link: float
    broken: int
    seconds: float
    cpu_s: float


class _Skipping(selectors.DefaultSelector):
    """Where the loop would sleep, its clock jumps."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout:
            self.now += timeout
        return ready


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._skipping = _Skipping()
        super().__init__(self._skipping)

    def time(self) -> float:
        return self._skipping.now


class _Network:
    """All nodes by address, and the delay of every directed pair."""

    def __init__(self, instance: Instance, seed: int) -> None:
        self.instance = instance
        self.sent = 0
        self.layers: dict[tuple[str, int], _Layer] = {}
        self._dice = random.Random(seed)
        self._delay: dict[tuple[object, object], float] = {}

    def neighbours(self, start: str, end: str) -> bool:
        stage, stages = self.instance.stage, self.instance.stages + 1
        if start == end or (stage[start] == stage[end] == 0):
            return False
        linked = (start, end) in self.instance.links or (end, start) in self.instance.links
        return linked or (stage[start] - stage[end]) % stages == 0

    def send(self, start: _Layer, address: tuple[str, int], message: bytes) -> None:
        self.sent += 1
        end = self.layers[address]
        pair = (start.peer.addr, address)
        delay = self._delay.setdefault(pair, self._dice.uniform(*CALM.delay_s))
        asyncio.get_running_loop().call_later(delay, end.callback, start.peer.addr, bytes(message))


class _Layer:
    """Lower layer of their protocol: sending, and the known peers."""

    def __init__(self, network: _Network, peer: Any) -> None:
        self.network = network
        self.peer = peer
        self.known: dict[tuple[str, int], Any] = {}
        self.submodule = None
        self._taken: dict[str, Any] = {}
        network.layers[peer.addr] = self

    def callback(self, address: tuple[str, int], message: bytes) -> None:
        """Taken over by the protocol above."""

    def connected_callback(self, address: tuple[str, int], peer: Any) -> None:
        """Taken over by the protocol above."""

    def disconnected_callback(self, address: tuple[str, int], node_id: bytes) -> None:
        """Taken over by the protocol above."""

    async def start(self, peer: Any) -> None:
        """Nothing to open."""

    async def sendto(self, message: bytes, address: tuple[str, int]) -> None:
        self.network.send(self, address, message)

    async def broadcast(self, message: bytes) -> None:
        for address in self.known:
            self.network.send(self, address, message)

    def get_al(self, address: tuple[str, int]) -> Any:
        return self.known.get(address)

    def get_peer(self, node_id: bytes) -> Any:
        return next((peer for peer in self.known.values() if peer.id_node == node_id), None)


class _Counted(list[Any]):
    """Their list of rounds, by whose length they know what to do in a round (modulo 12) and when to stop."""

    def __init__(self, rounds: int) -> None:
        super().__init__()
        self._extra = max(0, rounds - ROUNDS[0])

    def __len__(self) -> int:
        length = super().__len__()
        return length % 12 if length <= self._extra else length - self._extra // 12 * 12


def solve_by_authors(instance: Instance, seed: int, rounds: int) -> tuple[Flow, int, int]:
    """Their flow after `rounds`, units that reach no proper end, and datagrams.

    Their modules must be importable.
    """
    rng = _TolerantRandom(seed)
    for module in ("flownode", "flownode_ss", "flowprotocol", "flowprotocol_ss"):
        importlib.import_module(module).random = rng  # type: ignore[attr-defined]
    network = _Network(instance, seed)
    loop = _VirtualLoop()
    asyncio.set_event_loop(loop)
    nodes = _make_nodes(network, rounds)
    layers = dict(zip(nodes, network.layers.values(), strict=True))
    for name, layer in layers.items():
        layer.known = {
            other.peer.addr: other.peer for end, other in layers.items() if network.neighbours(name, end)
        }

    async def live() -> None:
        for name, node in nodes.items():
            await node.start(layers[name].peer)
            await asyncio.sleep(ROUND_S / len(nodes))
        for layer in layers.values():
            for address, peer in layer.known.items():
                layer.connected_callback(address, peer)
        await asyncio.sleep((rounds + MORE_ROUNDS) * ROUND_S)

    try:
        with contextlib.redirect_stdout(_Silence()), contextlib.redirect_stderr(_Silence()):
            loop.run_until_complete(live())
    finally:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.close()
        asyncio.set_event_loop(None)
    by_id = {node.peer.id_node: name for name, node in nodes.items()}
    paths = list(_follow(instance, nodes, by_id))
    own = instance.returns == "own"
    whole = tuple(
        path for path in paths if len(path) == instance.stages + 2 and (path[0] == path[-1] or not own)
    )
    return Flow(whole), len(paths) - len(whole), network.sent


def _make_nodes(network: _Network, rounds: int) -> dict[str, Any]:
    """Their protocol for every node, on a layer each, in the order of the instance."""
    instance = network.instance
    peers = importlib.import_module("deccom.peers.peer")
    relays = importlib.import_module("flowprotocol")
    sources = importlib.import_module("flowprotocol_ss")

    def cost(mine: str, other: str) -> float:
        links = instance.links
        return links[mine, other] if (mine, other) in links else links[other, mine]

    nodes: dict[str, Any] = {}
    for at, name in enumerate(instance.stage):
        layer = _Layer(network, peers.Peer(("10.0.0.1", at + 1), name))
        if name in instance.data:
            demand = instance.data[name].microbatches
            node = sources.FlowProtocolSS(0, instance.stages + 1, demand, 0, 0, demand, cost)
        else:
            relay = instance.relay[name]
            node = relays.FlowProtocol(relay.stage, instance.stages + 1, relay.capacity, 0, 0, 0, cost)
        node.iterationsss = _Counted(rounds)
        node.set_lower(layer)
        nodes[name] = node
    return nodes


def _follow(instance: Instance, nodes: dict[str, Any], by_id: dict[bytes, str]) -> Iterator[Hops]:
    """Every unit that leaves a data node, as far as both ends of each link know of it."""
    for source in instance.data:
        for unit, (after, _, _) in nodes[source].flow_node.outflow.items():
            path = [source]
            here: tuple[bytes, bytes] | None = (unit, after)
            while here is not None and len(path) <= instance.stages + 1:
                unit, after = here
                before = nodes[path[-1]].peer.id_node
                name = by_id[after]
                state = nodes[name].flow_node
                inflow = state.inflow.get(before, {}).get(unit)
                if inflow is None:
                    break
                path.append(name)
                onward = None if name in instance.data else state.outflow.get(inflow[0])
                here = (inflow[0], onward[0]) if onward is not None else None
            yield tuple(path)


class _TolerantRandom(random.Random):
    """They draw from a dict's view, which Python took until 3.10."""

    def sample(self, population: Any, k: int, **more: Any) -> list[Any]:  # type: ignore[override]
        return super().sample(tuple(population), k, **more)


class _Silence(io.TextIOBase):
    def write(self, text: str) -> int:
        return len(text)


def measure(trial: Trial, rounds: int) -> Result:
    instance = instance_of(trial)
    started = time.process_time()
    flow, broken, sent = solve_by_authors(instance, trial.seed, rounds)
    cpu_s = time.process_time() - started
    wrong = violations(flow, instance)
    if wrong:
        print(f"{trial}: {'; '.join(wrong[:3])}", file=sys.stderr)
    share, ratio = against(instance, flow)
    pairs = len(instance.links)
    for stage in range(1, instance.stages + 1):
        size = sum(relay.stage == stage for relay in instance.relays)
        pairs += size * (size - 1) // 2
    return Result(share, ratio, sent / pairs, broken, rounds * ROUND_S, cpu_s)


@contextlib.contextmanager
def _their_place(checkout: Path) -> Iterator[None]:
    """Import from the checkout, and let the log files that they write fall into a folder that goes away."""
    home = os.getcwd()
    sys.path.insert(0, str(checkout.resolve()))
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(home)


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--authors", type=Path, required=True, help="a checkout that has flowprotocol.py")
    parser.add_argument("--families", default="ABCDEF", help="letters; E with the rule `own`, as theirs is")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--costly-seeds", type=int, default=3, help="of families E and F")
    args = parser.parse_args()
    if not (args.authors / "flowprotocol.py").exists():
        parser.error(f"{args.authors} has no flowprotocol.py: check out commit f804a45 of DecCom-Python")
    rows: list[list[object]] = []
    with _their_place(args.authors):
        for letter in args.families:
            rows += _family(letter, args.costly_seeds if letter in "EF" else args.seeds)
    head = ["family", "whose", "seeds", "flow", "cost", "worst", "per link", "cut short", "s", "CPU s"]
    text = (
        "The authors' public flow protocol (github.com/NikolayBlagoev/DecCom-Python at f804a45, April 2024) "
        "and our `gwtf` on the same instances at demand 1×, in virtual time over lossless links of "
        "10–300 ms; columns as in `flow-families`. Theirs stops by itself after 134 rounds of 2 s, and is "
        "also given 1,000; ours stops when it is quiet. cut short: units that leave a data node and do not "
        "reach their own again at the end, mean; CPU s: of one run, mean."
    )
    options = f"--seeds {args.seeds} --costly-seeds {args.costly_seeds}"
    reproduce = f"python -m {harness.module()} --authors DecCom-Python {options}"
    body, title = f"{text}\n\n{table(head, rows)}", "The authors' GWTF beside ours"
    harness.write("flow-authors", title, body, reproduce=reproduce, dry=args.dry)


def _family(letter: str, seeds: int) -> Iterator[list[object]]:
    """Rows of theirs and ours."""
    family, setting = ("E own", "own") if letter == "E" else (letter, "calm")
    trials = [Trial(setting, "gwtf", family, 1.0, seed) for seed in range(seeds)]
    found = {f"authors, {rounds} rounds": [measure(trial, rounds) for trial in trials] for rounds in ROUNDS}
    cache = Cache()
    ours = [cache.get(trial) or run(trial) for trial in trials]
    found["ours"] = [
        Result(one.flow_share, one.cost_ratio, one.per_link, 0, one.seconds, one.cpu_s) for one in ours
    ]
    for whose, group in found.items():
        row = [
            *(family, whose, seeds),
            f"{mean(r.flow_share for r in group):.4f}",
            f"{mean(r.cost_ratio for r in group):.4f}",
            f"{max(r.cost_ratio for r in group):.4f}",
            f"{mean(r.per_link for r in group):.1f}",
            f"{mean(r.broken for r in group):.1f}",
            f"{mean(r.seconds for r in group):.0f}",
            f"{mean(r.cpu_s for r in group):.0f}",
        ]
        print(*row, flush=True)
        yield row


if __name__ == "__main__":
    main()
