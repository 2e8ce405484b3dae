"""Joining the swarm through seeds: every seed and every address behind it is tried, for ever.

A seed is at rest while each address behind it is a living member or ourselves. Any other is tried again: each
second or two by a node that is in no swarm, with a back-off of 1 to 30 s by one that is, so two islands that
were started from the same seeds become one. Names are resolved anew at each try.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from p2pdrl.clock import Clock
from p2pdrl.config.node import TRAINS
from p2pdrl.errors import PeerRefusedError, PeerTimeoutError, PeerUnreachableError, TransportError, UsageError
from p2pdrl.membership.events import NOT_ITSELF, Effect, Welcomed
from p2pdrl.membership.messages import JoinRequest, Starting, Welcome, decode, encode
from p2pdrl.membership.records import MemberRecord, refuse_address, spoken_in
from p2pdrl.membership.state import Membership
from p2pdrl.transport.dial import ip_of, system_resolve
from p2pdrl.transport.protocol import Address, Refusal, Transport
from p2pdrl.versions import ProtocolRange, refuse_protocol

__all__ = [
    "JoinHooks",
    "Joiner",
    "Listens",
    "Resolver",
    "Seed",
    "SeedBook",
    "Sighting",
    "judge_newcomer",
    "knows_no_address",
    "listens",
    "resolve",
]

BACKOFF_MIN_S = 1.0
BACKOFF_MAX_S = 30.0
BACKOFF_ALONE_S = 1.5
"""The longest back-off of a node that is in no swarm: on a cluster all start at once, and some take long."""
TRIES_ALONE_PER_S = 20.0
"""Such a node tries no more than so many of its seeds a second."""
RECHECK_S = 1.0
RESOLVE_AGAIN_S = 30.0


@dataclass(slots=True)
class Seed:
    """One entry of ``--peers``, or an address remembered from the last run.

    Attributes:
        hint: remembered; dropped once the swarm was met.
        failures: tries in a row that failed.
        next_at: monotonic time of the next try.
        answered: node id of who answered, by address.
        refusal: reason of the last refusal.
        trouble: why the last try failed, in a few words; empty when it didn't.
    """

    address: Address
    hint: bool = False
    failures: int = 0
    next_at: float = 0.0
    answered: dict[Address, str] = field(default_factory=dict)
    refusal: str | None = None
    trouble: str = ""

    @property
    def is_name(self) -> bool:
        """True when it has to be resolved."""
        return ip_of(self.address.host) is None


class SeedBook:
    """All seeds of a node: those that the person gave, and hints remembered from the last run."""

    def __init__(self, seeds: Iterable[Address], hints: Iterable[Address], rng: random.Random) -> None:
        given = dict.fromkeys(seeds)
        self._seeds = [Seed(address) for address in given]
        self._seeds += [Seed(address, hint=True) for address in dict.fromkeys(hints) if address not in given]
        self._rng = rng
        self._heard_of = 0

    def __len__(self) -> int:
        return len(self._seeds)

    @property
    def all(self) -> list[Seed]:
        """Every seed."""
        return list(self._seeds)

    def hear_of(self, address: Address, at_most: int) -> None:
        """Take ``address`` in as a hint, unless it is known or there are ``at_most`` such already."""
        if all(seed.address != address for seed in self._seeds) and self._heard_of < at_most:
            self._heard_of += 1
            self._seeds.append(Seed(address, hint=True))

    def due(self, now: float) -> list[Seed]:
        """Seeds that are to be tried now."""
        return [seed for seed in self._seeds if seed.next_at <= now]

    def wait_s(self, now: float) -> float:
        """Seconds until some seed is due, at most `RECHECK_S`."""
        if not self._seeds:
            return RECHECK_S
        return min(RECHECK_S, max(0.01, min(seed.next_at for seed in self._seeds) - now))

    def todo(
        self,
        seed: Seed,
        addresses: Iterable[Address],
        own_id: str,
        at_rest: Callable[[Address, str | None], bool],
    ) -> list[Address]:
        """Return which ``addresses`` behind ``seed`` have to be tried: neither ours nor of living members.

        Args:
            addresses: what it resolves to now.
            own_id: our node id.
            at_rest: tells whether a living member has that address or that id.
        """
        current = list(dict.fromkeys(addresses))
        seed.answered = {address: who for address, who in seed.answered.items() if address in current}
        return [
            address
            for address in current
            if seed.answered.get(address) != own_id and not at_rest(address, seed.answered.get(address))
        ]

    def succeeded(self, seed: Seed, now: float) -> None:
        """Everything behind ``seed`` is a living member or ourselves."""
        seed.failures = 0
        seed.refusal = None
        seed.trouble = ""
        seed.next_at = now + (RESOLVE_AGAIN_S if seed.is_name else RECHECK_S)

    def failed(self, seed: Seed, now: float, *, joined: bool) -> None:
        """Something behind ``seed`` didn't answer: back off, a little only until we ``joined`` a swarm."""
        longest_s = BACKOFF_MAX_S
        if not joined:
            longest_s = min(BACKOFF_MAX_S, max(BACKOFF_ALONE_S, len(self._seeds) / TRIES_ALONE_PER_S))
        backoff_s = min(longest_s, BACKOFF_MIN_S * 2.0 ** min(seed.failures, 10))
        seed.failures += 1
        seed.next_at = now + backoff_s * self._rng.uniform(0.8, 1.0)

    def soon(self, seed: Seed, now: float) -> None:
        """The node there is only just starting: ask again without a back-off."""
        seed.failures = 0
        seed.next_at = now + RECHECK_S * self._rng.uniform(0.5, 0.7)

    def refused(self, seed: Seed, reason: str, now: float) -> bool:
        """The peer refused: try again slowly; True when the reason is new."""
        news = seed.refusal != reason
        seed.refusal = reason
        seed.next_at = now + BACKOFF_MAX_S * self._rng.uniform(0.8, 1.0)
        return news

    def drop_hints(self) -> None:
        """Forget the hints: the swarm was met."""
        self._seeds = [seed for seed in self._seeds if not seed.hint]
        self._heard_of = 0


JOIN_DEADLINE_S = 5.0
LISTENS_DEADLINE_S = 1.0
LONGEST_TROUBLE = 200
MAX_HEARD_OF = 64
MAX_TOLD_OF = 8
"""Nodes that are starting too, told to one that asks while we are; as many as `Starting` takes."""
NOT_YET = frozenset({409, 429, 503})
"""Refusals that mean "try again soon", and aren't told as a refusal to take us in."""

Resolver = Callable[[str], Awaitable[list[str]]]


async def resolve(host: str) -> list[str]:
    """Return every A and AAAA record of ``host``; raises ``OSError`` when the name isn't known."""
    return list(dict.fromkeys(await system_resolve(host, 0)))


Listens = Callable[[Address], Awaitable[bool]]


async def listens(address: Address) -> bool:
    """Tell whether ``address`` takes connections, be it without ever answering."""
    try:
        async with asyncio.timeout(LISTENS_DEADLINE_S):
            _, writer = await asyncio.open_connection(address.host, address.port)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


@dataclass(frozen=True, slots=True)
class Sighting:
    """What came of the last try of one address.

    Attributes:
        address: as the person wrote it, or as remembered.
        given: whether the person gave it.
        kind: "pending" (no try has ended yet), "silent" (nobody listens there), "frozen" (it takes
            connections and doesn't answer), "answered" (somebody is there who doesn't take us in),
            "starting" (a node that is in no swarm yet), "own" (ourselves), "joined".
        began_s: monotonic time at which that try began.
        node_id: who is starting there.
        starting: what it said.
        words: the trouble.
    """

    address: str
    given: bool
    kind: Literal["pending", "silent", "frozen", "answered", "starting", "own", "joined"]
    began_s: float = float("-inf")
    node_id: str = ""
    starting: Starting | None = None
    words: str = ""


@dataclass(frozen=True, slots=True)
class JoinHooks:
    """The daemon's part in joins.

    Attributes:
        meta: what our request to join carries (task hash ...).
        check_join: judges a newcomer's ``meta``: None takes it in, words refuse it (403); it may
            raise `Refusal` with another status (503: not yet, come again).
        info: what our welcome of a newcomer carries (task, lineage ...).
        check_welcome: judges the ``info`` of the member that takes us in: None accepts, words
            refuse and leave ``joined`` unset. That member knows us by then: end with a `leave`.
        starting: what a newcomer is answered while we are in no swarm ourselves; None once we are.
        lineage: the lineage that the ``info`` of the member that takes us in tells; empty for none.
        on_refused: told ``(address, reason)`` of every refusal that is news, on either side.
    """

    meta: Callable[[], bytes] = lambda: b""
    check_join: Callable[[bytes], str | None] = lambda content: None
    info: Callable[[], bytes] = lambda: b""
    check_welcome: Callable[[bytes], str | None] = lambda content: None
    starting: Callable[[], Starting | None] = lambda: None
    lineage: Callable[[bytes], str] = lambda content: ""
    on_refused: Callable[[str, str], None] = lambda address, reason: None


def knows_no_address(record: MemberRecord) -> bool:
    """True when a newcomer listens everywhere and has to be told where it was seen."""
    try:
        ip = ip_of(Address.parse(record.address).host)
    except UsageError:
        return False
    return ip is not None and ip.is_unspecified


def judge_newcomer(join: JoinRequest, sender: str, hooks: JoinHooks, spoken: ProtocolRange) -> None:
    """Let a newcomer in, or refuse it in plain words.

    Args:
        spoken: the protocols that this node speaks.

    Raises:
        Refusal: it isn't what it says, speaks another protocol, or the daemon doesn't want it.
    """
    record = join.record
    if record.id != sender:
        raise Refusal(403, "a node can only join in its own name")
    if record.state != "alive":
        raise Refusal(400, "a node that left can't join")
    theirs = spoken_in(record.tags, record.protocol)
    if (why := refuse_protocol(spoken, theirs)) is not None:
        hooks.on_refused(record.address, f"we refused it: {why}")
        raise Refusal(403, refuse_protocol(theirs, spoken) or why)
    reason = hooks.check_join(join.meta)
    if reason is not None:
        hooks.on_refused(record.address, f"we refused it: {reason}")
        raise Refusal(403, reason)


class Joiner:
    """Tries the seeds, for ever or once.

    Args:
        hints: addresses remembered from the last run.
        core: our membership, which takes in what a welcome brings.
        carry_out: does what the core wants done.

    Attributes:
        joined: set once some member took us in, or we took one in.
        own_address_among_seeds: True once a seed that the person gave turned out to be ourselves.
    """

    def __init__(
        self,
        *,
        transport: Transport,
        clock: Clock,
        seeds: Iterable[Address],
        hints: Iterable[Address],
        hooks: JoinHooks,
        core: Membership,
        carry_out: Callable[[list[Effect]], None],
        rng: random.Random,
        resolver: Resolver,
        listens: Listens,
    ) -> None:
        self._transport = transport
        self._clock = clock
        self._book = SeedBook(seeds, hints, rng)
        self._hooks = hooks
        self._core = core
        self._carry_out = carry_out
        self._resolver = resolver
        self._listens = listens
        self._sightings: dict[tuple[Address, Address], Sighting] = {}
        """By seed, and by the address behind it; a name that can't be resolved stands for itself."""
        self.joined = asyncio.Event()
        self.own_address_among_seeds = False
        self.declined: set[Address] = set()
        """Where a member took us in, whose swarm isn't one for us."""

    @property
    def node_id(self) -> str:
        """Our own id."""
        return self._core.me.id

    async def run(self) -> None:
        """Try whatever is due, for ever."""
        while True:
            due = self._book.due(self._clock.monotonic())
            await asyncio.gather(*(self._try(seed) for seed in due))
            if self.joined.is_set():
                self._book.drop_hints()
            await asyncio.sleep(self._book.wait_s(self._clock.monotonic()))

    async def once(self) -> bool:
        """Try every seed now; True when we are in the swarm after that."""
        await asyncio.gather(*(self._try(seed) for seed in self._book.all))
        return self.joined.is_set()

    def heard_of(self, address: Address) -> None:
        """Ask a node that asked us, or that we were told of, while none was in a swarm."""
        self._book.hear_of(address, MAX_HEARD_OF)

    def others_starting(self, asker: str) -> tuple[str, ...]:
        """Addresses of nodes other than ``asker`` that are starting, those first that may be founding.

        Who has asked and wasn't asked back yet may be about to found, and the latest asked last. Then those
        that said so, then who remembers the most and has the smallest id.
        """

        def order(sighting: Sighting) -> tuple[int, int, str]:
            said = sighting.starting
            if said is None:
                return (0, 0, "")
            return (1 if said.phase in ("claiming", "decided") else 2, -said.env_steps, sighting.node_id)

        known = reversed([s for s in self.sightings() if s.kind in ("starting", "pending")])
        first = sorted((sighting for sighting in known if sighting.address != asker), key=order)
        return tuple(dict.fromkeys(sighting.address for sighting in first))[:MAX_TOLD_OF]

    def sightings(self) -> list[Sighting]:
        """What came of the last try of each address of each seed."""
        found: list[Sighting] = []
        for seed in self._book.all:
            mine = [sighting for (of, _), sighting in self._sightings.items() if of == seed.address]
            found += mine or [Sighting(str(seed.address), not seed.hint, "pending")]
        return found

    def _saw(
        self,
        seed: Seed,
        address: Address,
        kind: Literal["silent", "frozen", "answered", "starting", "own", "joined"],
        began_s: float,
        *,
        node_id: str = "",
        starting: Starting | None = None,
    ) -> None:
        held = self._sightings.get((seed.address, address))
        if held is None or held.began_s <= began_s:
            self._sightings[seed.address, address] = Sighting(
                str(address), not seed.hint, kind, began_s, node_id, starting, seed.trouble
            )

    def refusals(self) -> dict[str, str]:
        """The last refusal of each seed that refuses us."""
        return {str(seed.address): seed.refusal for seed in self._book.all if seed.refusal is not None}

    def troubles(self) -> dict[str, str]:
        """Why the last try of each seed failed, where it did: the name isn't known, nobody listens."""
        return {str(seed.address): seed.trouble for seed in self._book.all if seed.trouble}

    async def _try(self, seed: Seed) -> None:
        """Ask every address behind ``seed`` that isn't at rest."""
        seed.next_at = float("inf")
        began_s = self._clock.monotonic()
        addresses = await self._resolve(seed)
        if not addresses:
            self._saw(seed, seed.address, "silent", began_s)
        me = self._core.me
        own = [address for address in addresses if str(address) == me.address]
        for address in own:
            self.own_address_among_seeds |= not seed.hint
            seed.answered[address] = me.id
            self._saw(seed, address, "own", began_s)
        behind = {*addresses} or {seed.address}
        for of, address in list(self._sightings):
            if of == seed.address and address not in behind:
                del self._sightings[of, address]  # the name means other addresses now
        todo = self._book.todo(seed, addresses, me.id, self._at_rest)
        fine = await asyncio.gather(*(self._ask(seed, address) for address in todo))
        now = self._clock.monotonic()
        if addresses and all(fine):
            self._book.succeeded(seed, now)
        elif any(
            of == seed.address and sighting.kind == "starting"
            for (of, _), sighting in self._sightings.items()
        ):
            self._book.soon(seed, now)
        elif seed.next_at == float("inf"):
            self._book.failed(seed, now, joined=self.joined.is_set())

    def _at_rest(self, address: Address, node_id: str | None) -> bool:
        """Gossip may bring members before any welcome did: until one has, everybody is asked."""
        return self.joined.is_set() and self._core.lives(str(address), node_id)

    async def _resolve(self, seed: Seed) -> list[Address]:
        if not seed.is_name:
            return [seed.address]
        try:
            return [Address(ip, seed.address.port) for ip in await self._resolver(seed.address.host)]
        except (OSError, UnicodeError) as error:  # the latter for labels that IDNA doesn't take
            seed.trouble = (getattr(error, "strerror", None) or str(error)).lower()[:LONGEST_TROUBLE]
            return []

    async def _ask(self, seed: Seed, address: Address) -> bool:
        """Ask ``address`` to take us in; True when a member did, or it is ourselves."""
        join = JoinRequest(self._core.me, self._hooks.meta())
        began_s = self._clock.monotonic()
        try:
            answer = await self._transport.call(
                address, None, "swim/join", encode(join), deadline_s=JOIN_DEADLINE_S, lane="probe"
            )
            welcome = decode(answer.meta)
        except PeerRefusedError as error:
            seed.trouble = error.reason[:LONGEST_TROUBLE]
            if error.status not in NOT_YET and error.status < 500:
                self._refused(seed, address, error.reason)
            remembered_elsewhere = seed.hint and error.status in NOT_ITSELF
            self._saw(seed, address, "silent" if remembered_elsewhere else "answered", began_s)
            return False
        except TransportError as error:
            seed.trouble = str(error)[:LONGEST_TROUBLE]
            self._saw(seed, address, await self._failure(address, error), began_s)
            return False
        if answer.sender == join.record.id:
            seed.answered[address] = answer.sender
            self.own_address_among_seeds |= not seed.hint
            self._saw(seed, address, "own", began_s)
            return True
        if isinstance(welcome, Starting) and answer.sender is not None:
            seed.trouble = "it is only just starting itself"
            self._saw(seed, address, "starting", began_s, node_id=answer.sender, starting=welcome)
            for told in welcome.others:
                if refuse_address(told, address.host) is None:
                    self.heard_of(Address.parse(told))
            return False
        powerless = self._takes_nobody_in(seed, answer.sender)
        self._saw(seed, address, "answered", began_s)
        if not isinstance(welcome, Welcome) or answer.sender is None or powerless:
            return False
        seed.answered[address] = answer.sender
        if self._learn_address(welcome):
            return False  # ask again, now that we know where we live
        reason = self._hooks.check_welcome(welcome.join_info)
        if reason is not None:
            self._refused(seed, address, reason)
            self.declined.add(address)
            return False
        self.declined.discard(address)
        now = self._clock.monotonic()
        lineage = self._hooks.lineage(welcome.join_info)
        if lineage and not self._core.swarm.lineage:  # once we have a state, that one's settings count
            self._carry_out(self._core.follow(lineage, now))
        self._saw(seed, address, "joined", began_s)
        welcomed = Welcomed(answer.sender, str(address), welcome, address.host)
        self._carry_out(self._core.handle(welcomed, now))
        self.joined.set()
        return True

    async def _failure(
        self, address: Address, error: TransportError
    ) -> Literal["silent", "frozen", "answered"]:
        """What a failed try shows: a process that is stopped still takes connections."""
        if isinstance(error, PeerUnreachableError) and not error.sent:
            return "silent"
        if isinstance(error, PeerTimeoutError):
            return "frozen" if await self._listens(address) else "silent"
        return "answered"  # it broke off, or said what isn't of our protocol

    def _takes_nobody_in(self, seed: Seed, member: str | None) -> bool:
        """Whether a member's certificate doesn't let it tell newcomers what they are to train."""
        allowed = None if member is None else self._transport.roles_of(member)
        if allowed is None or allowed & TRAINS:
            return False
        seed.trouble = f"it is certified for {' and '.join(sorted(allowed))} alone: name another member"
        return True

    def _learn_address(self, welcome: Welcome) -> bool:
        """Take the host that the seed saw, when we don't know our own."""
        me = self._core.me
        if not knows_no_address(me) or not welcome.observed_host:
            return False
        address = str(Address(welcome.observed_host, Address.parse(me.address).port))
        self._carry_out(self._core.update_self(self._clock.monotonic(), address))
        return True

    def _refused(self, seed: Seed, address: Address, reason: str) -> None:
        if self._book.refused(seed, reason, self._clock.monotonic()):
            self._hooks.on_refused(str(address), reason)
