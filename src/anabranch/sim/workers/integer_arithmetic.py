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
    """Number that stands for the embedding of a microbatch, or of a slot's begin. state: of stage 0. salt:
    its iteration, or `inner_salt` of a slot in a round. index: of the microbatch or slot."""
    return mix(1, state, salt, index)


def inner_salt(first: int, steps: int) -> int:
    """Number that stands for the inner steps `first` + 1 to `first` + `steps` of a slot in a round. It enters
    the embedding, so all results of the slot depend on it."""
    return mix(9, first, steps)


def with_state(x: int, carried: int) -> int:
    """Input x of a slot at a relay, mixed with the number of what the relay carries of the slot; x itself if
    `carried` is 0 (nothing)."""
    return mix(12, x, carried) if carried else x


def with_own(x: int, own: int) -> int:
    """Input x of a slot (result of `with_state`), mixed with the number that stands for its machine's private
    data; x itself if `own` is 0 (none)."""
    return mix(18, x, own) if own else x


def own_data(peer: str) -> int:
    """Number that stands for the private data of a machine."""
    return mix(19, *peer.encode())


def own_loss(state: int, x: int) -> float:
    """Loss sum of a slot on private data. state: state of stage 1 before the round. x: the slot's input
    (result of `with_own`)."""
    return float(mix(20, state, x) % 10_007)


def slot_state(state: int, x: int) -> int:
    """Number that stands for what a machine carries of a slot (state of its inner optimizer) after a round.
    state: the stage's state before the round. x: the slot's input (result of `with_own`, for pipeline islands
    the activation received)."""
    return mix(11, state, x)


def after_step_ahead(number: int) -> int:
    """Number that stands for what a machine carries of a slot after one more step ahead. number: the one
    before that step."""
    return mix(15, number)


def late_contribution(number: int) -> Words:
    """WORDS numbers that stand for a slot's contribution that came too late for its round and is added in the
    next one. number: `slot_state` after the late round; 0: none was late, and all numbers are 0."""
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
    """Number that stands for a stage's state after a step with this gradient. It depends on all earlier steps
    and on their order."""
    return mix(7, state, *gradient)


def digest_of(gradient: Words) -> str:
    return f"{mix(8, *gradient):x}"


def predicted(state: int) -> int:
    """Number that stands for the weights predicted from a stage's state: with them a delayed iteration
    computes that begins one step early."""
    return mix(10, state)


def fingerprint(t: int, state: int, ahead: int | None = None) -> str:
    """Fingerprint of a stage's state after step t. ahead: number of the weights with which iteration t + 1
    computes if it is delayed (None: it is not)."""
    return f"{t}:{state:x}" if ahead is None else f"{t}:{state:x}:{ahead:x}"


def in_pieces(state: int) -> tuple[int, ...]:
    """State (64 bits) split into PIECES numbers of 16 bits."""
    return tuple(state >> (16 * place) & 0xFFFF for place in range(PIECES))


def from_pieces(t: int, pieces: Sequence[Payload]) -> int | None:
    """State after step t, joined from the pieces of a snapshot: t, then those of `in_pieces`. None if they
    are not the pieces of such a state."""
    numbers = [piece for piece in pieces if isinstance(piece, int) and piece >= 0]
    if len(numbers) != PIECES + 1 or numbers[0] != t or any(number >> 16 for number in numbers[1:]):
        return None
    return sum(number << (16 * place) for place, number in enumerate(numbers[1:]))
