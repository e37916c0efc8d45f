"""State of one incoming microbatch at one peer, and the record of its gradient sent back upstream."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from anabranch.protocol.context.task_queue import TaskPriority
from anabranch.protocol.interface.tasks import Payload


class ReturnedGradient(NamedTuple):
    """Record of a gradient that was sent to an upstream peer, so that it is not sent again while it is under
    way.

    transmission: the upstream peer's number of the transmission that the gradient answers. tensor: True if it
    had a payload. at: send time (s). ahead_bytes: bytes queued on the link when it was sent, its own
    included. tensors: payloads of this microbatch sent to that peer over its present link.
    """

    transmission: int
    tensor: bool
    at: float
    ahead_bytes: float
    tensors: int


@dataclass
class IncomingMicrobatch:
    """Microbatch that an upstream peer sent.

    train: False for an evaluation microbatch. upstream: peer that gets the gradient. path: peers that
    computed it before. received: its activation. gradient_needed: False if upstream has the gradient already.
    transmission: upstream's number of its last transmission. granted: peer whose credit it occupies ("": one
    that was removed), None once released. kept: True if its activations stay in memory until its weight
    gradient is added; otherwise its forward is computed again. forward_done: True once that was computed.
    gradient_in, gradient_out: gradient from the next stage, and the one to send upstream. returned: True once
    nothing is left to compute for upstream. sent_back_at: time (s) of the last sending back, None before it
    and once it is acknowledged. back: upstream peer -> gradient last sent to it. sender, gradient_sender:
    peers that sent the activation and the gradient. others: further upstream peers that wait for the gradient
    -> number of their transmission. again: upstream peer -> Forwards of it that came while this peer had the
    microbatch. spoilt: True if its forward overflowed: it waits for the input of another peer. added: True
    once its weight gradient was added before its gradient came.
    """

    index: int
    train: bool
    upstream: str
    path: tuple[str, ...]
    received: Payload
    gradient_needed: bool
    granted: str | None
    transmission: int
    kept: bool = True
    forward_done: bool = False
    gradient_in: Payload | None = None
    returned: bool = False
    gradient_out: Payload | None = None
    sent_back_at: float | None = None
    back: dict[str, ReturnedGradient] = field(default_factory=dict)
    others: dict[str, int] = field(default_factory=dict)
    again: Counter[str] = field(default_factory=Counter)
    sender: str = ""
    gradient_sender: str = ""
    spoilt: bool = False
    added: bool = False

    @property
    def sender_of_last(self) -> str:
        """Peer that sent the last input used: the gradient, if that came and the forward is computed, else
        the activation."""
        return self.gradient_sender if self.forward_done and self.gradient_sender else self.sender

    def rank(self, usual: TaskPriority) -> TaskPriority:
        """Priority of a task of this microbatch: EVALUATION in an evaluation, REDO (more urgent than that) if
        no upstream peer waits for its gradient, else `usual`."""
        if not self.train:
            return TaskPriority.EVALUATION
        return usual if self.gradient_needed else TaskPriority.REDO
