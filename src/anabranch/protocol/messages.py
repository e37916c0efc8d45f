"""Every message between peers, declared once.

A message is a msgpack array tagged by its type; a payload (one tensor), where the table below says so,
travels beside it. Decoding is strict: an unknown type, a wrong field or a message over the size limit is
refused before anything else looks at it (I7). `docs/protocol.md` says when each is sent.
"""

from __future__ import annotations

import math
from typing import Annotated

import msgspec

from anabranch.flow.agent import Side
from anabranch.flow.auction.messages import Answer, Offer
from anabranch.flow.gwtf_messages import GwtfLetter
from anabranch.protocol.records import Genesis, Member

#: Longest encoded message in bytes (log tails are cut to fit).
MAX_MESSAGE_BYTES = 1 << 20

Id = Annotated[str, msgspec.Meta(max_length=128)]
Hash = Annotated[str, msgspec.Meta(max_length=128)]
Text = Annotated[str, msgspec.Meta(max_length=2048)]
#: What a peer says of itself, and others repeat in a text of their own (characters).
REMARK_MAX = 256
Remark = Annotated[str, msgspec.Meta(max_length=REMARK_MAX)]
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
StageNumber = Annotated[int, msgspec.Meta(ge=0, le=4096)]
Index = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]


class Fence(msgspec.Struct, array_like=True, frozen=True):
    """Which history a message belongs to: epoch, sender's incarnation, iteration, base (DESIGN §3)."""

    epoch: Count
    incarnation: Count
    t: Count
    base: Hash


class Message(msgspec.Struct, array_like=True, frozen=True, tag_field="type"):
    """Base of all messages."""


# --- the microbatch's way -------------------------------------------------------------------------


class Slots(Message, frozen=True, tag=1):
    """You may have sent me `total` forwards of this iteration so far; I received `received` and am done with
    `released` of them, and `returned` slots you handed back (all cumulative). `standing` of the slots that
    you hold are yours; what you hold beyond answers an Ask. `others`: units of other upstream peers that are
    here and whose gradient is not back."""

    fence: Fence
    total: Count
    received: Count
    released: Count
    returned: Count
    standing: Count
    others: Count = 0


class Ask(Message, frozen=True, tag=2):
    """I have (t, index) for you and no slot. Answered by a higher Slots total, now or when one is free."""

    fence: Fence
    index: Index
    repair: bool


class Return(Message, frozen=True, tag=3):
    """I hand back slots beyond my standing ones that I do not need (cumulative)."""

    fence: Fence
    total: Count


class Forward(Message, frozen=True, tag=4):
    """Payload: the activation. `path` is whom the microbatch came through, data node first. With `repair`
    the receiver first asks the next stage whether somebody there already has it (R5). Without
    `gradient_needed` the sender already has the input gradient: an empty Backward will do. `way` counts
    what its sender has sent on in this iteration: the same one again is the same message again. `lost`: in
    whose place the receiver of a repair is, so that it asks those who may have it from there."""

    fence: Fence
    index: Index
    path: tuple[Id, ...]
    train: bool
    repair: bool
    gradient_needed: bool
    way: Count
    lost: Id = ""


class Backward(Message, frozen=True, tag=5):
    """Payload: the gradient of the activation received; none for evaluation windows and where it was not
    needed."""

    fence: Fence
    index: Index


class Want(Message, frozen=True, tag=6):
    """Do you hold (t, index)? If so I am its upstream now: answer Have, and Backward when it is there. `way`:
    on which it left me, or is looked for; the answer repeats it, so that what is late is known."""

    fence: Fence
    index: Index
    gradient_needed: bool
    way: Count


class Have(Message, frozen=True, tag=7):
    fence: Fence
    index: Index
    way: Count


class Lack(Message, frozen=True, tag=8):
    """I do not hold (t, index). `refused`: what came on that way I did not take."""

    fence: Fence
    index: Index
    refused: bool
    way: Count


class Overflow(Message, frozen=True, tag=9):
    """Computing (t, index) at `stage` gave a non-finite or out-of-range value in `tensor`."""

    fence: Fence
    stage: StageNumber
    index: Index
    tensor: Text


# --- cover, reduce, commit ------------------------------------------------------------------------


class Claim(Message, frozen=True, tag=20):
    """Units whose contribution this replica holds (cumulative, R6). At stage 0 with the loss sums (nats)
    of head units and of evaluation windows, by index, and the hash of the batch. `apart`: members of its
    stage that it cannot reach."""

    fence: Fence
    stage: StageNumber
    units: tuple[Index, ...]
    losses: dict[int, float] = {}
    evaluations: dict[int, float] = {}
    manifest: Hash = ""
    apart: tuple[Id, ...] = ()


class AttemptId(msgspec.Struct, array_like=True, frozen=True, order=True):
    term: Count
    number: Count


class Attempt(Message, frozen=True, tag=21):
    """Reduce stage `stage`: member `owners[k]` counts unit k; nobody else does (R7)."""

    fence: Fence
    stage: StageNumber
    attempt: AttemptId
    membership: Count
    members: tuple[Id, ...]
    owners: tuple[Count, ...]


class ReducePart(Message, frozen=True, tag=22):
    """Payload: my sum over my units of part `part`, for the member that reduces that part."""

    fence: Fence
    stage: StageNumber
    attempt: AttemptId
    part: Count


class ReducedPart(Message, frozen=True, tag=23):
    """Payload: part `part` summed over all members."""

    fence: Fence
    stage: StageNumber
    attempt: AttemptId
    part: Count


class Prepared(Message, frozen=True, tag=24):
    """I hold the reduced gradient of the whole batch; this is its digest (R8)."""

    fence: Fence
    stage: StageNumber
    attempt: AttemptId
    digest: Hash
    squares: dict[str, float]


class Applied(Message, frozen=True, tag=25):
    """I applied C_t (fence.base is C_t's hash); this is my state's fingerprint (R11). links: to whom I have
    measured how long a round trip takes (s), and how much gets there (bits per second; 0: not known)."""

    fence: Fence
    stage: StageNumber
    fingerprint: Hash
    timing: dict[str, float] = {}
    links: dict[str, tuple[float, float]] = {}


class Release(Message, frozen=True, tag=26):
    """Boundaries of iteration t may go (R11)."""

    fence: Fence


class Announce(Message, frozen=True, tag=27):
    """Chosen log entries in order, as written."""

    entries: tuple[bytes, ...]


class FetchLog(Message, frozen=True, tag=28):
    """Send me the chosen entries from position `start`."""

    start: Count


class Missing(Message, frozen=True, tag=29):
    """From the leader: nobody claims these units (stage -> units). Whoever sent one on asks after it (R6)."""

    fence: Fence
    units: dict[int, tuple[Index, ...]]


# --- membership and state -------------------------------------------------------------------------


class Enquire(Message, frozen=True, tag=38):
    """What is this run? First message of a joiner to the leader."""


class About(Message, frozen=True, tag=39):
    """The run's genesis: everything that a joiner needs to measure itself for it. `doors`: other peers (id,
    address) that may know who leads when I am gone."""

    genesis: Genesis
    doors: tuple[tuple[Id, Text], ...] = ()


class JoinRequest(Message, frozen=True, tag=40):
    """A peer that was let in by ticket asks to serve. `stage` -1: wherever it helps most."""

    member: Member
    stage: Annotated[int, msgspec.Meta(ge=-1, le=4096)]
    protocol_version: Count
    model_hash: Hash
    corpus_fingerprint: Hash


class Welcome(Message, frozen=True, tag=41):
    """You are admitted to `stage`; this is where the run stands."""

    stage: StageNumber
    members: tuple[Member, ...]
    active_from: dict[str, int]
    number: Count
    next_index: Count
    last_hash: Hash
    base: Hash
    t: Count
    adam_step: Count
    term: Count
    fingerprint: Hash
    certificate: bytes
    voters: tuple[Id, ...] = ()
    skips: Count = 0
    steps: Count = 0
    held: Annotated[int, msgspec.Meta(ge=-1, le=1 << 40)] = -1


class Refused(Message, frozen=True, tag=42):
    """You are not admitted, or no longer; the reason says what to do."""

    reason: Text


class Ready(Message, frozen=True, tag=43):
    """My state is that after iteration t (R14). `apart`: members of my stage that I cannot reach."""

    t: Count
    stage: StageNumber
    fingerprint: Hash
    apart: tuple[Id, ...] = ()


class Leave(Message, frozen=True, tag=44):
    """I am going, on purpose."""

    reason: Remark


class Ping(Message, frozen=True, tag=45):
    """Heartbeat. `next_index` is how much of the log the sender has; `leads` the term in which it leads the
    log (0: it does not), in this epoch of the run."""

    number: Count
    next_index: Count
    leads: Count = 0
    epoch: Count = 0


class Pong(Message, frozen=True, tag=46):
    """My seconds per microbatch (0: not known), what I measured of the link to you (bits per second; 0: not
    known), and my cost to go (seconds; infinite: not known)."""

    number: Count
    forward_s: float
    backward_s: float
    bandwidth_bps: float = 0.0
    price: float = math.inf


class FetchGradient(Message, frozen=True, tag=47):
    """Send me the reduced gradient of iteration t at your stage."""

    t: Count
    stage: StageNumber


class Gradient(Message, frozen=True, tag=48):
    """Payload: the flat reduced gradient; none when it is no longer kept."""

    t: Count
    stage: StageNumber


class FetchState(Message, frozen=True, tag=49):
    """Offer me the state of `stage`: after iteration t, or with t = -1 your latest."""

    stage: StageNumber
    t: Annotated[int, msgspec.Meta(ge=-1, le=1 << 40)]


class StateOffer(Message, frozen=True, tag=50):
    """State after t in `pieces` pieces, each with its hash; pieces = 0: I do not have it."""

    stage: StageNumber
    t: Annotated[int, msgspec.Meta(ge=-1, le=1 << 40)]
    fingerprint: Hash
    pieces: Count
    hashes: tuple[Hash, ...] = ()


class FetchPiece(Message, frozen=True, tag=51):
    stage: StageNumber
    t: Count
    piece: Count


class Piece(Message, frozen=True, tag=52):
    """Payload: bytes of the snapshot."""

    stage: StageNumber
    t: Count
    piece: Count


class Report(Message, frozen=True, tag=53):
    """Events of a peer for the run's event log (JSON objects, one each): of the sender, or of `origin`, who
    reported them to it while the founder was away."""

    events: tuple[bytes, ...]
    origin: Id = ""


class Got(Message, frozen=True, tag=54):
    """Your Forward of (t, index) is here whole, or with `backward` your Backward: the link can be measured.
    Sent for some of the first of an iteration from each peer."""

    fence: Fence
    index: Index
    backward: bool


class Route(Message, frozen=True, tag=55):
    """A letter between the flow's agents. `ahead`: you are at the stage after mine."""

    ahead: bool
    letter: Offer | Answer


class Bargain(Message, frozen=True, tag=56):
    """A letter between the flow's agents under `gwtf`. `side`: where I stand, seen from you."""

    side: Side
    letter: GwtfLetter


class Burst(Message, frozen=True, tag=57):
    """Answer at once: the link has no traffic to be measured by. `padding`: nothing."""

    number: Count
    padding: Annotated[bytes, msgspec.Meta(max_length=1 << 14)]


class GotBurst(Message, frozen=True, tag=58):
    number: Count


# --- the voters of the log (Raft; both ends are named as voters: peer and disk) -------------------


class AskVote(Message, frozen=True, tag=60):
    """Vote for me in `term`: my log has `length` lines, the last of `last_term`. `trial`: would you? (nothing
    is promised by the answer). `forced`: the leader itself asked me to take over."""

    sender: Id
    to: Id
    term: Count
    trial: bool
    length: Count
    last_term: Count
    forced: bool = False


class Vote(Message, frozen=True, tag=61):
    """Answer to AskVote, in the voter's own term (that of the question if granted)."""

    sender: Id
    to: Id
    term: Count
    trial: bool
    granted: bool


class Append(Message, frozen=True, tag=62):
    """From the leader of `term`: lines from index `start` on, the hash of the line before them, and how many
    lines of the log are chosen. `round` numbers the leader's messages."""

    sender: Id
    to: Id
    term: Count
    start: Count
    previous: Hash
    lines: tuple[bytes, ...]
    chosen: Count
    round: Count


class Appended(Message, frozen=True, tag=63):
    """With `matches`: my first `length` lines are yours, and on my disk. Else: I have `length` lines, which
    what you sent does not follow."""

    sender: Id
    to: Id
    term: Count
    matches: bool
    length: Count
    round: Count


class TakeOver(Message, frozen=True, tag=64):
    """From the leader of `term`: I am going; stand for election at once."""

    sender: Id
    to: Id
    term: Count


class Probe(Message, frozen=True, tag=80):
    """Do you hear `subject` (this process of it)? Answered by Probed in any case."""

    number: Count
    subject: Id
    incarnation: Count


class Probed(Message, frozen=True, tag=81):
    """`heard`: I heard of `subject` after you asked; otherwise I have been without a word of it for
    `silence_s`, or have no link to it."""

    number: Count
    subject: Id
    linked: bool
    heard: bool
    silence_s: float


class Elsewhere(Message, frozen=True, tag=65):
    """I do not lead the log; this peer does ("": I do not know). Answer to a joiner."""

    leader: Id
    address: Text


class Keep(Message, frozen=True, tag=70):
    """From the leader: hold a copy of the state of `stage` after iteration t; `sources` have it."""

    stage: StageNumber
    t: Count
    fingerprint: Hash
    sources: tuple[Id, ...]


class Held(msgspec.Struct, array_like=True, frozen=True):
    """One state that a peer holds. fingerprint "": it was asked to and has no room for it."""

    stage: StageNumber
    t: Count
    fingerprint: Hash


class HeldGradient(msgspec.Struct, array_like=True, frozen=True):
    """The reduced gradient of one step of another stage, which a peer keeps."""

    stage: StageNumber
    t: Count
    digest: Hash


class Holds(Message, frozen=True, tag=71):
    """The snapshots that I hold, my own stage's and those that I was asked to keep, and the gradients of
    other stages that I keep (all of them). `number` counts these reports: an older one that comes later says
    nothing."""

    states: tuple[Held, ...]
    number: Count
    gradients: tuple[HeldGradient, ...] = ()


class Complete(Message, frozen=True, tag=72):
    """From the leader: every stage's state after iteration t is held by enough peers; older ones may go."""

    t: Count


class WhoHas(Message, frozen=True, tag=73):
    """Who has the state of `stage` after iteration t (-1: after the last one)? Answered by Holders."""

    stage: StageNumber
    t: Annotated[int, msgspec.Meta(ge=-1, le=1 << 40)]


class Holders(Message, frozen=True, tag=74):
    """These peers hold the state of `stage` after iteration t (nobody, as far as I know, if empty)."""

    stage: StageNumber
    t: Count
    fingerprint: Hash
    peers: tuple[Id, ...]


class Behind(Message, frozen=True, tag=75):
    """I serve `stage` and have no state after iteration t: nobody gave me what is needed for it (R12). With
    `step`: none of those who keep the gradient of that step, on the way to t, gave it to me."""

    t: Count
    stage: StageNumber
    step: Count = 0


class Spoilt(Message, frozen=True, tag=76):
    """What `holder` gave me as the state of `stage` after iteration t is not that state."""

    stage: StageNumber
    t: Count
    holder: Id


class KeepGradient(Message, frozen=True, tag=77):
    """From the leader: keep the reduced gradient of iteration t at `stage`; `sources` have it."""

    stage: StageNumber
    t: Count
    digest: Hash
    sources: tuple[Id, ...]


class Steps(Message, frozen=True, tag=78):
    """From the leader: from the state of `stage` after iteration t, whose base is `base`, these steps were
    taken (lines of the log); `holders` keep their gradients."""

    stage: StageNumber
    t: Count
    base: Hash
    lines: tuple[bytes, ...]
    holders: tuple[Id, ...]


class Wish(Message, frozen=True, tag=82):
    """The run's owner wants this: "pause", "continue", or "steps" (the new number). From the founder, until
    the log says it. From the leader, `done`: nothing is to be logged for it (any more)."""

    action: Text
    steps: Count = 0
    done: bool = False


class Watch(Message, frozen=True, tag=83):
    """Show me the run's event log from this byte on. Whoever says that only looks on from then on."""

    position: Count


class Shown(Message, frozen=True, tag=84):
    """What the event log has from `position` on, compressed (zlib); empty: nothing new, or not now. It has
    `size` bytes in all."""

    position: Count
    data: Annotated[bytes, msgspec.Meta(max_length=1 << 19)]
    size: Count


AnyMessage = (
    Slots | Ask | Return | Forward | Backward | Want | Have | Lack | Overflow
    | Claim | Attempt | ReducePart | ReducedPart | Prepared | Applied | Release | Announce | FetchLog
    | Missing | Enquire | About | JoinRequest | Welcome | Refused | Ready | Leave | Ping | Pong
    | FetchGradient | Gradient | FetchState | StateOffer | FetchPiece | Piece | Report | Got | Route
    | Bargain | Burst | GotBurst | Probe | Probed
    | AskVote | Vote | Append | Appended | TakeOver | Elsewhere
    | Keep | Holds | Complete | WhoHas | Holders | Behind | Spoilt | KeepGradient | Steps | Wish
    | Watch | Shown
)  # fmt: skip

#: Messages that may carry a payload, with the bulk lane's priority (lower goes first): input gradients,
#: activations, reduce, boundaries, state download (DESIGN §3).
PAYLOAD_PRIORITY: dict[type[Message], int] = {
    Backward: 0,
    Forward: 1,
    ReducePart: 2,
    ReducedPart: 2,
    Gradient: 3,
    Piece: 4,
}

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyMessage)


class MessageError(ValueError):
    """Bytes that are not a message of this protocol."""


def encode(message: Message) -> bytes:
    """Encoded bytes. Raises MessageError over MAX_MESSAGE_BYTES (the caller cut it wrongly)."""
    data = _encoder.encode(message)
    if len(data) > MAX_MESSAGE_BYTES:
        raise MessageError(f"{type(message).__name__} of {len(data)} bytes is over {MAX_MESSAGE_BYTES}")
    return data


def decode(data: bytes | memoryview) -> AnyMessage:
    """The message in `data`; raises MessageError saying what is wrong with it."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise MessageError(f"message of {len(data)} bytes is over {MAX_MESSAGE_BYTES}")
    try:
        message: AnyMessage = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MessageError(f"not a message: {error}") from None
    return message
