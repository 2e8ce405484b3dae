"""How torch.distributed is led through proxies, for `bench_pipeline.py`.

Its processes find each other by a store, in which each leaves the address where it listens for gloo; our
backend over torch leaves that of its own connections there too. `Redirected` is a store that names other
ports to those who connect. Who does is known beforehand: of two of gloo's processes the one whose port gloo
takes for the greater one (`pipeline_bench.ports`; a proxy's must not change that, so it is a small one), and
of two neighbours the rank behind.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store

from pipeline_bench.talk import hear, say

__all__ = ["Redirected"]

TIMEOUT = timedelta(seconds=60)
_GLOO = re.compile(rb"\x02\x00(..)\x7f\x00\x00\x01", re.DOTALL)
"""AF_INET, the port, 127.0.0.1."""
_LINK = re.compile(rb"127\.0\.0\.1 (\d+) ")


class Redirected(Store):
    """A store that says where else others are to be reached.

    Once this rank has an address for gloo it says so (``port``, and ``link``, where its neighbour connects),
    and hears the ports that it is to connect to instead, by rank: ``gloo`` and ``links``.

    Args:
        inner: the store proper.
        rank: whose it is.
    """

    def __init__(self, inner: Store, rank: int) -> None:
        super().__init__()
        self._inner = inner
        self._rank = rank
        self._link = 0
        self._gloo: Mapping[str, int] = {}
        self._links: Mapping[str, int] = {}

    def set(self, key: str, value: Any) -> None:
        """Pass it on; an address of ours is told first."""
        raw = value.encode() if isinstance(value, str) else value
        link, gloo = _LINK.match(raw), _GLOO.search(raw)
        if link is not None:
            self._link = int(link[1])
        elif gloo is not None and key.rpartition("/")[2] == str(self._rank):
            say(port=int.from_bytes(gloo[1], "big"), link=self._link)
            instead = hear()
            self._gloo, self._links = instead["gloo"], instead["links"]
        self._inner.set(key, value)

    def get(self, key: str) -> bytes:
        """Return what is there, with another port where it is an address."""
        value: bytes = self._inner.get(key)
        rank = key.rpartition("/")[2]
        link, gloo = _LINK.match(value), _GLOO.search(value)
        if link is not None and rank in self._links:
            return _instead(value, link, str(self._links[rank]).encode())
        if link is None and gloo is not None and rank in self._gloo:
            return _instead(value, gloo, self._gloo[rank].to_bytes(2, "big"))
        return value

    def add(self, key: str, amount: int) -> int:
        """Pass it on."""
        return self._inner.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        """Pass it on."""
        return self._inner.check(keys)

    def wait(self, keys: list[str], timeout: timedelta = TIMEOUT) -> None:
        """Pass it on."""
        self._inner.wait(keys, timeout)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        """Pass it on."""
        found: bytes = self._inner.compare_set(key, expected, desired)
        return found

    def delete_key(self, key: str) -> bool:
        """Pass it on."""
        return self._inner.delete_key(key)

    def set_timeout(self, timeout: timedelta) -> None:
        """Pass it on."""
        self._inner.set_timeout(timeout)

    def has_extended_api(self) -> bool:
        """No: all goes through the methods above."""
        return False


def _instead(value: bytes, found: re.Match[bytes], port: bytes) -> bytes:
    return value[: found.start(1)] + port + value[found.end(1) :]
