"""Measured links: exactly on a transport whose times are known, and roughly over real sockets."""

from __future__ import annotations

import asyncio
import time

import msgspec
import pytest
from aiohttp import web

from p2pdrl.clock import ManualClock, SystemClock
from p2pdrl.errors import PeerRefusedError, PeerTimeoutError, PeerUnreachableError, WireError
from p2pdrl.membership.identity import Identity
from p2pdrl.strategies.pipeline.link_probe import ProbeServer, measure_link
from p2pdrl.strategies.pipeline.messages import MAX_PROBE_BYTES, Probe
from p2pdrl.testing.fault_proxy import FaultProxy
from p2pdrl.testing.memory_transport import MemoryNetwork
from p2pdrl.transport.http.listener import Listener
from p2pdrl.transport.http_transport import HttpTransport
from p2pdrl.transport.limits import TransportLimits
from p2pdrl.transport.protocol import Address, Answer

KEY = b"the swarm's key"
IDENTITIES = Identity(b"b" * 32), Identity(b"a" * 32)
SERVER, CALLER = (identity.node_id for identity in IDENTITIES)
SERVER_TLS, CALLER_TLS = (identity.tls([KEY]) for identity in IDENTITIES)
ADDRESS = Address("127.0.0.1", 7700)
EARLY_S = 0.5


class Known:
    """A transport to a peer whose link is known; the first call takes longer, for it connects."""

    def __init__(self, round_trip_s=0.1, up=1e6, down=1e6, *, first_s=EARLY_S):
        self.clock = ManualClock()
        self.round_trip_s, self.up, self.down = round_trip_s, up, down
        self.first_s = first_s
        self.sizes = []
        self.answered = lambda nbytes: nbytes

    async def call(self, to, target_id, route, meta, *, vector=None, into=None, deadline_s, lane):
        assert (to, target_id, route, lane) == (ADDRESS, SERVER, "stage", "bulk")
        up = 0 if vector is None else vector.nbytes
        down = msgspec.msgpack.decode(meta, type=Probe).answer_bytes
        self.sizes.append((up, down))
        took_s = self.first_s + self.round_trip_s + up / self.up + down / self.down
        self.first_s = 0.0
        self.clock.advance(min(took_s, deadline_s))
        if took_s > deadline_s:
            raise PeerTimeoutError("late")
        came = self.answered(down)
        if came and (into is None or into(b"", came) is None):
            raise WireError("refused")
        return Answer(b"", came, SERVER)

    async def measure(self, **options):
        clock = self.clock.monotonic
        return await measure_link(self, ADDRESS, SERVER, "stage", clock=clock, **options)


async def test_each_direction_is_measured():
    line = Known(0.1, 4e6, 16e6)
    pair = await line.measure()
    assert pair.there.latency_s == pair.back.latency_s == pytest.approx(0.05)
    assert pair.there.bandwidth_bytes_s == pytest.approx(4e6)
    assert pair.back.bandwidth_bytes_s == pytest.approx(16e6)


async def test_messages_grow_while_there_is_time():
    """Half a second each way: at 4 MB/s for 256 KiB and 1 MiB, at 16 MB/s for 4 MiB as well."""
    line = Known(0.1, 4e6, 16e6)
    await line.measure()
    kib = 1024
    assert line.sizes[6:] == [(256 * kib, 0), (1024 * kib, 0)] + [
        (0, size * kib) for size in (256, 1024, 4096)
    ]


async def test_however_fast_a_link_is_messages_are_bounded():
    line = Known(0.001, 1e12, 1e12)
    pair = await line.measure()
    assert max(max(sizes) for sizes in line.sizes) == MAX_PROBE_BYTES
    assert 1e9 < pair.there.bandwidth_bytes_s < 1e12


@pytest.mark.parametrize("bandwidth", [1e3, 3e5, 1e6, 1e8])
async def test_it_ends_in_time(bandwidth):
    line = Known(0.1, bandwidth, bandwidth)
    await line.measure()
    assert line.clock.monotonic() <= EARLY_S + 6 * 0.1 + 1.0 + 2 * 3 * 2 * 0.1


async def test_a_link_too_slow_for_the_first_message_has_a_bound():
    pair = await Known(0.1, 1e3, 4e6).measure()
    assert pair.there.bandwidth_bytes_s == 256 * 1024 / 0.5
    assert pair.back.bandwidth_bytes_s == pytest.approx(4e6)


async def test_who_does_not_answer_at_all_is_late():
    line = Known(10.0)
    with pytest.raises(PeerTimeoutError):
        await line.measure(deadline_s=2.0)
    assert line.clock.monotonic() == 2.0


async def test_long_round_trips_are_tried_less_often():
    line = Known(1.5, first_s=0.0)
    pair = await line.measure(deadline_s=5.0)
    assert pair.there.latency_s == 0.75
    assert line.sizes[:4] == [(0, 0)] * 3 + [(256 * 1024, 0)]


@pytest.mark.parametrize("answered", [lambda n: n // 2, lambda n: n + 1, lambda _: 5])
async def test_answers_of_another_length_are_refused(answered):
    line = Known()
    line.answered = answered
    with pytest.raises(WireError):
        await line.measure()


# The other side


class Call:
    """An incoming call; its vector comes when it may."""

    def __init__(self, meta, nbytes=0):
        self.meta, self.vector_nbytes, self.sender = meta, nbytes, CALLER
        self.go = asyncio.Event()

    async def read_vector_into(self, out):
        assert len(out) == self.vector_nbytes
        await self.go.wait()


def probe(answer_bytes=0):
    return msgspec.msgpack.encode(Probe(answer_bytes))


async def test_few_are_served_at_once():
    server = ProbeServer(2)
    calls = [Call(probe(), 10) for _ in range(2)]
    tasks = [asyncio.create_task(server.serve_probe(call)) for call in calls]
    await asyncio.sleep(0)
    with pytest.raises(Exception, match="too many others"):
        await server.serve_probe(Call(probe(10)))
    assert (await server.serve_probe(Call(probe()))).vector is None  # short ones need no memory
    for call in calls:
        call.go.set()
    await asyncio.gather(*tasks)
    replies = [await server.serve_probe(Call(probe(10))) for _ in range(2)]
    with pytest.raises(Exception, match="too many others"):
        await server.serve_probe(Call(probe(10)))
    for reply in replies:
        assert bytes(reply.vector) == bytes(10)
        reply.on_end(False)
    await server.serve_probe(Call(probe(10)))


async def test_a_vector_that_breaks_off_frees_its_place():
    server = ProbeServer(1)
    for _ in range(3):
        task = asyncio.create_task(server.serve_probe(Call(probe(10), 10)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert (await server.serve_probe(Call(probe(10)))).vector is not None


@pytest.mark.parametrize(
    "meta",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({"type": "probe", "answer_bytes": MAX_PROBE_BYTES + 1}),
        msgspec.msgpack.encode({"type": "probe", "answer_bytes": -1}),
        msgspec.msgpack.encode({"type": "other"}),
        msgspec.msgpack.encode({"type": "probe", "more": 1}),
    ],
)
async def test_metadata_that_are_none_are_refused(meta):
    with pytest.raises(WireError):
        await ProbeServer().serve_probe(Call(meta))


async def test_a_vector_that_is_too_long_is_not_read():
    with pytest.raises(Exception, match="at most"):
        await ProbeServer().serve_probe(Call(probe(), MAX_PROBE_BYTES + 1))


# Over transports


@pytest.mark.looptime
async def test_over_a_network_in_memory():
    network = MemoryNetwork(delay_s=(0.05, 0.05))
    one, other = (network.join(name, Address(at, 1)) for name, at in ((CALLER, "a"), (SERVER, "b")))
    other.serve("stage", ProbeServer().serve_probe, max_vector_bytes=1 << 30)
    for node in (one, other):
        await node.start()
    now = asyncio.get_running_loop().time
    pair = await measure_link(one, Address("b", 1), SERVER, "stage", clock=now)
    assert pair.there.latency_s == pytest.approx(0.05)
    network.cut(CALLER, SERVER)
    with pytest.raises((PeerTimeoutError, PeerUnreachableError)):
        await measure_link(one, Address("b", 1), SERVER, "stage", clock=now)
    for node in (one, other):
        await node.close()


@pytest.fixture
async def served():
    """The address of a node that serves probes over TCP."""
    limits = TransportLimits()
    transport = HttpTransport(SERVER, "default", SERVER_TLS, clock=SystemClock(), limits=limits)
    app = web.Application(client_max_size=limits.max_api_body_bytes)
    transport.mount(app)
    transport.serve("stage", ProbeServer().serve_probe, max_vector_bytes=1 << 30)
    listener = Listener(limits, SystemClock(), transport.counters)
    address = await listener.listen(app, "127.0.0.1", 0, has_key=True)
    await transport.start()
    yield address
    await transport.close()
    await listener.close()


@pytest.fixture
async def caller():
    transport = HttpTransport(CALLER, "default", CALLER_TLS, clock=SystemClock())
    await transport.start()
    yield transport
    await transport.close()


async def test_100_mbit_and_40_ms_are_found(served, caller):
    """Within 25 %; a machine that does much else is asked again."""
    async with FaultProxy(served) as proxy:
        for flow in (proxy.up, proxy.down):
            flow.bytes_per_s, flow.delay_s = 12.5e6, 0.04
        for _ in range(4):
            pair = await measure_link(caller, proxy.address, SERVER, "stage", clock=time.perf_counter)
            good = all(
                abs(link.latency_s / 0.04 - 1) < 0.25 and abs(link.bandwidth_bytes_s / 12.5e6 - 1) < 0.25
                for link in pair
            )
            if good:
                break
        assert good, pair


async def test_a_peer_that_serves_no_probes_refuses(served, caller):
    with pytest.raises(PeerRefusedError):
        await measure_link(caller, served, SERVER, "other", clock=time.perf_counter)
