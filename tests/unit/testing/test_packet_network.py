"""Packets between two machines: delayed, lost, cut one way; what TCP makes of it. Wants root."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from p2pdrl.testing.packet_network import PacketNetwork


@pytest.fixture
def network():
    if why := PacketNetwork.missing():
        pytest.skip(why)
    made = PacketNetwork(2, seed=1)
    try:
        made.__enter__()
    except OSError as error:
        pytest.skip(f"this machine lets nobody make networks: {error}")
    yield made
    made.__exit__(None, None, None)


def on(network, machine, do):
    """What ``do`` returns on a machine."""
    found = []

    def run():
        network.enter(machine)
        try:
            found.append(do())
        except OSError as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


@pytest.fixture
def listener(network):
    """On machine 1; says everything again."""
    sock = on(network, 1, lambda: socket.create_server((network.host(1), 7000)))

    def serve():
        while True:
            try:
                taken, _ = sock.accept()
            except OSError:
                return
            with taken:
                while data := taken.recv(65536):
                    taken.sendall(data)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield
    sock.shutdown(socket.SHUT_RDWR)
    sock.close()
    thread.join(5)


def connect(network):
    return on(network, 0, lambda: socket.create_connection((network.host(1), 7000), 0.5))


def round_trip_s(sock):
    began_s = time.monotonic()
    sock.sendall(b"x")
    assert sock.recv(10) == b"x"
    return time.monotonic() - began_s


def test_delays_are_of_each_way_and_end_with_mend(network, listener):
    with connect(network) as sock:
        assert round_trip_s(sock) < 0.08
        network.link(0, 1).delay_s = (0.05, 0.05)
        network.link(1, 0).delay_s = (0.05, 0.06)
        assert 0.1 <= round_trip_s(sock) < 0.4
        network.mend()
        assert round_trip_s(sock) < 0.08


@pytest.mark.parametrize("way", [(0, 1), (1, 0)])
def test_a_way_that_is_cut_passes_nothing_and_the_other_does(network, listener, way):
    with connect(network) as sock:
        network.link(*way).cut = True
        before = network.link(*way[::-1]).packets
        sock.sendall(b"x")
        with pytest.raises(TimeoutError):
            sock.recv(10)
        assert isinstance(connect(network), TimeoutError)
        network.mend()
        assert network.link(*way).lost
        assert way == (0, 1) or network.link(*way[::-1]).packets > before
        sock.settimeout(5.0)
        assert sock.recv(10) == b"x", "TCP sent it again"


def test_lost_packets_come_again_by_tcp(network, listener):
    network.each_link(lambda link: setattr(link, "loss", 0.1))
    sock = connect(network)
    while isinstance(sock, TimeoutError):
        sock = connect(network)
    with sock:
        sock.settimeout(20.0)
        sock.sendall(bytes(range(256)) * 400)
        came = b""
        while len(came) < 256 * 400:
            came += sock.recv(65536)
    assert came == bytes(range(256)) * 400
    link = network.link(0, 1)
    assert 0 < link.lost < link.packets


def test_sides_are_parted_both_ways(network, listener):
    network.part([0], [1])
    assert isinstance(connect(network), TimeoutError)
    network.mend()
    connect(network).close()
