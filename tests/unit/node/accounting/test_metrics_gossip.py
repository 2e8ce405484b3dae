from __future__ import annotations

import asyncio
import random

import msgspec
import numpy as np
import pytest

from p2pdrl.clock import LoopClock
from p2pdrl.errors import PeerRefusedError
from p2pdrl.node.accounting import metrics_gossip
from p2pdrl.node.accounting.claims import ClaimBounds
from p2pdrl.node.accounting.counters import Counts, NodeCounts
from p2pdrl.node.accounting.metrics_gossip import MetricsGossip
from p2pdrl.node.accounting.progress_tracker import LineageFacts
from p2pdrl.node.accounting.report_table import PeerReport
from p2pdrl.tensors.moments import Moments
from p2pdrl.tensors.sidecar import SidecarItem, SidecarLayout
from p2pdrl.testing.memory_transport import MemoryNetwork
from p2pdrl.transport.protocol import Address, Answer

from ..signing import counted, node_id, said, signer_of, tracker_of

pytestmark = pytest.mark.looptime

CLOCK = LoopClock(wall_s=1000.0)
"""Boots are counted in milliseconds of its wall time."""


class Talker:
    """A node that does nothing but talk."""

    def __init__(self, network: MemoryNetwork, number: int) -> None:
        self.id = node_id(number)
        self.address = Address("10.0.0.1", 7000 + number)
        self.transport = network.join(self.id, self.address)
        self.progress_tracker = tracker_of(number)
        self.progress_tracker.follow("l0")
        self.peers: dict[str, Address] = {}
        self.seq = 0
        self.rounds = 0
        self.number = number
        self.forgers: list[str] = []
        self.gossip = MetricsGossip(
            transport=self.transport,
            progress_tracker=self.progress_tracker,
            clock=CLOCK,
            rng=random.Random(number),
            alive=lambda: self.peers,
            make_report=self.report,
            on_round=self.on_round,
            refused=lambda peer, why: self.forgers.append(peer),
        )
        self.task: asyncio.Task[None] | None = None

    def report(self) -> PeerReport:
        self.seq += 1
        return PeerReport(id=self.id, boot=1, seq=self.seq, name=f"n{self.number}")

    def on_round(self) -> None:
        self.rounds += 1

    def work(self, steps: int) -> None:
        self.progress_tracker.credit(Counts(steps))
        mean = Moments(float(steps), np.full(2, 1.0), np.zeros(2))
        self.progress_tracker.put_moments({"obs": msgspec.msgpack.encode(mean.to_wire())})

    async def start(self) -> None:
        await self.transport.start()
        self.transport.serve(
            metrics_gossip.ROUTE, self.gossip.answer, max_meta_bytes=metrics_gossip.MAX_META_BYTES
        )

    def go_round(self) -> None:
        self.task = asyncio.create_task(self.gossip.run())

    async def close(self) -> None:
        if self.task is not None:
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)
        await self.transport.close()


@pytest.fixture
def network() -> MemoryNetwork:
    return MemoryNetwork(random.Random(0), delay_s=(0.001, 0.01))


@pytest.fixture
async def talkers(network):
    made = [Talker(network, number) for number in range(6)]
    for talker in made:
        talker.peers = {other.id: other.address for other in made if other is not talker}
        await talker.start()
    yield made
    for talker in made:
        await talker.close()


def others_count(talker: Talker) -> float:
    return Moments.from_wire(msgspec.msgpack.decode(talker.progress_tracker.others_moments()["obs"])).count


async def test_reports_counts_and_moments_get_around(talkers):
    for number, talker in enumerate(talkers, 1):
        talker.work(10**number)
        talker.go_round()
    await asyncio.sleep(8)
    for number, talker in enumerate(talkers, 1):
        assert talker.progress_tracker.total().env_steps == 1111110
        assert others_count(talker) == 1111110 - 10**number
        found = [talker.gossip.table.get(other.id, CLOCK.monotonic()) for other in talkers]
        assert all(one is not None and one[1] < 6.0 for one in found)
    assert all(6 <= talker.rounds <= 10 for talker in talkers)


async def test_telling_twice_changes_nothing(talkers):
    one, two = talkers[:2]
    one.work(5)
    two.work(7)
    one.gossip.refresh()
    two.gossip.refresh()
    for _ in range(3):
        assert await one.gossip.tell(two.id, two.address)
    assert one.progress_tracker.total() == two.progress_tracker.total() == Counts(12)
    assert others_count(one) == 7.0


@pytest.mark.parametrize("how", ["cut", "frozen", "dead", "other"])
async def test_a_partner_that_doesnt_answer_costs_one_round(talkers, network, how):
    one, two = talkers[:2]
    if how == "cut":
        network.cut(one.id, two.id)
    elif how == "frozen":
        network.freeze(two.id)
    elif how == "dead":
        await two.transport.close()
    target = talkers[2].id if how == "other" else two.id
    began_s = CLOCK.monotonic()
    assert not await one.gossip.tell(target, two.address)
    assert CLOCK.monotonic() - began_s <= metrics_gossip.DEADLINE_S + 0.01
    network.thaw(two.id)


async def test_the_loop_goes_on_when_nobody_answers(talkers, network):
    one = talkers[0]
    for other in talkers[1:]:
        network.cut(one.id, other.id)
    one.go_round()
    await asyncio.sleep(10)
    assert one.rounds >= 3
    network.heal()
    one.work(3)
    await asyncio.sleep(4)
    assert sum(other.progress_tracker.total().env_steps == 3 for other in talkers[1:]) >= 2


async def test_alone_it_goes_round_by_itself(talkers):
    one = talkers[0]
    one.peers = {}
    one.go_round()
    await asyncio.sleep(5)
    assert one.rounds >= 4


def words(**changes) -> bytes:
    said = {"reports": [], "counts": {}, "moments": {}, "holds": {}} | changes
    return msgspec.msgpack.encode(said)


def plainly(struct: msgspec.Struct) -> list:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(struct))


def said_by(number: int, **fields) -> list:
    return plainly(said(PeerReport(**({"id": node_id(number), "boot": 1, "seq": 1} | fields))))


def signed(body: object) -> list:
    return plainly(signer_of(30).sign("counts", "l0", msgspec.msgpack.encode(body)))


async def send(one: Talker, two: Talker, meta: bytes) -> int:
    try:
        await one.transport.call(two.address, two.id, metrics_gossip.ROUTE, meta, deadline_s=1.0)
    except PeerRefusedError as error:
        return error.status
    return 200


@pytest.mark.parametrize(
    "meta",
    [
        b"",
        b"\xc1",
        b"\x91" * 100_000,
        words(reports=[[0.0, [b"short", b"", b""]]]),
        words(reports=[[-1.0, *said_by(30)[1:]]]),
        words(reports=[said_by(30, mean_return=float("nan"))]),
        words(reports=[said_by(30, env_steps=-1)]),
        words(counts={"l0": [signed([[-5, 0, 0], 0, []])]}),
        words(counts={"l0": [signed(7)]}),
        words(counts={"l0": [[b"short", b"", b""]]}),
        words(moments={"obs": [["c" * 32, 1, [1.0, [2], b"", b""], b""]]}),
        words(holds={"obs": [["c" * 32, 1]]}),
    ],
)
async def test_hostile_words_are_refused(talkers, meta):
    one, two = talkers[:2]
    two.work(5)
    assert await send(one, two, meta) == 400
    assert two.progress_tracker.total().env_steps == 5
    assert two.gossip.table.ids() == []
    assert await one.gossip.tell(two.id, two.address)


async def test_words_that_are_too_long_are_refused(talkers):
    one, two = talkers[:2]
    assert await send(one, two, bytes(metrics_gossip.MAX_META_BYTES + 1)) == 413


async def test_a_hostile_answer_is_no_answer(talkers):
    one, two = talkers[:2]

    async def lied_to(*_, **__):
        return Answer(msgspec.msgpack.encode({"reports": 7}), 0, two.id)

    one.transport.call = lied_to
    assert not await one.gossip.tell(two.id, two.address)


async def test_boots_of_the_far_future_are_ignored(talkers):
    one, two = talkers[:2]
    far = int((CLOCK.wall() + 3600) * 1000)
    stranger = tracker_of(30, far)
    stranger.follow("l0")
    stranger.credit(Counts(999))
    meta = words(
        reports=[said_by(30, boot=far), said_by(31)],
        counts=counted(stranger),
    )
    assert await send(one, two, meta) == 200
    assert two.progress_tracker.total().env_steps == 0
    assert two.gossip.table.ids() == [node_id(31)]


async def test_one_round_brings_a_newcomer_the_moments(talkers):
    one, two = talkers[:2]
    two.work(50)
    two.gossip.refresh()
    parts = (("count", ()), ("mean", (2,)), ("m2", (2,)))
    items = tuple(SidecarItem(f"obs.{part}", shape, "float64", "moments") for part, shape in parts)
    one.progress_tracker.open_streams(SidecarLayout(items))
    assert await one.gossip.tell(two.id, two.address)
    assert others_count(one) == 50.0


def listen(talker: Talker) -> tuple[list[int], list[int]]:
    """Lengths of what a talker says from now on, and of the answers to it."""
    call, said, heard = talker.transport.call, [], []

    async def listening(to, peer, route, meta, **options):
        said.append(len(meta))
        answer = await call(to, peer, route, meta, **options)
        heard.append(len(answer.meta))
        return answer

    talker.transport.call = listening
    return said, heard


def crowd(nodes: int, boots: int = 1, lineages: int = 1) -> LineageFacts:
    """What a liar may say: many nodes, boots and lineages."""
    counts = tuple((boot, Counts(9, 9, 9)) for boot in range(1, boots + 1))
    body = msgspec.msgpack.encode(NodeCounts(boots=counts))
    signers = [signer_of(number + 100) for number in range(nodes)]
    return {
        f"l{number}": [signer.sign("counts", f"l{number}", body) for signer in signers]
        for number in range(lineages)
    }


@pytest.mark.parametrize(
    "lie",
    [
        {"nodes": 200, "boots": 30},
        *(
            pytest.param(slow, marks=pytest.mark.slow)
            for slow in ({"nodes": 4000}, {"nodes": 500, "lineages": 20})
        ),
    ],
)
async def test_nobodys_tables_grow_a_message_beyond_its_bounds(talkers, lie):
    one, two = talkers[:2]
    one.work(70)
    one.progress_tracker.merge_counts(crowd(**lie))
    one.gossip.refresh()
    sent, _ = listen(one)
    assert await one.gossip.tell(two.id, two.address)
    assert sent[0] <= metrics_gossip.MESSAGE_BYTES
    assert two.progress_tracker.of_node(one.id).env_steps == 70
    rounds = 1
    while two.progress_tracker.total() != one.progress_tracker.total() and rounds < 12:
        await asyncio.sleep(metrics_gossip.MOST_CHECKS / metrics_gossip.CHECKS_PER_S)
        assert await one.gossip.tell(two.id, two.address)
        rounds += 1
    assert rounds < 12


async def test_many_moments_take_turns(talkers):
    one, two = talkers[:2]
    size = 512
    wide = msgspec.msgpack.encode(Moments(1.0, np.zeros(size), np.zeros(size)).to_wire())
    for talker in (one, two):
        talker.progress_tracker.credit(Counts(1))
        talker.progress_tracker.put_moments({"obs": wide})
    one.progress_tracker.merge_counts(crowd(300))
    one.progress_tracker.sign()
    two.progress_tracker.sign()
    rows = [
        [node_id(number + 100), 1, [1.0, [size], bytes(8 * size), bytes(8 * size)], bytes(24) + number_bytes]
        for number, number_bytes in ((number, (number + 100).to_bytes(8, "big")) for number in range(300))
    ]
    assert one.progress_tracker.merge_moments({"obs": rows}) == 300
    rounds = 0
    _, heard = listen(two)
    while others_count(two) < 301:
        assert await two.gossip.tell(one.id, one.address)
        assert heard.pop() <= metrics_gossip.MESSAGE_BYTES
        rounds += 1
    assert 3 <= rounds <= 20


async def test_what_others_say_of_us_is_ignored(talkers):
    one, two = talkers[:2]
    two.gossip.refresh()
    assert await send(one, two, words(reports=[said_by(two.number, seq=9999, name="liar")])) == 200
    assert two.gossip.table.get(two.id, 0.0)[0].name == "n1"


async def test_who_passes_on_what_isnt_signed_is_refused_and_told_of(talkers):
    one, two = talkers[:2]
    report = said_by(30)
    report[1][0] = bytes(31) + b"\x1f"  # another's key
    assert await send(one, two, words(reports=[report])) == 403
    assert two.forgers == [one.id]
    assert two.gossip.table.ids() == []

    async def lied_to(*_, **__):
        return Answer(words(reports=[report]), 0, two.id)

    one.transport.call = lied_to
    assert not await one.gossip.tell(two.id, two.address)
    assert one.forgers == [two.id]


async def test_counts_are_believed_as_far_as_time_allows(talkers):
    one, two = talkers[:2]
    two.progress_tracker.bounds = ClaimBounds(two.id, 1000.0)
    two.gossip.refresh()
    one.work(10**9)
    one.gossip.refresh()
    for _ in range(3):
        assert await one.gossip.tell(two.id, two.address)
    assert two.progress_tracker.total() == Counts()
    assert two.progress_tracker.bounds.held >= 3
    three = talkers[2]
    three.work(900)
    three.gossip.refresh()
    assert await three.gossip.tell(two.id, two.address)
    assert two.progress_tracker.total() == Counts(900)


async def test_no_member_keeps_others_busy_with_signatures(talkers, monkeypatch):
    """Claims that aren't believed have to be checked each time that they come, and that takes long."""
    one, two = talkers[:2]
    signer, checked = two.progress_tracker.signer, []
    check = signer.check
    monkeypatch.setattr(signer, "check", lambda *fact: (check(*fact), checked.append(fact)))
    two.progress_tracker.bounds = None
    most, rate = int(metrics_gossip.MOST_CHECKS), int(metrics_gossip.CHECKS_PER_S)
    body = msgspec.msgpack.encode(NodeCounts(boots=((1, Counts(1, 1, 1)),)))
    facts = [signer_of(number).sign("counts", "l0", body) for number in range(100, 100 + most + 600)]
    meta = words(counts={"l0": [plainly(fact) for fact in facts]})
    assert await send(one, two, meta) == 200
    assert len(checked) == most
    assert two.progress_tracker.total().env_steps == most
    await asyncio.sleep(2.0)
    assert await send(one, two, meta) == 200
    assert 2 * rate <= len(checked) - most <= 2 * rate + rate // 5
    assert await send(talkers[2], two, meta) == 200  # another has its own
    assert two.progress_tracker.total().env_steps == most + 600
