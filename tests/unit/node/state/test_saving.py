from __future__ import annotations

import asyncio
import base64

import msgspec
import numpy as np
import pytest

from p2pdrl.config.node import CheckpointConfig
from p2pdrl.config.task import StopConfig, TaskConfig
from p2pdrl.errors import CheckpointError, StorageError
from p2pdrl.node.accounting.counters import Counts
from p2pdrl.node.accounting.steps import StepAccounting
from p2pdrl.node.bootstrap.first_state import founded_at, restore_steps, take_up
from p2pdrl.node.settings import StopSetting
from p2pdrl.node.state.checkpoints import CheckpointStore, Saving, as_state, from_bytes, load
from p2pdrl.node.state.state_transfer import params_hash
from p2pdrl.tensors.board import BoardSpec
from p2pdrl.tensors.layout import Layout, TensorEntry
from p2pdrl.tensors.moments import Moments

ME = "a" * 32


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
def step_accounting() -> StepAccounting:
    made = StepAccounting(ME, 5)
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
def saving(disk, training, step_accounting, clock, events) -> Saving:
    return Saving(
        store=disk,
        config=CheckpointConfig(every_s=1.0),
        training=training,
        step_accounting=step_accounting,
        clock=clock,
        events=events,
    )


async def test_what_a_checkpoint_holds(saving, store, training):
    saving.stop_setting = StopSetting(StopConfig(env_steps=500), 123.0)
    saving.mean_return = 40.0
    path = await saving.save()
    loaded = load(store.last)
    assert path == str(store.last) == saving.path
    assert loaded.params.tolist() == [1.5] * 5
    assert loaded.sidecar["adam.step"] == 7
    meta = loaded.meta
    assert msgspec.convert(meta["task"], TaskConfig) == training.task
    assert meta["params_hash"] == params_hash(np.full(5, 1.5, np.float32))
    assert (meta["policy_version"], meta["lineage"], meta["env_steps"]) == (7, "ab" * 8, 120)
    assert (meta["mean_return"], meta["best_mean_return"]) == (40.0, 40.0)
    assert founded_at(loaded, 999.0) == 123.0
    others = msgspec.msgpack.decode(base64.b64decode(meta["others_moments"]))
    assert Moments.from_wire(msgspec.msgpack.decode(others["obs"])).count == 0.0


async def test_an_heir_knows_what_was_done(saving, store, step_accounting, events):
    await saving.save()
    heir = StepAccounting(ME, 6)
    await take_up(store, heir, events)
    assert heir.total() == step_accounting.total() == Counts(120, 6, 3)
    assert heir.moments_digest() == {"obs": [[ME, 5, 9.0]]}


async def test_nothing_to_take_up(store, events, kinds):
    assert await take_up(store, StepAccounting(ME, 6), events) is None
    assert founded_at(None, 999.0) == 999.0
    assert kinds() == []


async def test_a_damaged_checkpoint_is_passed_over_and_told(saving, store, events, kinds, training):
    await saving.save()
    training.board.post_delta(np.ones(5, np.float32), 30)
    await saving.save()
    data = store.last.read_bytes()
    store.last.unlink()
    store.last.write_bytes(data[: len(data) // 2])
    loaded = await take_up(store, StepAccounting(ME, 6), events)
    assert loaded.meta["policy_version"] == 30
    assert kinds() == ["checkpoint-skipped"]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda meta: meta.pop("counts"),
        lambda meta: meta.update(counts=7),
        lambda meta: meta.update(counts={"l0": "many"}),
        lambda meta: meta.pop("moments"),
        lambda meta: meta.update(moments="not base64!"),
        lambda meta: meta.update(moments=7),
        lambda meta: meta.update(moments=base64.b64encode(b"\xc1").decode()),
        lambda meta: meta.update(moments=base64.b64encode(msgspec.msgpack.encode([1])).decode()),
        lambda meta: meta.update(moments=base64.b64encode(msgspec.msgpack.encode({"a": [7]})).decode()),
    ],
)
async def test_unreadable_counts_are_told(saving, spoil):
    checkpoint = await saving.snapshot()
    spoil(checkpoint.meta)
    with pytest.raises(CheckpointError, match="can't be read"):
        restore_steps(StepAccounting(ME, 6), checkpoint)


async def test_a_full_disk_is_told_once_until_it_works_again(saving, disk, kinds, clock):
    assert saving.age_s is None
    assert await saving.try_save()
    clock.advance(5.0)
    disk.full = True
    for _ in range(3):
        assert not await saving.try_save()
    assert kinds() == ["checkpoint-failed"]
    assert (saving.failures, saving.age_s) == (3, 5.0)
    assert "disk is full" in saving.error
    with pytest.raises(StorageError):
        await saving.save()
    disk.full = False
    assert await saving.try_save()
    assert saving.error is None
    assert saving.age_s == 0.0
    disk.full = True
    assert not await saving.try_save()
    assert kinds() == ["checkpoint-failed", "checkpoint-works", "checkpoint-failed"]


async def test_poisoned_parameters_arent_kept(saving, store, training, kinds):
    await saving.save()
    training.board.post_set(np.full(5, np.nan, np.float32), None, 9)
    assert not await saving.try_save()
    assert kinds() == ["checkpoint-failed"]
    assert load(store.last).meta["policy_version"] == 7


async def test_without_a_state_nothing_is_written(saving, training, make_board, kinds):
    training.board = make_board(None)
    for act in (saving.save, saving.export, saving.snapshot):
        with pytest.raises(CheckpointError, match="no state yet"):
            await act()
    assert saving.path is None


async def test_the_best_is_the_one_with_the_greatest_return(saving, store, training):
    versions = []
    for version, mean in [(10, None), (11, -5.0), (12, 3.0), (13, 2.0), (14, None)]:
        training.board.post_delta(np.ones(5, np.float32), version)
        saving.mean_return = mean
        await saving.save()
        versions.append(load(store.best).meta["policy_version"] if store.best.exists() else None)
    assert versions == [None, 11, 12, 12, 12]
    assert load(store.last).meta["best_mean_return"] == 3.0


async def test_after_a_restart_the_best_must_still_be_beaten(
    saving, store, training, step_accounting, clock, events
):
    saving.mean_return = 100.0
    await saving.save()
    heir = Saving(
        store=store,
        config=CheckpointConfig(),
        training=training,
        step_accounting=step_accounting,
        clock=clock,
        events=events,
    )
    heir.was_best(load(store.last).meta["best_mean_return"])
    training.board.post_delta(np.ones(5, np.float32), 50)
    heir.mean_return = 20.0
    await heir.save()
    assert load(store.best).meta["mean_return"] == 100.0
    heir.mean_return = 101.0
    await heir.save()
    assert load(store.best).meta["mean_return"] == 101.0


async def test_the_export_is_a_checkpoint_file(saving):
    exported = from_bytes(await saving.export())
    assert exported.params.tolist() == [1.5] * 5
    assert saving.path is None


@pytest.mark.looptime
async def test_it_saves_now_and_then(saving, monkeypatch):
    saves = []

    async def note() -> bool:
        saves.append(asyncio.get_running_loop().time())
        return True

    monkeypatch.setattr(saving, "try_save", note)
    running = asyncio.create_task(saving.run())
    await asyncio.sleep(3.5)
    assert saves == pytest.approx([1.0, 2.0, 3.0])
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_checkpoint_is_a_state_to_begin_from(saving, training):
    state = as_state(await saving.snapshot(), training.spec)
    assert state.vector.tolist() == [1.5] * 5
    assert int(state.sidecar["adam.step"]) == 7
    assert (state.head.policy_version, state.head.lineage) == (7, "ab" * 8)
    other = BoardSpec(training.spec.layout)
    assert as_state(await saving.snapshot(), other).sidecar is None
    with pytest.raises(CheckpointError, match="another layout"):
        as_state(await saving.snapshot(), BoardSpec(Layout((TensorEntry("w", (6,)),))))
