"""Contradictions between receipts that end at a data node: it sent two relays different results of one
microbatch, or a relay says so of a data node that did not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import msgspec
import pytest

from anabranch.protocol import messages as msg
from anabranch.protocol.audit.receipts import (
    EndReceipt,
    Receipt,
    UnitReceipt,
    opened,
    signed,
)
from anabranch.protocol.audit.seals import ACTIVATION, GRADIENT, seal_text
from anabranch.protocol.audit.tracing import Traces, traced
from anabranch.protocol.coordinator.round import Round
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.interface.tasks import HashInputs, Payload, Result
from anabranch.protocol.log.records import Revoke
from anabranch.protocol.messages.audit import Transfer
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.simulated_signer import SimulatedSigner
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.workers.integer_worker import hashed
from anabranch.sim.workers.integer_world import Machine, counting_world, wrong_states
from swarm.byzantine.test_audit import records_of
from swarm.byzantine.test_review_audits import leader, of_step
from swarm.byzantine.test_review_stalls import go_on, removed

RUN, STEPS, SINCE = "ends", 16, 3


def world_with(data_nodes: int) -> World:
    settings = Settings(RUN, 1, 2, 12, STEPS, min_replicas=2, audit_share=1.0, checkpoint_every=2)
    machines = [Machine(f"d{n}", 0) for n in range(data_nodes)]
    machines += [Machine(f"r{stage}.{n}", stage) for stage in (1, 2) for n in range(3)]
    return counting_world(settings, machines, 1)


def resealed(sender: Node, said: msg.Forward, payload: Payload) -> tuple[bytes, Payload, str]:
    """Another activation than the one of a Forward, with the sender's seal: message, payload, its hash."""
    assert isinstance(payload, int)
    false: Payload = payload ^ 1
    digest = hashed(HashInputs(said.fence.t, hashed=True), (false,), Result()).hashes[0]
    stage = sender.peer.ctx.run.stage
    text = seal_text(RUN, said.fence.base, stage, ACTIVATION, str(said.index), digest)
    said = msgspec.structs.replace(said, seal=sender.peer.ctx.signer.sign(text))
    return msg.encode(said), false, digest


def convicted(world: World) -> list[str]:
    return [record.id for record in records_of(world) if isinstance(record, Revoke)]


def test_a_data_node_that_sends_two_relays_different_embeddings_is_convicted() -> None:
    """Nobody was at the end of the trace, so that the log went back after 0, 30, 60, ... seconds: nine steps
    in a quarter of an hour."""
    world, deeds = world_with(2), Counter[str]()
    carry = world.carry

    def on_its_way(sender: Node, peer: str, message: bytes, payload: Payload | None) -> None:
        said = msg.decode(message)
        carry(sender, peer, message, payload)
        again = isinstance(said, msg.Forward) and said.train and said.fence.t >= SINCE
        if again and isinstance(said, msg.Forward) and sender.id == "d1" and deeds[said.fence.base] < 2:
            deeds[said.fence.base] += 1
            others = [name for name in ("r1.0", "r1.1", "r1.2") if name != peer]
            false, other, _ = resealed(sender, said, payload if payload is not None else 0)
            carry(sender, others[said.index % 2], false, other)

    world.carry = on_its_way  # type: ignore[method-assign]
    assert go_on(world, 900.0) == STEPS and deeds
    assert convicted(world) == ["d1"] and wrong_states(world).keys() <= {"d1"}
    assert list(removed(world)) == ["d1"] and world.clock.now < 60.0


LIAR = "r1.1"


def with_false_input(sender: Node, said: msg.Prepared, false: dict[int, str]) -> msg.Prepared:
    """PREPARED whose receipt lists for each false activation (microbatch -> hash) a made-up input."""
    receipt = opened(said.receipt, sender.peer.ctx.signer)
    assert receipt is not None
    others = []
    for unit in receipt.others:
        if (output := false.get(unit.unit)) is not None:
            came = msgspec.structs.replace(unit.activation_in, hash="f" * 32, seal=b"x" * 32)
            changes = {"activation_in": came, "activation_out": output, "gradient_out": ""}
            unit = msgspec.structs.replace(unit, **changes)
        others.append(unit)
    receipt = msgspec.structs.replace(receipt, others=tuple(others))
    return msgspec.structs.replace(said, receipt=signed(receipt, sender.peer.ctx.signer))


def test_a_relay_that_blames_the_data_node_for_its_false_activation_is_convicted() -> None:
    """It sends one false activation on, gives the microbatch up so that it owns nothing, and lists an input
    with a seal that the data node never made. The log went back again and again: two steps in a quarter of an
    hour."""
    world, false = world_with(1), dict[str, dict[int, str]]()
    carry = world.carry

    def on_its_way(sender: Node, peer: str, message: bytes, payload: Payload | None) -> None:
        said = msg.decode(message)
        mine = false.get(said.fence.base, {}) if isinstance(said, msg.FencedMessage) else {}
        if sender.id != LIAR:
            carry(sender, peer, message, payload)
        elif isinstance(said, msg.Forward) and said.train and said.fence.t >= SINCE and not mine:
            message, payload, digest = resealed(sender, said, payload if payload is not None else 0)
            false[said.fence.base] = {said.index: digest}
            carry(sender, peer, message, payload)
            iteration = sender.peer.iterations.at(said.fence.t)
            assert iteration is not None
            unit = iteration.units[said.index]
            lack = msg.Lack(said.fence, said.index, refused=True, way=unit.transmission)
            carry(sender, unit.upstream, msg.encode(lack), None)
        elif isinstance(said, msg.Claim):
            units = tuple(unit for unit in said.units if unit not in mine)
            carry(sender, peer, msg.encode(msgspec.structs.replace(said, units=units)), None)
        elif isinstance(said, msg.Prepared):
            carry(sender, peer, msg.encode(with_false_input(sender, said, mine)), None)
        elif not (isinstance(said, msg.Backward) and said.index in mine):
            carry(sender, peer, message, payload)

    world.carry = on_its_way  # type: ignore[method-assign]
    assert go_on(world, 900.0) == STEPS and false
    assert convicted(world) == [LIAR] and wrong_states(world).keys() <= {LIAR}
    assert list(removed(world)) == [LIAR] and world.clock.now < 60.0


# --- traces of gradients of data nodes ----------------------------------------------------------------


def sealed(sender: str, stage: int, kind: str, digest: str) -> Transfer:
    text = seal_text(RUN, "base", stage, kind, "0", digest)
    return Transfer(digest, sender, stage, SimulatedSigner(sender).sign(text))


def relay(
    peer: str, stage: int, came: tuple[Transfer, Transfer], made: tuple[str, str], owns: bool
) -> Receipt:
    unit = UnitReceipt(0, *came, *made)
    units, others = ((unit,), ()) if owns else ((), (unit,))
    return Receipt(RUN, "base", 1, stage, peer, 1, 1, units, (), (), (), (), others)


def trace(activations: tuple[str, str], heads: tuple[str, str]) -> Traces:
    """Trace of a microbatch that p and q of the last stage computed; q owns it, and its embedding's gradient
    came from p. activations: that p and q say that they sent. heads: data nodes that sent them gradients."""
    came = sealed("d0", 0, ACTIVATION, "x")
    p, q = (
        relay(peer, 1, (came, sealed(head, 0, GRADIENT, f"g of {peer}")), (out, f"dx of {peer}"), peer == "q")
        for peer, out, head in zip("pq", activations, heads, strict=True)
    )
    end = EndReceipt(1, sealed("p", 1, GRADIENT, "dx of p"))
    ends = Receipt(RUN, "base", 1, 0, "d0", 1, 1, (), (), (), (), (end,), ())
    return traced([p, q, ends], SimulatedSigner("d0"))


@pytest.mark.parametrize(
    ("activations", "heads", "found"),
    [
        (("a", "a"), ("d0", "d1"), lambda traces: traces.apart and not traces.liars),
        (("a", "a"), ("d1", "d1"), lambda traces: traces.apart and not traces.liars),
        (("a", "b"), ("d0", "d0"), lambda traces: {each.peer for each in traces.disputed} == {"p", "q"}),
    ],
)
def test_two_gradients_of_one_activation_convict_nobody_at_once(
    activations: tuple[str, str], heads: tuple[str, str], found: Callable[[Traces], bool]
) -> None:
    """A relay may have sent another activation than it says, and got an honest gradient for it. Where the
    relays say that they sent different ones, these are computed again."""
    traces = trace(activations, heads)
    assert found(traces) and not traces.unlisted


@pytest.mark.parametrize(
    ("kind", "ends", "expelled"),
    [
        (ACTIVATION, [(("d0", "p"), ("d1", "q"))], {"d1"}),
        (GRADIENT, [(("d0", "p"), ("d1", "q")), (("d0", "q"), ("d1", "p"))], set()),
        (GRADIENT, [(("d0", "liar"), ("d1", "p")), (("d0", "liar"), ("d1", "q"))], set()),
        (GRADIENT, [(("d0", "p"), ("d1", "q")), (("d1", "r"), ("d1", "s"))], {"d1"}),
        (GRADIENT, [(("d0", "p"), ("d0", "q"))] * 2, set()),
        (ACTIVATION, [(("d1", "p"), ("d2", "q"))] * 2, set()),
    ],
)
def test_a_data_node_is_out_once_no_relay_explains_its_results(
    kind: str, ends: list[tuple[tuple[str, str], ...]], expelled: set[str]
) -> None:
    cases, removals = leader()
    step = of_step(cases)
    for each in ends:
        step._differ(Round(1, "base", 0.0), kind, each)
    assert removals.banned == removals.removed.keys() == expelled
