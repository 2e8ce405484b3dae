"""An invite's way over the network: the inviter's API on a real port, and the newcomer that asks it."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from p2pdrl.api.invites import TRIES_AT_ONCE, RedeemRequest
from p2pdrl.api.routes import mount
from p2pdrl.clock import SystemClock
from p2pdrl.config.node import NodeConfig
from p2pdrl.errors import (
    JoinRefusedError,
    PeerRefusedError,
    PeerUnreachableError,
    StorageError,
    UsageError,
    WireError,
)
from p2pdrl.membership.identity import Identity, verify
from p2pdrl.membership.invites import Grant, InviteLine, Inviter, redeem_proof
from p2pdrl.membership.operators import Ban, BansSetting, Operator
from p2pdrl.membership.records import Verifier
from p2pdrl.membership.swarm_records import SwarmRecords
from p2pdrl.node.bootstrap.invited import (
    InvitedMember,
    InviterClient,
    Renewal,
    as_member,
    read_membership,
)
from p2pdrl.node.events import EventLog
from p2pdrl.testing.fake_node import FakeNode
from p2pdrl.transport.certificates import Authority, Credentials, is_issued_by
from p2pdrl.transport.http.listener import Listener
from p2pdrl.transport.http_transport import HttpTransport
from p2pdrl.transport.limits import TransportLimits
from p2pdrl.transport.protocol import Address
from p2pdrl.transport.tls import client_context, unproven_context

KEY, NEW = b"the swarm's key", b"its next key"
OWNER, OTHER, ALICE, BOB = (Identity(name * 32) for name in (b"o", b"x", b"a", b"b"))
SWARM = "0123456789abcdef"
CLOCK = SystemClock()


class InvitingNode:
    """A node's API behind its real port."""

    def __init__(self, folder: Path, identity: Identity = OWNER, *keys: bytes) -> None:
        self.identity = identity
        self.keys = list(keys or (KEY,))
        self.operators: list[tuple[bytes, str]] = []
        self.node = FakeNode(swarm_key=self.keys[0])
        self.node.node_id = identity.node_id
        self.inviter = self.node.inviter = Inviter(
            folder,
            node_id=identity.node_id,
            swarm_id=SWARM,
            keys=lambda: self.keys,
            members=lambda: [self.address, "10.0.0.9:7700"],
            clock=CLOCK,
            operators=lambda: self.operators,
        )
        limits = TransportLimits(shutdown_grace_s=0.05)
        self.transport = HttpTransport(
            identity.node_id, SWARM, identity.tls(self.keys), clock=CLOCK, limits=limits
        )
        self.listener = Listener(limits, CLOCK, self.transport.counters)

    async def start(self) -> InvitingNode:
        app = web.Application(client_max_size=1 << 20)
        self.transport.mount(app)
        mount(app, self.node, CLOCK)
        self.address = str(await self.listener.listen(app, "127.0.0.1", 0, has_key=True))
        await self.transport.start()
        return self

    def use(self, *keys: bytes) -> None:
        self.keys = list(keys)
        self.transport.use_keys(keys, anew=True)

    def invite(self, *roles: str, seeds: list[str] | None = None) -> InviteLine:
        members = seeds or self.inviter.members()
        return self.inviter.create(roles, 600.0, members=members)[1]  # type: ignore[arg-type]

    async def post(self, path: str, body: bytes, tls: ssl.SSLContext | None = None) -> tuple[int, Any]:
        scheme = "https" if tls is not None else "http"
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{scheme}://{self.address}{path}", data=body, ssl=tls or True) as answer,
        ):
            return answer.status, json.loads(await answer.read())

    async def close(self) -> None:
        await self.transport.close()
        await self.listener.close()


@pytest.fixture
async def owner(tmp_path: Path) -> AsyncIterator[InvitingNode]:
    made = await InvitingNode(tmp_path / "owner").start()
    yield made
    await made.close()


@pytest.fixture(autouse=True)
def folders(tmp_path: Path) -> None:
    for name in ("owner", "other", "alice"):
        (tmp_path / name).mkdir()


def client(identity: Identity = ALICE) -> InviterClient:
    return InviterClient(OWNER.node_id, identity, CLOCK)


async def join(tmp_path: Path, invite: InviteLine | None, identity: Identity = ALICE) -> InvitedMember | None:
    events = EventLog(100, CLOCK)
    return await as_member(tmp_path / "alice", identity, invite, name="alice", events=events, clock=CLOCK)


# Redeeming


async def test_the_newcomer_is_a_member_by_tls_then(owner: InvitingNode, tmp_path: Path) -> None:
    member = await join(tmp_path, owner.invite("actor"))
    assert member is not None
    assert member.roles == {"actor"}
    assert member.grant.members == (owner.address, "10.0.0.9:7700")
    tls = ALICE.tls(member.credentials)
    transport = HttpTransport(ALICE.node_id, SWARM, tls, clock=CLOCK)
    await transport.start()
    where = Address.parse(owner.address)
    with pytest.raises(PeerRefusedError, match="nothing is served"):  # so it was let in, that far
        await transport.call(where, OWNER.node_id, "nothing", b"", deadline_s=5)
    await transport.close()
    (kept,) = owner.inviter.all()
    assert kept.node_name == "alice"


async def test_it_needs_no_invite_after_a_restart(owner: InvitingNode, tmp_path: Path) -> None:
    invite = owner.invite()
    first = await join(tmp_path, invite)
    assert first == read_membership(tmp_path / "alice")
    assert await join(tmp_path, None) == first
    assert await join(tmp_path, invite) == first, "the line may stay where it is"
    path = tmp_path / "alice" / "membership.json"
    assert path.stat().st_mode & 0o777 == 0o600
    assert invite.secret.hex() not in path.read_text()


async def test_a_restart_waits_for_nobody(owner: InvitingNode, tmp_path: Path) -> None:
    first = await join(tmp_path, owner.invite())
    await owner.close()
    async with asyncio.timeout(5):
        assert await join(tmp_path, None) == first


async def test_without_an_invite_it_is_no_member(tmp_path: Path) -> None:
    assert await join(tmp_path, None) is None


async def test_another_invite_gives_other_roles(owner: InvitingNode, tmp_path: Path) -> None:
    await join(tmp_path, owner.invite("actor"))
    member = await join(tmp_path, owner.invite("actor", "learner"))
    assert member is not None
    assert member.roles == {"actor", "learner"}


async def test_the_folder_of_another_swarms_member_is_left_alone(owner: InvitingNode, tmp_path: Path) -> None:
    await join(tmp_path, owner.invite())
    elsewhere = msgspec.structs.replace(owner.invite(), swarm=b"x" * 8)
    with pytest.raises(UsageError, match=r"member of another swarm.*--data-dir"):
        await join(tmp_path, elsewhere)


async def test_a_refusal_is_told_in_the_inviters_words(owner: InvitingNode, tmp_path: Path) -> None:
    invite = owner.invite()
    await client(BOB).redeem(invite, owner.address, "bob")
    with pytest.raises(JoinRefusedError, match="doesn't take this node in: the invite was used already"):
        await join(tmp_path, invite)
    assert read_membership(tmp_path / "alice") is None


async def test_the_secret_goes_to_the_inviter_alone(tmp_path: Path, owner: InvitingNode) -> None:
    """Another member is at the first address: it is passed over before anything was sent."""
    other = await InvitingNode(tmp_path / "other", OTHER).start()
    other.node.inviter = None
    invite = owner.invite(seeds=[other.address, owner.address])
    with pytest.raises(PeerUnreachableError, match="isn't the one that has invited us"):
        await client().redeem(invite, other.address, "alice")
    member = await join(tmp_path, invite)
    assert member is not None
    assert member.grant.members[0] == owner.address
    assert sum(other.transport.counters.refused.values()) == 0
    await other.close()


async def test_the_inviter_has_to_be_of_the_invites_swarm(owner: InvitingNode) -> None:
    """As the certificate that it shows is of the authority which the line names, or nothing is sent."""
    invite = msgspec.structs.replace(owner.invite(), authority=b"f" * 32)
    with pytest.raises(PeerRefusedError, match="key was replaced since"):
        await client().redeem(invite, owner.address, "alice")
    assert [kept.node_key for kept in owner.inviter.all()] == [""]


async def test_an_authority_that_the_inviter_tells_and_doesnt_show_is_not_enough(
    owner: InvitingNode,
) -> None:
    invite = owner.invite()
    owner.transport.use_keys([NEW], anew=True)  # it names the old authority, and shows the new one
    with pytest.raises(PeerRefusedError, match="doesn't prove that it is of the invite's swarm"):
        await client().redeem(invite, owner.address, "alice")
    assert [kept.node_key for kept in owner.inviter.all()] == [""]


async def test_nobody_there_is_told_and_tried_again(owner: InvitingNode, tmp_path: Path) -> None:
    invite = owner.invite(seeds=["127.0.0.1:1"])
    with pytest.raises(PeerUnreachableError, match=r"127.0.0.1:1: (connect call failed|connection refused)"):
        await client().redeem(invite, "127.0.0.1:1", "alice")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await join(tmp_path, invite)


async def test_a_grant_for_somebody_else_isnt_taken(
    owner: InvitingNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = owner.inviter.redeem
    for change, words in [
        ({"certificate": Authority(KEY).certify(BOB.public_key)}, "another node's"),
        ({"certificate": Authority(NEW).certify(ALICE.public_key)}, "of no authority"),
        ({"certificate": b"junk"}, "another node's"),
        ({"authorities": (b"junk",)}, "an authority that is none"),
        ({"authorities": (Authority(KEY).certificate, b"junk")}, "an authority that is none"),
        ({"authorities": (Authority(NEW).certificate,)}, "of no authority"),
        ({"operators": ((bytes(32), "\x1b[2J"),)}, "can't be read"),
        ({"swarm": "f" * 16}, "another swarm"),
    ]:
        monkeypatch.setattr(
            owner.inviter,
            "redeem",
            lambda *args, change=change, **given: msgspec.structs.replace(real(*args, **given), **change),
        )
        with pytest.raises(WireError, match=words):
            await client().redeem(owner.invite(), owner.address, "alice")


# The API


def request(owner: InvitingNode, invite: InviteLine, identity: Identity = ALICE) -> bytes:
    proof = identity.sign(redeem_proof(OWNER.node_id, invite.secret))
    return msgspec.json.encode(RedeemRequest(invite.secret, identity.public_key, "alice", proof))


async def test_a_secret_in_the_open_is_refused(owner: InvitingNode) -> None:
    status, said = await owner.post("/v1/invites/redeem", request(owner, owner.invite()))
    assert (status, said["error"]) == (403, "secrets go over TLS alone: use https://")


@pytest.mark.parametrize(
    ("body", "status"),
    [(b"", 400), (b"{}", 400), (b"[" * 5000, 413), (b"[" * 3000, 400), (b'{"secret": 7}', 400)],
)
async def test_bodies_are_bounded_and_checked(owner: InvitingNode, body: bytes, status: int) -> None:
    for path in ("/v1/invites/redeem", "/v1/invites/renew"):
        assert (await owner.post(path, body, client_context([KEY])))[0] == status


async def test_names_are_fit_to_be_printed(owner: InvitingNode) -> None:
    invite = owner.invite()
    body = request(owner, invite).replace(b'"alice"', b'"a\\u001b[2J"')
    status, said = await owner.post("/v1/invites/redeem", body, unproven_context())
    assert status == 400
    assert "can't be printed" in said["error"]


async def test_who_tries_too_often_has_to_wait(owner: InvitingNode) -> None:
    tls = unproven_context()
    seen: list[int] = []
    while 429 not in seen and len(seen) < 5 * TRIES_AT_ONCE:  # some come back while a busy machine answers
        seen.append((await owner.post("/v1/invites/redeem", b"{}", tls))[0])
    assert seen[: int(TRIES_AT_ONCE)] == [400] * int(TRIES_AT_ONCE)
    assert seen[-1] == 429


async def test_two_at_once_get_one_membership(owner: InvitingNode) -> None:
    invite = owner.invite()
    people = [Identity(bytes([number]) * 32) for number in range(8)]
    ends = await asyncio.gather(
        *(client(who).redeem(invite, owner.address, "x") for who in people), return_exceptions=True
    )
    good = [end for end in ends if not isinstance(end, Exception)]
    assert len(good) == 1
    assert {end.status for end in ends if isinstance(end, PeerRefusedError)} == {409}


# What the membership says of the node


def member_of(*roles: str, until_s: float | None = None, members: tuple[str, ...] = ()) -> InvitedMember:
    certificate = Authority(KEY).certify(ALICE.public_key, roles or None, until_s)
    grant = Grant(SWARM, certificate, (Authority(KEY).certificate,), (), members)
    return InvitedMember(OWNER.node_id, "", grant)


def test_an_actor_takes_the_roles_that_it_may_have() -> None:
    fitted = member_of("actor", members=("10.0.0.1:7700",)).fitted(NodeConfig())
    assert fitted.roles == ("actor",)
    assert not fitted.promote, "it may not learn, also when nobody is left who does"
    assert fitted.peers == ("10.0.0.1:7700",)
    assert fitted.listen == "0.0.0.0:7700", "others have to reach it"


def test_roles_within_the_limits_may_be_chosen() -> None:
    member = member_of("actor", "learner", "replay")
    assert member.fitted(NodeConfig()).roles == ("actor", "learner", "replay")
    assert member.fitted(NodeConfig(roles=("learner",))).roles == ("learner",)
    assert member.fitted(NodeConfig()).promote
    with pytest.raises(UsageError, match="as actor and learner and replay alone, and can't be server"):
        member.fitted(NodeConfig(roles=("learner", "server")))


def test_without_limits_nothing_changes_but_where_to_dial() -> None:
    own = NodeConfig(peers=("10.0.0.7:1",), listen="10.0.0.8:7700")
    fitted = member_of(members=("10.0.0.1:7700",)).fitted(own)
    assert fitted == msgspec.structs.replace(own, peers=("10.0.0.7:1", "10.0.0.1:7700"))


@pytest.mark.parametrize(
    ("members", "listen"),
    [
        (("127.0.0.1:7700", "[::1]:7701", "localhost:7702"), None),
        (("[fd00::1]:7700",), "[::]:7700"),
        (("box.example:7700",), "0.0.0.0:7700"),
    ],
)
def test_it_listens_where_the_others_can_reach_it(members: tuple[str, ...], listen: str | None) -> None:
    assert member_of(members=members).fitted(NodeConfig()).listen == listen


def test_when_it_ends_can_be_told() -> None:
    assert member_of(until_s=4e9).until_s == 4e9
    assert member_of().until_s is None


def test_a_damaged_membership_is_told(tmp_path: Path) -> None:
    (tmp_path / "membership.json").write_text('{"inviter": 7}')
    with pytest.raises(StorageError, match="damaged: move it away"):
        read_membership(tmp_path)


# A replaced key


class Followed:
    """A renewal that a test runs round by round, and what it has the node use."""

    def __init__(self, owner: InvitingNode, member: InvitedMember, folder: Path) -> None:
        self.used: list[tuple[Credentials, bool]] = []
        self.events = EventLog(100, CLOCK)
        self.renewal = Renewal(
            member,
            folder,
            client(),
            lambda node_id: [owner.address] if node_id == OWNER.node_id else [],
            lambda credentials, dropped: self.used.append((credentials, dropped)),
            self.events,
        )


async def test_a_replaced_key_is_followed_step_by_step(owner: InvitingNode, tmp_path: Path) -> None:
    member = await join(tmp_path, owner.invite("actor"))
    assert member is not None
    followed = Followed(owner, member, tmp_path / "alice")
    old, new = Authority(KEY).certificate, Authority(NEW).certificate
    await followed.renewal.once()
    assert followed.used == []
    for keys, authorities, dropped in [
        ((KEY, NEW), (old, new), False),
        ((NEW, KEY), (new, old), False),
        ((NEW,), (new,), True),
    ]:
        owner.use(*keys)
        await followed.renewal.once()
        credentials, was_dropped = followed.used[-1]
        assert (credentials.authorities, was_dropped) == (authorities, dropped)
        assert is_issued_by(credentials.certificate, authorities[0])
        kept = read_membership(tmp_path / "alice")
        assert kept is not None
        assert (kept.credentials, kept.roles) == (credentials, {"actor"})
    assert len(followed.used) == 3


async def test_who_was_away_all_the_while_is_renewed_at_its_start(
    owner: InvitingNode, tmp_path: Path
) -> None:
    """The old key is refused by all by then, and it knows no other; its inviter knows it still."""
    await join(tmp_path, owner.invite())
    owner.use(NEW)
    member = await join(tmp_path, None)
    assert member is not None
    assert member.grant.authorities == (Authority(NEW).certificate,)


async def test_a_revoked_node_is_not_renewed(owner: InvitingNode, tmp_path: Path) -> None:
    member = await join(tmp_path, owner.invite())
    assert member is not None
    owner.inviter.revoke(owner.inviter.all()[0].id)
    owner.use(NEW)
    followed = Followed(owner, member, tmp_path / "alice")
    await followed.renewal.once()
    assert followed.used == []
    (told,) = followed.events.since(0)
    assert "doesn't renew this membership: the invite of your node was revoked" in told["text"]


async def test_an_inviter_that_isnt_there_changes_nothing(owner: InvitingNode, tmp_path: Path) -> None:
    member = await join(tmp_path, owner.invite())
    assert member is not None
    await owner.close()
    followed = Followed(owner, msgspec.structs.replace(member, inviter=OWNER.node_id), tmp_path / "alice")
    followed.renewal.member = msgspec.structs.replace(
        member, grant=msgspec.structs.replace(member.grant, members=(owner.address,))
    )
    await followed.renewal.once()
    assert followed.used == []
    assert read_membership(tmp_path / "alice") == member


async def test_an_inviter_that_is_banned_is_not_followed(owner: InvitingNode, tmp_path: Path) -> None:
    """It would name operators who lift the ban."""
    member = await join(tmp_path, owner.invite())
    assert member is not None
    followed = Followed(owner, member, tmp_path / "alice")
    bans: dict[str, str] = {OWNER.node_id: "banned from this swarm"}
    named: list[tuple[Operator, ...]] = []
    followed.renewal.barred = bans.get
    followed.renewal.use_operators = named.append
    mine = Operator(BOB.public_key, "bob")
    owner.operators = [(mine.public_key, mine.name)]
    owner.use(NEW)
    await followed.renewal.once()
    assert (followed.used, named, read_membership(tmp_path / "alice")) == ([], [], member)
    (told,) = followed.events.since(0)
    assert "isn't asked to renew this membership, it is banned from this swarm" in told["text"]
    bans.clear()
    await followed.renewal.once()
    assert named == [(mine,)]
    owner.operators = []
    owner.use(KEY)
    await followed.renewal.once()
    assert named == [(mine,)], "nobody isn't taken for everybody"
    assert followed.renewal.member.operators == (mine,)
    assert followed.used[-1][0].authorities == (Authority(KEY).certificate,)


async def test_nor_is_it_after_a_restart(owner: InvitingNode, tmp_path: Path) -> None:
    operator = Operator(BOB.public_key, "bob")
    owner.operators = [(operator.public_key, operator.name)]
    member = await join(tmp_path, owner.invite())
    assert member is not None
    records = SwarmRecords(Verifier(SWARM, verify), (operator,))
    for by, followed in ((ALICE, True), (BOB, False)):
        bans = records.compose("bans", BansSetting((Ban(OWNER.node_id),)), by)
        (tmp_path / "alice" / "swarm.json").write_bytes(msgspec.json.encode({"records": [bans]}))
        owner.use(NEW if followed else KEY)
        again = await join(tmp_path, None)
        assert again is not None
        assert again.grant.authorities == (Authority(NEW).certificate,)
    (tmp_path / "alice" / "swarm.json").write_bytes(b"{")
    again = await join(tmp_path, None)
    assert again is not None
    assert again.grant.authorities == (Authority(KEY).certificate,)
