"""A node's core at the start of a run: who we are this time.

The daemon calls `open_core`; tests and the simulator build on `own_record`.
"""

from __future__ import annotations

import random

from p2pdrl.clock import Clock
from p2pdrl.ids import PROTOCOL_VERSION
from p2pdrl.membership.addresses import AddressPolicy
from p2pdrl.membership.identity import Signer, verify
from p2pdrl.membership.known_members import KnownMembers
from p2pdrl.membership.parameters import MembershipConfig
from p2pdrl.membership.records import Incarnation, MemberRecord, Verifier
from p2pdrl.membership.state import Membership

__all__ = ["open_core", "own_record"]


def own_record(signer: Signer, name: str, address: str, boot_ms: int, tags: dict[str, str]) -> MemberRecord:
    """A node's first record of this boot, unsigned."""
    return MemberRecord(
        signer.node_id,
        signer.public_key,
        name,
        address,
        Incarnation(boot_ms, 0),
        "alive",
        dict(tags),
        PROTOCOL_VERSION,
    )


def open_core(
    *,
    config: MembershipConfig,
    signer: Signer,
    swarm_id: str,
    name: str,
    address: str,
    clock: Clock,
    rng: random.Random,
    known: KnownMembers,
    tags: dict[str, str] | None = None,
    policy: AddressPolicy | None = None,
) -> Membership:
    """Make the core of a node that starts now, with a boot id greater than any before."""
    boot_ms = known.next_boot_ms(clock.wall(), config.future_s)
    return Membership(
        config=config,
        signer=signer,
        verifier=Verifier(swarm_id, verify, config.future_s),
        record=own_record(signer, name[:64], address, boot_ms, tags or {}),
        rng=rng,
        wall=clock.wall,
        now=clock.monotonic(),
        policy=policy,
    )
