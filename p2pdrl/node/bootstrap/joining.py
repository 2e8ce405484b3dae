"""How a node comes to a task and a lineage: it founds a swarm, or takes over the task of one.

A node without seeds or memories founds; `founding` has the rules for all others.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass
from typing import Literal

import msgspec

from p2pdrl.config.task import TaskConfig, task_hash
from p2pdrl.errors import UsageError, WireError
from p2pdrl.group.compatibility import Natural, Short
from p2pdrl.transport import codec
from p2pdrl.transport.protocol import Address

__all__ = [
    "JoinInfo",
    "SwarmOrigin",
    "advertised",
    "decode_info",
    "direct",
    "refuse_task",
    "seed_address",
]

_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")


class JoinInfo(msgspec.Struct, frozen=True):
    """What a member tells a newcomer beside the view and the records."""

    task: TaskConfig
    task_hash: str
    lineage: Short
    """Empty while that member has no state itself."""
    lineage_steps: Natural
    policy_version: Natural
    founded_at: float


@dataclass(frozen=True)
class SwarmOrigin:
    """Where this node's task and lineage come from."""

    how: Literal["founded", "resumed", "joined"]
    task: TaskConfig
    info: JoinInfo | None
    """What the member through which we joined told; None when founding or resuming."""
    lineage: str = ""
    """The remembered one that is resumed; empty otherwise."""


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


def decode_info(data: bytes) -> JoinInfo:
    """Read what a member told.

    Raises:
        WireError: it can't be read, or its hash isn't that of its task.
    """
    info: JoinInfo = codec.decode(data, JoinInfo, "swarm's task (of another release?)")
    if task_hash(info.task) != info.task_hash:
        raise WireError("the swarm's task doesn't have the hash that was told")
    return info


def refuse_task(wanted_hash: str, task: TaskConfig, our_hash: str) -> str | None:
    """Say why a newcomer that wants ``wanted_hash`` isn't let in; None when it is.

    Args:
        wanted_hash: hash of the task that the newcomer insists on; empty when it takes any.
        task: our task.
        our_hash: its hash.
    """
    if wanted_hash in ("", our_hash):
        return None
    return (
        f"this swarm trains {task.subject} with {task.algorithm.__struct_config__.tag} "
        f"(task {our_hash[:8]}), "
        f"you ask for another task ({wanted_hash[:8]}): leave out your task options to take the swarm's"
    )


def advertised(given: str | None, bound: Address, seeds: tuple[str, ...]) -> Address:
    """Return the address that others reach us at.

    Args:
        given: what the person says, with or without a port.
        bound: where we listen; a wildcard is replaced by the address that faces the seeds.
        seeds: addresses of other nodes.
    """
    if given is not None:
        return Address.parse(given, bound.port)
    if bound.host not in ("0.0.0.0", "::"):  # noqa: S104 - compared, not bound
        return bound
    towards = Address.parse(seeds[0]) if seeds else Address("192.0.2.1", 9)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((towards.host, towards.port))
            return Address(str(probe.getsockname()[0]), bound.port)
        except OSError:
            return Address("127.0.0.1", bound.port)


def direct(given: str | None) -> bool:
    """Tell whether others reach this machine itself where they reach its node, so at any port of it.

    Not so behind a router or in a container that passes one port on. Names that aren't the machine's own are
    looked up nowhere, and count as somebody else's.

    Args:
        given: the address that the person says others reach us at; without one it is an address of our own.
    """
    if given is None:
        return True
    host = Address.parse(given).host
    own = socket.gethostname().lower()
    if host.lower() in (own, own.partition(".")[0], "localhost"):
        return True
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return False
    family = socket.AF_INET6 if ip.version == 6 else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))  # only what is ours can be bound
    except OSError:
        return False
    return not ip.is_unspecified
