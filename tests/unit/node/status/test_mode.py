"""Who follows the mode that the record says."""

from __future__ import annotations

import msgspec
import pytest

from p2pdrl.config.strategy import AdpsgdConfig, ServerSyncConfig
from p2pdrl.errors import CheckpointError, ConfigError
from p2pdrl.node import settings
from p2pdrl.node.accounting.report_table import PeerReport
from p2pdrl.node.record_follower import RecordFollower
from p2pdrl.node.settings import ModeSetting
from p2pdrl.node.status.meters import Meters
from p2pdrl.node.status.reporter import StatusReporter
from p2pdrl.node.status.view import ApiView
from p2pdrl.strategies.local import LocalStrategy
from p2pdrl.strategies.protocol import Merged, RoundReport

from ..signing import node_id, said

B, C, D = map(node_id, range(11, 14))


@pytest.fixture
def figures(talking, membership, training) -> StatusReporter:
    """A node among three others, of which one is dead."""
    membership.views += [membership.view(B, "bob"), membership.view(C, "carol")]
    membership.views += [membership.view(D, "dave", "dead")]
    talking.training, talking.state = training, "training"
    membership.follow(training.lineage)
    return StatusReporter(talking)


@pytest.fixture
def view(figures, context, events) -> ApiView:
    return view_of(context, figures, events)


def view_of(context, figures, events) -> ApiView:
    made = ApiView(
        node_id="a" * 32,
        name="me", token="t" * 64, swarm_keys=(), keyed=False, open_metrics=False,
        data_dir="/data", events=events,
        leave=lambda reason: None,
    )  # fmt: skip
    made.attach(
        context,
        figures,
        Meters(context, figures, None),
        RecordFollower(context, figures),
        lambda roles: None,
    )
    return made


def hear(context, clock, node, stamp, strategy, seq=1):
    report = PeerReport(id=node, boot=1, seq=seq, state="training", mode_epoch=stamp, strategy=strategy)
    context.gossip.table.merge([said(report)], clock.monotonic())


async def test_before_there_is_a_record(figures):
    document = figures.mode()
    assert (document["record"], document["mode"], document["protocol"]) == (None, "gossip", "adpsgd")
    assert not any(member["follows"] for member in document["members"])


async def test_who_follows(figures, context, membership, training, clock):
    record = membership.propose(settings.MODE, ModeSetting.of(AdpsgdConfig(weight=0.3)))
    stamp = settings.stamp(record.epoch, record.proposer)
    training.mode.epoch = stamp
    hear(context, clock, B, stamp, "adpsgd")
    document = figures.mode()
    assert (document["mode"], document["protocol"], document["epoch"]) == ("gossip", "adpsgd", 1)
    assert document["options"] == {"weight": 0.3}
    assert document["facts"] == {"role": "worker"}
    assert document["since"] is not None
    assert document["record"] == {
        "epoch": 1, "proposer": membership.identity.node_id, "proposer_name": "me", "mode": "gossip",
        "protocol": "adpsgd", "options": {"weight": 0.3}, "at": None,
    }  # fmt: skip
    follows = {member["name"]: member["follows"] for member in document["members"]}
    assert follows == {"me": True, "bob": True, "carol": False}, "the dead don't count"
    assert document["members"][2]["state"] == "unheard"
    hear(context, clock, C, stamp, "local")
    carol = figures.mode()["members"][2]
    assert (carol["epoch"], carol["protocol"], carol["follows"]) == (1, "local", False), "it can't run it"
    # The same epoch by another proposer isn't the same mode.
    hear(context, clock, B, settings.stamp(1, "0" * 32), "adpsgd", seq=2)
    assert not figures.mode()["members"][1]["follows"]
    msgspec.json.encode(document)


async def test_the_row_of_a_peer_tells_its_strategy(figures, context, clock):
    hear(context, clock, B, settings.stamp(3, B), "dsgd")
    bob = figures.peers()[1]
    assert (bob["mode_epoch"], bob["strategy"], bob["role"]) == (3, "dsgd", "")


async def test_a_person_changes_the_mode(view, membership):
    done = await view.set_mode("server-sync", ["servers=2"])
    record = membership.records.get(settings.MODE)
    assert done == {"epoch": 1, "proposer": membership.identity.node_id}
    assert settings.decode(record.value, ModeSetting) == ModeSetting.of(ServerSyncConfig(servers=2))


@pytest.mark.parametrize(
    ("mode", "sets"),
    [("pipeline", ["chunks=2"]), ("gossip", ["wieght=1"]), ("allreduce", ["backend=torch"]), ("x", [])],
)
async def test_a_bad_change_is_refused(view, membership, mode, sets):
    with pytest.raises(ConfigError):
        await view.set_mode(mode, sets)
    assert membership.records.get(settings.MODE) is None


async def test_a_node_without_a_swarm_proposes_nothing(view, context):
    context.training = None
    with pytest.raises(CheckpointError, match="still starting"):
        await view.set_mode("local", [])
    assert view.mode()["mode"] is None
    assert view.rounds() == []


async def test_before_its_state_has_a_lineage_a_node_changes_no_settings(
    context, figures, events, membership
):
    """What it proposed would be of no lineage, and lost as the node founds its swarm or joins one."""
    membership.records.follow("")
    made = view_of(context, figures, events)
    for ask in (
        lambda: made.pause(paused=True, swarm=True),
        lambda: made.pause(paused=False, swarm=True),
        lambda: made.set_mode("local", []),
    ):
        with pytest.raises(CheckpointError, match="still starting"):
            await ask()
    assert membership.records.all() == ()
    membership.follow("cd" * 8)
    await made.pause(paused=True, swarm=True)
    assert settings.decode(membership.records.get(settings.PAUSE).value, settings.PauseSetting).paused


async def test_without_training_there_is_nothing_to_hold(view, context):
    context.training = None
    with pytest.raises(CheckpointError, match="still starting"):
        await view.pause(paused=True, swarm=False)


async def test_rounds_are_counted_and_shown(view, context, training):
    meters = Meters(context, StatusReporter(context), None)
    report = RoundReport("ok", (Merged(context.node_id, 0.5), Merged(B, 0.5, 4)), bytes_in=10, round_trips=1)
    training.accounting.round(report)
    meters.round(report)
    assert view.rounds()[0]["merged"][1]["name"] == "bob"
    assert view.status()["accounting"]["adpsgd"]["rounds"] == {"ok": 1}
    assert meters.registry.value("rounds_total", outcome="ok") == 1
    assert meters.registry.value("staleness_versions_sum") == 4, "ourselves don't count"


async def test_strategies_without_facts_have_none():
    assert dict(LocalStrategy().facts) == {}
