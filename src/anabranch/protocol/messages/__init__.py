# ruff: noqa: F403
"""Messages between peers: classes by subject, encoding, `table` (a new message is one class and one row). Not
here: the handling of messages (protocol.peer), framing and transport (net).

Imported by: node, protocol.audit, protocol.consensus, protocol.context, protocol.coordinator,
protocol.failure_detection, protocol.fleet, protocol.interface, protocol.observers, protocol.peer,
protocol.pipeline, protocol.raft, protocol.recovery, protocol.reduce, protocol.routing, protocol.state,
sim.
"""

from anabranch.protocol.messages.audit import *
from anabranch.protocol.messages.codec import MessageError as MessageError
from anabranch.protocol.messages.codec import decode as decode
from anabranch.protocol.messages.codec import encode as encode
from anabranch.protocol.messages.commit import *
from anabranch.protocol.messages.common import MAX_MESSAGE_BYTES as MAX_MESSAGE_BYTES
from anabranch.protocol.messages.common import REMARK_MAX as REMARK_MAX
from anabranch.protocol.messages.common import Fence as Fence
from anabranch.protocol.messages.common import FencedMessage as FencedMessage
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
