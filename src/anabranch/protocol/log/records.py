"""Records of the commit log, their JSON encoding, and the hash of an entry.

A record is small (a few kB), holds no tensors, and is written as canonical JSON, which people and other
programs can read (`docs/reference`) and which keeps every float exactly. The *base* of an iteration is the
hash of the last Genesis, Commit or Rollback entry before it.
"""

from __future__ import annotations

import hashlib
import math
from functools import lru_cache

import msgspec


class Record(msgspec.Struct, frozen=True, tag_field="kind", forbid_unknown_fields=True):
    """Base class of log records; each is one decision of the leader."""


class Member(msgspec.Struct, frozen=True):
    """Member of the run, as the log describes it.

    stage: 0 for a data node. incarnation: number of its process, which rises with each start. capacity:
    microbatches whose activations it can hold at a time; 0 for an auditor (`protocol.fleet.auditors`), which
    takes none. name, region: as it states them ("": not stated). address: its addresses, commas between, in
    the forms of `anabranch.addresses`: its own, at carriers, or through iroh ("": it cannot be dialled).
    disk: name of the disk on which it can keep the log ("": it cannot). forward_s, backward_s: measured
    seconds per block and microbatch (0: not measured). ticket: key of the ticket with which it came, set by
    the leader ("": none, as of the owner's own peer, or it is not known, in logs of an earlier release).
    walk_in: True if that is an open ticket, which is no secret; else unset. shared: microbatches whose
    activations it can hold for each of two pipeline islands at one time, beside the inputs of as many as are
    under way; unset: it holds one island only.
    """

    id: str
    stage: int
    incarnation: int
    numerics_class: str
    capacity: int
    name: str = ""
    region: str = ""
    address: str = ""
    forward_s: float = 0.0
    disk: str = ""
    backward_s: float = 0.0
    ticket: str = ""
    walk_in: bool | msgspec.UnsetType = msgspec.UNSET
    shared: int | msgspec.UnsetType = msgspec.UNSET

    def held(self, seats: int) -> int:
        """Microbatches whose activations it can hold for each of `seats` pipeline islands, 1 or 2; 0 if it
        cannot hold two."""
        return self.capacity if seats < 2 else self.shared or 0

    @property
    def is_auditor(self) -> bool:
        """True for a member that only audits: it never serves."""
        return self.capacity == 0


Crew = tuple[str, ...]
"""Machines that fill a slot of a round: the one that holds the whole model, or one of each stage in the order
in which microbatches pass, from stage 1 to the last one and then stage 0."""


class Slot(msgspec.Struct, frozen=True, array_like=True):
    """Slot of a round. first: its inner steps before this round, those of a late contribution included.
    steps: inner steps that it takes in this round (0: it takes no part). peer: who fills it ("": anybody); in
    a pipeline island its machine of stage 1, and others: those of stages 2 to S, then its data node.
    carried: round from which the machine carries state of the slot; only that machine can fill it (0: the
    slot begins anew). late: inner steps of the contribution to round `carried`, which was late and is merged
    in this round (0: it was not late)."""

    first: int
    steps: int
    peer: str = ""
    carried: int = 0
    late: int = 0
    others: tuple[str, ...] = ()

    @property
    def crew(self) -> Crew:
        """Machines that fill the slot; () if anybody may fill it."""
        return (self.peer, *self.others) if self.peer else ()

    def seats(self) -> list[tuple[int, str]]:
        """(stage, machine) of each machine of the crew; of one machine with the whole model, stage 1; [] if
        anybody may fill the slot."""
        crew = self.crew
        return [((place + 1) % max(2, len(crew)), peer) for place, peer in enumerate(crew)]

    @property
    def done(self) -> int:
        """Inner steps that counted in earlier rounds."""
        return self.first - self.late

    @property
    def weight(self) -> int:
        """Inner steps by which this slot's counter rises if its contribution counts in this round: those of
        the round, and those of a late contribution that is merged."""
        return self.steps + self.late


class Genesis(Record, frozen=True, tag="genesis"):
    """Identity of the run, the first record. owner, leader: both the founder's peer id. config: text of the
    run file. stages: number S of relay stages. fingerprints: of the initial states of stages 0 to S."""

    run: str
    epoch: int
    protocol_version: int
    owner: str
    leader: str
    config: str
    stages: int
    microbatches: int
    parameters: int
    corpus_fingerprint: str
    tokenizer_hash: str
    numerics_class: str
    initial_weights_hash: str
    fingerprints: tuple[str, ...]


class Members(Record, frozen=True, tag="members"):
    """Change of membership: removed peers with the reason, admitted peers (not active yet), and iterations
    from which some become active, applied in this order. number: running number of these records. Only this
    record removes a peer (R3)."""

    number: int
    joined: tuple[Member, ...] = ()
    active_from: dict[str, int] = {}
    removed: dict[str, str] = {}


class Dispute(msgspec.Struct, frozen=True, array_like=True):
    """Result of a relay that the receipt of another relay contradicts, so that it is computed again.
    position: of the relay that made it, among the members of the reduce. unit: microbatch. output: hash of
    the activation or gradient."""

    position: int
    unit: int
    output: str


class StageCommit(msgspec.Struct, frozen=True, omit_defaults=True):
    """Part of a Commit about one stage. fingerprint_before: of the state before the step. digest: of the
    reduced gradient. squares: sum of squares of each tensor's gradient. classes: numerics class of each
    member. owners[k]: position in `members` of the replica whose gradient of unit k counted; -1 for a slot
    that does not count in a round. contributions: digest of each slot's contribution ("": it does not count),
    in a round on private data. In runs that are audited, receipts: hash of the receipt of each member
    that owns a unit or has a disputed result ("": none); disputed: results of which the receipts contradict
    each other; far_off: position of a member whose contribution is audited as its norm or direction is far
    off the others' (-1: none)."""

    fingerprint_before: str
    digest: str
    squares: dict[str, float]
    members: tuple[str, ...]
    classes: tuple[str, ...]
    owners: tuple[int, ...]
    receipts: tuple[str, ...] = ()
    disputed: tuple[Dispute, ...] = ()
    far_off: int = -1
    contributions: tuple[str, ...] = ()

    def units_of(self, peer: str) -> int:
        """Number of units that counted as those of `peer`; 0 if it is no member."""
        return self.owners.count(self.members.index(peer)) if peer in self.members else 0


class Evaluation(msgspec.Struct, frozen=True):
    """Held-out loss of the state after iteration t: loss sum of each window (nats) and token count."""

    t: int
    loss_sums: tuple[float, ...]
    tokens: int


#: Witness.tensor of a round that is skipped since nobody fills any of its slots: their machines left with
#: what they carried, or their crews lost a machine or were too late.
STRANDED = "state of slots"
#: Overflow.tensor by which a machine says that its crew does not go on with a slot, as a task of it failed.
GIVEN_UP = "slot"


class Witness(msgspec.Struct, frozen=True):
    """Cause of a skipped step: the overflow of `tensor` in microbatch `index` at `stage`, as `peer` reported
    it. With tensor `STRANDED` the cause is a round none of whose slots can be filled any more; peer is the
    leader then, and index the first of these slots."""

    peer: str
    stage: int
    index: int
    tensor: str


class Commit(Record, frozen=True, tag="commit"):
    """Commit of iteration t. previous_base: base of the state before. manifest: hash of the batch. verdict:
    "step", or "skip" with empty `stages` and a `witness`. tokens: target tokens of the batch (of a skipped
    step, too), in a round those of the slots that count. loss_sums: summed loss of each microbatch (nats), or
    of each slot in a round; () if skipped. norm: 2-norm of the whole gradient, before it is clipped.
    adam_step: Adam's counter after it (skipped iterations and rounds are not counted). evaluation: of the
    state before. slots: plan of the next iteration, if that is a round."""

    run: str
    epoch: int
    term: int
    t: int
    previous_base: str
    manifest: str
    verdict: str
    tokens: int
    loss_sums: tuple[float, ...]
    stages: tuple[StageCommit, ...]
    norm: float
    clip_factor: float
    learning_rate: float
    bias_correction1: float
    bias_correction2: float
    adam_step: int
    evaluation: Evaluation | None = None
    witness: Witness | None = None
    slots: tuple[Slot, ...] | msgspec.UnsetType = msgspec.UNSET


def loss_total(record: Commit | Evaluation) -> float:
    """Sum of a record's losses (nats); nan if it has none, or no finite sum: a leader may log anything."""
    try:
        return math.fsum(record.loss_sums) if record.loss_sums else math.nan
    except (OverflowError, ValueError):
        return math.nan


def overflowed(record: Commit) -> bool:
    """True if the step was skipped for an overflow; False if it was taken, or a stranded round."""
    return record.witness is not None and record.witness.tensor != STRANDED


class Closing(Record, frozen=True, tag="closing"):
    """Held-out evaluation of the final state, after the last step."""

    t: int
    evaluation: Evaluation


class Rollback(Record, frozen=True, tag="rollback"):
    """Return to the state after iteration t, which makes later commits void. adam_step: Adam's counter in
    that state. fingerprints: of the states of stages 0 to S. slots: plan of iteration t + 1, if that is a
    round."""

    t: int
    adam_step: int
    reason: str
    fingerprints: tuple[str, ...]
    slots: tuple[Slot, ...] | msgspec.UnsetType = msgspec.UNSET


class Voters(Record, frozen=True, tag="voters"):
    """Change of the log's voters: `ids` are the voters from this record on."""

    ids: tuple[str, ...]


class Epoch(Record, frozen=True, tag="epoch"):
    """New epoch after the owner gave up the former voters (`anabranch recover --new-epoch`): `ids` are the
    voters from here on, and messages of earlier epochs are refused."""

    epoch: int
    ids: tuple[str, ...]
    reason: str


class Revoke(Record, frozen=True, tag="revoke"):
    """Revocation of a peer or of a ticket, by the run's owner or after an audit convicted the peer. id: the
    peer's id, or the ticket's key; who has it, or came with it, takes no part from this record on."""

    id: str
    reason: str


class Control(Record, frozen=True, tag="control"):
    """Pause, new length or end of a run. action: "pause" (steps: the last iteration that is opened),
    "continue" (ends a pause; steps: 0), "steps" (steps: the new number of optimizer steps of the run), or
    "stop" (logged by the leader when the run is over; steps: the last committed iteration)."""

    action: str
    steps: int = 0


class Carriers(Record, frozen=True, tag="carriers"):
    """Dedicated carriers of the run from this record on (peer id -> its addresses), in place of the list
    before: processes that hold no stage and forward the bytes of members which cannot dial each other."""

    addresses: dict[str, str]


class NoOp(Record, frozen=True, tag="noop"):
    """Record without content, the first of a leader's term (R9)."""


AnyRecord = (
    Genesis | Members | Commit | Closing | Rollback | Voters | Epoch | Revoke | Control | Carriers | NoOp
)


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Log entry, one line of the log. previous: hash of the entry before."""

    index: int
    term: int
    previous: str
    record: AnyRecord


#: Log lines whose decoded entry and hash are cached: several parts of a peer use the newest ones.
LINES_CACHED = 64
#: `previous` of the first entry.
NO_ENTRY = "0" * 32
_encoder = msgspec.json.Encoder(order="deterministic")
_decoder = msgspec.json.Decoder(Entry)


def encode_entry(entry: Entry) -> bytes:
    """Canonical JSON of an entry, without a newline."""
    return _encoder.encode(entry)


@lru_cache(LINES_CACHED)
def decode_entry(line: bytes) -> Entry:
    """Decode a log line. Raises msgspec.DecodeError (a ValueError) if it is no entry."""
    try:
        return _decoder.decode(line)
    except RecursionError:
        raise msgspec.DecodeError("nested too deeply") from None


@lru_cache(LINES_CACHED)
def entry_hash(line: bytes) -> str:
    """Hash (32 hex characters) of a log line, by which the next entry and a base refer to its entry."""
    return hashlib.sha256(line).hexdigest()[:32]
