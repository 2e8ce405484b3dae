"""The trace of a pipeline, put together from ranks whose clocks differ, that fail, or that talk nonsense."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace

import msgspec
import pytest

from p2pdrl.errors import ConfigError, PeerRefusedError, WorkerError
from p2pdrl.node.status.traces import ROUTE, TraceAnswer, TraceCollector, TraceRequest
from p2pdrl.pipeline.trace import MOST_SPANS, TraceSpan
from p2pdrl.testing.memory_transport import MemoryNetwork
from p2pdrl.transport.protocol import Address, Reply

pytestmark = pytest.mark.looptime


class Rank:
    """A node of a pipeline whose monotonic clock is ``ahead_s`` ahead of the loop's."""

    def __init__(self, network, number: int, ahead_s: float) -> None:
        self.id, self.address = f"{number:032x}", Address("10.0.0.1", 7000 + number)
        self.transport = network.join(self.id, self.address)
        self.order = SimpleNamespace(generation=5, schedule="1f1b", backend="stream")
        self.alive: dict[str, Address] = {}
        self.members: tuple[str, ...] = ()
        self.ahead_s, self.spans, self.learner_s, self.fault = ahead_s, [], 0.0, ""
        self.asked: list[float] = []
        self.timelines = made = TraceCollector(
            me=self.id,
            stages=self,
            members=lambda: self.members,
            transport=self.transport,
            clock=SimpleNamespace(monotonic=self.now_s),
            alive=lambda: self.alive,
            named=lambda node: f"n{int(node, 16)}",
        )
        self.answer = made.answer

    def now_s(self) -> float:
        return asyncio.get_running_loop().time() + self.ahead_s

    async def trace(self, seconds: float, *, deadline_s: float):
        self.asked.append(seconds)
        await asyncio.sleep(self.learner_s)
        if self.fault:
            raise WorkerError(self.fault)
        return self.spans


@pytest.fixture
async def ranks():
    network = MemoryNetwork(random.Random(0))
    made = [Rank(network, number, 1e6 * number) for number in range(3)]
    for rank in made:
        rank.members = tuple(each.id for each in made)
        rank.alive = {each.id: each.address for each in made if each is not rank}
        await rank.transport.start()
        rank.transport.serve(ROUTE, lambda incoming, rank=rank: rank.answer(incoming))
    yield made
    for rank in made:
        await rank.transport.close()


def boxes(document) -> list[tuple[int, float, float]]:
    """Row, begin and duration of all boxes, in milliseconds."""
    return [
        (event["tid"], round(event["ts"] / 1e3, 1), round(event["dur"] / 1e3, 1))
        for event in document["traceEvents"]
        if event["ph"] == "X"
    ]


def rows(document) -> list[str]:
    return [event["args"]["name"] for event in document["traceEvents"] if event["name"] == "thread_name"]


async def test_all_ranks_are_in_one_trace_on_one_clock(ranks):
    for number, rank in enumerate(ranks):
        begin_s = rank.now_s() + 0.1 * number
        rank.spans = [TraceSpan("forward", begin_s, begin_s + 0.1, number, 0, 0)]
        rank.learner_s = 0.5 * number
    document = await ranks[1].timelines.collect(2.0)
    assert rows(document) == ["rank 0: n0", "rank 1: n1", "rank 2: n2"]
    assert boxes(document) == [(0, 0.0, 100.0), (1, 100.0, 100.0), (2, 200.0, 100.0)]
    others = document["otherData"]
    told = others.pop("told")
    assert others == {"generation": 5, "backend": "stream", "missing": {}}
    assert [(one["boxes"], one["remembers_no_more"]) for one in told.values()] == [(1, False)] * 3
    assert [one["began_s_ago"] for one in told.values()] == pytest.approx([1.0, 0.9, 0.8], abs=0.01)
    assert [rank.asked for rank in ranks] == [[2.0]] * 3
    msgspec.json.encode(document)


async def test_what_a_rank_has_forgotten_is_told(ranks):
    now_s = ranks[1].now_s()
    ranks[1].spans = [TraceSpan("forward", now_s - 2.4, now_s - 1.4)] * MOST_SPANS
    told = (await ranks[0].timelines.collect(5.0))["otherData"]["told"]
    assert told["rank 1: n1"] == {
        "boxes": MOST_SPANS,
        "began_s_ago": 2.4,
        "ended_s_ago": 1.4,
        "remembers_no_more": True,
    }
    assert told["rank 0: n0"] == {
        "boxes": 0,
        "began_s_ago": None,
        "ended_s_ago": None,
        "remembers_no_more": False,
    }


async def test_who_doesnt_tell_has_an_empty_row(ranks):
    for rank in ranks:
        rank.spans = [TraceSpan("forward", rank.now_s(), rank.now_s() + 0.1)]
    ranks[1].order = SimpleNamespace(generation=6)
    ranks[2].fault = "the learner is down"
    document = await ranks[0].timelines.collect(2.0)
    assert len(rows(document)) == 3
    assert [row for row, _, _ in boxes(document)] == [0]
    missing = document["otherData"]["missing"]
    assert "generation 5" in missing["rank 1: n1"]
    assert "the learner is down" in missing["rank 2: n2"]
    ranks[0].alive = {}
    ranks[0].fault = "no learner here"
    assert len((await ranks[0].timelines.collect(2.0))["otherData"]["missing"]) == 3


async def test_a_rank_that_hangs_is_left_out_in_time(ranks):
    ranks[2].learner_s = 1000.0
    begin_s = asyncio.get_running_loop().time()
    document = await ranks[0].timelines.collect(2.0)
    assert asyncio.get_running_loop().time() - begin_s < 4.5
    assert list(document["otherData"]["missing"]) == ["rank 2: n2"]
    with pytest.raises(PeerRefusedError) as refused:
        await ask(ranks, TraceRequest(5, 1.0))
    assert refused.value.status == 423


async def test_without_a_pipeline(ranks):
    ranks[0].order = None
    with pytest.raises(ConfigError, match="no pipeline"):
        await ranks[0].timelines.collect(2.0)


async def ask(ranks, message):
    meta = message if isinstance(message, bytes) else msgspec.msgpack.encode(message)
    return await ranks[0].transport.call(ranks[2].address, ranks[2].id, ROUTE, meta, deadline_s=2.0)


@pytest.mark.parametrize(
    ("message", "status"),
    [
        (b"\xff", 400),
        (TraceRequest(5, 61.0), 400),
        (TraceRequest(5, float("nan")), 400),
        (TraceRequest(-1, 1.0), 400),
        (TraceRequest(6, 0.0), 409),
    ],
)
async def test_what_makes_no_sense_is_refused(ranks, message, status):
    with pytest.raises(PeerRefusedError) as refused:
        await ask(ranks, message)
    assert refused.value.status == status
    assert ranks[2].asked == []


@pytest.mark.parametrize(
    "told",
    [
        b"\xff",
        msgspec.msgpack.encode(TraceAnswer(float("nan"))),
        msgspec.msgpack.encode({"clock_s": 1.0, "spans": [["forward", 0.0, float("inf")]]}),
        msgspec.msgpack.encode({"clock_s": 1.0, "spans": [["x" * 33, 0.0, 1.0]]}),
        msgspec.msgpack.encode({"clock_s": 1.0, "spans": [["forward", 0.0, 1.0]] * 8193}),
    ],
)
async def test_nonsense_of_a_peer_is_left_out(ranks, told):
    async def answer(_incoming):
        return Reply(told)

    ranks[2].answer = answer
    document = await ranks[0].timelines.collect(2.0)
    assert list(document["otherData"]["missing"]) == ["rank 2: n2"]
