from __future__ import annotations

import asyncio
import random

import msgspec
import numpy as np
import pytest

from p2pdrl.clock import LoopClock
from p2pdrl.errors import PeerRefusedError
from p2pdrl.node.accounting import metrics_gossip
from p2pdrl.node.accounting.counters import Counts, CountsWire, NodeCounts
from p2pdrl.node.accounting.metrics_gossip import MetricsGossip
from p2pdrl.node.accounting.progress_tracker import ProgressTracker
from p2pdrl.node.accounting.report_table import PeerReport
from p2pdrl.tensors.moments import Moments
from p2pdrl.tensors.sidecar import SidecarItem, SidecarLayout
from p2pdrl.testing.memory_transport import MemoryNetwork
from p2pdrl.transport.protocol import Address, Answer

pytestmark = pytest.mark.looptime

CLOCK = LoopClock(wall_s=1000.0)
"""Boots are counted in milliseconds of its wall time."""


class Talker:
    """A node that does nothing but talk."""

    def __init__(self, network: MemoryNetwork, number: int) -> None:
        self.id = f"{number:032x}"
        self.address = Address("10.0.0.1", 7000 + number)
        self.transport = network.join(self.id, self.address)
        self.progress_tracker = ProgressTracker(self.id, 1)
        self.progress_tracker.follow("l0")
        self.peers: dict[str, Address] = {}
        self.seq = 0
        self.rounds = 0
        self.gossip = MetricsGossip(
            me=self.id,
            transport=self.transport,
            progress_tracker=self.progress_tracker,
            clock=CLOCK,
            rng=random.Random(number),
            alive=lambda: self.peers,
            make_report=self.report,
            on_round=self.on_round,
        )
        self.task: asyncio.Task[None] | None = None

    def report(self) -> PeerReport:
        self.seq += 1
        return PeerReport(id=self.id, boot=1, seq=self.seq, name=f"n{int(self.id, 16)}")

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


def said_by(node: str, **fields) -> list:
    plain = msgspec.to_builtins(PeerReport(id=node, boot=1, seq=1))
    return list((dict(zip(PeerReport.__struct_fields__, plain, strict=True)) | fields).values())


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
        words(reports=[said_by("short")]),
        words(reports=[said_by("c" * 32, mean_return=float("nan"))]),
        words(reports=[said_by("c" * 32, env_steps=-1)]),
        words(counts={"l0": [[["c" * 32, [-5, 0, 0], 0, []]]]}),
        words(moments={"obs": [["c" * 32, 1, [1.0, [2], b"", b""]]]}),
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
    stranger = ProgressTracker("c" * 32, far)
    stranger.follow("l0")
    stranger.credit(Counts(999))
    meta = words(
        reports=[said_by("c" * 32, boot=far), said_by("d" * 32)],
        counts=stranger.counts(),
    )
    assert await send(one, two, meta) == 200
    assert two.progress_tracker.total().env_steps == 0
    assert two.gossip.table.ids() == ["d" * 32]


async def test_one_round_brings_a_newcomer_the_moments(talkers):
    one, two = talkers[:2]
    two.work(50)
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


def crowd(nodes: int, boots: int = 1, lineages: int = 1) -> dict[str, CountsWire]:
    """What a liar may say: many nodes, boots and lineages."""
    counts = tuple((boot, Counts(9, 9, 9)) for boot in range(1, boots + 1))
    rows = tuple(NodeCounts(f"{number + 100:032x}", Counts(), 0, counts) for number in range(nodes))
    return {f"l{number}": CountsWire(rows) for number in range(lineages)}


@pytest.mark.parametrize(
    "lie",
    [
        {"nodes": 1, "boots": 8100},
        *(
            pytest.param(slow, marks=pytest.mark.slow)
            for slow in ({"nodes": 8000}, {"nodes": 500, "lineages": 20})
        ),
    ],
)
async def test_nobodys_tables_grow_a_message_beyond_its_bounds(talkers, lie):
    one, two = talkers[:2]
    one.work(70)
    one.progress_tracker.merge_counts(crowd(**lie))
    said, _ = listen(one)
    assert await one.gossip.tell(two.id, two.address)
    assert said[0] <= metrics_gossip.MESSAGE_BYTES
    assert two.progress_tracker.of_node(one.id).env_steps == 70
    rounds = 1
    while two.progress_tracker.total() != one.progress_tracker.total() and rounds < 12:
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
    rows = [
        [f"{number + 100:032x}", 1, [1.0, [size], bytes(8 * size), bytes(8 * size)]] for number in range(300)
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
    assert await send(one, two, words(reports=[said_by(two.id, seq=9999, name="liar")])) == 200
    assert two.gossip.table.get(two.id, 0.0)[0].name == "n1"
