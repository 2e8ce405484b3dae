"""Who may ask the API what: the check in front of every route.

| access | on a keyless node | with a swarm key |
|---|---|---|
| open (``/``, ``/healthz``, ``/readyz``) | anyone who reaches the port | anyone; reasons to some only |
| metrics | anyone | credentials, unless ``open_metrics`` |
| read | anyone (it listens on loopback only) | credentials |
| change, ask | credentials, even on loopback: a lab machine's loopback isn't private | credentials |

Where the swarm has operators, its key alone changes nothing: the request is signed by one of them as well
(``P2PDRL-Operator``: public key and signature in hex, of the MAC). The local token still does, for its node.

Credentials are the local token as ``Authorization: Bearer``, or a MAC over method, path, time, nonce
and target keyed by the local token or by the swarm key. Our own commands always send the MAC, so
that a stranger who listens on the port first never gets hold of a token.

The target is this node's id and a random number of this run. Whoever signs asks for it first, at
``GET /v1/target?nonce=NONCE`` with a fresh nonce, and believes an answer only with its proof: a MAC
over target and nonce, by the same key. So a captured request is refused by every other node of the swarm,
and nobody without the key can make a client sign for a target of his own.
"""

from __future__ import annotations

import hmac
import re
from enum import Enum

from aiohttp import web

from p2pdrl.api.answers import ApiRefusal, Handler, answers_errors, json_answer
from p2pdrl.api.protocol import NodeView
from p2pdrl.clock import Clock
from p2pdrl.membership.identity import verify
from p2pdrl.transport.auth import (
    OPERATOR_HEADER,
    ReplayGuard,
    is_nonce,
    new_nonce,
    operator_payload,
    parse_time,
    prove_target,
    verify_api,
)
from p2pdrl.transport.dial import is_loopback
from p2pdrl.transport.http.listener import watched

__all__ = ["MAC_HEADERS", "Access", "AccessGuard", "from_this_machine"]

MAC_HEADERS = ("P2PDRL-Time", "P2PDRL-Nonce", "P2PDRL-Mac")
"""The headers of a signed request: wall time, nonce, `p2pdrl.transport.auth.sign_api` over both."""

_ENDS = ("sockname", "peername")
_MAC = re.compile(r"[0-9a-f]{64}")
_PROVEN = web.RequestKey("proven", bool)
_SIGNATURE = re.compile(r"[0-9a-f]{128}")
_WANTS = {"WWW-Authenticate": 'Bearer realm="p2pdrl"'}


class Access(Enum):
    """What a route does, which decides who may call it."""

    OPEN = "open"
    METRICS = "metrics"
    READ = "read"
    CHANGE = "change"
    ASK = "ask"
    """Wants credentials as a change does, and changes nothing."""


class AccessGuard:
    """Decides about each request of one node's API."""

    def __init__(self, node: NodeView, clock: Clock) -> None:
        self._node = node
        self._replays = ReplayGuard(clock)
        self._target = f"{node.node_id}.{new_nonce()}"

    async def target(self, request: web.Request) -> web.Response:
        """Prove to key holders who we are: one proof for each key that this node takes.

        Raises:
            ApiRefusal: 400 without a nonce.
        """
        nonce = request.query.get("nonce", "")
        if not is_nonce(nonce):
            raise ApiRefusal(400, "write ?nonce= and 32 hex digits")
        proofs = [prove_target(key, self._target, nonce) for key in self._keys()]
        return json_answer({"target": self._target, "proofs": proofs})

    def guard(self, access: Access, handler: Handler, *, takes_body: bool = False) -> Handler:
        """Return ``handler`` behind the check, with errors as JSON."""

        async def guarded(request: web.Request) -> web.StreamResponse:
            self.check(request, access, takes_body=takes_body)
            return await handler(request)

        return answers_errors(guarded)

    def check(self, request: web.Request, access: Access, *, takes_body: bool = False) -> None:
        """Let the request pass, or refuse it; who takes a body bounds it.

        Raises:
            ApiRefusal: 401 without good credentials; 409 for a replay; 400 or 415 for a body.
        """
        _refuse_body(request, takes_body=takes_body)
        shown = "P2PDRL-Mac" in request.headers or "Authorization" in request.headers
        if (
            access in (Access.CHANGE, Access.ASK)
            or not self._readable(access)
            or (access is Access.OPEN and shown)
        ):
            self._authenticate(request, access)
            request[_PROVEN] = True
        elif access is Access.OPEN or self._node.keyed:
            return
        if (connection := watched(request)) is not None:
            connection.proven = True  # strangers' connections give way to it

    def tells_details(self, request: web.Request) -> bool:
        """Whether an open route tells this caller more than a yes or no."""
        return not self._node.keyed or from_this_machine(request) or _PROVEN in request

    def _readable(self, access: Access) -> bool:
        if access is Access.OPEN or not self._node.keyed:
            return True
        return access is Access.METRICS and self._node.open_metrics

    def _authenticate(self, request: web.Request, access: Access) -> None:
        if "P2PDRL-Mac" in request.headers:
            self._check_mac(request, access)
            return
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        if given and self._node.keyed and not (request.secure or _stays_here(request)):
            raise ApiRefusal(
                401, "a token goes over TLS only, where others could listen: use https://", _WANTS
            )
        if scheme.lower() != "bearer":
            raise ApiRefusal(
                401,
                "this route wants credentials: the token in DATA_DIR/token as `Authorization: Bearer …`, "
                "or the swarm key (--swarm-key-file)",
                _WANTS,
            )
        if not hmac.compare_digest(
            given.strip().encode("utf-8", "surrogateescape"), self._node.token.encode()
        ):
            raise ApiRefusal(
                401, "that isn't this node's token, which is in the file `token` of its data folder", _WANTS
            )

    def _check_mac(self, request: web.Request, access: Access) -> None:
        """In this order strangers learn nothing: only holders of a key hear of freshness."""
        time_text, nonce, mac = (request.headers.get(name, "") for name in MAC_HEADERS)
        wall_s = parse_time(time_text)
        well_formed = is_nonce(nonce) and _MAC.fullmatch(mac) and request.raw_path.isascii()
        if wall_s is None or not well_formed:
            raise ApiRefusal(400, "malformed P2PDRL-Time, P2PDRL-Nonce, P2PDRL-Mac or path")
        signed = (request.method, request.raw_path, wall_s, nonce)
        good = [key for key in self._keys() if verify_api(key, *signed, mac=mac, target=self._target)]
        if not good:
            raise ApiRefusal(
                401,
                "the request is signed with another swarm's key or another node's token, or for another node",
                _WANTS,
            )
        if access is Access.CHANGE and self._node.token.encode() not in good:
            self._check_operator(request.headers.get(OPERATOR_HEADER, ""), mac)
        if stale := self._replays.stale(wall_s):
            raise ApiRefusal(401, stale)
        fresh = self._replays.take(nonce)
        if fresh is None:
            raise ApiRefusal(429, "too many signed requests a minute", {"Retry-After": "60"})
        if not fresh:
            raise ApiRefusal(409, "this signed request was seen before")

    def _check_operator(self, shown: str, mac: str) -> None:
        operators = self._node.operator_keys
        if not operators:
            return
        public, _, signature = shown.partition(".")
        if not (_MAC.fullmatch(public) and _SIGNATURE.fullmatch(signature)):
            raise ApiRefusal(
                403,
                "the swarm's key alone changes nothing here: on its own machine name the node's --data-dir, "
                "or sign as an operator with --operator FILE",
            )
        key = bytes.fromhex(public)
        if key not in operators or not verify(key, bytes.fromhex(signature), operator_payload(mac)):
            raise ApiRefusal(403, "that isn't signed by an operator of this swarm")

    def _keys(self) -> list[bytes]:
        return [self._node.token.encode(), *self._node.swarm_keys]


def from_this_machine(request: web.Request) -> bool:
    """Whether the request comes from this machine, and not through a proxy on it."""
    proxied = "X-Forwarded-For" in request.headers or "Forwarded" in request.headers
    return not proxied and _stays_here(request)


def _stays_here(request: web.Request) -> bool:
    """Whether a connection is this machine's with itself: over loopback, or from its own address to that."""
    if is_loopback(request.remote or ""):
        return True
    if request.transport is None:
        return False
    ours, theirs = (request.transport.get_extra_info(end) for end in _ENDS)
    return bool(ours and theirs) and ours[0] == theirs[0] == request.remote


def _refuse_body(request: web.Request, *, takes_body: bool) -> None:
    """Most routes take no body, so it is never read."""
    if "Content-Encoding" in request.headers:
        raise ApiRefusal(415, "an encoded body isn't taken")
    if not takes_body and request.body_exists and request.content_length != 0:
        raise ApiRefusal(400, "this route takes no body")
