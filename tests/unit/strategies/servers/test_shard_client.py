"""What a worker holds of its own node's shard while it puts slices together."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from p2pdrl.config.strategy import ServerSyncConfig
from p2pdrl.errors import PeerTimeoutError
from p2pdrl.strategies.servers.messages import ServerAnswer
from p2pdrl.strategies.servers.shard import ShardVersions
from p2pdrl.strategies.servers.shard_client import ShardClient, SliceAnswer
from p2pdrl.strategies.servers.shard_plan import cut


@pytest.fixture
def versions():
    """Of our own shard: version 1 is out."""
    versions = ShardVersions(2)
    versions.put(versions.blank(), 1)
    return versions


@pytest.fixture
def client():
    """Our node serves the first of two shards."""
    plan = SimpleNamespace(spans=cut(4, 2), servers=("a", "b"))
    session = SimpleNamespace(plan=plan, me="a")
    return ShardClient(session, SimpleNamespace(max_abs=1e6), ServerSyncConfig(), differences=False)


def parts(versions: ShardVersions, other: int) -> list[SliceAnswer]:
    return [
        SliceAnswer(ServerAnswer(1), None, versions.newest.hold()),
        SliceAnswer(ServerAnswer(other), memoryview(b""), None),
    ]


async def test_slices_of_one_version_stay_held(client, versions):
    settled = await client.settle(parts(versions, 1))
    versions.put(versions.blank(), 2)
    assert versions.blank() is not settled[0].own
    client.release(settled)
    assert versions.blank() is settled[0].own


@pytest.mark.parametrize("other", [0, 2], ids=["the other's is older", "ours is older"])
@pytest.mark.parametrize("error", [asyncio.CancelledError, PeerTimeoutError])
async def test_what_is_given_up_is_released_once(client, versions, other, error):
    async def fetch(version, shards):
        raise error

    client.fetch = fetch
    with pytest.raises(error):
        await client.settle(parts(versions, other))
    assert versions.blank() is not versions.newest  # still out: nobody may write to it
    first = versions.newest
    versions.put(versions.blank(), 2)
    assert versions.blank() is first  # nobody else holds it


async def test_servers_that_stay_apart(client, versions):
    async def fetch(version, shards):
        return [SliceAnswer(ServerAnswer(version + 1), memoryview(b""), None) for _ in shards]

    client.fetch = fetch
    with pytest.raises(PeerTimeoutError, match="different versions"):
        await client.settle(parts(versions, 2))
    assert versions.blank() is not versions.newest
