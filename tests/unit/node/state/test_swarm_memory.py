"""What outlives a night on which all nodes of a swarm with operators were off."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from p2pdrl.config.strategy import LocalConfig
from p2pdrl.config.task import StopConfig, TaskConfig
from p2pdrl.ids import founded_by, new_lineage
from p2pdrl.membership.identity import Identity
from p2pdrl.membership.operators import Ban, BansSetting, Operator, OperatorsSetting
from p2pdrl.node import settings
from p2pdrl.node.bootstrap.first_state import first_state
from p2pdrl.node.bootstrap.joining import SwarmOrigin
from p2pdrl.node.settings import HaltSetting, ModeSetting, PauseSetting, StopSetting
from p2pdrl.node.state.swarm_memory import RememberedSwarm, SwarmMemory, recall_members, recall_stop

ROOT, FOUNDER = Identity(b"r" * 32), Identity(b"f" * 32)
ALICE = Operator(ROOT.public_key, "alice")
BOB = Operator(Identity(b"b" * 32).public_key, "bob")
LINEAGE = new_lineage(FOUNDER.public_key)
STRANGER = "9" * 32


@pytest.fixture
def make(make_membership, context, training):
    """This node anew, with nothing but its files."""

    def started():
        membership = make_membership(1, [ALICE])
        context.membership, context.swarm_id = membership, membership.records.swarm_id
        training.lineage, training.lineage_steps = LINEAGE, 10
        return membership

    return started


def command(membership, key, value):
    membership.submit(membership.records.compose(key, value, ROOT, 5.0))


async def remembered(context, training) -> RememberedSwarm:
    await SwarmMemory(context).write(training)
    memory = await SwarmMemory(context).read()
    assert memory is not None
    return memory


async def test_a_swarm_that_is_resumed_knows_all_that_was_commanded(make, context, training):
    before = make()
    before.follow(LINEAGE)
    command(before, settings.OPERATORS, OperatorsSetting((BOB,)))
    command(before, settings.BANS, BansSetting((Ban(STRANGER),)))
    stop = StopSetting(StopConfig(env_steps=7), 1.0)
    for key, value in (
        (settings.STOP, stop),
        (settings.MODE, ModeSetting.of(LocalConfig())),
        (settings.PAUSE, PauseSetting(True)),
        (settings.PAUSE, PauseSetting(False)),
        (settings.HALT, HaltSetting("command", "enough", 2, ALICE.id)),
    ):
        command(before, key, value)
    held = {record.key: record for record in before.records.all()}
    memory = await remembered(context, training)
    assert memory.settled
    after = make()
    recall_members(context, memory)
    assert after.records.operators == (ALICE, BOB)
    assert set(after.records.bans) == {STRANGER}
    after.follow(LINEAGE)
    recall_stop(context, memory)
    assert {record.key for record in after.records.all()} == held.keys() - {"halt"}
    assert settings.decode(after.records.get(settings.STOP).value, StopSetting) == stop
    assert not after.records.merge(held["halt"]), "it had its effect, whoever sends it again"


async def test_a_nodes_own_configuration_changes_nothing_that_operators_do(make, context, training, events):
    before = make()
    before.follow(LINEAGE)
    command(before, settings.STOP, StopSetting(StopConfig(env_steps=7), 1.0))
    memory = await remembered(context, training)
    after = make()
    after.follow(LINEAGE)
    context.config = SimpleNamespace(
        task=TaskConfig(stop=StopConfig(env_steps=99)), node=SimpleNamespace(mode_from_config=True)
    )
    recall_stop(context, memory)
    held = settings.decode(after.records.get(settings.STOP).value, StopSetting)
    assert held.stop.env_steps == 7
    assert "p2pdrl stop set" in events.since(0)[-1]["text"]


@pytest.mark.parametrize(
    ("founder", "settled", "stays"), [(False, True, True), (False, False, False), (True, False, True)]
)
async def test_a_lineage_whose_settings_nobody_here_could_write_isnt_resumed(
    make, context, training, founder, settled, stays
):
    membership = make()
    lineage = new_lineage(membership.public_key) if founder else LINEAGE
    origin = SwarmOrigin("resumed", TaskConfig(), None, lineage, settled)
    state, found = await first_state(context, training, origin, None)
    assert state is None
    assert (found == lineage) == stays
    assert stays or founded_by(found, membership.public_key)
