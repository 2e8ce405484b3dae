"""Every public decoder of bytes that come from somebody else, with good examples to begin from."""

from __future__ import annotations

import base64
import secrets
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from p2pdrl.api.act import decode_binary, decode_json
from p2pdrl.api.answers import ApiRefusal
from p2pdrl.api.keyfile import read_swarm_keys, write_swarm_key
from p2pdrl.config.task import TaskConfig, task_hash
from p2pdrl.errors import P2PDRLError
from p2pdrl.membership import messages
from p2pdrl.membership.identity import Identity
from p2pdrl.membership.known_members import KnownMember, KnownMembers
from p2pdrl.membership.records import Incarnation, MemberRecord, Suspicion, sign_member, sign_suspicion
from p2pdrl.node import settings
from p2pdrl.node.accounting.counters import Counts, NodeCounts
from p2pdrl.node.accounting.facts import FactSigner
from p2pdrl.node.accounting.metrics_gossip import MetricsExchange
from p2pdrl.node.accounting.progress_tracker import ProgressTracker
from p2pdrl.node.accounting.report_table import PeerReport, ReportRow
from p2pdrl.node.bootstrap.first_state import restore_steps
from p2pdrl.node.bootstrap.joining import decode_info
from p2pdrl.node.state.checkpoints import Checkpoint, from_bytes, to_bytes
from p2pdrl.strategies.servers.shard_plan import read_note
from p2pdrl.tensors import positions, wire
from p2pdrl.tensors.board import BoardSpec
from p2pdrl.tensors.compression import make_codec
from p2pdrl.tensors.inference_slots import InferenceSpec
from p2pdrl.tensors.layout import Layout, TensorEntry
from p2pdrl.tensors.moments import Moments
from p2pdrl.tensors.unroll_ring import UnrollSpec
from p2pdrl.transport import codec
from p2pdrl.transport.framing import HEAD_BYTES, AnswerFrame, CallFrame
from p2pdrl.transport.http.headers import AnswerHead, RequestHead
from p2pdrl.transport.opening import ConnectionOpening
from p2pdrl.transport.pipe import frames
from p2pdrl.transport.pipe.server import PipeAnswer
from p2pdrl.transport.protocol import Address
from p2pdrl.versions import SPOKEN

__all__ = ["REFUSALS", "Decoder", "decoders"]

REFUSALS = (P2PDRLError, ApiRefusal)
"""What a decoder may raise."""
SIZE = 600
"""Elements of vectors."""


@dataclass(frozen=True)
class Decoder:
    """One decoder.

    Attributes:
        name: dotted, as its module is called.
        examples: bytes that it takes.
        decode: is called with any bytes; raises one of `REFUSALS` or nothing.
    """

    name: str
    examples: tuple[bytes, ...]
    decode: Callable[[bytes], object]


def decoders() -> list[Decoder]:
    """All of them."""
    return [*_transport(), *_membership(), *_tensors(), *_node(), *_files()]


def _pack(value: object) -> bytes:
    return msgspec.msgpack.encode(value)


def _transport() -> list[Decoder]:
    calls = tuple(CallFrame(*each).encode() for each in ((1, 0, 0), (131, 1 << 20, 1 << 40)))
    answers = tuple(AnswerFrame(*each).encode() for each in ((200, 5, 9, False), (503, 0, 0, True)))
    piped = frames.pack_head(3, 7, 100, 4096)
    opening = ConnectionOpening.new(sealed=True, hides=True).encode()
    piped_answer = PipeAnswer(ConnectionOpening.new(sealed=True, hides=True), b"x").encode()
    identity = Identity(secrets.token_bytes(32))
    head = RequestHead(
        path="/p2p/take", sender=identity.node_id, target=identity.node_id, swarm="default",
        meta_nbytes=3, vector_nbytes=4,
    )  # fmt: skip
    answered = AnswerHead(sender=identity.node_id, meta_nbytes=1, vector_nbytes=2)

    def fixed(data: bytes, nbytes: int) -> bytes:
        return data[:nbytes].ljust(nbytes, b"\0")  # a reader reads as many

    def lines(headers: dict[str, str]) -> bytes:
        return "\n".join(f"{name}: {value}" for name, value in headers.items()).encode()

    def headers_in(data: bytes) -> dict[str, str]:
        pairs = (line.partition(": ") for line in data.decode("utf-8", "surrogateescape").split("\n"))
        return {name: value for name, _, value in pairs}

    frame = frames.HEAD_BYTES
    return [
        Decoder("transport.framing.CallFrame", calls, lambda d: CallFrame.decode(fixed(d, HEAD_BYTES))),
        Decoder("transport.framing.AnswerFrame", answers, lambda d: AnswerFrame.decode(fixed(d, HEAD_BYTES))),
        Decoder("transport.pipe.frames", (piped,), lambda d: frames.unpack_head(fixed(d, frame), 7)),
        Decoder("transport.opening", (opening,), ConnectionOpening.decode),
        Decoder("transport.pipe.PipeAnswer", (piped_answer,), PipeAnswer.decode),
        Decoder(
            "transport.codec", (_pack({"a": [1, 2.5, "x", b"y", None]}),), lambda d: codec.decode(d, Any)
        ),
        Decoder(
            "transport.http.RequestHead",
            (lines(head.to_headers()),),
            lambda d: RequestHead.from_headers("/p2p/take", headers_in(d)),
        ),
        Decoder(
            "transport.http.AnswerHead",
            (lines(answered.to_headers()),),
            lambda d: AnswerHead.from_headers(headers_in(d)),
        ),
        Decoder(
            "transport.Address",
            (b"10.0.0.1:7700", b"[::1]:7700", b"name.example"),
            lambda d: Address.parse(d.decode("utf-8", "replace")),
        ),
    ]


def _membership() -> list[Decoder]:
    identity = Identity(secrets.token_bytes(32))
    record = MemberRecord(
        id=identity.node_id, public_key=identity.public_key, name="n", address="10.0.0.1:7700",
        incarnation=Incarnation(1, 2), state="alive", tags={"role": "actor"}, protocol=SPOKEN.oldest,
    )  # fmt: skip
    record = sign_member(identity, "default", record)
    suspicion = Suspicion(identity.node_id, Incarnation(1, 2), identity.node_id, "dead", "no answer")
    suspicion = sign_suspicion(identity, "default", suspicion)
    examples = (
        messages.JoinRequest(record, b"hash"),
        messages.Welcome((record, suspicion), b"info", "10.0.0.1"),
        messages.GossipMessage(Incarnation(1, 2), (record, suspicion)),
        messages.Delta((record,), (identity.node_id,), ("mode",)),
        messages.Digest(False, (messages.DigestEntry(b"1" * 16, Incarnation(1, 1), 0),)),
        messages.Starting("looking", 5, ("10.0.0.2:1",)),
    )
    return [Decoder("membership.messages", tuple(map(messages.encode, examples)), messages.decode)]


def _tensors() -> list[Decoder]:
    vector = np.linspace(-1, 1, SIZE, dtype=np.float32)
    found: list[Decoder] = []
    for kind in ("none", "bf16", "int8", "topk", "threshold"):
        one = make_codec(kind, SIZE, keep=0.1, threshold=0.3)  # type: ignore[arg-type]
        room = bytearray(one.max_nbytes)
        used = one.encode(vector, memoryview(room))

        def decode(data: bytes, one: Any = one) -> None:
            one.decode(memoryview(data), np.zeros(SIZE, np.float32))

        found.append(Decoder(f"tensors.compression.{kind}", (bytes(room[:used]),), decode))
    for dtype in ("float32", "bf16"):
        room = bytearray(wire.encoded_nbytes(SIZE, dtype))  # type: ignore[arg-type]
        wire.encode(vector, dtype, room)  # type: ignore[arg-type]

        def read(data: bytes, dtype: Any = dtype) -> None:
            wire.decode(data, dtype, np.zeros(SIZE, np.float32))

        found.append(Decoder(f"tensors.wire.{dtype}", (bytes(room),), read))
    layout = Layout((TensorEntry("w", (20, 30)),))
    moments = Moments(3.0, np.zeros(4), np.ones(4)).to_wire()
    board = BoardSpec(layout).to_wire()

    def shape(of: Callable[[object], object]) -> Callable[[bytes], object]:
        return lambda data: of(codec.decode(data, Any))

    few = np.arange(0, 50, 10, dtype=np.int64)
    placed = bytearray(positions.encoded_nbytes(few.size, SIZE))
    positions.encode(few, SIZE, memoryview(placed))
    unrolls = {"items": [["rewards", "float32", [-1, 4], 0]], "shares": [2, 2], "slots": 2, "remote": 1}
    return [
        *found,
        Decoder("tensors.layout", (_pack(layout.to_wire()),), shape(Layout.from_wire)),
        Decoder("tensors.board", (_pack(board),), shape(BoardSpec.from_wire)),
        Decoder("tensors.moments", (_pack(moments),), shape(Moments.from_wire)),
        Decoder("tensors.unroll_ring", (_pack(unrolls),), shape(UnrollSpec.from_wire)),
        Decoder(
            "tensors.positions",
            (bytes(placed),),
            lambda d: positions.decode(memoryview(d), 5, SIZE),
        ),
    ]


def _node() -> list[Decoder]:
    layout = Layout((TensorEntry("w", (20, 30)),))
    signer = FactSigner(Identity(secrets.token_bytes(32)), "default")
    tracker = ProgressTracker(signer, 7)
    tracker.follow("l")
    tracker.credit(Counts(5, 2, 1))
    tracker.sign()
    moments = Moments(3.0, np.zeros(4), np.ones(4)).to_wire()
    report = PeerReport(id=signer.node_id, boot=7, seq=1, name="n", state="training")
    row = ReportRow(0.0, signer.sign("report", "", _pack(report)))
    said = [fact.body for facts in tracker.counts().values() for fact in facts]
    signed = {"o": [[signer.node_id, 7, moments, b"", b""]]}
    exchange = MetricsExchange([row], tracker.counts(), signed, {})
    meta = {
        "layout": layout.to_wire(),
        "facts": base64.b64encode(_pack(tracker.counts())).decode(),
        "moments": "gA==",
        "policy_version": 3,
    }
    checkpoint = to_bytes(Checkpoint(np.zeros(SIZE, np.float32), {}, meta))

    def restore(data: bytes) -> None:
        """A checkpoint whose document is as somebody wishes, and whose sums are right."""
        found = codec.decode(data, dict)
        restore_steps(ProgressTracker(signer, 0), Checkpoint(np.zeros(SIZE, np.float32), {}, found))

    task = TaskConfig()
    info = {
        "task": msgspec.to_builtins(task), "task_hash": task_hash(task), "lineage": "l", "policy_version": 1,
        "lineage_steps": 1, "founded_at": 1.0,
    }  # fmt: skip
    spec = InferenceSpec(
        obs_shape=(4,), obs_dtype="float32", action_shape=(), action_dtype="int64", has_values=True
    )
    asked = b'{"observations": [[1, 2, 3, 4]], "greedy": true}'
    values = (
        (settings.StopSetting, _pack(settings.StopSetting.of(task, 5.0))),
        (settings.ModeSetting, _pack(settings.ModeSetting.of(task.strategy))),
        (settings.PauseSetting, _pack(settings.PauseSetting(True))),
    )
    return [
        Decoder("node.state.checkpoints", (checkpoint,), from_bytes),
        Decoder("node.bootstrap.restore_steps", (_pack(meta),), restore),
        Decoder("node.bootstrap.joining", (_pack(info),), decode_info),
        Decoder(
            "node.accounting.metrics_gossip",
            (_pack(exchange),),
            lambda d: codec.decode(d, MetricsExchange),
        ),
        Decoder("node.accounting.report", (row.fact.body,), lambda d: codec.decode(d, PeerReport)),
        Decoder("node.accounting.counts", tuple(said), lambda d: codec.decode(d, NodeCounts)),
        *(
            Decoder(f"node.settings.{kind.__name__}", (good,), lambda d, kind=kind: settings.decode(d, kind))
            for kind, good in values
        ),
        Decoder("strategies.servers.note", (_pack([[0, 5, 3]]), _pack({})), lambda d: read_note(d, SIZE)),
        Decoder("api.act.json", (asked,), lambda d: decode_json(d, spec, 64)),
        Decoder("api.act.binary", (bytes(16),), lambda d: decode_binary(d, {"rows": "1"}, spec, 64)),
    ]


def _files() -> list[Decoder]:
    folder = Path(tempfile.mkdtemp(prefix="p2pdrl-fuzz-"))
    key = folder / "good.key"
    write_swarm_key(key)
    known = KnownMembers(folder)
    known.save(5, (KnownMember("a" * 32, "n", "10.0.0.1:7700"),))
    remembered = (folder / "members.json").read_bytes()

    def read_key(data: bytes) -> object:
        path = folder / "key"
        path.touch(mode=0o600)
        path.write_bytes(data)
        return read_swarm_keys(path)

    def read_members(data: bytes) -> object:
        (folder / "members.json").write_bytes(data)
        return KnownMembers(folder).members

    return [
        Decoder("api.keyfile", (key.read_bytes(),), read_key),
        Decoder("membership.known_members", (remembered,), read_members),
    ]
