"""Limits of a connection's sizes, queues and times, which bound the resources that another peer can take.

Not here: limits on messages per second, and bans (`protocol.context.rate_limits_and_bans`)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from anabranch.net.framing import MAX_MESSAGE_BYTES, MAX_OPEN_STREAMS
from anabranch.net.packing import size_bounds
from anabranch.net.resource_manager import Budgets, make_budgets

#: Unfinished payloads of one link, in largest ones, for an unknown run: two of each of two priorities.
_LARGEST_OF_LINK = 4
#: Allowance (bytes) beyond the computed size of payloads, for rounding.
PAYLOAD_SLACK_BYTES = 1 << 20
#: Most bytes of messages and long frames of one link that have not come whole: one on each connection.
_MESSAGES_OF_LINK_BYTES = 2 * MAX_MESSAGE_BYTES
#: Least bytes of an unfinished payload's connection in `Limits.stall_s`: a fiftieth of the slowest home link.
STALL_BYTES = 60 << 10
#: Checks for progress in `Limits.stall_s` that must all find none: a suspended process is late for one.
STALL_CHECKS = 4


@dataclass(frozen=True)
class Limits:
    """Limits of one transport and its links. max_message_bytes: largest message that is accepted.
    handshake_timeout_s: of incoming connections in their handshakes, and of each part of a dial.
    max_pending_handshakes: most of them at a time."""

    max_message_bytes: int = MAX_MESSAGE_BYTES
    max_payload_bytes: int = 256 << 20
    """Largest payload accepted. At most `framing.MAX_OPEN_STREAMS` arrive at once."""
    link_payload_bytes: int = 0
    """Most bytes of unfinished payloads and long messages of one peer; 0: four of the largest payloads."""
    max_connections: int = 0
    """Most connections of this process; 0: what its descriptor limit allows (`resource_manager`)."""
    stall_s: float = 60.0
    """Seconds in which a connection with unfinished payloads must bring STALL_BYTES or finish one. A choice:
    far longer than a failure detector waits, so that only a peer that means it is met."""
    control_bytes_per_s: int = 4 << 20
    """Bytes per second of messages without payload that are read from a link; the rest waits unread at the
    sender. A choice: a hundred times what members of a large run send."""
    control_burst_bytes: int = 8 << 20
    """Bytes of such messages that are read at once after a pause: eight of the largest."""
    max_queued_control_bytes: int = 8 << 20
    """Most bytes of messages without payload that wait; with more, the link is closed as too slow."""
    max_queued_bulk_bytes: int = 1 << 30
    """Most bytes of payloads that wait to be sent; with more, the link is closed as too slow."""
    chunk_bytes: int = 256 << 10
    """Payloads are sent in chunks of this size (at most `framing.MAX_CHUNK_BYTES`)."""
    handshake_timeout_s: float = 10.0
    max_pending_handshakes: int = 128
    max_pending_of_host: int = 64
    """Most pending handshakes from one address, so that one host cannot keep all others out."""
    attempts_per_s: float = 20.0
    """Connections per second that one address block may begin. A choice: a handshake was measured to take
    2 ms of CPU time, so one block takes a twenty-fifth of a core."""
    attempts_burst: float = 512.0
    """Connections that one address block may begin at once. A choice: 256 peers of a laboratory at once."""
    shutdown_timeout_s: float = 2.0
    """Seconds for which a closing link tries to send queued messages and the reason of its end."""

    def budgets(self) -> Budgets:
        """Budgets of the transport's resource manager that follow from these limits: memory and number of
        unfinished payloads of one link, and number of connections."""
        link_bytes = self.link_payload_bytes or _LARGEST_OF_LINK * self.max_payload_bytes
        return make_budgets(link_bytes, MAX_OPEN_STREAMS, self.max_connections)


@dataclass(frozen=True)
class CarryLimits:
    """Limits of a carrier, set by its owner. A link of two peers takes two circuits."""

    circuits: int = 256
    """Most circuits at once; 0: this process carries for nobody."""
    circuits_of_peer: int = 64
    """Most circuits that one peer opened, or that lead to it: 32 links. A choice: about as many as it has
    neighbours."""
    circuits_of_pair: int = 8
    """Most circuits from one peer to another, so that none takes all of another's: two links and their
    successors."""
    bytes_per_s: float = 0.0
    """Most bytes per second of all circuits together, each byte counted once; 0: no limit."""
    link_s: float = 1.0
    """Seconds in which a circuit's target must have a link to the carrier: it may be dialling."""
    offer_s: float = 5.0
    """Seconds in which the peer that a circuit leads to must come for it."""
    idle_s: float = 60.0
    """Seconds without a byte after which a circuit ends; links send heartbeats."""


@dataclass(frozen=True)
class LineCaps:
    """Caps of a machine's line: most bytes per second of payloads that it sends (up) and receives (down),
    over all its links together; 0: no limit. Messages without payload are few and not counted, so that
    heartbeats never wait. Circuits that it carries for others have a limit of their own (`CarryLimits`)."""

    up_bytes_per_s: float = 0.0
    down_bytes_per_s: float = 0.0


def limits_of_run(parameters: int, largest_share: float, activation_bytes: int, piece_bytes: int) -> Limits:
    """Limits whose payload sizes are what a run can need; all others are the defaults.

    parameters: number in the model. largest_share: share of them in the largest stage, at most 1.
    activation_bytes, piece_bytes: largest activation and piece of a state. A sender has at most two payloads
    of each priority unfinished (`chunk_queue`): input gradients and activations, parts of sums and reduced
    gradients of at most a stage, pieces and bandwidth probes.
    """
    sums_bytes = size_bounds(math.ceil(parameters * min(1.0, largest_share)))[1]
    return Limits(
        max_payload_bytes=max(sums_bytes, activation_bytes, piece_bytes) + PAYLOAD_SLACK_BYTES,
        link_payload_bytes=4 * (sums_bytes + activation_bytes + piece_bytes)
        + PAYLOAD_SLACK_BYTES
        + _MESSAGES_OF_LINK_BYTES,
    )
