"""Messages of one step's gradient claims, all-reduce and commit, and of the commit log's distribution."""

from __future__ import annotations

import msgspec

from anabranch.protocol.messages.common import (
    Apart,
    Count,
    CountOrNone,
    FencedMessage,
    Hash,
    Id,
    Index,
    Message,
    Receipt,
    Seal,
    StageNumber,
)

#: Peer of the next stage -> microbatches that it gave back first, and others that it was sent or asked after.
SentOn = dict[Id, tuple[tuple[Index, ...], tuple[Index, ...]]]


class Claim(FencedMessage, frozen=True, tag=20):
    """Report of a replica that its gradient sum contains `units` (microbatches; at stage 0 heads and
    embeddings), cumulative over the iteration (R6).

    At stage 0 also loss sums (nats) of microbatches (`losses`) and of evaluation windows, by index, and the
    hash of the batch (`manifest`). apart: members of its stage that the sender cannot reach. holders: peer of
    the next stage -> microbatches that it gave back first, and others that it was sent or asked after; only
    after a `Missing` in the iteration.
    """

    stage: StageNumber
    units: tuple[Index, ...]
    losses: dict[int, float] = msgspec.field(default_factory=dict)
    evaluations: dict[int, float] = msgspec.field(default_factory=dict)
    manifest: Hash = ""
    apart: Apart = ()
    holders: SentOn = msgspec.field(default_factory=dict)


class ContributionDigests(FencedMessage, frozen=True, tag=95):
    """Report of the digests of contributions that its sender made of data of its own (`data.private`), and of
    their loss sums (nats), by slot, for the log; cumulative over the round, and sent before each `Claim` of
    them. If a slot was filled twice, the data node's loss may be of the other machine's data."""

    stage: StageNumber
    digests: dict[Index, Hash]
    losses: dict[Index, float]


class AttemptId(msgspec.Struct, array_like=True, frozen=True, order=True):
    """Identity of a reduce attempt: the leader's term and its running number; later attempts are greater."""

    term: Count
    number: Count


class Attempt(FencedMessage, frozen=True, tag=21):
    """Order to reduce the gradients of `stage` over `members`. Only the member at position `owners[k]` adds
    the contribution to unit k, a microbatch or at stage 0 its head or embedding (R7); -1: nobody does, since
    its slot does not count in the round.

    membership: number of the membership record that the leader knew. helpers: peers of other stages that sum
    parts. sums: peer that sums each part, as a position among members followed by helpers; empty: members
    alone sum, as `reduce.hierarchy` arranges them.
    """

    stage: StageNumber
    attempt: AttemptId
    membership: Count
    members: tuple[Id, ...]
    owners: tuple[CountOrNone, ...]
    helpers: tuple[Id, ...] = ()
    sums: tuple[Count, ...] = ()


class ReducePart(FencedMessage, frozen=True, tag=22):
    """Reduce-scatter message to the peer that sums `part`. Payload: that part of the sender's gradient sum,
    of the units that it owns; between the cells of a large stage, of its cell's sum. seal: the sender's
    signature of the payload's hash; b"" for a cell's sum, and in runs without audits."""

    stage: StageNumber
    attempt: AttemptId
    part: Count
    seal: Seal = b""


class ReducedPart(FencedMessage, frozen=True, tag=23):
    """All-gather message from the peer that sums `part`. Payload: the part, summed over all members. seal:
    the sender's signature of the payload's hash; b"" if it has no receipt for the sum, as in runs without
    audits."""

    stage: StageNumber
    attempt: AttemptId
    part: Count
    seal: Seal = b""


class Prepared(FencedMessage, frozen=True, tag=24):
    """Report that the sender holds the reduced gradient of the whole batch, with its digest (R8) and the sum
    of squares of each tensor. receipt: the sender's signed receipt of its work, where runs are audited
    (`protocol.audit.receipts`). moments: sum of squares and inner product with the sum, also there, of the
    contribution of each member that owns a unit, in the order of these members, over the parts that the
    sender added up; () if it added up none, or computed no moments."""

    stage: StageNumber
    attempt: AttemptId
    digest: Hash
    squares: dict[str, float]
    receipt: Receipt = b""
    moments: tuple[tuple[float, float], ...] = ()


class Applied(FencedMessage, frozen=True, tag=25):
    """Report that the sender applied a commit (fence.base is its hash) and has this state fingerprint (R11).
    timing: kind of task -> compute seconds. links: peer -> (round trip in seconds, bits per second sent to
    it), as the sender measured; 0: not known."""

    stage: StageNumber
    fingerprint: Hash
    timing: dict[str, float] = msgspec.field(default_factory=dict)
    links: dict[str, tuple[float, float]] = msgspec.field(default_factory=dict)


class Vouch(FencedMessage, frozen=True, tag=86):
    """Keyed hash of a serving replica's state after C_t (fence.base is the key), sent while its stage has a
    joiner: the leader compares the joiner's `Ready.proof` with it (R14)."""

    stage: StageNumber
    proof: Hash


class Release(FencedMessage, frozen=True, tag=26):
    """Leader's permission to drop the activations and gradients of iteration fence.t that peers keep for
    repairs (R11)."""


class Announce(Message, frozen=True, tag=27):
    """Committed log entries in order, encoded: from the leader to all members, or in reply to FetchLog."""

    entries: tuple[bytes, ...]


class FetchLog(Message, frozen=True, tag=28):
    """Request for the committed log entries from index `start` on; answered by Announce, or not at all if
    there are none, or beyond the asker's budget of their bytes."""

    start: Count


class Missing(FencedMessage, frozen=True, tag=29):
    """Leader's list of units (microbatches; at stage 0 heads and embeddings), by stage, that no replica
    claims. A peer that had sent one of them to the next stage asks its holder there for it (R6). If the
    holder gave the gradient back, after several lists another replica gets the microbatch; outside rounds
    also where a later stage is the one that lacks it. Credits that the receiver asked back, and that are
    unused, go to peers that wait for some. Empty: the receiver of this message repeats its own reports. In
    both cases the receiver's claims in that iteration have `Claim.holders` from then on."""

    units: dict[int, tuple[Index, ...]]


class Spared(Message, frozen=True, tag=30):
    """Leader's list of standbys: replicas that get no microbatches while others of their stage can take them.

    number: running number of this message within the leader's term. waits: standby -> seconds to wait for
    another replica before a microbatch is sent to the standby.
    """

    number: Count
    waits: dict[Id, float]


class Measured(Message, frozen=True, tag=31):
    """One-time report of a peer's link measurements, in the form of `Applied.links`."""

    links: dict[Id, tuple[float, float]]
