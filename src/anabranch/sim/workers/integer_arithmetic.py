"""Arithmetic of workers that compute with integers instead of tensors.

Every activation, gradient and contribution is a hash of its inputs: the state of the stage, the microbatch,
and the payloads received. A contribution (the weight gradient of a microbatch) is a vector of 64-bit numbers,
and a reduced gradient is the sum of contributions. So a contribution that is lost, added twice, or computed
from a stale state or another microbatch's payload changes the sum, the state after the step, and all later
states. Not here: a peer's tasks (`integer_worker`), all steps of a single machine (`single_machine`).
"""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.protocol.interface.tasks import Payload

#: Numbers in a contribution and in a gradient (a choice).
WORDS = 4
#: Pieces of a snapshot, besides the one that contains its iteration (a choice).
PIECES = 4

Words = tuple[int, ...]


def mix(*numbers: int) -> int:
    """64-bit hash of the given integers, the same in every process (ints are hashed without a seed)."""
    return hash(numbers) & 0xFFFFFFFFFFFFFFFF


def initial(stage: int) -> int:
    return mix(0, stage)


def embedded(state: int, salt: int, index: int) -> int:
    """Embedding of a microbatch. salt: its iteration, or `inner_salt` of a slot in a round."""
    return mix(1, state, salt, index)


def inner_salt(first: int, steps: int) -> int:
    """Number that stands for the inner steps `first` + 1 to `first` + `steps` of a slot in a round: all
    results of the slot depend on it."""
    return mix(9, first, steps)


def with_state(x: int, carried: int) -> int:
    """Input x of a slot at a relay, mixed with the number of the state that the relay carries of the slot; x
    itself if `carried` is 0 (no state)."""
    return mix(12, x, carried) if carried else x


def with_own(x: int, own: int) -> int:
    """Input x of a slot, `with_state`, mixed with the number that stands for its machine's own data; x itself
    if `own` is 0 (none)."""
    return mix(18, x, own) if own else x


def own_data(peer: str) -> int:
    """Number that stands for the private data of a machine."""
    return mix(19, *peer.encode())


def own_loss(state: int, x: int) -> float:
    """Loss sum of a slot on private data. state: of stage 1 before the round. x: input, `with_own`."""
    return float(mix(20, state, x) % 10_007)


def slot_state(state: int, x: int) -> int:
    """Number that stands for a machine's own state of a slot (its inner optimizer) after a round. state: the
    stage's state before the round. x: input of the slot, `with_state`."""
    return mix(11, state, x)


def after_step_ahead(number: int) -> int:
    """Number that stands for a machine's own state of a slot after one more step ahead. number: before it."""
    return mix(15, number)


def late_contribution(number: int) -> Words:
    """Numbers that stand for a slot's contribution that came too late for its round and is added in the next.
    number: `slot_state` after the late round; 0: none was late, and all numbers are 0."""
    return tuple(mix(13, word, number) if number else 0 for word in range(WORDS))


def activated(state: int, stage: int, x: int) -> int:
    return mix(2, state, stage, x)


def loss_of(state: int, x: int) -> float:
    return float(mix(3, state, x) % 10_007)


def loss_gradient(state: int, x: int) -> int:
    return mix(4, state, x)


def input_gradient(state: int, stage: int, x: int, dy: int) -> int:
    return mix(5, state, stage, x, dy)


def contribution(state: int, stage: int, *boundary: int) -> Words:
    """Stand-in for a stage's contribution of a microbatch to its gradient: WORDS 64-bit hashes of all
    arguments. state: the stage's state (an integer). boundary: activation and gradient received; at stage 0
    the activation that the head received, or (t, index, gradient) for the embedding."""
    return tuple(mix(6, word, state, stage, *boundary) for word in range(WORDS))


def step(state: int, gradient: Words) -> int:
    """State after a step; it depends on all earlier steps and on their order."""
    return mix(7, state, *gradient)


def digest_of(gradient: Words) -> str:
    return f"{mix(8, *gradient):x}"


def predicted(state: int) -> int:
    """Stand-in for the weights with which the iteration after the next one computes, if it is delayed."""
    return mix(10, state)


def fingerprint(t: int, state: int, ahead: int | None = None) -> str:
    """Fingerprint after step t. ahead: what iteration t + 1 computes with, if it is delayed."""
    return f"{t}:{state:x}" if ahead is None else f"{t}:{state:x}:{ahead:x}"


def in_pieces(state: int) -> tuple[int, ...]:
    """State split into PIECES pieces."""
    return tuple(state >> (16 * place) & 0xFFFF for place in range(PIECES))


def from_pieces(t: int, pieces: Sequence[Payload]) -> int | None:
    """State after step t, joined from its pieces; None if they are not the pieces of such a state."""
    numbers = [piece for piece in pieces if isinstance(piece, int) and piece >= 0]
    if len(numbers) != PIECES + 1 or numbers[0] != t or any(number >> 16 for number in numbers[1:]):
        return None
    return sum(number << (16 * place) for place, number in enumerate(numbers[1:]))
