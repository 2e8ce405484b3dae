"""What people may have a node do that has no say in the swarm's settings."""

from __future__ import annotations

import msgspec
import pytest

from p2pdrl.errors import ConfigError
from p2pdrl.membership.identity import Identity
from p2pdrl.membership.operators import BansSetting, Operator
from p2pdrl.node.status.view import ApiView

ALICE = Identity(b"a" * 32)


async def test_an_operator_is_told_that_nobody_takes_a_record_from_an_invited_actor(context, events):
    """The node itself would follow it, and the command seem done."""
    records = context.membership.records
    records.use_roots((Operator(ALICE.public_key, "alice"),))
    view = ApiView(
        name="me",
        node_id=context.node_id,
        token="t",
        swarm_keys=(),
        keyed=True,
        open_metrics=False,
        data_dir=context.data_dir,
        events=events,
        leave=lambda reason: None,
    )
    view.attach(context, None, None, None, lambda roles: None)
    signed = msgspec.msgpack.encode(records.compose("bans", BansSetting(), ALICE, 5.0))
    context.allowed = frozenset({"actor"})
    with pytest.raises(ConfigError, match="invited as actor alone, without a say in that: ask another node"):
        await view.submit(signed)
    assert records.get("bans") is None
    context.allowed = frozenset({"actor", "learner"})
    assert await view.submit(signed) == {"epoch": 2, "proposer": ALICE.node_id}
