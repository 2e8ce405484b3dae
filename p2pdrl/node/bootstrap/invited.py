"""A node that was invited: redeems the line once, keeps what it got, follows a change of the swarm's key.

What it holds in place of the swarm's key is in ``membership.json`` in its data folder: a certificate for its
own Ed25519 key, and those of the swarm's authorities. `InviterClient` asks who has invited it; whom it talks
to, the node id shows, which is the hash of a key, so that holds while authorities come and go.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from aiohttp.connector import Connection
from aiohttp.tracing import Trace
from yarl import URL

from p2pdrl.api.invites import RedeemRequest, RenewRequest
from p2pdrl.atomic import storage_error, write_atomic
from p2pdrl.clock import Clock
from p2pdrl.config.node import NodeConfig, Role
from p2pdrl.errors import (
    JoinRefusedError,
    P2PDRLError,
    PeerRefusedError,
    PeerUnreachableError,
    StorageError,
    TransportError,
    UsageError,
    WireError,
)
from p2pdrl.membership.identity import Identity, verify
from p2pdrl.membership.invites import Grant, InviteLine, redeem_proof, renew_proof, secret_hash
from p2pdrl.membership.operators import Operator
from p2pdrl.membership.records import BadRecordError, SwarmRecord, Verifier
from p2pdrl.membership.swarm_records import SwarmRecords
from p2pdrl.node.bootstrap.datadir import SWARM_FILE
from p2pdrl.node.events import EventLog
from p2pdrl.transport.certificates import Credentials, fingerprint, is_issued_by, read_certificate
from p2pdrl.transport.dial import Dialer, is_loopback
from p2pdrl.transport.protocol import DEFAULT_PORT, Address
from p2pdrl.transport.tls import SwarmTls, authority_context, unproven_context

__all__ = ["MEMBERSHIP_FILE", "InvitedMember", "InviterClient", "Renewal", "as_member", "read_membership"]

MEMBERSHIP_FILE = "membership.json"
_LONGEST_ANSWER = 65_536
_DEADLINE_S = 10.0
_AGAIN_S = 2.0
_RENEW_EVERY_S = 30.0
_FIRST_RENEWAL_S = 3.0


class InvitedMember(msgspec.Struct, frozen=True):
    """What an invited node keeps.

    Attributes:
        inviter: node id of who has invited it.
        redeemed: hash of the secret, hex: the same line given again isn't redeemed again.
        grant: what it got.
    """

    inviter: str
    redeemed: str
    grant: Grant

    @property
    def operators(self) -> tuple[Operator, ...]:
        """The root operators that its inviter has named."""
        return tuple(Operator(*one) for one in self.grant.operators)

    @property
    def credentials(self) -> Credentials:
        """What it shows, and whom it believes."""
        return Credentials(self.grant.certificate, self.grant.authorities)

    @property
    def roles(self) -> frozenset[str] | None:
        """All that it may do; None for no limit."""
        certificate = read_certificate(self.grant.certificate)
        return None if certificate is None else certificate.roles

    @property
    def until_s(self) -> float | None:
        """Wall time at which its certificate ends; None for never."""
        certificate = read_certificate(self.grant.certificate)
        return None if certificate is None else certificate.until_s

    def fitted(self, node: NodeConfig) -> NodeConfig:
        """Return a node's configuration with what the membership says where it says nothing itself.

        Raises:
            UsageError: it asks for roles that the invite doesn't allow.
        """
        allowed = self.roles
        roles, promote = node.roles, node.promote
        if allowed is not None:
            if beyond := [role for role in roles if role not in allowed]:
                raise UsageError(
                    f"this node was invited as {' and '.join(sorted(allowed))} alone, and can't be "
                    f"{' and '.join(beyond)}: leave out --roles, or ask for another invite"
                )
            named: tuple[Role, ...] = ("actor", "learner", "replay", "server")
            roles = roles or tuple(role for role in named if role in allowed)
            promote = promote and "learner" in allowed
        peers = tuple(dict.fromkeys((*node.peers, *self.grant.members)))
        return msgspec.structs.replace(
            node, roles=roles, promote=promote, peers=peers, listen=node.listen or _listen(peers)
        )

    def save(self, folder: Path) -> None:
        """Keep it.

        Raises:
            StorageError: the disk doesn't take it.
        """
        path = folder / MEMBERSHIP_FILE
        try:
            write_atomic(path, msgspec.json.format(msgspec.json.encode(self)))
        except OSError as error:
            raise storage_error("keep the membership in", path, error) from error


def _listen(peers: Iterable[str]) -> str | None:
    """Where to listen when nobody said so: on all interfaces where others are on other machines."""
    hosts = [Address.parse(peer).host for peer in peers]
    if all(is_loopback(host) or host == "localhost" for host in hosts):
        return None
    return f"[::]:{DEFAULT_PORT}" if ":" in hosts[0] else f"0.0.0.0:{DEFAULT_PORT}"


def read_membership(folder: Path) -> InvitedMember | None:
    """Return what the data folder keeps of a membership by invitation; None where there is none.

    Raises:
        StorageError: the file can't be read.
    """
    path = folder / MEMBERSHIP_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=InvitedMember)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise storage_error("read the membership in", path, error) from error
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise StorageError(
            f"{path} is damaged: move it away, and ask for another invite (`p2pdrl invite`)"
        ) from None


class _PinnedConnector(aiohttp.TCPConnector):
    """Connections to one node and no other, whoever answers at its address."""

    def __init__(self, node_id: str) -> None:
        super().__init__(limit=1, force_close=True)
        self._node_id = node_id

    async def connect(
        self,
        req: aiohttp.ClientRequest,
        traces: list[Trace],
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109 - aiohttp's name
    ) -> Connection:
        """Connect; nothing was sent when somebody else is there.

        Raises:
            PeerUnreachableError: somebody else is.
        """
        connection = await super().connect(req, traces, timeout)
        transport = connection.transport
        shown = SwarmTls.shown_by(transport.get_extra_info("ssl_object")) if transport is not None else None
        if shown is None or shown.node_id != self._node_id:
            connection.close()
            raise PeerUnreachableError("the node there isn't the one that has invited us", sent=False)
        return connection


class InviterClient:
    """Asks the node that has invited us, over TLS.

    Args:
        inviter_id: who that is.
        identity: our node's.
    """

    def __init__(self, inviter_id: str, identity: Identity, clock: Clock) -> None:
        self._inviter_id = inviter_id
        self._identity = identity
        self._dialer = Dialer(clock, ttl_s=0.0)

    async def redeem(self, invite: InviteLine, address: str, name: str) -> Grant:
        """Redeem an invite at one address.

        Args:
            name: what people call this node.

        Raises:
            TransportError: the inviter isn't there, refuses (`PeerRefusedError`), or isn't of that swarm.
        """
        told = await self._ask("GET", address, "/v1/invites/authority", None)
        try:
            known = msgspec.json.decode(told, type=_Authorities).authorities
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise WireError(f"{address} tells no authority: {str(error)[:200]}") from error
        authority = known[0] if known else b""
        if fingerprint(authority) != invite.authority:
            raise PeerRefusedError(410, "the swarm's key was replaced since: ask for another invite")
        proof = self._identity.sign(redeem_proof(self._inviter_id, invite.secret))
        request = RedeemRequest(invite.secret, self._identity.public_key, name[:64], proof)
        grant = self._grant(
            await self._ask("POST", address, "/v1/invites/redeem", request, authority=authority)
        )
        if grant.swarm != invite.swarm.hex() or authority not in grant.authorities:
            raise WireError(f"{address} makes us a member of another swarm")
        return grant

    async def renew(self, address: str) -> Grant:
        """Ask at one address for what we need now.

        Raises:
            TransportError: as for `redeem`.
        """
        proof = self._identity.sign(renew_proof(self._inviter_id))
        request = RenewRequest(self._identity.public_key, proof)
        return self._grant(await self._ask("POST", address, "/v1/invites/renew", request))

    def _grant(self, answer: bytes) -> Grant:
        try:
            grant = msgspec.json.decode(answer, type=Grant)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise WireError(f"the certificate can't be read: {str(error)[:200]}") from error
        certificate = read_certificate(grant.certificate)
        if certificate is None or certificate.public_key != self._identity.public_key:
            raise WireError("the certificate is another node's")
        try:
            authority_context(grant.authorities)
        except (ValueError, ssl.SSLError) as error:
            raise WireError(f"the inviter names an authority that is none: {str(error)[:200]}") from error
        if not any(is_issued_by(grant.certificate, authority) for authority in grant.authorities):
            raise WireError("the certificate is of no authority that the inviter names")
        for member in grant.members:
            Address.parse(member)
        return grant

    async def _ask(
        self, method: str, to: str, path: str, request: Any, *, authority: bytes | None = None
    ) -> bytes:
        """Send one request to the inviter alone, and return the body of a good answer.

        Args:
            authority: its certificate must be by this one, too.

        Raises:
            TransportError: it isn't there, refuses, or answers what can't be read.
        """
        try:
            async with asyncio.timeout(_DEADLINE_S):
                return await self._try_each(method, to, path, request, authority)
        except TimeoutError:
            raise PeerUnreachableError(f"{to} doesn't answer within {_DEADLINE_S:g} s") from None
        except aiohttp.ClientConnectorCertificateError:
            raise PeerRefusedError(403, f"{to} doesn't prove that it is of the invite's swarm") from None
        except aiohttp.ClientSSLError:
            raise PeerUnreachableError(f"{to} speaks no TLS: is that the inviter's address?") from None
        except (aiohttp.ClientError, OSError, UnicodeError) as error:
            raise PeerUnreachableError(f"{to}: {_words(error)}") from error

    async def _try_each(
        self, method: str, to: str, path: str, request: Any, authority: bytes | None
    ) -> bytes:
        context = unproven_context() if authority is None else authority_context([authority])
        connector = _PinnedConnector(self._inviter_id)
        body = None if request is None else msgspec.json.encode(request)
        broken: Exception | None = None
        async with aiohttp.ClientSession(connector=connector, trust_env=False) as session:
            for address in await self._dialer.addresses(Address.parse(to)):
                url = URL.build(scheme="https", host=address.host, port=address.port, path=path)
                try:
                    async with session.request(
                        method, url, data=body, ssl=context, allow_redirects=False
                    ) as response:
                        answer = await _bounded(response)
                        if response.status != 200:
                            raise _refusal(response.status, answer)
                        return answer
                except (aiohttp.ClientConnectorError, PeerUnreachableError) as error:
                    if isinstance(error, aiohttp.ClientSSLError):
                        raise
                    broken = error
        raise PeerUnreachableError(f"{to}: {_words(broken)}") from broken


def _words(error: Exception | None) -> str:
    """Why nothing came of a connection, without what aiohttp puts around it."""
    inner = getattr(error, "os_error", error)
    return str(getattr(inner, "strerror", None) or inner).lower()[:200]


class _Authorities(msgspec.Struct, frozen=True):
    authorities: tuple[bytes, ...]


async def _bounded(response: aiohttp.ClientResponse) -> bytes:
    """Read the body of an answer, as far as any honest one goes."""
    found = b""
    while len(found) <= _LONGEST_ANSWER and (piece := await response.content.readany()):
        found += piece
    if len(found) > _LONGEST_ANSWER:
        raise WireError("the answer is too long for an inviter's")
    return found


def _refusal(status: int, body: bytes) -> TransportError:
    try:
        said = str(msgspec.json.decode(body)["error"])
    except (msgspec.MsgspecError, ValueError, RecursionError, KeyError, TypeError):
        said = f"it answered with status {status}"
    words = "".join(c if c.isprintable() else " " for c in said)[:300]
    return PeerRefusedError(status, words)


_COME_AGAIN = frozenset({408, 429, 500, 502, 503})


async def as_member(
    folder: Path,
    identity: Identity,
    invite: InviteLine | None,
    *,
    name: str,
    events: EventLog,
    clock: Clock,
) -> InvitedMember | None:
    """Return this node's membership by invitation, made now where there is an ``invite`` that is new.

    While the inviter doesn't answer, this goes on trying for ever.

    Args:
        folder: the node's data folder.
        name: what people call the node.

    Raises:
        UsageError: the data folder is that of a member of another swarm.
        JoinRefusedError: the inviter refuses.
        StorageError: the membership can't be kept.
    """
    held = read_membership(folder)
    redeemed = "" if invite is None else secret_hash(invite.secret).hex()
    if held is not None and (invite is None or held.redeemed == redeemed):
        return await _renewed(held, folder, identity, events, clock)  # it was redeemed in an earlier run
    if invite is None:
        return None
    if held is not None and held.grant.swarm != invite.swarm.hex():
        raise UsageError(
            f"{folder} is the data folder of a member of another swarm ({held.grant.swarm}): name another "
            "one with --data-dir"
        )
    inviter = invite.inviter.hex()
    client = InviterClient(inviter, identity, clock)
    while True:
        troubles = []
        for address in invite.seeds:
            try:
                grant = await client.redeem(invite, address, name)
            except PeerRefusedError as error:
                if error.status not in _COME_AGAIN:
                    raise JoinRefusedError(f"{address} doesn't take this node in: {error.reason}") from None
                troubles.append(f"{address}: {error.reason}")
            except P2PDRLError as error:
                troubles.append(str(error))
            else:
                members = tuple(dict.fromkeys((address, *grant.members, *invite.seeds)))[:16]
                member = InvitedMember(inviter, redeemed, msgspec.structs.replace(grant, members=members))
                member.save(folder)
                may = (
                    "a member"
                    if member.roles is None
                    else f"a member as {' and '.join(sorted(member.roles))}"
                )
                events.emit("invited", f"is {may} of swarm {grant.swarm} now, by the invite of {address}")
                return member
        events.remind("still-trying", f"can't redeem the invite yet: {'; '.join(troubles)}; goes on trying")
        await asyncio.sleep(_AGAIN_S)


class _Memory(msgspec.Struct, frozen=True):
    """What counts here of `node.state.swarm_memory`."""

    records: tuple[SwarmRecord, ...] = ()


def _remembered(held: InvitedMember, folder: Path) -> SwarmRecords:
    """Who commanded the swarm and who was banned when this node ran last, as far as that can be read."""
    known = SwarmRecords(Verifier(held.grant.swarm, verify), held.operators)
    try:
        records = msgspec.json.decode((folder / SWARM_FILE).read_bytes(), type=_Memory).records
    except (OSError, ValueError, RecursionError, msgspec.MsgspecError):
        return known
    for key in ("operators", "bans"):
        for record in records:
            if record.key == key:
                with suppress(BadRecordError):
                    known.merge(record, trusted=True)
    return known


async def _renewed(
    held: InvitedMember, folder: Path, identity: Identity, events: EventLog, clock: Clock
) -> InvitedMember:
    """Ask for what a node needs that was away while the swarm's key was replaced; go on without an answer."""
    client = InviterClient(held.inviter, identity, clock)
    barred = _remembered(held, folder).why_banned
    renewal = Renewal(held, folder, client, lambda _: [], lambda *_: None, events, barred=barred)
    try:
        async with asyncio.timeout(_FIRST_RENEWAL_S):
            await renewal.once()
    except TimeoutError:
        pass
    return renewal.member


@dataclass
class Renewal:
    """Keeps an invited node's certificate good while the swarm's key is replaced.

    Attributes:
        member: what it holds.
        where: addresses at which the inviter may be now, by its id.
        use: takes what changed; with ``dropped`` an authority that was good is good no more.
        use_operators: takes the root operators that the inviter names, when they change.
        barred: says why a node isn't asked, by id; None for all others. An inviter that is banned would else
            name other operators, who lift its ban.
    """

    member: InvitedMember
    folder: Path
    client: InviterClient
    where: Callable[[str], list[str]]
    use: Callable[[Credentials, bool], None]
    events: EventLog
    every_s: float = _RENEW_EVERY_S
    use_operators: Callable[[tuple[Operator, ...]], None] = lambda operators: None
    barred: Callable[[str], str | None] = lambda node_id: None

    async def run(self) -> None:
        """Ask until cancelled."""
        while True:
            await asyncio.sleep(self.every_s)
            await self.once()

    async def once(self) -> None:
        """Ask the inviter what is good now; while it isn't there, what we have stays."""
        for address in dict.fromkeys([*self.where(self.member.inviter), *self.member.grant.members]):
            try:
                if (why := self.barred(self.member.inviter)) is not None:
                    text = f"the inviter isn't asked to renew this membership, it is {why}; ask for an invite"
                    self.events.remind("not-renewed", text)
                    return
                grant = await self.client.renew(address)
                if self.barred(self.member.inviter) is not None:
                    return  # since then
            except PeerRefusedError as error:
                if error.status in (403, 410):
                    self.events.remind(
                        "not-renewed", f"the inviter doesn't renew this membership: {error.reason}"
                    )
                    return
            except P2PDRLError:
                continue
            else:
                await self._take(grant)
                return

    async def _take(self, grant: Grant) -> None:
        held = self.member.grant
        # an inviter whose key file lacks the operators lets nobody else command
        grant = msgspec.structs.replace(grant, operators=grant.operators or held.operators)
        told = (grant.certificate, grant.authorities, grant.operators)
        if grant.swarm != held.swarm or told == (held.certificate, held.authorities, held.operators):
            return
        # where the inviter is, membership tells us; the addresses that were good stay
        grant = msgspec.structs.replace(grant, members=held.members)
        member = msgspec.structs.replace(self.member, grant=grant)
        dropped = not set(held.authorities) <= set(grant.authorities)
        try:
            await asyncio.to_thread(member.save, self.folder)
            if (grant.certificate, grant.authorities) != (held.certificate, held.authorities):
                self.use(member.credentials, dropped)
        except (StorageError, OSError) as error:
            self.events.remind("not-renewed", f"can't take the new certificate yet: {error}")
            return
        self.member = member
        if grant.operators != held.operators:
            self.use_operators(member.operators)
        if (grant.certificate, grant.authorities) == (held.certificate, held.authorities):
            return
        words = "the swarm's key is being replaced: this node's certificate is renewed by its inviter"
        if dropped:
            words = "the old swarm key is refused; connections are made anew"
        self.events.emit("key-changed", words, keys=len(grant.authorities))
