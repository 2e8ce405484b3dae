"""The mode that outlives a night on which all nodes were off."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest

from p2pdrl.config.root import Config
from p2pdrl.config.strategy import AdpsgdConfig, LocalConfig, ServerSyncConfig
from p2pdrl.config.task import TaskConfig, task_hash
from p2pdrl.errors import StorageError
from p2pdrl.node import settings
from p2pdrl.node.bootstrap.joining import JoinInfo, SwarmOrigin
from p2pdrl.node.record_follower import RecordFollower
from p2pdrl.node.settings import ModeSetting
from p2pdrl.node.state.swarm_memory import SavedMode, recall_mode

LINEAGE = "ab" * 8
TASK = TaskConfig(strategy=AdpsgdConfig(weight=0.3))
FOUNDED = SwarmOrigin("founded", TASK, None)
CHECKPOINT = SimpleNamespace(meta={"lineage": LINEAGE})
SERVERS = ServerSyncConfig(servers=2)


def joined(lineage: str = LINEAGE) -> SwarmOrigin:
    return SwarmOrigin("joined", TASK, JoinInfo(TASK, task_hash(TASK), lineage, 10, 0.0))


@pytest.fixture
def saved(tmp_path) -> SavedMode:
    return SavedMode(tmp_path, task_hash(TASK), "swarm")


@pytest.fixture
def stranger(make_membership):
    """Another node, which proposed all of the swarm's modes."""
    return make_membership(2)


@pytest.fixture
def record(stranger):
    """The third mode: servers."""
    for strategy in (AdpsgdConfig(), LocalConfig()):
        stranger.propose(settings.MODE, ModeSetting.of(strategy))
    return stranger.propose(settings.MODE, ModeSetting.of(SERVERS))


@pytest.fixture
def kept(saved, record) -> SavedMode:
    saved.write(record, SERVERS)
    return saved


def mode(membership):
    held = membership.records.get(settings.MODE)
    return None if held is None else settings.decode(held.value, ModeSetting).strategy


def last_text(events) -> str:
    return str(events.since(0)[-1]["text"])


def test_a_record_comes_back_as_it_was(kept, record):
    assert kept.read() == record
    assert kept.path.stat().st_mode & 0o777 == 0o600
    assert msgspec.json.decode(kept.path.read_bytes())["mode"] == "server-sync"
    assert [path.name for path in kept.path.parent.iterdir()] == [kept.path.name]


def test_without_a_file_there_is_none(saved):
    assert saved.read() is None


def test_tasks_have_files_of_their_own_and_other_swarms_records_are_passed_over(tmp_path, kept):
    assert SavedMode(tmp_path, "f" * 64, "swarm").read() is None
    assert SavedMode(tmp_path, task_hash(TASK), "another swarm").read() is None


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b'{"format": 1}',
        b'{"format": 3, "what": "a later release says"}',
        b" " * 65537,
        b"[" * 60000,
    ],
    ids=["empty", "cut", "no text", "list", "bare", "newer", "long", "deep"],
)
def test_a_damaged_file_is_an_error(kept, data):
    kept.path.write_bytes(data)
    with pytest.raises(StorageError, match="can't be read"):
        kept.read()


def test_a_file_cut_anywhere_is_an_error(kept):
    whole = kept.path.read_bytes().rstrip()
    for length in range(0, len(whole), 7):
        kept.path.write_bytes(whole[:length])
        with pytest.raises(StorageError):
            kept.read()


def test_a_record_of_something_else_is_an_error(saved, stranger):
    record = stranger.propose(settings.PAUSE, settings.PauseSetting(True))
    saved.write(record, SERVERS)
    with pytest.raises(StorageError, match="no mode"):
        saved.read()


def test_a_disk_that_does_not_take_it_is_an_error(saved, record):
    saved.path.parent.parent.joinpath("modes").write_text("a file where the folder should be")
    with pytest.raises(StorageError, match="keep the mode"):
        saved.write(record, SERVERS)


async def test_a_founder_goes_on_in_the_last_mode_under_its_epoch(context, membership, kept, record, events):
    await recall_mode(context, kept, FOUNDED, None)
    assert membership.records.get(settings.MODE) == record
    assert events.since(0)[-1]["kind"] == "mode-recalled"
    assert "server-sync (servers=2)" in last_text(events)
    assert "gossip: adpsgd" in last_text(events)


async def test_a_founder_whose_mode_is_the_configurations_says_nothing(context, membership, kept, kinds):
    task = TaskConfig(strategy=SERVERS)
    await recall_mode(context, kept, SwarmOrigin("founded", task, None), None)
    assert mode(membership) == SERVERS
    assert kinds() == []


async def test_on_request_the_configurations_mode_overrules_the_last_one(context, membership, kept, record):
    context.config = msgspec.convert({"node": {"mode_from_config": True}}, Config)
    await recall_mode(context, kept, FOUNDED, CHECKPOINT)
    held = membership.records.get(settings.MODE)
    assert mode(membership) == TASK.strategy
    assert (held.epoch, held.proposer) == (record.epoch + 1, membership.identity.node_id)


async def test_a_newer_mode_that_others_hold_stays(context, membership, stranger, kept):
    newer = stranger.propose(settings.MODE, ModeSetting.of(LocalConfig()))
    membership.records.merge(newer, trusted=True)
    await recall_mode(context, kept, joined(), CHECKPOINT)
    assert membership.records.get(settings.MODE) == newer


@pytest.mark.parametrize(
    ("lineage", "checkpoint", "recalls"),
    [
        (LINEAGE, CHECKPOINT, True),
        ("cd" * 8, CHECKPOINT, False),
        (LINEAGE, None, False),
        ("", CHECKPOINT, False),
    ],
)
async def test_a_member_recalls_its_mode_only_for_what_it_trained_before(
    context, membership, kept, lineage, checkpoint, recalls, kinds
):
    await recall_mode(context, kept, joined(lineage), checkpoint)
    assert mode(membership) == (SERVERS if recalls else None)
    assert kinds() == []


async def test_a_damaged_file_leaves_the_configurations_mode_and_is_told(
    context, membership, kept, events, kinds
):
    kept.path.write_bytes(b"rubbish")
    await recall_mode(context, kept, FOUNDED, CHECKPOINT)
    assert mode(membership) is None
    assert kinds() == ["mode-unreadable"]
    assert "gossip: adpsgd" in last_text(events)
    assert events.since(0)[-1]["level"] == "warning"


@pytest.mark.parametrize("forged", ["value", "epoch", "proposer"])
async def test_a_forged_record_is_not_followed(context, membership, kept, record, forged, kinds):
    changes = {
        "value": msgspec.msgpack.encode(ModeSetting.of(LocalConfig())),
        "epoch": record.epoch + 7,
        "proposer": membership.identity.node_id,
    }
    bad = msgspec.structs.replace(record, **{forged: changes[forged]})
    kept.write(bad, SERVERS)
    await recall_mode(context, kept, FOUNDED, CHECKPOINT)
    assert membership.records.get(settings.MODE) is None
    assert kinds() == ["mode-unreadable"]


class Reports:
    """Nobody's."""

    def newest_mode(self):
        return 0, ""


async def test_every_mode_that_is_followed_is_kept(context, membership, training, stranger, saved, kinds):
    follower = RecordFollower(context, Reports())
    follower.saved_mode = saved
    membership.propose(settings.MODE, ModeSetting.of(SERVERS))
    await follower.follow(training)
    assert saved.read() == membership.records.get(settings.MODE)
    training.cannot = (LocalConfig,)
    theirs = None
    for strategy in (AdpsgdConfig(), LocalConfig(), AdpsgdConfig(weight=0.1)):
        theirs = stranger.propose(settings.MODE, ModeSetting.of(strategy))
    membership.records.merge(theirs)
    await follower.follow(training)
    assert saved.read() == theirs


async def test_a_mode_that_cannot_work_here_is_kept_as_well(context, membership, training, saved, kinds):
    """The swarm is in it; others can."""
    follower = RecordFollower(context, Reports())
    follower.saved_mode = saved
    training.cannot = (ServerSyncConfig,)
    record = membership.propose(settings.MODE, ModeSetting.of(SERVERS))
    await follower.follow(training)
    assert kinds() == ["mode-failed"]
    assert saved.read() == record


async def test_a_bad_disk_is_a_warning_and_the_mode_is_followed(context, membership, training, saved, kinds):
    saved.path.parent.write_text("a file where the folder should be")
    follower = RecordFollower(context, Reports())
    follower.saved_mode = saved
    membership.propose(settings.MODE, ModeSetting.of(SERVERS))
    await follower.follow(training)
    assert training.used[-1][0] == SERVERS
    assert kinds() == ["mode", "mode-unsaved"]
