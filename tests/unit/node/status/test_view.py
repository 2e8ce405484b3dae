"""What people may have a node do that has no say in the swarm's settings."""

from __future__ import annotations

import msgspec
import pytest

from p2pdrl.config.task import StopConfig
from p2pdrl.errors import ConfigError
from p2pdrl.membership.identity import Identity
from p2pdrl.membership.operators import BansSetting, Operator
from p2pdrl.node.settings import PauseSetting, StopSetting
from p2pdrl.node.status.view import ApiView

ALICE, BOB = Identity(b"a" * 32), Identity(b"b" * 32)


def view_of(context, events):
    return ApiView(
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


async def test_an_operator_is_told_that_nobody_takes_a_record_from_an_invited_actor(context, events):
    """The node itself would follow it, and the command seem done."""
    records = context.membership.records
    records.use_roots((Operator(ALICE.public_key, "alice"),))
    view = view_of(context, events)
    view.attach(context, None, None, None, lambda roles: None)
    signed = msgspec.msgpack.encode(records.compose("bans", BansSetting(), ALICE, 5.0))
    context.allowed = frozenset({"actor"})
    with pytest.raises(ConfigError, match="invited as actor alone, without a say in that: ask another node"):
        await view.submit(signed)
    assert records.get("bans") is None
    context.allowed = frozenset({"actor", "learner"})
    assert await view.submit(signed) == {"epoch": 2, "proposer": ALICE.node_id}


async def test_a_swarm_that_is_done_takes_no_command_that_would_do_nothing(context, events, follower):
    """Nodes that stay up afterwards would take the record, and say that the swarm trains again."""
    view = view_of(context, events)
    view.attach(context, None, None, follower, lambda roles: None)
    await view.pause(paused=True, swarm=False)
    await view.pause(paused=False, swarm=False)
    assert context.state == "training"
    records = context.membership.records
    records.use_roots(tuple(Operator(one.public_key, name) for one, name in ((ALICE, "alice"), (BOB, "bob"))))
    stop = StopSetting(StopConfig(env_steps=100), 0.0)
    await view.submit(msgspec.msgpack.encode(records.compose("stop", stop, BOB, 4.0)))
    follower.halt("mean return 475 is reached")
    for swarm in (False, True):
        with pytest.raises(ConfigError, match="the swarm is done; a pause counts for nothing any more"):
            await view.pause(paused=False, swarm=swarm)
    with pytest.raises(ConfigError, match="the swarm is done; its stop condition counts for nothing"):
        await view.set_stop(["env_steps=1000000"])
    for key, value in (("pause", PauseSetting(False)), ("stop", StopSetting(StopConfig(), 0.0))):
        signed = msgspec.msgpack.encode(records.compose(key, value, ALICE, 5.0))
        with pytest.raises(ConfigError, match="the swarm is done"):
            await view.submit(signed)
    await view.submit(msgspec.msgpack.encode(records.compose("stop", stop, ALICE, 6.0)))
    assert records.get("stop").proposer == ALICE.node_id, "an operator signs what another wrote"
