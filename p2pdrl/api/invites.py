"""The routes of invites: people make and revoke them, newcomers redeem them; see `membership.invites`.

| route | who | answer |
|---|---|---|
| ``POST /v1/invites`` | change | ``?role=actor&expires_s=86400&membership_s=…``; the line, once |
| ``GET /v1/invites`` | read | what has become of each |
| ``POST /v1/invites/revoke`` | change | ``?id=…`` |
| ``GET /v1/invites/authority`` | open | certificates of the swarm's authorities |
| ``POST /v1/invites/redeem`` | open, with a secret | `RedeemRequest`; a `Grant` |
| ``POST /v1/invites/renew`` | open, to nodes that were invited | `RenewRequest`; a `Grant` |

Secrets go over TLS, or stay on this machine.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Annotated, Any, TypeVar, cast, get_args

import msgspec
from aiohttp import web
from msgspec import Meta

from p2pdrl.api.answers import ApiRefusal, json_answer
from p2pdrl.api.auth import from_this_machine
from p2pdrl.api.protocol import NodeView
from p2pdrl.clock import Clock
from p2pdrl.config.node import Role
from p2pdrl.ids import node_id_from_public_key
from p2pdrl.membership.invites import SECRET_BYTES, Inviter, IssuedInvite
from p2pdrl.transport.calls import TokenBuckets
from p2pdrl.transport.dial import network_of
from p2pdrl.transport.protocol import Refusal

__all__ = ["InviteHandlers", "RedeemRequest", "RenewRequest", "invite_row"]

T = TypeVar("T")

DEFAULT_S = 86_400.0
MAX_BODY_BYTES = 4096
BODY_S = 10.0
TRIES_PER_S, TRIES_AT_ONCE = 2.0, 60.0
"""Of newcomers, two requests each, and renewals, from one IPv4 address or IPv6 network."""

_WORK: frozenset[str] = frozenset({"actor", "learner", "replay"})

PublicKey = Annotated[bytes, Meta(min_length=32, max_length=32)]
Signature = Annotated[bytes, Meta(min_length=64, max_length=64)]


class RedeemRequest(msgspec.Struct, frozen=True):
    """A newcomer's request; bytes are base64."""

    secret: Annotated[bytes, Meta(min_length=SECRET_BYTES, max_length=SECRET_BYTES)]
    public_key: PublicKey
    name: Annotated[str, Meta(max_length=64)]
    proof: Signature


class RenewRequest(msgspec.Struct, frozen=True):
    """The request of a node that was invited before."""

    public_key: PublicKey
    proof: Signature


class InviteHandlers:
    """Handlers of one node."""

    def __init__(self, node: NodeView, clock: Clock) -> None:
        self._node = node
        self._clock = clock
        self._tries = TokenBuckets(clock, TRIES_PER_S, TRIES_AT_ONCE)

    async def create(self, request: web.Request) -> web.Response:
        """Make an invite; its line is told once, and kept nowhere."""
        if unknown := set(request.query) - {"role", "expires_s", "membership_s"}:
            raise ApiRefusal(
                400, f"this route takes role, expires_s and membership_s, not {min(unknown)[:40]!r}"
            )
        if not (request.secure or from_this_machine(request)):
            raise ApiRefusal(403, "an invite holds a secret: it is told over TLS, or on this machine")
        roles = request.query.getall("role", [])
        if len(roles) > len(get_args(Role)) or (unknown := set(roles) - set(get_args(Role))):
            raise ApiRefusal(400, f"there are the roles {', '.join(get_args(Role))}")
        if roles and not _WORK & set(roles):
            raise ApiRefusal(
                400, f"who is {' and '.join(roles)} alone has nothing to do: add learner or actor"
            )
        expires_s = _seconds(request, "expires_s") or DEFAULT_S
        membership_s = _seconds(request, "membership_s")
        inviter = self._inviter()
        limits, members = cast("list[Role]", roles), inviter.members()
        kept, invite = await _in_a_thread(
            lambda: inviter.create(limits, expires_s, membership_s, members=members)
        )
        row = invite_row(kept, self._clock.wall())
        return json_answer({"ok": True, "line": invite.text(), **row, "seeds": list(invite.seeds)})

    async def list(self, _request: web.Request) -> web.Response:
        """Show all, without secrets."""
        wall_s = self._clock.wall()
        return json_answer([invite_row(kept, wall_s) for kept in self._inviter().all()])

    async def revoke(self, request: web.Request) -> web.Response:
        """Let one be redeemed no more."""
        if set(request.query) != {"id"}:
            raise ApiRefusal(400, "this route takes id")
        inviter, name = self._inviter(), request.query["id"]
        before = await _in_a_thread(lambda: inviter.revoke(name))
        return json_answer({"ok": True, "before": before.state(self._clock.wall()), "id": before.id})

    async def authority(self, request: web.Request) -> web.Response:
        """Tell newcomers what certificates to look at; what they are worth, their fingerprint tells them."""
        self._count(request)
        inviter = self._inviter()
        return json_answer({"authorities": await _in_a_thread(inviter.authorities)})

    async def redeem(self, request: web.Request) -> web.Response:
        """Make a newcomer a member."""
        asked = await self._read(request, RedeemRequest)
        if not asked.name.isprintable():
            raise ApiRefusal(400, "a name holds characters that can't be printed")
        inviter = self._inviter()
        members = inviter.members()
        grant = await _in_a_thread(
            lambda: inviter.redeem(asked.secret, asked.public_key, asked.name, asked.proof, members=members)
        )
        return json_answer(grant)

    async def renew(self, request: web.Request) -> web.Response:
        """Give a node that was invited what it needs after a change of the swarm's key."""
        asked = await self._read(request, RenewRequest)
        inviter = self._inviter()
        members = inviter.members()
        return json_answer(
            await _in_a_thread(lambda: inviter.renew(asked.public_key, asked.proof, members=members))
        )

    def _inviter(self) -> Inviter:
        inviter = self._node.inviter
        if inviter is not None:
            return inviter
        if self._node.keyed:
            raise ApiRefusal(
                409, "this node was invited itself, and holds no swarm key: have a node invite that does"
            )
        raise ApiRefusal(
            409, "this swarm has no key, so nobody needs an invite: p2pdrl node --peers HOST:PORT joins it"
        )

    def _count(self, request: web.Request) -> None:
        """Count a request of a stranger.

        Raises:
            ApiRefusal: 429, there are too many from its network.
        """
        if not self._tries.take(network_of(request.remote or "")):
            raise ApiRefusal(429, "too many tries from your address: wait a minute", {"Retry-After": "60"})

    async def _read(self, request: web.Request, kind: type[T]) -> T:
        """Read a small body, of whoever doesn't ask too often.

        Raises:
            ApiRefusal: it isn't one.
        """
        self._count(request)
        if not request.secure:
            raise ApiRefusal(403, "secrets go over TLS alone: use https://")
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_S):
                while piece := await request.content.readany():
                    body += piece
                    if len(body) > MAX_BODY_BYTES:
                        raise ApiRefusal(413, f"the body is longer than {MAX_BODY_BYTES} bytes")
        except TimeoutError:
            raise ApiRefusal(408, f"the body didn't come within {BODY_S:g} s") from None
        try:
            return msgspec.json.decode(bytes(body), type=kind)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            raise ApiRefusal(
                400, "the body can't be read: install the same p2pdrl on both machines"
            ) from None


def _seconds(request: web.Request, name: str) -> float | None:
    text = request.query.get(name)
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not math.isfinite(seconds) or seconds <= 0:
        raise ApiRefusal(400, f"{name} is a number of seconds")
    return seconds


async def _in_a_thread(work: Callable[[], T]) -> T:
    """Do what waits for the disk.

    Raises:
        ApiRefusal: what a `Refusal` says.
    """
    try:
        return await asyncio.to_thread(work)
    except Refusal as refusal:
        raise ApiRefusal(refusal.status, refusal.reason) from None


def invite_row(kept: IssuedInvite, wall_s: float) -> dict[str, Any]:
    """What people are told of an invite."""
    node_id = node_id_from_public_key(bytes.fromhex(kept.node_key)) if kept.node_key else None
    return {
        "id": kept.id,
        "state": kept.state(wall_s),
        "roles": list(kept.roles) or None,
        "created": kept.created_s,
        "expires": kept.expires_s,
        "used": kept.used_s,
        "node": node_id,
        "name": kept.node_name or None,
        "membership_s": kept.membership_s,
        "until": kept.until_s,
    }
