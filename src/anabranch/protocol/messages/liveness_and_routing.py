"""Heartbeats, indirect probes, bandwidth probes, and messages that wrap the letters of the flow agents."""

from __future__ import annotations

import math
from typing import Annotated

import msgspec

from anabranch.flow.agents.interface import Side
from anabranch.flow.auction.messages import Answer, Offer
from anabranch.flow.gwtf.messages import GwtfLetter
from anabranch.protocol.messages.common import Count, Id, Message


class Ping(Message, frozen=True, tag=45):
    """Heartbeat. number: repeated by the Pong. next_index: length of the sender's log. leads: term in which
    the sender leads the log (0: it does not), within `epoch` of the run."""

    number: Count
    next_index: Count
    leads: Count = 0
    epoch: Count = 0


class Pong(Message, frozen=True, tag=46):
    """Reply to Ping with measurements of the sender.

    forward_s, backward_s: seconds per microbatch (0: not known). bandwidth_bps: measured bandwidth from the
    sender to the receiver of this message (bits per second; 0: not known). price: cost of a microbatch from
    the sender to the end of the pipeline (s; infinite: not known).
    """

    number: Count
    forward_s: float
    backward_s: float
    bandwidth_bps: float = 0.0
    price: float = math.inf


class Route(Message, frozen=True, tag=55):
    """Message between the flow agents of two peers under policy `auction`. ahead: True if the receiver serves
    the stage after the sender's."""

    ahead: bool
    letter: Offer | Answer


class Bargain(Message, frozen=True, tag=56):
    """Message between the flow agents of two peers under policy `gwtf`. side: position of the sender's stage
    as seen from the receiver (before, after, or the same)."""

    side: Side
    letter: GwtfLetter


class Burst(Message, frozen=True, tag=57):
    """Bandwidth probe of an idle link, answered at once by GotBurst. padding: bytes without meaning; in a
    trial (`routing.bandwidth_probes`) it is empty, and a payload without meaning takes its place."""

    number: Count
    padding: Annotated[bytes, msgspec.Meta(max_length=1 << 14)]


class GotBurst(Message, frozen=True, tag=58):
    """Reply to the bandwidth probe Burst, sent at once, so that the prober can time it. number: that of the
    Burst."""

    number: Count


class Probe(Message, frozen=True, tag=80):
    """Indirect probe: question whether the receiver hears peer `subject` with this incarnation. number: that
    of the question, which the answer (Probed) repeats."""

    number: Count
    subject: Id
    incarnation: Count


class Probed(Message, frozen=True, tag=81):
    """Reply to Probe. heard: True if a message of `subject` came after the question; otherwise `subject` has
    been silent for `silence_s` seconds. linked: True if the sender has a link to `subject`; without one
    silence_s says nothing."""

    number: Count
    subject: Id
    linked: bool
    heard: bool
    silence_s: float
