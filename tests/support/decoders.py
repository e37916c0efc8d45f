"""Every decoder of bytes that come from elsewhere, with good inputs and the errors that it documents."""

from __future__ import annotations

import base64
import json
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import get_args

import msgspec
import numpy as np
import torch
from blake3 import blake3

from anabranch.checkpoint.directory import CHECKPOINT_VERSION, CheckpointManifest, RunDirectory, StageFile
from anabranch.checkpoint.proof_files import PROOF_VERSION, ProofFile, read_proof
from anabranch.config import RunConfig, load_run_file, render_run_file
from anabranch.data.corpus import open_corpus
from anabranch.errors import ConfigError, UserError
from anabranch.flow.graph.instance_file import InstanceError, parse_instance
from anabranch.net import scaled_packing
from anabranch.net.errors import FrameError, Refused, TicketError
from anabranch.net.framing import (
    Blob,
    FrameReader,
    checksum_of,
    chunk_header,
    close_frame,
    done_frame,
    hash_text,
    message_frame,
    open_frame,
    pause_frame,
    payload_hasher,
)
from anabranch.net.handshake import Gate, ServerHandshake
from anabranch.net.identity import Identity, IdentitySigner
from anabranch.net.packing import pack, unpack
from anabranch.net.ticket import check_certificate, check_grant, issue_certificate, issue_ticket, parse_ticket
from anabranch.net.wan.profile import WanError, parse_profile
from anabranch.node.driver.raft_storage import RaftStorage
from anabranch.node.driver.tensor_codec import from_blob, to_blob
from anabranch.node.lifecycle.training_machine import run_of
from anabranch.observe.events import KINDS, Note, Suspected, decode_event, encode_event
from anabranch.protocol import messages as msg
from anabranch.protocol.audit.receipts import (
    EndReceipt,
    Receipt,
    SumReceipt,
    Transfer,
    UnitReceipt,
    broken_seal,
    contradictions,
    mismatch,
    opened,
    signed,
)
from anabranch.protocol.log.hash_chain import LogError, Position, follow
from anabranch.protocol.log.records import (
    NO_ENTRY,
    Control,
    Entry,
    Genesis,
    Member,
    Members,
    Rollback,
    encode_entry,
)
from anabranch.protocol.messages import Attempt
from anabranch.protocol.messages.commit import AttemptId
from anabranch.sim.cluster.churn_trace import parse_trace
from anabranch.sim.cluster.scenario import load_scenario
from anabranch.train.model.layout import Layout
from anabranch.train.stage.audit import payload_hash
from anabranch.train.stage.state import SnapshotError, StageState, parse_pieces
from benchmarks.flow.families import Family
from support.instance_writer import format_instance
from support.swarms.byzantine_peer import Fabricator

OWNER = Identity.from_seed(b"owner".ljust(32))
NOW_S = 1_800_000_000


@dataclass(frozen=True)
class Decoder:
    decode: Callable[[bytes], object]
    documented: tuple[type[Exception], ...]
    seeds: tuple[bytes, ...]


def _messages() -> tuple[bytes, ...]:
    fabricator = Fabricator(random.Random(1), ["r1.0", "d0"], [1, 3])
    return tuple(msg.encode(fabricator.message(kind)) for kind in get_args(msg.AnyMessage))


def read_frames(data: bytes, payload_bytes: int) -> None:
    """Read the bytes of a lane with payloads of at most `payload_bytes`; whole ones become tensors."""
    reader = FrameReader(max_payload_bytes=payload_bytes, max_message_bytes=1 << 12)
    for item in reader.feed(data):
        if isinstance(item, tuple) and item[1] is not None:
            from_blob(item[1])


def _frames(data: bytes) -> None:
    """Bulk lane, and control lane, which refuses payloads."""
    for payload_bytes in (1 << 16, 0):
        read_frames(data, payload_bytes)


def _packed(data: bytes) -> None:
    """Packed sums; the first two bytes say of how many values the frame told."""
    count = int.from_bytes(data[:2], "big")
    unpack(np.frombuffer(data[2:], dtype=np.uint8), count)


def _packed_seeds() -> tuple[bytes, ...]:
    values = np.zeros(3000, dtype=np.int64)
    values[5], values[1500], values[-1] = 300, -(1 << 38), 1 << 62
    return tuple(len(some).to_bytes(2, "big") + pack(some).tobytes() for some in (values, values[:7]))


def _scaled(data: bytes) -> None:
    """Sums packed with a power of two for each block; the first two bytes say of how many values."""
    count = int.from_bytes(data[:2], "big")
    scaled_packing.unpack(np.frombuffer(data[2:], dtype=np.uint8), count)


def _scaled_seeds() -> tuple[bytes, ...]:
    values = np.zeros(300, dtype=np.int64)
    values[5], values[100], values[200], values[-1] = 3 << 9, -(100 << 20), -(1 << 14), 1 << 62
    some = (values, values[:7])
    return tuple(len(each).to_bytes(2, "big") + scaled_packing.pack(each).tobytes() for each in some)


def _receipt(stage: int = 1) -> Receipt:
    """Receipt of a relay (or a data node, stage 0) with one of each part that receipts have."""
    came = Transfer("h", "d0", 0, bytes(64))
    units = (UnitReceipt(0, came, came, "a", "b"),) if stage else ()
    ends = () if stage else (EndReceipt(1, came),)
    total = SumReceipt(0, ((1, came),), "o")
    return Receipt("r", "base", 1, stage, OWNER.peer_id, 1, 1, units, ("p",), (total,), (came,), ends)


def _receipts(data: bytes) -> None:
    """Receipt of a peer: signed here (first byte 1), so that what is behind the signature is reached too, or
    by itself."""
    signer, signed_bytes = IdentitySigner(OWNER), data[1:]
    if data[:1] == b"\x01":
        try:
            signed_bytes = signed(msgspec.msgpack.decode(data[1:], type=Receipt), signer)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return
    receipt = opened(signed_bytes, signer)
    if receipt is None or receipt.peer != OWNER.peer_id:
        return
    stage, me = receipt.stage, (OWNER.peer_id,)
    attempt = Attempt(msg.Fence(1, 1, 1, "base", stage), stage, AttemptId(1, 1), 1, me, (0, 0))
    mismatch(receipt, OWNER.peer_id, attempt, "r", 1)
    broken_seal(receipt, signer)
    contradictions([receipt, _receipt(0), _receipt(2)], signer)


def _receipt_seeds() -> tuple[bytes, ...]:
    bodies = [msgspec.msgpack.encode(_receipt(stage)) for stage in (0, 1, 2)]
    whole = signed(_receipt(), IdentitySigner(OWNER))
    return (b"\x00" + whole, *(b"\x01" + body for body in bodies))


def _payload(stream: int, message: bytes, blob: Blob) -> bytes:
    """All frames of a payload, with the right checksum."""
    size_bytes = len(blob.view())
    header, body = open_frame(stream, message, blob, size_bytes)
    found = blob.hash or hash_text(payload_hasher(blob.dtype, blob.shape).update(blob.view()))
    done = done_frame(stream, checksum_of(blake3(body), found))
    return header + body + chunk_header(stream, size_bytes) + bytes(blob.view()) + done


def _frame_seeds() -> tuple[bytes, ...]:
    whole = _payload(3, b"message", Blob("float32", (2, 3), bytes(24)))
    values = torch.tensor([1, -300])
    packed = to_blob(values)
    payload_hash(values)
    sums = [_payload(4, b"sums", blob) for blob in (packed, to_blob(values))]  # form 0, form 1
    paused = pause_frame() + whole + pause_frame() * 2
    return (b"".join(message_frame(b"hello")), whole, close_frame("enough"), whole[:-3], *sums, paused)


def _tickets(data: bytes) -> None:
    parse_ticket(data.decode("utf-8", "surrogateescape"), now_s=NOW_S)


def _ticket_text() -> bytes:
    ticket = issue_ticket(OWNER, run="r", role="relay", expires_at_s=NOW_S + 60, quota=3, peers=[])
    return ticket.text.encode()


def _seals(data: bytes) -> None:
    for check in (
        lambda: check_grant(data, run="r", owner=OWNER.peer_id, now_s=NOW_S),
        lambda: check_certificate(data, run="r", now_s=NOW_S),
    ):
        try:
            check()
        except TicketError:
            continue


def _hello(data: bytes) -> None:
    gate = Gate("r", OWNER.peer_id, lambda hello: None)
    ServerHandshake(OWNER, 1, gate, binding=b"binding", nonce=bytes(32)).receive(data, now_s=NOW_S)


class _Files:
    """Decoders of files, by way of one."""

    def __init__(self) -> None:
        self._kept = tempfile.TemporaryDirectory(prefix="anabranch-fuzz-")  # gone when the last test ends
        self.folder = Path(self._kept.name)
        (self.folder / "version").write_text("1\n")
        (self.folder / "checkpoints").mkdir()

    def run_file(self, data: bytes) -> None:
        path = self.folder / "run.toml"
        path.write_bytes(data)
        load_run_file(path)

    def manifest(self, data: bytes) -> None:
        directory = RunDirectory(self.folder)
        path = directory.checkpoint_path(3)
        path.mkdir(parents=True, exist_ok=True)
        (path / "manifest.json").write_bytes(data)
        for stage in directory.manifest(3).stages:
            directory.read_stage(3, stage)

    def corpus_manifest(self, data: bytes) -> None:
        (self.folder / "manifest.json").write_bytes(data)
        open_corpus(self.folder)

    def vote(self, data: bytes) -> None:
        """Decode the files of a voter: term and vote, and behind the first line its log."""
        vote, _, log = data.partition(b"\n")
        (self.folder / "vote.json").write_bytes(vote)
        (self.folder / "log.jsonl").write_bytes(log)
        RaftStorage(self.folder / "log.jsonl", self.folder / "vote.json").load()

    def proof(self, data: bytes) -> None:
        """A proof file, and the receipt in it."""
        path = self.folder / "proof.json"
        path.write_bytes(data)
        opened(read_proof(path).receipt_bytes, IdentitySigner(OWNER))

    def scenario(self, data: bytes) -> None:
        path = self.folder / "scenario.toml"
        path.write_bytes(data)
        load_scenario(str(path))


#: A stage of two tensors, and its snapshot after step 3.
LAYOUT = Layout({"w": (2, 3), "b": (3,)})


def _snapshot(data: bytes) -> None:
    """A stage's state, as it comes from a peer in pieces."""
    pieces = torch.split(torch.frombuffer(bytearray(data), dtype=torch.uint8), 64) if data else ()
    parse_pieces(3, pieces, LAYOUT, torch.float32, torch.device("cpu"))


def _snapshot_bytes() -> bytes:
    state = StageState.initial(LAYOUT, torch.arange(LAYOUT.elements, dtype=torch.float32))
    state.t = 3
    return b"".join(bytes(piece.numpy()) for piece in state.pieces())


def _genesis(data: bytes) -> None:
    """The run file that a joiner is told by the peer at the door."""
    config = data.decode("utf-8", "replace")
    run_of(Genesis("r", 1, 1, "", "", config, 1, 1, 1, "", "", "", "", ()))


def _proof() -> bytes:
    receipt = base64.b64encode(signed(_receipt(), IdentitySigner(OWNER))).decode()
    proof = ProofFile(version=PROOF_VERSION, run_id="r", base="b", step=1, stage=1, subject=OWNER.peer_id,
        auditor="x", what="part 0 of the sum", found="f", claimed="c", receipt=receipt)  # fmt: skip
    return msgspec.json.encode(proof)


def _trace() -> bytes:
    events = ((1.0, "leave"), (2.5, "join"))
    changes = [{"at_s": at, "machine": "r1.0", "event": event} for at, event in events]
    return json.dumps({"version": 1, "source": "made up", "changes": changes}).encode()


def _network() -> bytes:
    return resources.files("anabranch.net.wan").joinpath("two-centres.json").read_bytes()


def _entries() -> tuple[bytes, ...]:
    member = Member("r1.0", 1, 1, "class", 4)
    records = [Control("stop", 3), Members(1, joined=(member,)), Rollback(2, 1, "why", ("a", "b"))]
    lines = tuple(encode_entry(Entry(0, 1, NO_ENTRY, record)) for record in records)
    return (*lines, lines[0].partition(b"\"control")[0] + NESTED[4:])


def _events() -> tuple[bytes, ...]:
    said = Suspected(time=1.0, peer="p", subject="q", reason="silent", asked={"r": "heard it"})
    return (encode_event(Note(time=1.0, text="a")), encode_event(said), b'{"kind": "unheard of"}',
            *(f'{{"kind": "{kind.__name__.lower()}"}}'.encode() for kind in KINDS))  # fmt: skip


def _instances() -> tuple[bytes, ...]:
    families = (Family(1, 1, (1, 2), (1, 9)), Family(2, 2, (1, 3), (1, 20), data_nodes=2))
    return tuple(format_instance(family.draw(1)).encode() for family in families)


def _corpus_manifest() -> bytes:
    part = {"documents": 1, "tokens": 2, "text_bytes": 3}
    names = ("train.tokens", "heldout.tokens", "tokenizer.json")
    manifest = {
        "format": "anabranch-corpus", "version": 1, "token_type": "u2", "vocab_size": 300, "separator": 256,
        "train": part, "held_out": part, "source": {}, "fingerprint": "00",
        "files": [{"name": name, "size_bytes": 0, "hash": "00"} for name in names],
    }  # fmt: skip
    return json.dumps(manifest).encode()


def _votes() -> tuple[bytes, ...]:
    """A good one, one in a term that is no number, one whose log is nested too deeply, one that is itself."""
    vote, (entry, *_, nested) = b'{"version": 1, "nonce": "1a", "term": 3, "vote": "x"}\n', _entries()
    return (vote + entry + b"\n", vote.replace(b"3", b"1e999"), vote + nested + b"\n", NESTED[4:])


SCENARIO = b"""[anabranch]
version = 1
[fleet]
relays = 4
device = ["t4"]
[churn]
crash = 0.1
[[machines]]
count = 2
stage = 1
"""


#: Deeper than a reader that calls itself can follow.
NESTED = b"a = " + b"[" * 100_000
#: An integer of more digits than Python converts.
LONG = b"a = " + b"9" * 5000


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def decoders() -> dict[str, Decoder]:
    files = _Files()
    manifest = CheckpointManifest(version=CHECKPOINT_VERSION, run_id="r", t=3, base="b", stages={
        0: StageFile(name="stage-0", size_bytes=3, blake3="00", fingerprint="f")})  # fmt: skip
    grant = issue_ticket(OWNER, run="r", role="relay", expires_at_s=NOW_S + 60, quota=3, peers=[])
    me = OWNER.peer_id
    certificate = issue_certificate(OWNER, run="r", peer_id=me, role="relay", expires_at_s=NOW_S + 9)
    hello = b"anbr" + bytes([0, 1, 0, 0, 0, 3]) + b"\x93\x01\x02"
    run = render_run_file(RunConfig()).encode()
    return {
        "messages": Decoder(msg.decode, (msg.MessageError,), _messages()),
        "frames": Decoder(_frames, (FrameError,), _frame_seeds()),
        "receipts": Decoder(_receipts, (), _receipt_seeds()),
        "scaled": Decoder(_scaled, (FrameError,), _scaled_seeds()),
        "packed": Decoder(_packed, (FrameError,), _packed_seeds()),
        "tickets": Decoder(_tickets, (TicketError,), (_ticket_text(),)),
        "seals": Decoder(_seals, (), (certificate, grant.text.encode())),
        "hello": Decoder(_hello, (Refused, TicketError), (hello,)),
        "run-files": Decoder(files.run_file, (ConfigError,), (run, run[:600], NESTED, LONG)),
        "proofs": Decoder(files.proof, (UserError,), (_proof(),)),
        "manifests": Decoder(files.manifest, (UserError,), (msgspec.json.encode(manifest),)),
        "log-entries": Decoder(lambda data: follow(Position(), data), (LogError,), _entries()),
        "event-lines": Decoder(decode_event, (ValueError, msgspec.DecodeError), _events()),
        "corpus-manifests": Decoder(files.corpus_manifest, (UserError,), (_corpus_manifest(), NESTED[4:])),
        "votes": Decoder(files.vote, (UserError,), _votes()),
        "snapshots": Decoder(_snapshot, (SnapshotError,), (_snapshot_bytes(),)),
        "genesis": Decoder(_genesis, (ConfigError,), (run[:600], NESTED, LONG)),
        "scenarios": Decoder(files.scenario, (UserError,), (SCENARIO, NESTED, LONG)),
        "churn-traces": Decoder(lambda data: parse_trace(_text(data), "trace"), (UserError,), (_trace(),)),
        "networks": Decoder(lambda data: parse_profile(_text(data), "net"), (WanError,), (_network(),)),
        "instances": Decoder(parse_instance, (InstanceError,), _instances()),
    }
