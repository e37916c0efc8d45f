"""Messages about microbatches of the open iteration: credits, activations, gradients, repairs."""

from __future__ import annotations

from typing import Annotated

import msgspec

from anabranch.protocol.messages.common import (
    Count,
    FencedMessage,
    Id,
    Index,
    PeerPath,
    Seal,
    StageNumber,
    Text,
)

#: Longest list of lost relays in a repaired Forward; the receiver asks them, and two in a row are rare.
LOST_MAX = 4
Lost = Annotated[tuple[Id, ...], msgspec.Meta(max_length=LOST_MAX)]


class Slots(FencedMessage, frozen=True, tag=1):
    """Credit grant to the peer upstream to which this message goes; counts are cumulative over the iteration.

    total: forwards that the upstream peer may have sent so far. received: its forwards that came. released:
    those of them that are finished. returned: credits that it gave back. standing: credits that it keeps
    without asking; further ones answer an Ask. others: unfinished microbatches of other upstream peers at the
    granting peer.
    """

    total: Count
    received: Count
    released: Count
    returned: Count
    standing: Count
    others: Count = 0


class Ask(FencedMessage, frozen=True, tag=2):
    """Request for a credit to send microbatch `index`; a later Slots with a higher total answers it. repair:
    True if it is sent again after a loss, which has precedence."""

    index: Index
    repair: bool


class Return(FencedMessage, frozen=True, tag=3):
    """Return of credits. total: credits beyond the standing ones given back in this iteration, cumulative."""

    total: Count


class Forward(FencedMessage, frozen=True, tag=4):
    """Microbatch on its way down the pipeline. Payload: the activation.

    path: peers that the microbatch came through, data node first. repair: True if the receiver must ask the
    next stage whether a replica there already has the microbatch (R5) before it sends the microbatch on; it
    computes meanwhile. gradient_needed: False if the sender already has the input gradient; an empty Backward
    then completes the microbatch. way: the sender's running number of this forward in the iteration; a
    repeated number is a repeated message. lost: with `repair`, relays that had the microbatch before (the
    last first), whose downstream peers are asked for it. seal: the sender's signature of the activation's
    hash (`protocol.audit.seals`).
    """

    index: Index
    path: PeerPath
    train: bool
    repair: bool
    gradient_needed: bool
    way: Count
    lost: Lost = ()
    seal: Seal = b""


class Backward(FencedMessage, frozen=True, tag=5):
    """Microbatch on its way back up the pipeline. Payload: gradient of the received activation; none for
    evaluation windows and where no gradient was needed. seal: the sender's signature of its hash."""

    index: Index
    seal: Seal = b""


class Want(FencedMessage, frozen=True, tag=6):
    """Question whether the receiver holds microbatch `index`; if so, the sender becomes its upstream peer.

    The answer is Have (and Backward when the gradient is ready) or Lack. way: running number of the sender's
    Forward or search, repeated in the answer so that a late answer is recognised.
    """

    index: Index
    gradient_needed: bool
    way: Count


class Have(FencedMessage, frozen=True, tag=7):
    """Positive answer to Want number `way`: the sender holds microbatch `index`, has made the receiver its
    upstream peer, and will send it the gradient (Backward)."""

    index: Index
    way: Count


class Lack(FencedMessage, frozen=True, tag=8):
    """Answer to Want that the sender does not hold microbatch `index`; with `refused` also the rejection of a
    Forward, or its withdrawal after CallBack. way: running number of that Want or Forward."""

    index: Index
    refused: bool
    way: Count


class CallBack(FencedMessage, frozen=True, tag=85):
    """Request to drop up to `most` microbatches that still wait for the worker, because another replica of
    the stage is idle. ways: microbatch -> running number of its Forward. Lack(refused=True) answers each
    dropped microbatch.
    """

    ways: dict[Index, Count]
    most: Count


class Overflow(FencedMessage, frozen=True, tag=9):
    """Report that computing microbatch `index` at `stage` gave a non-finite or out-of-range value. tensor:
    name of the value, or `GIVEN_UP` for a slot with which a crew does not go on. sender: peer that sent the
    last input, "" if there was none."""

    stage: StageNumber
    index: Index
    tensor: Text
    sender: Id = ""


class Got(FencedMessage, frozen=True, tag=54):
    """Acknowledgement of a whole payload, from which the sender measures the link.

    It acknowledges the Forward of microbatch `index` (with `backward` its Backward): the first in each
    direction over a link in some iterations (`pipeline.link_sampling`). Within a stage it acknowledges
    ReducePart number `index`.
    """

    index: Index
    backward: bool


class InnerActivation(FencedMessage, frozen=True, tag=93):
    """Activation of microbatch `number` of inner step `step` of a pipeline island, on its way down. index:
    slot. step: counted over all rounds of the slot. Payload: the activation."""

    index: Index
    step: Count
    number: Index


class InnerGradient(FencedMessage, frozen=True, tag=94):
    """Gradient of the activation of an InnerActivation with the same numbers, on its way up. Payload: the
    gradient."""

    index: Index
    step: Count
    number: Index
