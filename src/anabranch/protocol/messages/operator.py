"""Messages for the run's owner: event log, observers, operator decisions."""

from __future__ import annotations

from typing import Annotated

import msgspec

from anabranch.protocol.messages.common import Count, Id, Message, Remark, Text


class Report(Message, frozen=True, tag=53):
    """Message with events (JSON objects) for the run's event log. It goes to the log's leader. origin: peer
    that reported the events to the sender while the founder was away; "": they are the sender's own. A
    message with an origin goes to the founder, which alone takes it, and only from a voter."""

    events: tuple[bytes, ...]
    origin: Id = ""


class Wish(Message, frozen=True, tag=82):
    """Operator's request, repeated by the founder until the log has the decision. action: "pause",
    "continue", "steps" (steps: the new number) or "revoke" (target: id of a peer or key of a ticket; reason:
    the owner's words). done: True in the leader's answer that nothing is left to log."""

    action: Text
    steps: Count = 0
    done: bool = False
    target: Id = ""
    reason: Remark = ""


class Watch(Message, frozen=True, tag=83):
    """Request for the run's event log from byte `position` on. Its sender is an observer from then on."""

    position: Count


class Shown(Message, frozen=True, tag=84):
    """Answer to a watcher: part of the event log from byte `position` on, compressed by zlib, and the log's
    full `size` in bytes. Empty data: nothing new; with size 0, the log cannot be read now, ask later."""

    position: Count
    data: Annotated[bytes, msgspec.Meta(max_length=1 << 19)]
    size: Count
