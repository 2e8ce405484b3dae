"""Meetings that fail; others are in ``rl/pipeline/test_torch_runner``, whose ranks are processes."""

from __future__ import annotations

import socket
import struct
import threading
import time

import msgspec
import pytest
import torch

from p2pdrl.errors import ConfigError, PeerTimeoutError, PeerUnreachableError
from p2pdrl.pipeline.plan import Rendezvous, StageOrder
from p2pdrl.workers.pipeline import torch_stages
from p2pdrl.workers.pipeline.protocol import Blocks, Measure
from p2pdrl.workers.pipeline.torch_stages import TorchStages
from p2pdrl.workers.torch_group.rendezvous import abort_group, leave, open_store

from ..stage_learners import CLASSIFIER, Team, orders

CPU = torch.device("cpu")
ORDER = StageOrder(
    generation=1,
    rank=0,
    blocks=2,
    cuts=(1,),
    schedule="1f1b",
    microbatches=2,
    ranks=2,
    timeout_s=0.3,
    idle_timeout_s=1.0,
    state_every=1,
    backend="torch",
    meeting=Rendezvous("127.0.0.1", 0, 0.3),
)


@pytest.fixture(scope="module", autouse=True)
def _first_time():
    """Importing takes a while, and the first store of a process opens a pipe that stays."""
    torch_stages.import_schedules()
    open_store(["127.0.0.1"], 1.0)


def change(**fields):
    return msgspec.structs.replace(ORDER, **fields)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@pytest.mark.parametrize("order", [change(meeting=None), change(ranks=1, cuts=())])
def test_orders_that_are_not_for_this_are_refused(order):
    with pytest.raises(ConfigError, match="meeting"):
        TorchStages(order, CPU, lambda _: None)


def test_who_meets_nobody_gives_up_in_time():
    ports = []
    begin_s = time.monotonic()
    with pytest.raises(PeerTimeoutError):
        TorchStages(ORDER, CPU, ports.append)
    assert time.monotonic() - begin_s < 5.0
    assert len(ports) == 1
    with socket.create_server(("127.0.0.1", ports[0])):  # nobody listens there any more
        pass


def test_where_no_store_is_nobody_waits_for_long():
    with pytest.raises((PeerTimeoutError, PeerUnreachableError)):
        TorchStages(change(rank=1, meeting=Rendezvous("127.0.0.1", free_port(), 0.3)), CPU, lambda _: None)


def test_a_host_that_is_frozen_is_not_waited_for_forever():
    with socket.create_server(("127.0.0.1", 0)) as listener:  # nobody accepts, as in a frozen process
        port = listener.getsockname()[1]
        begin_s = time.monotonic()
        with pytest.raises((PeerTimeoutError, PeerUnreachableError)):
            TorchStages(change(rank=1, meeting=Rendezvous("127.0.0.1", port, 0.3)), CPU, lambda _: None)
        assert time.monotonic() - begin_s < 5.0


def test_addresses_that_do_not_exist_are_told():
    with pytest.raises(PeerUnreachableError, match="can't be connected"):
        TorchStages(change(meeting=Rendezvous("no such host", 0, 0.3)), CPU, lambda _: None)


def test_only_who_knows_the_word_becomes_a_neighbour():
    token = bytes(range(16))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        stranger = socket.create_connection(address)
        stranger.sendall(b"\0" * 16)
        silent = socket.create_connection(address)
        silent.close()
        found = []
        where = f"{address[0]} {address[1]} {token.hex()}"
        until_s = time.monotonic() + 10.0
        thread = threading.Thread(target=lambda: found.append(torch_stages.connect_to_rank(where, until_s)))
        thread.start()
        neighbour = torch_stages.accept_rank(listener, token, until_s)
        thread.join()
        with neighbour, found[0], stranger:
            assert neighbour.getpeername() == found[0].getsockname()
            assert stranger.recv(1) == b""


def test_strangers_who_say_nothing_or_break_off_do_not_keep_a_neighbour_away(monkeypatch):
    monkeypatch.setattr(torch_stages, "TOKEN_TIMEOUT_S", 0.05)
    token = bytes(range(16))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        rude = socket.create_connection(address)
        rude.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        rude.close()  # by a reset
        silent, neighbour = socket.create_connection(address), socket.create_connection(address)
        neighbour.sendall(token)
        with silent, neighbour, torch_stages.accept_rank(listener, token, time.monotonic() + 5.0) as found:
            assert found.getpeername() == neighbour.getsockname()


def test_strangers_alone_are_not_waited_for_longer():
    listener = socket.create_server(("127.0.0.1", 0))
    with listener, socket.create_connection(listener.getsockname()), pytest.raises(TimeoutError):
        torch_stages.accept_rank(listener, bytes(16), time.monotonic() + 0.1)


def test_an_order_ends_a_meeting_and_so_does_a_question():
    """The second rank never comes."""
    team = Team(CLASSIFIER, 1)
    member, blocks = team.head, team.blocks
    for generation, message in ((1, Measure(4)), (2, None)):
        first = orders(blocks, 2, generation=generation, backend="torch", timeout_s=30.0)[0]
        member.order(msgspec.structs.replace(first, meeting=Rendezvous("127.0.0.1", 0)), {})
        assert member.news("meeting", "broken").what == "meeting"
        began_s = time.monotonic()
        if message is None:
            member.order(orders(blocks, 1, generation=3)[0], {})
            assert member.news("ready").generation == 3
        else:
            member.say(message)
            assert member.news("broken", "ready").what == "broken"
            while not isinstance(member.hear(), Blocks):
                pass
        assert time.monotonic() - began_s < 5.0
    team.close()


def test_without_a_group_there_is_nothing_to_break_off_or_leave():
    abort_group()
    leave()
