"""Shards, their versions, and where contents come from when a shard moves."""

from __future__ import annotations

import numpy as np
import pytest

from p2pdrl.config.strategy import ServerSyncConfig
from p2pdrl.errors import PeerUnreachableError, PoisonedVectorError
from p2pdrl.group.view import ViewKey
from p2pdrl.strategies.servers.messages import Pull
from p2pdrl.strategies.servers.shard import (
    Contents,
    NobodyGivesError,
    Puller,
    ReplicaStore,
    Shard,
    ShardVersions,
    difference_codec,
    restore,
)
from p2pdrl.strategies.servers.shard_plan import STATE_LAG, HeldSpan, Holder, ShardSpan
from p2pdrl.transport.protocol import Refusal

SIZE = 20
ADAM = ServerSyncConfig(compression="none", optimizer="adam")
KEY = ViewKey(1, 1, "p")


def stepped(span: ShardSpan, steps: int, config: ServerSyncConfig = ADAM, seed: int = 0) -> Shard:
    """A shard with a history, published."""
    rng = np.random.default_rng(seed)
    shard = Shard(span, config, 0, differences=True)
    shard.parameters[:] = rng.normal(size=SIZE)[span.slice]
    for _ in range(steps):
        shard.apply(rng.normal(size=SIZE).astype(np.float32)[span.slice].copy(), 0.1)
    shard.publish(shard.write_version(), steps)
    return shard


class TestShardVersions:
    def test_what_is_sent_is_never_written_to(self):
        versions = ShardVersions(3)
        first = versions.blank()
        first.vector[:] = 1
        versions.put(first, 1)
        sending = first.hold()
        for version in (2, 3, 4, 5):
            written = versions.blank()
            written.vector[:] = version
            versions.put(written, version)
        assert sending.vector.tolist() == [1, 1, 1]
        assert versions.newest.version == 5

    def test_buffers_are_used_again(self):
        versions = ShardVersions(3)
        seen = set()
        for version in range(10):
            written = versions.blank()
            seen.add(id(written))
            versions.put(written, version)
        assert len(seen) == 2


class TestDifferences:
    @pytest.mark.parametrize("compression", ["bf16", "int8", "topk", "threshold"])
    def test_workers_follow_bit_for_bit_and_rounding_is_not_lost(self, compression):
        config = ServerSyncConfig(compression=compression, optimizer="sgd")
        shard = Shard(ShardSpan(0, SIZE), config, 0, differences=True)
        rng = np.random.default_rng(1)
        shard.parameters[:] = rng.normal(size=SIZE)
        shard.publish(shard.write_version(), 0)
        worker = shard.published.vector.copy()
        assert np.array_equal(worker, shard.parameters)
        codec, difference = difference_codec(compression, SIZE), np.empty(SIZE, np.float32)
        for version in range(1, 60):
            shard.apply(rng.normal(size=SIZE).astype(np.float32), 1e-3)
            shard.publish(shard.write_version(), version)
            codec.decode(shard.published.delta, difference)
            worker = worker + difference
            assert np.array_equal(worker, shard.published.vector)
        assert np.abs(worker - shard.parameters).max() < 1e-4

    def test_a_step_of_zero_changes_nothing(self):
        shard = stepped(ShardSpan(0, SIZE), 3, ServerSyncConfig(compression="int8", optimizer="adam"))
        before = shard.published.vector.copy()
        for version in range(4, 9):
            shard.apply(np.ones(SIZE, np.float32), 0.0)
            shard.publish(shard.write_version(), version)
        assert np.array_equal(shard.published.vector, before)


class Elsewhere:
    """Stores of several nodes, pulled from without a network."""

    def __init__(self, **nodes: ReplicaStore) -> None:
        self.nodes = nodes
        self.dead: set[str] = set()

    async def pull(self, peer, span, version, *, parameters, state):
        if peer in self.dead:
            raise PeerUnreachableError(peer)
        found = await self.nodes[peer].snapshot(span, version, parameters=parameters, state=state)
        if found is None:
            raise PeerUnreachableError("nothing so new")
        return found


def holding(shard: Shard) -> ReplicaStore:
    store = ReplicaStore(SIZE)
    store.shard = shard
    return store


class TestRestoring:
    async def test_a_shard_is_put_together_from_two_with_their_momenta(self):
        whole = stepped(ShardSpan(0, SIZE), 5)
        left, right = stepped(ShardSpan(0, 8), 5), stepped(ShardSpan(8, SIZE), 5)
        target = Shard(ShardSpan(3, 15), ADAM, 5, differences=True)
        parts = [
            HeldSpan(ShardSpan(3, 8), (Holder("a", 5, state=True),)),
            HeldSpan(ShardSpan(8, 15), (Holder("b", 5, state=True),)),
        ]
        assert await restore(target, parts, Elsewhere(a=holding(left), b=holding(right)))
        assert np.array_equal(target.parameters, whole.parameters[3:15])
        assert target.optimizer.steps == 5
        gradient = np.linspace(-1, 1, SIZE).astype(np.float32)
        target.apply(gradient[3:15].copy(), 0.1)
        whole.apply(gradient, 0.1)
        assert np.array_equal(target.parameters, whole.parameters[3:15])

    async def test_the_next_holder_is_asked_when_the_best_is_gone(self):
        best, other = stepped(ShardSpan(0, SIZE), 6), stepped(ShardSpan(0, SIZE), 4)
        there = Elsewhere(a=holding(best), b=holding(other))
        there.dead.add("a")
        target = Shard(ShardSpan(0, SIZE), ADAM, 6, differences=True)
        holders = (Holder("a", 6, state=True), Holder("b", 4, state=True))
        assert await restore(target, [HeldSpan(ShardSpan(0, SIZE), holders)], there)
        assert np.array_equal(target.parameters, other.parameters)
        there.dead.add("b")
        with pytest.raises(NobodyGivesError):
            await restore(target, [HeldSpan(ShardSpan(0, SIZE), holders)], there)

    @pytest.mark.parametrize(("lag", "kept"), [(STATE_LAG, True), (STATE_LAG + 1, False)])
    async def test_a_workers_copy_takes_state_from_who_kept_it_unless_it_is_old(self, lag, kept):
        old = stepped(ShardSpan(0, SIZE), 3)
        version = 3 + lag
        worker, keeper = ReplicaStore(SIZE), holding(old)
        fresh = np.full(SIZE, 9, np.float32)
        worker.copy = Contents(ShardSpan(0, SIZE), version, fresh)
        target = Shard(ShardSpan(2, 9), ADAM, version, differences=True)
        parts = [HeldSpan(ShardSpan(2, 9), (Holder("w", version, state=False), Holder("k", 3, state=True)))]
        assert await restore(target, parts, Elsewhere(w=worker, k=keeper)) is kept
        assert np.array_equal(target.parameters, fresh[2:9])
        assert target.optimizer.steps == (3 if kept else 0)
        assert bool(target.optimizer.state()["v"].any()) is kept

    async def test_an_optimizer_without_arrays(self):
        sgd = ServerSyncConfig(compression="none", optimizer="sgd")
        source = stepped(ShardSpan(0, SIZE), 4, sgd)
        target = Shard(ShardSpan(0, SIZE), sgd, 4, differences=True)
        parts = [HeldSpan(ShardSpan(0, SIZE), (Holder("a", 4, state=True),))]
        assert await restore(target, parts, Elsewhere(a=holding(source)))
        assert target.optimizer.steps == 4


class TestReplicaStore:
    async def test_the_newest_is_given(self):
        store = holding(stepped(ShardSpan(0, 10), 5))
        copy = np.arange(SIZE, dtype=np.float32)
        await store.replace_copy(copy, 6)
        found = await store.snapshot(ShardSpan(2, 6), 6, parameters=True, state=False)
        assert found.parameters.tolist() == [2, 3, 4, 5]
        assert found.version == 6
        found = await store.snapshot(ShardSpan(2, 6), 5, parameters=True, state=True)
        assert found.version == 5
        assert set(found.arrays) == {"m", "v"}
        assert found.scalars == {"steps": 5.0}
        assert await store.snapshot(ShardSpan(2, 6), 7, parameters=True, state=False) is None
        assert await store.snapshot(ShardSpan(8, 12), 5, parameters=True, state=True) is None

    async def test_a_snapshot_is_a_copy(self):
        store = holding(stepped(ShardSpan(0, SIZE), 2))
        found = await store.snapshot(ShardSpan(0, SIZE), 0, parameters=True, state=True)
        before = found.parameters.copy()
        store.shard.apply(np.ones(SIZE, np.float32), 1.0)
        assert np.array_equal(found.parameters, before)

    def test_an_older_version_never_replaces_a_newer(self):
        store = ReplicaStore(SIZE)
        store.keep(Contents(ShardSpan(0, 5), 8, None))
        store.keep(Contents(ShardSpan(0, 5), 7, None))
        assert store.kept[ShardSpan(0, 5)].version == 8

    def test_what_was_served_is_kept_for_who_serves_it_now(self):
        store = holding(stepped(ShardSpan(0, 10), 5))
        store.replace_shard(stepped(ShardSpan(10, 20), 6))
        assert [(claim.start, claim.version, claim.live) for claim in store.claims] == [
            (10, 6, True),
            (0, 5, False),
        ]
        store.forget({ShardSpan(3, 4)}, keep_shard=True)
        assert len(store.claims) == 1
        store.forget(set(), keep_shard=False)
        assert store.claims == ()

    def test_a_shard_that_is_not_filled_is_no_claim(self):
        assert holding(Shard(ShardSpan(0, 5), ADAM, 3, differences=True)).claims == ()

    async def test_a_pull_from_outside_is_refused(self):
        store = holding(stepped(ShardSpan(0, SIZE), 5))
        for start, stop, status in ((5, 5, 400), (9, 3, 400), (0, SIZE + 1, 400)):
            with pytest.raises(Refusal) as refused:
                await store.serve(Pull(KEY, start, stop, 0))
            assert refused.value.status == status
        for _ in range(5):
            with pytest.raises(Refusal) as refused:
                await store.serve(Pull(KEY, 0, SIZE, 6))
            assert refused.value.status == 409
        head, contents = await store.serve(Pull(KEY, 0, 4, 5, state=True))
        store.sent()
        assert head.version == 5
        assert [view.nbytes for view in contents.views] == [16, 16, 16]


class FakeTransport:
    """Answers every call with the same message."""

    def __init__(self, meta: bytes, vector: bytes) -> None:
        self.meta, self.vector = meta, vector

    async def call(self, to, target_id, route, meta, *, into, deadline_s, lane):
        from p2pdrl.transport.protocol import Answer

        room = into(self.meta, len(self.vector))
        if room is not None:
            room[:] = self.vector
        return Answer(self.meta, 0 if room is None else len(self.vector), target_id)


class TestPuller:
    def pull(self, version: int, scalars: dict[str, float], vectors: np.ndarray):
        import msgspec

        meta = msgspec.msgpack.encode({"version": version, "scalars": scalars})
        self.strikes = []
        puller = Puller(
            "me",
            KEY,
            ReplicaStore(SIZE),
            FakeTransport(meta, vectors.astype(np.float32).tobytes()),
            lambda peer: None,
            1e6,
            lambda peer, why: self.strikes.append(peer),
            ADAM,
        )
        return puller.pull("peer", ShardSpan(0, 4), 3, parameters=True, state=True)

    async def test_good(self):
        found = await self.pull(3, {"steps": 7.0}, np.arange(12))
        assert found.parameters.tolist() == [0, 1, 2, 3]
        assert found.arrays["m"].tolist() == [4, 5, 6, 7]
        assert found.scalars == {"steps": 7.0}

    @pytest.mark.parametrize(
        ("scalars", "bad"),
        [
            ({}, 0.0),
            ({"steps": -1.0}, 0.0),
            ({"steps": float("nan")}, 0.0),
            ({"steps": 1.0, "more": 1.0}, 0.0),
            ({"steps": 1.0}, np.nan),
            ({"steps": 1.0}, np.inf),
        ],
    )
    async def test_poison_is_refused_and_struck(self, scalars, bad):
        vectors = np.zeros(12)
        vectors[5] = bad
        with pytest.raises(PoisonedVectorError):
            await self.pull(3, scalars, vectors)
        assert self.strikes == ["peer"]

    async def test_huge_parameters(self):
        vectors = np.zeros(12)
        vectors[0] = 1e7
        with pytest.raises(PoisonedVectorError):
            await self.pull(3, {"steps": 1.0}, vectors)

    @pytest.mark.parametrize(("version", "length"), [(2, 12), (3, 11), (3, 13)])
    async def test_what_was_not_asked_for(self, version, length):
        with pytest.raises(NobodyGivesError):
            await self.pull(version, {"steps": 1.0}, np.zeros(length))
