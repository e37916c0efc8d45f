"""Base classes of messages and their bounded field types."""

from __future__ import annotations

from typing import Annotated

import msgspec

#: Longest encoded message (bytes), without the tensor that may follow as its payload.
MAX_MESSAGE_BYTES = 1 << 20
#: Longest free text (characters) that a peer sends about itself, which others repeat inside a Text.
REMARK_MAX = 256
#: Largest stage number, and largest integer of any other kind: far beyond every run, and safe to add up.
STAGE_MAX = 4096
COUNT_MAX = 1 << 40

Id = Annotated[str, msgspec.Meta(max_length=128)]
Hash = Annotated[str, msgspec.Meta(max_length=128)]
Text = Annotated[str, msgspec.Meta(max_length=2048)]
Remark = Annotated[str, msgspec.Meta(max_length=REMARK_MAX)]
#: Signature of a payload's hash by its sender; empty in runs without audit.
Seal = Annotated[bytes, msgspec.Meta(max_length=64)]
#: Signed receipt of a relay's work in one step.
Receipt = Annotated[bytes, msgspec.Meta(max_length=1 << 19)]
Count = Annotated[int, msgspec.Meta(ge=0, le=COUNT_MAX)]
StageNumber = Annotated[int, msgspec.Meta(ge=0, le=STAGE_MAX)]
Index = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]
#: Ids of the peers that a microbatch came through, one of each stage at most; and of the members of a stage
#: that a peer cannot reach. A list decoded takes up to thirty times its bytes.
PeerPath = Annotated[tuple[Id, ...], msgspec.Meta(max_length=STAGE_MAX + 1)]
Apart = Annotated[tuple[Id, ...], msgspec.Meta(max_length=STAGE_MAX)]
#: Optional numbers: -1 stands for none.
CountOrNone = Annotated[int, msgspec.Meta(ge=-1, le=COUNT_MAX)]
StageOrNone = Annotated[int, msgspec.Meta(ge=-1, le=STAGE_MAX)]


class Fence(msgspec.Struct, array_like=True, frozen=True):
    """Point in the run's history that a message belongs to, by which outdated messages are recognised: epoch
    of the run, sender's incarnation, iteration t, base of that iteration (hash of the log entry that it
    builds on), and the stage that the sender served (-1: none)."""

    epoch: Count
    incarnation: Count
    t: Count
    base: Hash
    stage: StageOrNone


class Message(msgspec.Struct, array_like=True, frozen=True, tag_field="type"):
    """Base class of all messages."""


class FencedMessage(Message, frozen=True):
    """Base class of messages about one iteration. The receiver compares the fence as the message's row of
    `table` says, before it handles the message."""

    fence: Fence
