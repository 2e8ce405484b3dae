"""A swarm's key: who has it is in, what goes over the network is hidden, and it is replaced in a live one."""

from __future__ import annotations

import shutil
import socket
import threading
import time

import pytest

from p2pdrl.api.keyfile import rotate_swarm_key, write_swarm_key
from tests.integration.conftest import free_port

PACE = ["--set", "node.learner.max_updates_per_s=5", "--set", "task.algorithm.unroll_steps=32"]


class Recorder:
    """Passes connections on to a node, and keeps every byte."""

    def __init__(self, port):
        self.to = ("127.0.0.1", port)
        self.heard = bytearray()
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listening.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.listening.shutdown(socket.SHUT_RDWR)
        self.listening.close()

    def _accept(self):
        while True:
            try:
                one, _ = self.listening.accept()
            except OSError:
                return
            try:
                other = socket.create_connection(self.to)
            except OSError:
                one.close()
                continue
            for source, sink in ((one, other), (other, one)):
                threading.Thread(target=self._pass_on, args=(source, sink), daemon=True).start()

    def _pass_on(self, source, sink):
        try:
            while data := source.recv(1 << 16):
                self.heard += data
                sink.sendall(data)
        except OSError:
            pass
        for sock in (source, sink):
            sock.close()


def has_told(node, kind):
    """Whether it is in its log: reading its API wants the key."""
    return any(event["kind"] == kind for event in node.told())


@pytest.fixture
def key(tmp_path):
    path = tmp_path / "swarm.key"
    write_swarm_key(path)
    return path


def test_what_nodes_tell_each_other_is_hidden(swarm, key, wait_until):
    """But for lengths, and on streams the routes' names."""
    keyed = [*PACE, "--swarm-key-file", str(key)]
    port = free_port()
    with Recorder(port) as recorder:
        first = ["--advertise", recorder.address, "--set", "node.name=marked-name-a"]
        a = swarm.start("a", *keyed, *first, port=port)
        wait_until(lambda: has_told(a, "training"), 60, "a founds")
        b = swarm.start("b", *keyed, "--peers", recorder.address)
        wait_until(lambda: has_told(b, "training"), 60, "b trains")
        wait_until(lambda: len(recorder.heard) > 100_000, 60, "states and exchanges went by")
    heard = bytes(recorder.heard)
    assert heard[:1] == b"\x16", "it begins with a TLS handshake"
    for word in (b"marked-name-a", b"P2PDRL", b"CartPole", b"adpsgd"):
        assert word not in heard, word


@pytest.mark.slow
def test_the_key_is_replaced_while_three_nodes_train(swarm, key, wait_until, tmp_path):
    files = [tmp_path / f"{name}.key" for name in "abc"]
    for file in files:
        shutil.copy(key, file)
        file.chmod(0o600)
    a = swarm.start("a", *PACE, "--swarm-key-file", str(files[0]))
    wait_until(lambda: has_told(a, "training"), 60, "a founds")
    b, c = (
        swarm.start(name, *PACE, "--swarm-key-file", str(file), peers=a)
        for name, file in zip("bc", files[1:], strict=True)
    )
    for node in (b, c):
        wait_until(lambda node=node: has_told(node, "training"), 60, f"{node.name} trains")
    rotate_swarm_key(files[0], 20.0, time.time())
    for file in files[1:]:  # copied in any order, some seconds apart
        time.sleep(4)
        file.write_bytes(files[0].read_bytes())
    for node in (a, b, c):
        wait_until(lambda node=node: "old swarm key is refused" in node.text(), 90, f"{node.name} changed")
    stranger = swarm.start("stranger", *PACE, "--swarm-key-file", str(key), peers=a)
    assert stranger.wait(40) == 2
    assert "it belongs to another swarm" in stranger.text()
    late = swarm.start("late", *PACE, "--swarm-key-file", str(files[2]), peers=a)
    wait_until(lambda: has_told(late, "joined"), 60, "who has the new key joins")
    for node in (a, b, c):
        assert not has_told(node, "dead"), "nobody was lost"
