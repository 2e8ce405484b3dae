from __future__ import annotations

import asyncio
import base64

import msgspec
import numpy as np
import pytest

from p2pdrl.config.node import CheckpointConfig
from p2pdrl.config.task import StopConfig, TaskConfig
from p2pdrl.errors import CheckpointError, StorageError
from p2pdrl.membership.identity import Identity
from p2pdrl.node.accounting.counters import Counts, NodeCounts
from p2pdrl.node.accounting.evaluations import Evaluation, EvaluationLog
from p2pdrl.node.accounting.facts import FactSigner
from p2pdrl.node.accounting.progress_tracker import ProgressTracker
from p2pdrl.node.bootstrap.first_state import founded_at, load_checkpoint, restore_steps
from p2pdrl.node.settings import StopSetting
from p2pdrl.node.state.checkpoints import Checkpointer, CheckpointStore, as_state, from_bytes, load
from p2pdrl.node.state.state_transfer import params_hash
from p2pdrl.tensors.board import BoardSpec
from p2pdrl.tensors.layout import Layout, TensorEntry
from p2pdrl.tensors.moments import Moments

from ..signing import counted, node_id, tracker_of

ME = node_id(10)


class FullDisk:
    """A store whose disk is full while it is said to be."""

    def __init__(self, store: CheckpointStore) -> None:
        self._store = store
        self.full = False
        self.last = store.last

    def save(self, checkpoint, *, best):
        if self.full:
            raise StorageError(f"can't write the checkpoint {self.last}: the disk is full")
        return self._store.save(checkpoint, best=best)


@pytest.fixture
def progress_tracker() -> ProgressTracker:
    made = tracker_of(10, 5)
    made.follow("ab" * 8)
    made.credit(Counts(120, 6, 3))
    made.put_moments({"obs": msgspec.msgpack.encode(Moments(9.0, np.ones(2), np.ones(2)).to_wire())})
    return made


@pytest.fixture
def store(tmp_path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", keep=2)


@pytest.fixture
def disk(store) -> FullDisk:
    return FullDisk(store)


@pytest.fixture
def curve() -> EvaluationLog:
    made = EvaluationLog()
    made.add(ME, Evaluation(100, 5, 4, 30.0, 2.0, 30.0, 0.5))
    return made


@pytest.fixture
def checkpointer(disk, training, progress_tracker, clock, events, curve) -> Checkpointer:
    return Checkpointer(
        store=disk,
        config=CheckpointConfig(every_s=1.0),
        training=training,
        progress_tracker=progress_tracker,
        clock=clock,
        events=events,
        evaluations=lambda: curve,
    )


async def test_what_a_checkpoint_holds(checkpointer, store, training, curve):
    checkpointer.stop_setting = StopSetting(StopConfig(env_steps=500), 123.0)
    checkpointer.mean_return = 40.0
    path = await checkpointer.save()
    loaded = load(store.last)
    assert path == str(store.last) == checkpointer.path
    assert loaded.params.tolist() == [1.5] * 5
    assert loaded.sidecar["adam.step"] == 7
    meta = loaded.meta
    assert msgspec.convert(meta["task"], TaskConfig) == training.task
    assert meta["params_hash"] == params_hash(np.full(5, 1.5, np.float32))
    assert (meta["policy_version"], meta["lineage"], meta["env_steps"]) == (7, "ab" * 8, 120)
    assert (meta["mean_return"], meta["best_mean_return"]) == (40.0, 40.0)
    assert founded_at(loaded, 999.0) == 123.0
    found = EvaluationLog()
    found.restore(meta["evaluations"])
    assert found.rows() == curve.rows()
    others = msgspec.msgpack.decode(base64.b64decode(meta["others_moments"]))
    assert Moments.from_wire(msgspec.msgpack.decode(others["obs"])).count == 0.0


async def test_an_heir_knows_what_was_done(checkpointer, store, progress_tracker, events):
    await checkpointer.save()
    heir = tracker_of(10, 6)
    await load_checkpoint(store, heir, events)
    assert heir.total() == progress_tracker.total() == Counts(120, 6, 3)
    heir.sign()
    assert heir.moments_digest() == {"obs": [[ME, 5, 9.0]]}


async def test_a_checkpoint_keeps_what_others_signed(checkpointer, store, progress_tracker, events):
    other = tracker_of(11, 3)
    other.follow("cd" * 8)
    other.credit(Counts(1000))
    progress_tracker.merge_counts(counted(other))
    await checkpointer.save()
    heir = tracker_of(10, 6)
    await load_checkpoint(store, heir, events)
    assert heir.steps("cd" * 8) == 1000
    assert heir.counts()["cd" * 8] == other.counts()["cd" * 8]


async def test_what_nobody_signed_is_forgotten(checkpointer):
    mine, other = Identity(b"1" * 32), Identity(b"2" * 32)
    owner = ProgressTracker(FactSigner(mine, "swarm"), 5)
    owner.follow("l0")
    owner.credit(Counts(7))
    rumour = FactSigner(other, "another swarm")
    body = msgspec.msgpack.encode(NodeCounts(Counts(10**9), 4))
    facts = {"l0": [rumour.sign("counts", "l0", body), *counted(owner)["l0"]]}
    checkpoint = await checkpointer.snapshot()
    checkpoint.meta["facts"] = base64.b64encode(msgspec.msgpack.encode(facts)).decode()
    heir = ProgressTracker(FactSigner(mine, "swarm"), 6)
    restore_steps(heir, checkpoint)
    assert heir.total() == Counts(7)


async def test_of_an_earlier_releases_checkpoint_our_own_counts_and_moments_stay(checkpointer):
    checkpoint = await checkpointer.snapshot()
    meta = checkpoint.meta
    del meta["facts"]
    meta["counts"] = {
        "l0": [[[ME, [5, 1, 1], 3, [[4, [10, 2, 2]]]], [node_id(11), [10**9, 0, 0], 2, []]]],
        "l1": [[[node_id(11), [7, 0, 0], 2, []]]],
        "l2": [[]],
    }
    moments = [[node, 4, Moments(9.0, np.ones(2), np.ones(2)).to_wire()] for node in (ME, node_id(11))]
    meta["moments"] = base64.b64encode(msgspec.msgpack.encode({"obs": moments})).decode()
    heir = tracker_of(10, 6)
    restore_steps(heir, checkpoint)
    assert heir.total() == Counts(15, 3, 3)
    heir.sign()
    assert heir.moments_digest() == {"obs": [[ME, 4, 9.0]]}


async def test_nothing_to_take_up(store, events, kinds):
    assert await load_checkpoint(store, tracker_of(10, 6), events) is None
    assert founded_at(None, 999.0) == 999.0
    assert kinds() == []


async def test_a_damaged_checkpoint_is_passed_over_and_told(checkpointer, store, events, kinds, training):
    await checkpointer.save()
    training.board.post_delta(np.ones(5, np.float32), 30)
    await checkpointer.save()
    data = store.last.read_bytes()
    store.last.unlink()
    store.last.write_bytes(data[: len(data) // 2])
    loaded = await load_checkpoint(store, tracker_of(10, 6), events)
    assert loaded.meta["policy_version"] == 30
    assert kinds() == ["checkpoint-skipped"]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda meta: meta.pop("facts"),
        lambda meta: meta.update(facts=7),
        lambda meta: meta.update(facts="not base64!"),
        lambda meta: meta.update(facts=base64.b64encode(msgspec.msgpack.encode({"l0": [7]})).decode()),
        lambda meta: meta.update(counts=meta.pop("facts") and 7),
        lambda meta: meta.update(counts={meta.pop("facts"): "many"}),
        lambda meta: meta.update(counts={meta.pop("facts"): [[[ME, 7]]]}),
        lambda meta: meta.update(counts={meta.pop("facts"): []}),
        lambda meta: meta.pop("moments"),
        lambda meta: meta.update(moments="not base64!"),
        lambda meta: meta.update(moments=7),
        lambda meta: meta.update(moments=base64.b64encode(b"\xc1").decode()),
        lambda meta: meta.update(moments=base64.b64encode(msgspec.msgpack.encode([1])).decode()),
        lambda meta: meta.update(moments=base64.b64encode(msgspec.msgpack.encode({"a": [7]})).decode()),
    ],
)
async def test_unreadable_counts_are_told(checkpointer, spoil):
    checkpoint = await checkpointer.snapshot()
    spoil(checkpoint.meta)
    with pytest.raises(CheckpointError, match="can't be read"):
        restore_steps(tracker_of(10, 6), checkpoint)


async def test_a_full_disk_is_told_once_until_it_works_again(checkpointer, disk, kinds, clock):
    assert checkpointer.age_s is None
    assert await checkpointer.try_save()
    clock.advance(5.0)
    disk.full = True
    for _ in range(3):
        assert not await checkpointer.try_save()
    assert kinds() == ["checkpoint-failed"]
    assert (checkpointer.failures, checkpointer.age_s) == (3, 5.0)
    assert "disk is full" in checkpointer.error
    with pytest.raises(StorageError):
        await checkpointer.save()
    disk.full = False
    assert await checkpointer.try_save()
    assert checkpointer.error is None
    assert checkpointer.age_s == 0.0
    disk.full = True
    assert not await checkpointer.try_save()
    assert kinds() == ["checkpoint-failed", "checkpoint-works", "checkpoint-failed"]


async def test_poisoned_parameters_arent_kept(checkpointer, store, training, kinds):
    await checkpointer.save()
    training.board.post_set(np.full(5, np.nan, np.float32), None, 9)
    assert not await checkpointer.try_save()
    assert kinds() == ["checkpoint-failed"]
    assert load(store.last).meta["policy_version"] == 7


async def test_without_a_state_nothing_is_written(checkpointer, training, make_board, kinds):
    training.board = make_board(None)
    for act in (checkpointer.save, checkpointer.export, checkpointer.snapshot):
        with pytest.raises(CheckpointError, match="no state yet"):
            await act()
    assert checkpointer.path is None


async def test_the_best_is_the_one_with_the_greatest_return(checkpointer, store, training):
    versions = []
    for version, mean in [(10, None), (11, -5.0), (12, 3.0), (13, 2.0), (14, None)]:
        training.board.post_delta(np.ones(5, np.float32), version)
        checkpointer.mean_return = mean
        await checkpointer.save()
        versions.append(load(store.best).meta["policy_version"] if store.best.exists() else None)
    assert versions == [None, 11, 12, 12, 12]
    assert load(store.last).meta["best_mean_return"] == 3.0


async def test_after_a_restart_the_best_must_still_be_beaten(
    checkpointer, store, training, progress_tracker, clock, events
):
    checkpointer.mean_return = 100.0
    await checkpointer.save()
    heir = Checkpointer(
        store=store,
        config=CheckpointConfig(),
        training=training,
        progress_tracker=progress_tracker,
        clock=clock,
        events=events,
        best=load(store.last).meta["best_mean_return"],
    )
    training.board.post_delta(np.ones(5, np.float32), 50)
    heir.mean_return = 20.0
    await heir.save()
    assert load(store.best).meta["mean_return"] == 100.0
    heir.mean_return = 101.0
    await heir.save()
    assert load(store.best).meta["mean_return"] == 101.0


async def test_where_evaluations_judge_they_alone_decide_on_the_best(
    store, training, progress_tracker, clock, events
):
    config = CheckpointConfig(every_s=1.0)
    given = {"training": training, "progress_tracker": progress_tracker, "clock": clock, "events": events}
    judged = Checkpointer(store=store, config=config, **given, judged=True)
    judged.mean_return = 1e6
    await judged.save()
    assert not store.best.exists()
    evaluated = await judged.snapshot()
    training.board.post_delta(np.ones(5, np.float32), 50)
    assert await judged.keep_best(evaluated, 40.0)
    assert not await judged.keep_best(await judged.snapshot(), 40.0)
    assert load(store.best).params.tolist() == evaluated.params.tolist()
    meta = load(store.best).meta
    assert (meta["mean_return"], meta["best_mean_return"]) == (40.0, 40.0)
    assert load(store.last).params.tolist() == evaluated.params.tolist()
    await judged.save()
    assert load(store.last).meta["best_mean_return"] == 40.0
    off = Checkpointer(store=store, config=CheckpointConfig(every_s=0.0), **given, judged=True)
    assert not await off.keep_best(evaluated, 99.0)


async def test_the_export_is_a_checkpoint_file(checkpointer):
    exported = from_bytes(await checkpointer.export())
    assert exported.params.tolist() == [1.5] * 5
    assert checkpointer.path is None


@pytest.mark.looptime
async def test_it_saves_now_and_then(checkpointer, monkeypatch):
    saves = []

    async def note() -> bool:
        saves.append(asyncio.get_running_loop().time())
        return True

    monkeypatch.setattr(checkpointer, "try_save", note)
    running = asyncio.create_task(checkpointer.run())
    await asyncio.sleep(3.5)
    assert saves == pytest.approx([1.0, 2.0, 3.0])
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_checkpoint_is_a_state_to_begin_from(checkpointer, training):
    state = as_state(await checkpointer.snapshot(), training.spec)
    assert state.vector.tolist() == [1.5] * 5
    assert int(state.sidecar["adam.step"]) == 7
    assert (state.head.policy_version, state.head.lineage) == (7, "ab" * 8)
    other = BoardSpec(training.spec.layout)
    assert as_state(await checkpointer.snapshot(), other).sidecar is None
    with pytest.raises(CheckpointError, match="another layout"):
        as_state(await checkpointer.snapshot(), BoardSpec(Layout((TensorEntry("w", (6,)),))))
