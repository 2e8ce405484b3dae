"""Brings up what a node needs before it knows its task: folder, identity, its one port, membership."""

from __future__ import annotations

import ipaddress
import random
import re
import resource
import socket
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
from aiohttp import web

import p2pdrl
from p2pdrl.api.keyfile import read_swarm_keys
from p2pdrl.api.routes import mount
from p2pdrl.atomic import storage_error
from p2pdrl.clock import Clock
from p2pdrl.config.node import LimitsConfig, NodeConfig, tags_of
from p2pdrl.config.root import Config
from p2pdrl.errors import UsageError
from p2pdrl.ids import short, swarm_id_from_name
from p2pdrl.membership.identity import Identity
from p2pdrl.membership.invites import Inviter
from p2pdrl.membership.joining import JoinHooks
from p2pdrl.membership.known_members import KnownMembers
from p2pdrl.membership.parameters import MembershipConfig
from p2pdrl.membership.records import SwarmRecord
from p2pdrl.membership.service import MembershipService
from p2pdrl.membership.state import open_core
from p2pdrl.node.accounting.claims import ClaimBounds
from p2pdrl.node.accounting.facts import FactSigner
from p2pdrl.node.accounting.progress_tracker import ProgressTracker
from p2pdrl.node.bootstrap.datadir import RATES_FILE, DataDir
from p2pdrl.node.bootstrap.invited import InvitedMember, InviterClient, Renewal
from p2pdrl.node.bootstrap.key_watch import KeyWatch
from p2pdrl.node.bootstrap.lan import LanDiscovery
from p2pdrl.node.context import NodeContext
from p2pdrl.node.events import EventLog
from p2pdrl.node.port_mapping import PortMapping
from p2pdrl.node.reachability import Reachability
from p2pdrl.node.status.view import ApiView
from p2pdrl.transport.certificates import Credentials
from p2pdrl.transport.dial import ip_of, is_loopback, is_own
from p2pdrl.transport.http.guard import guard_middleware
from p2pdrl.transport.http.listener import Listener
from p2pdrl.transport.http_transport import HttpTransport
from p2pdrl.transport.limits import TransportLimits
from p2pdrl.transport.protocol import DEFAULT_PORT, Address
from p2pdrl.transport.rate import NodeRates, RateLimits

__all__ = ["Opened", "advertised", "direct", "moved_to", "open_node", "seed_address"]


_WILDCARDS = ("0.0.0.0", "::")  # noqa: S104 - compared, not bound
_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")


def seed_address(text: str) -> Address:
    """Read the address of a peer that a person has given.

    A name that isn't known now is fine: it may be known later.

    Raises:
        UsageError: it can't be the address of anything.
    """
    address = Address.parse(text)
    if address.port == 0:
        raise UsageError(f"--peers {text[:80]!r}: nobody listens on port 0: write HOST:PORT")
    if not _can_be_host(address.host):
        raise UsageError(
            f"--peers {text[:80]!r}: {address.host[:80]!r} is neither an IP address nor a machine's name: "
            "write HOST:PORT, or [IPV6]:PORT"
        )
    return address


def _can_be_host(host: str) -> bool:
    """Whether it is an IP address, or could be a name; no name ends with a label of digits alone."""
    labels = host.removesuffix(".").split(".")
    try:
        if ":" in host:
            ipaddress.IPv6Address(host)
        elif labels[-1].isdigit():
            ipaddress.IPv4Address(host)
    except ValueError:
        return False
    return ":" in host or all(map(_LABEL.fullmatch, labels))


def advertised(
    given: str | None,
    bound: Address,
    seeds: tuple[str, ...],
    *,
    source_ip: Callable[[Address, socket.AddressFamily], str | None] | None = None,
    own_ips: Callable[[socket.AddressFamily], list[str]] | None = None,
) -> Address:
    """Return the address that others reach us at: the given one (a port is added where it has none) or ours.

    A wildcard that we listen on is replaced by the address that faces the seeds, else the internet, else, on
    a network that leads nowhere else, by the first of this machine's that isn't loopback.

    Args:
        source_ip: the IP of ours that faces an address.
        own_ips: the IPs of this machine's interfaces.
    """
    if given is not None:
        return Address.parse(given, bound.port)
    if bound.host not in _WILDCARDS:
        return bound
    towards = Address.parse(seeds[0]) if seeds else Address("192.0.2.1", 9)
    family = socket.AF_INET6 if bound.host == "::" else socket.AF_INET
    facing = (source_ip or _source_ip)(towards, family)
    if facing is None and not seeds:
        facing = next(iter((own_ips or _own_ips)(family)), None)
    return Address(facing or "127.0.0.1", bound.port)


def _own_ips(family: socket.AddressFamily) -> list[str]:
    """Of the interfaces that are up, but loopback and addresses of one link."""
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    found = [
        ipaddress.ip_address(one.address)
        for name, addresses in psutil.net_if_addrs().items()
        for one in addresses
        if name in up and one.family == family and "%" not in one.address
    ]
    return [str(ip) for ip in found if not (ip.is_loopback or ip.is_link_local)]


def moved_to(
    now: Address,
    towards: Iterable[Address],
    *,
    ours: Callable[[str], bool] | None = None,
    source_ip: Callable[[Address], str | None] | None = None,
) -> Address | None:
    """Return our new address when the machine no longer has the IP that others reach us at.

    None while it has, or has no other that faces anybody; loopback replaces nothing, for it is there whenever
    a cable isn't.

    Args:
        now: our address, an IP of this machine's.
        towards: peers that we want to be reached by; those written as names are passed over.
        ours: tells whether an IP is this machine's.
        source_ip: the IP of ours that faces a peer.
    """
    if (ours or is_own)(now.host):
        return None
    for peer in towards:
        if ip_of(peer.host) is None or (":" in peer.host) != (":" in now.host):
            continue
        found = (source_ip or _source_ip)(peer)
        if found is not None and not ipaddress.ip_address(found).is_loopback:
            return Address(found, now.port)
    return None


def _source_ip(towards: Address, family: socket.AddressFamily | None = None) -> str | None:
    """The IP of ours from which packets go to a peer; None without a way there."""
    if family is None:
        family = socket.AF_INET6 if ":" in towards.host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((towards.host, towards.port))  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return None


def direct(given: str | None) -> bool:
    """Tell whether others reach this machine itself where they reach its node, so at any port of it.

    Not so behind a router or in a container that passes one port on. Names that aren't the machine's own are
    looked up nowhere, and count as somebody else's. Without a given address it is one of our own.
    """
    if given is None:
        return True
    host = Address.parse(given).host
    own = socket.gethostname().lower()
    if host.lower() in (own, own.partition(".")[0], "localhost"):
        return True
    return is_own(host)


_MOST_FILES = 65_536
_FILES_BESIDE_CONNECTIONS = 96
"""What a node has open: logs, checkpoints, children, connections of its own to peers."""


def raise_open_files() -> int:
    """Allow this process as many open files as it may allow itself; return how many those are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError):  # macOS has a further bound
            return soft
        return wanted
    return soft if soft != resource.RLIM_INFINITY else _MOST_FILES


def _limits(config: LimitsConfig, files: int, events: EventLog) -> TransportLimits:
    """Bounds of the transport, for no more connections than there can be open files."""
    max_connections = config.max_connections
    possible = max(files // 4, files - _FILES_BESIDE_CONNECTIONS)
    if possible < max_connections:
        text = (
            f"this process may open {files} files only, so it takes {possible} connections at a time and not "
            f"{max_connections}: raise the limit (ulimit -n, or LimitNOFILE of systemd)"
        )
        events.emit("few-files", text, level="warning")
    connections = min(possible, max_connections)
    return TransportLimits(
        max_connections=connections,
        max_relayed=config.relayed_members,
        max_tunnels=connections // 4,
        relay_bytes_s=config.relay_bytes_s,
    )


def _own_names(advertise: str | None) -> set[str]:
    return set() if advertise is None else {Address.parse(advertise).host.lower()}


async def _serve(
    stack: AsyncExitStack,
    view: ApiView,
    transport: HttpTransport,
    *,
    config: NodeConfig,
    events: EventLog,
    clock: Clock,
) -> tuple[Listener, Address]:
    """Bind the port, serve peers and people there, and dial; without a swarm key on loopback only.

    Raises:
        UsageError: the port is taken, or open to others without a key.
    """
    limits = transport.limits

    def starved(why: str) -> None:
        text = f"can't take a connection: {why.lower()}; raise the limit of open files (ulimit -n)"
        events.remind("starved", text)

    listener = Listener(limits, clock, transport.counters, on_starved=starved)
    stack.push_async_callback(transport.close)
    stack.push_async_callback(listener.close)
    guard = guard_middleware(lambda: _own_names(config.advertise), transport.counters)
    app = web.Application(middlewares=[guard], client_max_size=limits.max_api_body_bytes)
    transport.mount(app)
    mount(app, view, clock)
    await transport.start()
    given = config.listen
    wanted = Address("127.0.0.1", DEFAULT_PORT) if given is None else Address.parse(given)
    bound = await listener.listen(
        app,
        wanted.host,
        wanted.port,
        port_is_default=given is None,
        has_key=view.keyed,
        insecure=config.insecure,
    )
    return listener, bound


def _rates(data_dir: str, limits: LimitsConfig) -> NodeRates | None:
    """What this node's processes keep to, in a file of its data folder; None without bounds.

    Raises:
        StorageError: the file can't be made.
    """
    if not (limits.upload_bytes_s or limits.download_bytes_s):
        return None
    path = Path(data_dir) / RATES_FILE
    try:
        return NodeRates(RateLimits(str(path), limits.upload_bytes_s, limits.download_bytes_s), anew=True)
    except OSError as error:
        raise storage_error("share the node's rates in", path, error) from error


@dataclass(frozen=True)
class Opened:
    """A node that listens and knows who it is."""

    data: DataDir
    context: NodeContext
    view: ApiView
    remembers: bool
    """Whether members of an earlier run are on disk."""
    may_move: bool
    """Whether we listen on all addresses of the machine, and tell others one that was chosen here."""
    key_watch: KeyWatch | Renewal | None
    """Follows the swarm's key while it is replaced; None for a swarm without one."""


def _tell_other_protocol(events: EventLog, node_id: str, why: str) -> None:
    events.emit("refused", f"we refused node {short(node_id)}: {why}", level="warning", node=node_id)


async def open_node(
    stack: AsyncExitStack,
    config: Config,
    data: DataDir,
    identity: Identity,
    member: InvitedMember | None = None,
    *,
    events: EventLog,
    clock: Clock,
    hooks: JoinHooks,
    leave: Callable[[str], None],
    on_record: Callable[[SwarmRecord], None],
    on_twin: Callable[[str], None],
) -> Opened:
    """Bind the port, make membership (not started yet).

    Args:
        data: the node's folder, which is locked.
        member: what a node that was invited holds in place of the swarm's key.
        on_twin: told the address of another node that runs with our identity.

    Raises:
        UsageError: bad key file, malformed peer, taken port, open address without a key, missing extra.
        StorageError: the data folder can't be used.
    """
    node = config.node
    _require_extras(node)
    seeds = [seed_address(peer) for peer in node.peers]
    keys = None if node.swarm_key_file is None else read_swarm_keys(node.swarm_key_file)
    good = () if keys is None else keys.good(clock.wall())
    if keys is not None:
        swarm_id, roots = keys.swarm_id, keys.operators
    elif member is not None:
        swarm_id, roots = member.grant.swarm, member.operators
    else:
        swarm_id, roots = swarm_id_from_name(node.swarm), ()
    if data.picked_other:
        events.emit("data-dir", f"the first data folder is in use; this node takes {data.path}")
    view = ApiView(
        name=node.name or "",
        node_id=identity.node_id,
        token=data.token(),
        swarm_keys=good,
        keyed=bool(good) or member is not None,
        open_metrics=node.open_metrics,
        data_dir=str(data.path),
        events=events,
        leave=leave,
    )
    limits = _limits(node.limits, raise_open_files(), events)
    tls = identity.tls(good) if good else None if member is None else identity.tls(member.credentials)
    if good:
        view.inviter = Inviter(
            data.path,
            node_id=identity.node_id,
            swarm_id=swarm_id,
            keys=lambda: view.swarm_keys,
            members=view.meeting_points,
            clock=clock,
            operators=lambda: [(one.public_key, one.name) for one in core.swarm.roots],
            refuse=lambda node_id: core.swarm.why_banned(node_id),  # noqa: PLW0108 - it isn't there yet
        )
    rates = _rates(view.data_dir, node.limits)
    if rates is not None:
        stack.callback(rates.close)
    transport = HttpTransport(
        identity.node_id,
        swarm_id,
        tls,
        hides=not node.trusted_network,
        clock=clock,
        limits=limits,
        allowed_hosts=lambda: _own_names(node.advertise),
        rates=rates,
    )
    listener, bound = await _serve(stack, view, transport, config=node, events=events, clock=clock)
    transport.relayed.take = listener.take

    def use(now: tuple[bytes, ...] | Credentials, dropped: bool) -> None:
        transport.use_keys(now, anew=dropped)
        view.swarm_keys = () if isinstance(now, Credentials) else now
        if dropped:
            listener.cut()

    key_watch: KeyWatch | Renewal | None = None
    if keys is not None and node.swarm_key_file is not None:
        key_watch = KeyWatch(node.swarm_key_file, keys, use, events, clock)
    elif member is not None:
        client = InviterClient(member.inviter, identity, clock)
        key_watch = Renewal(
            member,
            data.path,
            client,
            view.addresses_of,
            use,
            events,
            barred=lambda node_id: core.swarm.why_banned(node_id),  # noqa: PLW0108 - it isn't there yet
        )
    address = advertised(node.advertise, bound, node.peers)
    name = view.name = node.name or f"{socket.gethostname()}:{bound.port}"
    known = KnownMembers(data.path)
    core = open_core(
        config=MembershipConfig.wan() if node.membership == "wan" else MembershipConfig.lan(),
        signer=identity,
        swarm_id=swarm_id,
        name=name,
        address=str(address),
        clock=clock,
        rng=random.Random(identity.node_id),
        known=known,
        tags=tags_of(node.roles, promote=node.promote),
        allowed=transport.roles_of,
        roots=roots,
        release=p2pdrl.__version__,
    )
    transport.bar(core.swarm.why_banned)
    transport.tell_other_protocols(partial(_tell_other_protocol, events))
    boot = core.me.incarnation.boot_ms
    membership = MembershipService(
        core,
        transport,
        clock,
        seeds,
        hooks=hooks,
        known=known,
        rng=random.Random(boot),
        on_record=on_record,
        on_twin=on_twin,
    )
    if key_watch is not None:
        key_watch.use_operators = membership.use_roots
    context = NodeContext(
        config=config,
        name=name,
        node_id=identity.node_id,
        swarm_id=swarm_id,
        boot=boot,
        data_dir=str(data.path),
        address=address,
        clock=clock,
        events=events,
        transport=transport,
        membership=membership,
        reachability=Reachability(membership, transport, clock, events, random.Random(boot)),
        progress_tracker=ProgressTracker(
            FactSigner(identity, swarm_id),
            boot,
            ClaimBounds(identity.node_id, node.limits.max_steps_per_s),
        ),
        began_s=clock.monotonic(),
        allowed=None if member is None else member.roles,
    )
    _tell(
        context,
        events,
        key_file=node.swarm_key_file,
        invited=member is not None,
        moved=node.listen is None and bound.port != DEFAULT_PORT,
        commanded=bool(roots) or not good,
        alone=bound.host in _WILDCARDS and is_loopback(context.address.host),
    )
    may_move = node.advertise is None and bound.host in _WILDCARDS
    return Opened(data, context, view, bool(known.members), may_move, key_watch)


def _require_extras(node: NodeConfig) -> None:
    if node.discover:
        LanDiscovery.require()
    if node.port_mapping:
        PortMapping.require()


def _tell(
    context: NodeContext,
    events: EventLog,
    *,
    key_file: str | None,
    invited: bool,
    moved: bool,
    commanded: bool,
    alone: bool,
) -> None:
    if moved:
        events.emit("port", f"port {DEFAULT_PORT} is taken; this node takes {context.address.port}")
    if alone:
        text = (
            "this machine has no address by which others reach it, so they are told "
            f"{context.address}, where they find themselves; name one with --advertise HOST:PORT"
        )
        events.emit("no-address", text, level="warning")
    if not commanded:
        text = (
            "the swarm's key names no operator, so whoever holds it can change, pause and end the swarm; "
            "`p2pdrl key rotate` with --add-operator names one"
        )
        events.emit("no-operators", text, level="warning")
    join = f"p2pdrl node --peers {context.address}" + (" --swarm-key-file FILE" if key_file else "")
    if key_file:
        join += ", or by a line that `p2pdrl invite` prints"
    if invited:
        join = "an invite by who holds the swarm's key"
    events.emit(
        "started",
        f"{context.name} ({short(context.node_id)}) listens on {context.address}; others join with: {join}",
        address=str(context.address),
        version=p2pdrl.__version__,
        data_dir=context.data_dir,
    )
