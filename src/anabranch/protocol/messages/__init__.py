# ruff: noqa: F403
"""Messages between peers: classes by subject, encoding, `table` (a new message is one class and one row). Not
here: the handling of messages (protocol.peer), framing and transport (net).

Imported by: node, protocol.audit, protocol.consensus, protocol.context, protocol.coordinator,
protocol.failure_detection, protocol.fleet, protocol.interface, protocol.observers, protocol.peer,
protocol.pipeline, protocol.raft, protocol.recovery, protocol.reduce, protocol.routing, protocol.state,
sim.
"""

from anabranch.protocol.messages.audit import *
from anabranch.protocol.messages.codec import *
from anabranch.protocol.messages.commit import *
from anabranch.protocol.messages.common import *
from anabranch.protocol.messages.common import Message as Message
from anabranch.protocol.messages.liveness_and_routing import *
from anabranch.protocol.messages.membership import *
from anabranch.protocol.messages.operator import *
from anabranch.protocol.messages.pipeline import *
from anabranch.protocol.messages.raft import *
from anabranch.protocol.messages.state_transfer import *
from anabranch.protocol.messages.table import ASKED_FOR as ASKED_FOR
from anabranch.protocol.messages.table import PAYLOAD_PRIORITY as PAYLOAD_PRIORITY

#: Older name of Message.
AnyMessage = Message
