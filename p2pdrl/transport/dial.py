"""From a peer's address to an IP that may be dialled.

Names are resolved here and the connection goes to the IP that was looked at, so that no name
can point to one place when checked and to another when dialled, and so that the Host header is
an IP literal that every node accepts. `http_transport` asks before each call.
"""

from __future__ import annotations

import asyncio
import ipaddress
import math
import socket
from collections.abc import Awaitable, Callable

from p2pdrl.clock import Clock
from p2pdrl.errors import PeerUnreachableError
from p2pdrl.transport.auth import Verdict
from p2pdrl.transport.protocol import Address

__all__ = [
    "DIALED_BACK",
    "METADATA_IPS",
    "Dialer",
    "Resolve",
    "dial_back",
    "forbidden",
    "ip_of",
    "is_loopback",
    "is_own",
    "network_of",
    "system_resolve",
]

Resolve = Callable[[str, int], Awaitable[list[str]]]
"""``(host, port) -> IPs``"""

IP = ipaddress.IPv4Address | ipaddress.IPv6Address

METADATA_IPS = frozenset(
    map(ipaddress.ip_address, ("169.254.169.254", "169.254.170.2", "fd00:ec2::254", "100.100.100.200"))
)
"""Metadata services of clouds: they give secrets to whoever asks from inside."""

_BROADCAST = ipaddress.IPv4Address("255.255.255.255")
_MAX_KNOWN = 1024
_Looked = tuple[float, list[Address], str]
"""Until when it holds, what may be dialled, and why the rest isn't."""


async def system_resolve(host: str, port: int) -> list[str]:
    """Ask the operating system for the IPs of ``host``."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]


def ip_of(host: str) -> IP | None:
    """Return the IP of a literal, without its zone, IPv4 where it is mapped; None for a name."""
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return None
    if isinstance(ip, ipaddress.IPv4Address):
        return ip
    return ip.ipv4_mapped or ipaddress.IPv6Address(int(ip))


def is_loopback(host: str) -> bool:
    """Tell whether ``host`` is an IP literal of this machine's loopback."""
    ip = ip_of(host)
    return ip is not None and ip.is_loopback


def is_own(host: str) -> bool:
    """Tell whether ``host`` is an IP literal of an interface of this machine's, loopback included."""
    ip = ip_of(host)
    if ip is None or ip.is_unspecified:
        return False
    if ip.is_loopback:
        return True
    family = socket.AF_INET if ip.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))  # only what is ours can be bound
    except OSError:
        return False
    return True


def network_of(host: str) -> str:
    """Whose connections are counted together: an IPv4 address's, or those of 64 bits of IPv6."""
    ip = ip_of(host)
    if not isinstance(ip, ipaddress.IPv6Address) or ip.is_loopback:
        return host
    return str(ipaddress.IPv6Address(int(ip) >> 64 << 64))


def forbidden(ip_text: str) -> Verdict:
    """Tell why ``ip_text`` is never dialled: cloud metadata services and groups of machines aren't peers."""
    ip = ip_of(ip_text)
    if ip is None:
        return f"{ip_text[:80]!r} isn't an IP address"
    if ip in METADATA_IPS:
        return f"{ip} is a cloud metadata service, not a peer"
    if ip.is_multicast or ip.is_unspecified or ip == _BROADCAST:
        return f"{ip} isn't the address of one machine"
    return None


DIALED_BACK = b"p2pdrl dial-back "
"""What a node says, with the asker's nonce and a line end, to a port that it was asked to dial."""


async def dial_back(address: Address, nonce: str, within_s: float = 3.0) -> str:
    """Connect to an IP address and say ``nonce``; return why that isn't possible, in a few words."""
    try:
        async with asyncio.timeout(within_s):
            _, writer = await asyncio.open_connection(address.host, address.port)
            writer.write(DIALED_BACK + nonce.encode() + b"\n")
            await writer.drain()
            writer.close()
            await writer.wait_closed()
    except TimeoutError:
        return f"a connection to {address} gets no answer: a router or a firewall drops it"
    except OSError as error:
        return f"a connection to {address}: {(error.strerror or str(error)).lower()}"[:200]
    return ""


class Dialer:
    """Resolves names, for a short time, and refuses forbidden addresses; what it found is kept.

    Args:
        clock: monotonic time for names.
        ttl_s: how long a name's addresses are reused.
        resolve: ``(host, port) -> IPs``; the system's by default.
    """

    def __init__(self, clock: Clock, ttl_s: float, resolve: Resolve = system_resolve) -> None:
        self._clock = clock
        self._ttl_s = ttl_s
        self._resolve = resolve
        self._known: dict[Address, _Looked] = {}

    async def addresses(self, to: Address) -> list[Address]:
        """Return the IPs behind ``to`` that may be dialled, at least one.

        Raises:
            PeerUnreachableError: the name isn't known, or no address may be dialled.
        """
        known = self._known.get(to)
        if known is None or known[0] <= self._clock.monotonic():
            known = await self._look_up(to)
        _, good, why = known
        if not good:
            raise PeerUnreachableError(f"{to} isn't dialled: {why}", sent=False)
        return good

    async def _look_up(self, to: Address) -> _Looked:
        until_s = math.inf
        ips = [to.host]
        if ip_of(to.host) is None:
            until_s = self._clock.monotonic() + self._ttl_s
            try:
                ips = list(dict.fromkeys(await self._resolve(to.host, to.port)))
            except (OSError, UnicodeError) as error:
                raise PeerUnreachableError(
                    f"the name {to.host} can't be resolved: {error}", sent=False
                ) from error
        verdicts = {ip_text: forbidden(ip_text) for ip_text in ips}
        good = [Address(ip_text, to.port) for ip_text, verdict in verdicts.items() if verdict is None]
        why = "; ".join(filter(None, verdicts.values())) or "it has no address"
        if len(self._known) >= _MAX_KNOWN:
            self._known.clear()
        self._known[to] = known = (until_s, good, why)
        return known
