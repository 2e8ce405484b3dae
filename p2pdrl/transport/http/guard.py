"""Keeps web pages out: the Host and Origin checks for every route and method.

A page in the operator's browser can send requests to loopback. Two things give it away: its
requests carry an Origin, and after DNS rebinding their Host is the page's own name. So a
Host must be an IP literal, ``localhost`` or one of our names, and an Origin must be ours; peer
routes take no Origin at all. The node puts `guard_middleware` before all routes of its
application; the peer routes check by themselves too.
"""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from p2pdrl.transport.auth import Verdict
from p2pdrl.transport.dial import ip_of
from p2pdrl.transport.protocol import TrafficCounters

__all__ = ["guard_middleware", "host_of", "judge"]

AllowedHosts = Callable[[], set[str]]


def host_of(authority: str) -> str | None:
    """Return the host of ``host[:port]`` in lower case without brackets, or None if malformed."""
    try:
        parts = urlsplit(f"//{authority}")
        _ = parts.port
    except ValueError:
        return None
    if (
        parts.netloc != authority
        or "@" in authority
        or not parts.hostname
        or any(map(str.isspace, authority))
    ):
        return None
    return parts.hostname.rstrip(".")


def judge(hosts: list[str], origin: str | None, allowed: set[str], *, own_origin_allowed: bool) -> Verdict:
    """Tell why a request with these Host and Origin headers is refused.

    Args:
        hosts: all Host headers; there has to be exactly one.
        origin: the Origin header, if any.
        allowed: our names in lower case, besides ``localhost`` and IP literals.
        own_origin_allowed: whether pages that we serve may call.
    """
    host = host_of(hosts[0]) if len(hosts) == 1 else None
    if host is None:
        return "the request needs exactly one well-formed Host header"
    if not (ip_of(host) is not None or host == "localhost" or host in allowed):
        return (
            f"Host {host[:80]!r} isn't a name of this node: use its IP address, "
            "or start it with this name as its advertised address"
        )
    if origin is None:
        return None
    if own_origin_allowed and origin.lower() in {f"http://{hosts[0].lower()}", f"https://{hosts[0].lower()}"}:
        return None
    return "requests made by web pages of other origins aren't answered"


def refuse_foreign(request: web.BaseRequest, allowed: set[str], *, own_origin_allowed: bool) -> Verdict:
    """Apply `judge` to a request."""
    origins = request.headers.getall("Origin", [])
    origin = None if not origins else origins[0] if len(origins) == 1 else "several"
    hosts = request.headers.getall("Host", [])
    return judge(hosts, origin, allowed, own_origin_allowed=own_origin_allowed)


def guard_middleware(allowed_hosts: AllowedHosts, counters: TrafficCounters | None = None) -> Middleware:
    """Return a middleware that answers 403 to foreign Hosts and Origins.

    Args:
        allowed_hosts: gives the node's own names in lower case, asked at each request.
        counters: refusals are counted here.
    """

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        verdict = refuse_foreign(request, allowed_hosts(), own_origin_allowed=True)
        if verdict is not None:
            if counters is not None:
                counters.refused[403] += 1
            return web.Response(status=403, text=verdict)
        return await handler(request)

    return guard
