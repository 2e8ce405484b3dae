"""Which addresses a member may claim, judged before anything dials them.

A record can name any address, and every member would dial it: so the cloud's metadata service,
unspecified and multicast addresses are never dialled, and loopback only when it was told over
loopback.
"""

from __future__ import annotations

import ipaddress

from p2pdrl.errors import UsageError
from p2pdrl.transport.protocol import Address

__all__ = ["AddressPolicy", "is_loopback", "is_unspecified"]

METADATA = frozenset({"fd00:ec2::254", "100.100.100.200", "metadata", "metadata.google.internal"})


class AddressPolicy:
    """Judges claimed addresses.

    Args:
        allow_cidr: networks that IP addresses must lie in; empty allows every network.
    """

    def __init__(self, allow_cidr: tuple[str, ...] = ()) -> None:
        self._networks = tuple(ipaddress.ip_network(text, strict=False) for text in allow_cidr)

    def refuse(self, address: str, told_by: str) -> str | None:
        """Say in plain words why ``address`` isn't dialled, or return None.

        Args:
            address: ``host:port`` as claimed.
            told_by: IP address of whoever told it; "" for unknown, which is trusted.
        """
        try:
            parsed = Address.parse(address)
        except UsageError:
            return f"{address[:80]!r} isn't an address"
        if not 1 <= parsed.port <= 65535:
            return f"{address} has no port"
        host = parsed.host.lower()
        if host in METADATA:
            return f"{address} is a metadata address"
        ip = _ip(host)
        loopback = is_loopback(host)
        if loopback and told_by and not is_loopback(told_by):
            return f"{address} is loopback, told by {told_by}"
        if ip is None:
            return None
        if ip.is_unspecified or ip.is_multicast or ip.is_link_local:
            return f"{address} can't be dialled: it is unspecified, multicast or link-local"
        if self._networks and not loopback and not any(ip in network for network in self._networks):
            return f"{address} is outside the allowed networks"
        return None


def is_loopback(host: str) -> bool:
    """True for ``localhost`` and loopback IP addresses."""
    ip = _ip(host)
    return host.lower() == "localhost" if ip is None else ip.is_loopback


def is_unspecified(host: str) -> bool:
    """True for ``0.0.0.0`` and ``::``."""
    ip = _ip(host)
    return ip is not None and ip.is_unspecified


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return None
    mapped = getattr(ip, "ipv4_mapped", None)
    return mapped if mapped is not None else ip
