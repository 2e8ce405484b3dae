"""Mutated bytes at every decoder of what others send, and at a live node on loopback.

First each decoder (`support.decoders`) is given mutations of good examples: flipped, cut, doubled and
inserted bytes, lengths at their edges, pieces of other messages, nesting. It may refuse them; anything else
that it raises is a bug, and so is a second of its time or 64 MiB of memory for one input. Then a keyed node
gets mutated HTTP requests, TLS handshakes and openings of streams. It has to live on, to answer its health
meanwhile, to answer nothing by 500, to log no traceback, to give all descriptors back, and to stay within
64 MiB of its memory.

    python scripts/fuzz.py --minutes 10 --seed 1

Exit code 0 if nothing was found, else 1; what was found goes to stdout, with the input in hex.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import socket
import ssl
import sys
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import psutil

from p2pdrl.membership.messages import ROUTES as SWIM
from p2pdrl.strategies.protocol import ROUTES as STRATEGY
from p2pdrl.transport.opening import HELLO, TOKEN_BYTES
from support.decoders import REFUSALS, Decoder, decoders
from support.local_swarm import LocalSwarm

SLOW_S = 1.0
MORE_BYTES = 64 << 20
LONGEST = 1 << 16
EDGES = (
    b"\0",
    b"\xff",
    b"\x7f\xff\xff\xff",
    b"\x80\0\0\0",
    b"\xff" * 8,
    b"\xdd\xff\xff\xff\xff",
    b"\xc6\x7f\xff\xff\xff",
)
WORDS = (
    b"NaN",
    b"Infinity",
    b"-1",
    b"1e999",
    b"9" * 400,
    b"[" * 3000,
    b"{" * 3000,
    b"\x91" * 3000,
    b"\r\n",
    b"\0",
)
API = [
    *("/", "/healthz", "/readyz", "/metrics", "/v1/target?nonce=aa", "/v1/status", "/v1/peers", "/v1/config"),
    *(
        "/v1/mode",
        "/v1/rounds",
        "/v1/evaluations",
        "/v1/events?follow=0",
        "/v1/checkpoint",
        "/v1/act",
        "/v1/pause",
    ),
    *(
        "/v1/resume",
        "/v1/roles?role=actor",
        "/v1/mode?mode=local",
        "/v1/pipeline/trace?seconds=1",
        "/v1/nothing",
    ),
]
PEER = [f"/p2p/{route}" for route in (*SWIM, *STRATEGY)]


def mutated(rng: random.Random, examples: Sequence[bytes]) -> bytes:
    """Some changes to one of the examples."""
    data = bytearray(rng.choice(examples))
    for _ in range(rng.choice((1, 1, 2, 3, 8))):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(8):
            case 0 if data:
                data[at % len(data)] ^= 1 << rng.randrange(8)
            case 1 if data:
                data[at % len(data)] = rng.randrange(256)
            case 2:
                del data[at:]
            case 3:
                del data[at : at + rng.randrange(1, 9)]
            case 4:
                data[at:at] = rng.randbytes(rng.randrange(1, 9))
            case 5:
                data[at:at] = rng.choice(EDGES + WORDS)
            case 6:
                other = rng.choice(examples)
                data[at:] = other[rng.randrange(len(other) + 1) :]
            case _:
                data[at:at] = data[at : at + rng.randrange(1, 200)]
    return bytes(data[:LONGEST])


class Findings:
    """What went wrong, each kind of it once."""

    def __init__(self) -> None:
        self.kinds: Counter[str] = Counter()

    def add(self, kind: str, detail: str, data: bytes = b"") -> None:
        """Tell of one, unless it is known."""
        self.kinds[kind] += 1
        if self.kinds[kind] == 1:
            print(
                json.dumps({"kind": kind, "detail": detail[-3000:], "input": data[:2000].hex()}), flush=True
            )


def try_decoder(one: Decoder, data: bytes, findings: Findings) -> bool:
    """Give a decoder an input; tell whether it took it."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began_s = time.thread_time()
    try:
        one.decode(data)
        taken = True
    except REFUSALS:
        taken = False
    except Exception as error:  # noqa: BLE001 - that is what is looked for
        frame = traceback.extract_tb(error.__traceback__)[-1]
        kind = f"{one.name}: {type(error).__name__} in {Path(frame.filename).name}:{frame.lineno}"
        findings.add(kind, traceback.format_exc(), data)
        taken = False
    if time.thread_time() - began_s > SLOW_S:
        findings.add(f"{one.name}: slow", f"{time.thread_time() - began_s:.1f} s", data)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - most) << 10
    if grown > MORE_BYTES:
        findings.add(f"{one.name}: memory", f"{grown >> 20} MiB more", data)
    return taken


def fuzz_decoders(seconds: float, rng: random.Random, findings: Findings) -> dict[str, tuple[int, int]]:
    """Go round all decoders; return how many inputs each got, and how many it took."""
    found = {one.name: (0, 0) for one in decoders()}
    all_ = decoders()
    for one in all_:
        for example in one.examples:
            try_decoder(one, example, findings)
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        for one in all_:
            for _ in range(20):
                taken = try_decoder(one, mutated(rng, one.examples), findings)
                inputs, good = found[one.name]
                found[one.name] = inputs + 1, good + taken
    return found


class Attacker:
    """Sends bytes to a node and watches it.

    Args:
        swarm: of one node.
        rng: what to send.
        findings: where to tell.
    """

    def __init__(self, swarm: LocalSwarm, rng: random.Random, findings: Findings) -> None:
        self._node = swarm.nodes[0]
        self._log = swarm.root / f"{self._node.name}.log"
        self._rng, self._findings = rng, findings
        self._process = psutil.Process(self._node.process.pid)
        self._rss, self._files = self._process.memory_info().rss, self._process.num_fds()
        self.statuses: Counter[str] = Counter()
        self._host = f"Host: {self._node.address}\r\n".encode()
        self._hello = _client_hello()

    def run(self, seconds: float) -> None:
        """Attack, and look now and then."""
        end_s, looked_s = time.monotonic() + seconds, 0.0
        while time.monotonic() < end_s and self._node.alive:
            act = self._rng.choice((self._http, self._http, self._http, self._tls, self._stream))
            try:
                act()
            except OSError:
                self.statuses["cut"] += 1
            if time.monotonic() > looked_s + 2.0:
                looked_s = time.monotonic()
                self._look()
        time.sleep(12.0)  # deadlines of half requests pass
        self._look()
        if self._node.alive:
            grown, files = self._process.memory_info().rss - self._rss, self._process.num_fds() - self._files
            if grown > MORE_BYTES:
                self._findings.add("node: memory", f"{grown >> 20} MiB more")
            if files > 8:
                self._findings.add("node: descriptors", f"{files} more")
        text = self._log.read_text(errors="replace")
        for word in ("Traceback", "never retrieved", "Fatal Python error"):
            if word in text:
                at = text.index(word)
                self._findings.add(f"node: {word}", text[max(0, at - 500) : at + 2500])

    def _look(self) -> None:
        if not self._node.alive:
            self._findings.add("node: died", self._log.read_text(errors="replace")[-2000:])
            return
        began_s = time.monotonic()
        try:
            self._node.client.health()
        except Exception as error:  # noqa: BLE001 - whatever it is, the node isn't healthy
            self._findings.add("node: no health", repr(error))
        if time.monotonic() - began_s > 5.0:
            self._findings.add("node: slow health", f"{time.monotonic() - began_s:.1f} s")

    def _send(self, data: bytes) -> bytes:
        with socket.create_connection((self._node.address.host, self._node.address.port), 2.0) as sock:
            sock.settimeout(0.3)
            sock.sendall(data)
            if self._rng.random() < 0.3:
                sock.shutdown(socket.SHUT_WR)
            try:
                return sock.recv(4096)
            except TimeoutError:
                return b""

    def _http(self) -> None:
        rng = self._rng
        method = rng.choice((b"GET", b"POST", b"PUT", b"HEAD", b"OPTIONS", b"PATCH", b"X"))
        path = rng.choice(API + PEER).encode()
        body = rng.randbytes(rng.choice((0, 0, 5, 300, 5000)))
        lines = [b"%s %s HTTP/1.1\r\n" % (method, path), self._host]
        lines += rng.choice(
            ([b"Content-Length: %d\r\n" % len(body)], [b"Transfer-Encoding: chunked\r\n"], [])
        )
        if rng.random() < 0.3:
            lines += [rng.choice((
                b"Content-Encoding: gzip\r\n", b"Origin: http://evil.example\r\n",
                b"Expect: 100-continue\r\n",
                b"Upgrade: websocket\r\nConnection: Upgrade\r\n", b"Content-Type: application/json\r\n",
                b"X-P2PDRL-Meta: 99999999999\r\n", b"Authorization: Bearer x\r\n",
            ))]  # fmt: skip
        request = b"".join([*lines, b"\r\n", body])
        answer = self._send(request if rng.random() < 0.3 else mutated(rng, [request]))
        status = answer[9:12].decode("ascii", "replace") if answer.startswith(b"HTTP/") else "none"
        self.statuses[status] += 1
        if status.startswith("5") and status not in ("503", "501", "505"):
            self._findings.add(f"node: answered {status}", answer[:500].decode("utf-8", "replace"), request)

    def _tls(self) -> None:
        self._send(mutated(self._rng, [self._hello]))
        self.statuses["tls"] += 1

    def _stream(self) -> None:
        token = self._rng.randbytes(TOKEN_BYTES)
        self._send(mutated(self._rng, [HELLO + token + self._rng.randbytes(64)]))
        self.statuses["stream"] += 1


def _client_hello() -> bytes:
    """The first record of a TLS handshake."""
    context = ssl.create_default_context()
    out = ssl.MemoryBIO()
    try:
        context.wrap_bio(ssl.MemoryBIO(), out, server_hostname="localhost").do_handshake()
    except ssl.SSLWantReadError:
        pass
    return out.read()


def main() -> None:
    """Read the arguments, fuzz, tell."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="half for the decoders, half for the node"
    )
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    rng, findings = random.Random(given.seed), Findings()
    seconds = 30.0 * given.minutes
    counts = fuzz_decoders(seconds, rng, findings)
    inputs = sum(count for count, _ in counts.values())
    print(f"{inputs} inputs at {len(counts)} decoders", file=sys.stderr)
    never = sorted(name for name, (_, good) in counts.items() if not good)
    print(f"of {', '.join(never) or 'none'} no mutation was taken", file=sys.stderr)
    pace = ["--config", "cartpole", "--set=node.learner.step_delay_s=0.05", "--set=node.actors.count=0"]
    with LocalSwarm(1, pace, key=True) as swarm:
        swarm.ready()
        attacker = Attacker(swarm, rng, findings)
        attacker.run(seconds)
        print(f"the node: {dict(attacker.statuses)}", file=sys.stderr)
    if findings.kinds:
        print(f"found: {dict(findings.kinds)}", file=sys.stderr)
        raise SystemExit(1)


if __name__ == "__main__":
    main()
