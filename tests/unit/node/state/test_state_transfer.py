"""State transfer, the download that tries donors in turn, and the state server side."""

from __future__ import annotations

import asyncio
import hashlib
import random
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from p2pdrl.clock import ManualClock
from p2pdrl.errors import PeerRefusedError, PoisonedVectorError, WireError
from p2pdrl.node.state import state_transfer
from p2pdrl.node.state.state_transfer import (
    Adoptions,
    OwnState,
    StateHead,
    StateRequest,
    StateServer,
    fetch,
    params_hash,
    without_moments,
)
from p2pdrl.tensors.board import BoardSpec
from p2pdrl.tensors.layout import Layout, TensorEntry
from p2pdrl.testing.memory_transport import MemoryNetwork
from p2pdrl.transport.protocol import Address, Reply

ASKER, ASKER_AT = "f" * 32, Address("10.0.0.9", 7000)


class Donor:
    """Gives its state as the real daemon does."""

    def __init__(self, network, number, board, spec, events) -> None:
        self.id = f"{number:032x}"
        self.address = Address("10.0.0.1", 7000 + number)
        self.transport = network.join(self.id, self.address)
        self.board, self.spec = board, spec
        self.own: OwnState | None = OwnState(board, spec, "task", "ab" * 8, 0)
        self.state_server = StateServer(lambda: self.own, events)
        self.spoil = lambda head, body: (head, body)
        self.asked = 0

    async def start(self) -> None:
        await self.transport.start()
        self.transport.serve(state_transfer.ROUTE, self.answer)

    async def answer(self, incoming):
        self.asked += 1
        reply = await self.state_server.answer(incoming)
        head = msgspec.msgpack.decode(reply.meta, type=StateHead)
        body = bytearray(b"".join(bytes(part) for part in reply.vector))
        head, body = self.spoil(head, body)
        meta = head if isinstance(head, bytes) else msgspec.msgpack.encode(head)
        return Reply(meta, vector=memoryview(bytes(body)) if body else None, on_end=reply.on_end)


@pytest.fixture
async def world(make_board, events):
    board = make_board(1.5, 7)
    spec = board.spec
    network = MemoryNetwork(random.Random(0))
    donors = [Donor(network, number, make_board(number + 1.5, 7), spec, events) for number in range(3)]
    asker = network.join(ASKER, ASKER_AT)
    await asker.start()
    for donor in donors:
        await donor.start()
    request = StateRequest("task", spec.layout.hash, spec.sidecar.hash)
    made = SimpleNamespace(network=network, donors=donors, asker=asker, request=request, spec=spec)
    yield made
    await asker.close()
    for donor in donors:
        await donor.transport.close()


async def ask(world, **changes):
    donor = world.donors[0]
    options = {"request": world.request, "spec": world.spec, "max_abs": 1e6} | changes
    return await fetch(world.asker, donor.id, donor.address, **options)


def adoptions(world, events, donors=None) -> Adoptions:
    async def take(*_found):
        raise AssertionError("nothing is adopted in the background")

    return Adoptions(
        transport=world.asker,
        events=events,
        max_abs=1e6,
        donors=donors or (lambda: listed(world.donors)),
        clock=ManualClock(),
        request=lambda: world.request,
        spec=lambda: world.spec,
        take=take,
    )


def listed(donors) -> list[tuple[str, Address]]:
    return [(donor.id, donor.address) for donor in donors]


async def test_a_state_arrives_whole(world, kinds):
    donor = world.donors[0]
    donor.board.post_delta(np.full(5, 0.25, np.float32), 11)
    state = await ask(world)
    assert state.vector.tolist() == [1.75] * 5
    assert int(state.sidecar["adam.step"]) == 7
    assert (state.head.policy_version, state.head.lineage) == (11, "ab" * 8)
    assert state.head.params_hash == params_hash(state.vector)
    await asyncio.sleep(0)
    assert kinds() == ["state-served"]


async def test_a_donor_without_sidecar(world, make_board):
    donor = world.donors[0]
    donor.board = make_board(None)
    donor.own = donor.own._replace(board=donor.board)
    donor.board.seed(np.ones(5, np.float32), None, 3)
    state = await ask(world)
    assert state.sidecar is None
    assert state.head.sidecar_hash == ""


def told(head: StateHead, **changes) -> StateHead:
    return msgspec.structs.replace(head, **changes)


def flip(body: bytearray, at: int) -> bytearray:
    body[at] ^= 1
    return body


def no_parameters(head: StateHead, body: bytearray):
    """Nothing arrives, and the lengths told add up to it."""
    zeros = hashlib.sha256(bytes(20)).hexdigest()
    return told(head, params_hash=zeros, sidecar_bytes=-head.params_bytes), bytearray()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda head, body: (head, flip(body, 3)),
        lambda head, body: (head, flip(body, len(body) - 1)),
        lambda head, body: (told(head, params_hash="0" * 64), body),
        lambda head, body: (told(head, sidecar_hash=""), body),
        lambda head, body: (head, body[:-1]),
        lambda head, body: (head, body + b"\0"),
        lambda head, body: (head, body[:20]),
        lambda head, body: (told(head, sidecar_bytes=0), body),
        lambda head, body: (told(head, params_bytes=len(body), sidecar_bytes=0), body),
        lambda head, body: (told(head, params_bytes=24, sidecar_bytes=len(body) - 24), body),
        no_parameters,
        lambda head, body: (head, bytearray()),
        lambda head, body: (b"\xc1", body),
        lambda head, body: (msgspec.msgpack.encode({"policy_version": "x"}), body),
    ],
)
async def test_damage_is_noticed(world, spoil):
    world.donors[0].spoil = spoil
    with pytest.raises(WireError):
        await ask(world)


def poisoned(at_byte: int, value: float, dtype: str):
    def spoil(head: StateHead, body: bytearray):
        np.frombuffer(body, dtype, 1, at_byte)[:] = value
        params = hashlib.sha256(body[:20]).hexdigest()
        return told(head, params_hash=params, sidecar_hash=hashlib.sha256(body[20:]).hexdigest()), body

    return spoil


@pytest.mark.parametrize(
    "spoil",
    [
        poisoned(8, np.nan, "<f4"),
        poisoned(8, np.inf, "<f4"),
        poisoned(8, 2e6, "<f4"),
        poisoned(20, np.nan, "<f4"),  # in the optimizer's state
        poisoned(24, -np.inf, "<f4"),
    ],
)
async def test_poison_is_refused(world, spoil):
    world.donors[0].spoil = spoil
    with pytest.raises(PoisonedVectorError):
        await ask(world)


@pytest.mark.parametrize(
    ("changes", "status"),
    [({"task_hash": "x"}, 409), ({"layout_hash": "x"}, 409), ({"sidecar_hash": "x"}, 409)],
)
async def test_another_task_or_layout_is_refused(world, changes, status):
    request = msgspec.structs.replace(world.request, **changes)
    with pytest.raises(PeerRefusedError) as caught:
        await ask(world, request=request)
    assert caught.value.status == status


async def test_without_a_state_or_while_adopting_nothing_is_given(world):
    world.donors[0].own = None
    with pytest.raises(PeerRefusedError) as caught:
        await ask(world)
    assert caught.value.status == 503


async def test_an_unreadable_request_is_refused(world):
    donor = world.donors[0]
    with pytest.raises(PeerRefusedError) as caught:
        await world.asker.call(donor.address, donor.id, state_transfer.ROUTE, b"\xc1", deadline_s=1.0)
    assert caught.value.status == 400


async def test_no_more_are_served_at_once_than_bearable(world):
    world.network.delay_s = (0.05, 0.05)
    asked = [asyncio.create_task(ask(world)) for _ in range(state_transfer.MAX_SERVED_AT_ONCE + 2)]
    done = await asyncio.gather(*asked, return_exceptions=True)
    refused = [one for one in done if isinstance(one, PeerRefusedError)]
    assert [error.status for error in refused] == [429, 429]
    world.network.delay_s = (0.0, 0.0)
    assert (await ask(world)).head.policy_version == 7
    asked = [ask(world) for _ in range(state_transfer.MAX_SERVED_AT_ONCE)]
    assert all(state.head.policy_version == 7 for state in await asyncio.gather(*asked))


async def test_a_failed_gift_makes_room_again(world, make_board):
    donor = world.donors[0]
    donor.own = donor.own._replace(board=make_board(None))  # nothing to read yet: 422
    for _ in range(state_transfer.MAX_SERVED_AT_ONCE + 1):
        with pytest.raises(PeerRefusedError) as caught:
            await ask(world)
        assert caught.value.status == 422
    donor.own = donor.own._replace(board=donor.board)
    assert (await ask(world)).head.policy_version == 7


async def test_the_next_donor_is_asked_when_one_fails(world, events, kinds):
    first, second, third = world.donors
    await first.transport.close()
    second.spoil = lambda head, body: (head, flip(body, 0))
    found = await adoptions(world, events).first(lambda: True)
    assert found is not None
    giver, state = found
    assert (giver, state.vector[0]) == (third.id, 3.5)
    assert kinds().count("donor-failed") == 2


async def test_a_donor_that_isnt_ready_is_no_news(world, events, kinds):
    for donor in world.donors:
        donor.own = None
    assert await adoptions(world, events).first(lambda: True) is None
    assert "donor-failed" not in kinds()
    assert [donor.asked for donor in world.donors] == [1, 1, 1]


async def test_asks_until_somebody_has_it(world, events, monkeypatch):
    monkeypatch.setattr("p2pdrl.node.state.state_transfer.RETRY_EVERY_S", 0.001)
    donor, looks = world.donors[0], []

    def donors():
        looks.append(None)
        return listed([donor]) if len(looks) >= 3 else []

    found = await adoptions(world, events, donors).first(lambda: False)
    assert found is not None
    assert found[0] == donor.id
    assert len(looks) == 3


async def test_gives_up_when_told(world, events):
    assert await adoptions(world, events, list).first(lambda: True) is None


async def test_moments_belong_to_the_donor(world):
    state = await ask(world)
    clean = without_moments(state, world.spec)
    assert float(clean.sidecar["observations.count"]) == 0.0
    assert int(clean.sidecar["adam.step"]) == 7
    assert float(state.sidecar["observations.count"]) == 7.0
    world.spec.sidecar.check(clean.sidecar)
    bare = BoardSpec(Layout((TensorEntry("w", (5,)),)))
    assert (
        without_moments(state_transfer.TransferredState(state.head, state.vector, None), bare).sidecar is None
    )
