"""A node follows its swarm's key file."""

from __future__ import annotations

import asyncio

import pytest

from p2pdrl.api.keyfile import read_swarm_keys, rotate_swarm_key, write_swarm_key
from p2pdrl.clock import ManualClock
from p2pdrl.membership.identity import Identity
from p2pdrl.membership.operators import Operator
from p2pdrl.node.bootstrap.key_watch import KeyWatch
from p2pdrl.node.events import EventLog

pytestmark = pytest.mark.looptime
NOW_S, HOUR_S = 1_790_000_000.0, 3600.0


class Watching:
    """A watched key file, and what came of it."""

    def __init__(self, path):
        write_swarm_key(path)
        self.path = path
        self.clock = ManualClock(wall_s=NOW_S)
        self.events, self.used = EventLog(100, self.clock), []

    def __iter__(self):
        return iter((self.path, self.clock, self.events, self.used))

    async def __aenter__(self):
        async def read(where):
            return read_swarm_keys(where)

        keys = await read(self.path)
        watch = KeyWatch(
            str(self.path), keys, lambda *now: self.used.append(now), self.events, self.clock, read
        )
        self.operators = []
        watch.use_operators = self.operators.append
        self.task = asyncio.create_task(watch.run())
        return self

    async def __aexit__(self, *_):
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


@pytest.fixture
def watching(tmp_path):
    return Watching(tmp_path / "swarm.key")


def words(events):
    return [event["text"] for event in events.since(0)]


async def test_nothing_happens_while_the_file_stays(watching):
    async with watching as (_, _, events, used):
        await asyncio.sleep(60)
        assert used == words(events) == []


async def test_a_rotation_is_followed_to_its_end(watching):
    async with watching as (path, clock, events, used):
        (old,) = read_swarm_keys(path).good(NOW_S)
        new = rotate_swarm_key(path, HOUR_S, NOW_S).keys[0].key
        await asyncio.sleep(6)
        assert used == [((old, new), False)]
        clock.advance(HOUR_S)
        await asyncio.sleep(6)
        assert used[1:] == [((new, old), False)]
        clock.advance(HOUR_S)
        await asyncio.sleep(6)
        assert used[2:] == [((new,), True)]
        assert [text.split(";")[0] for text in words(events)] == [
            "a new swarm key is taken, too",
            "this node shows the new swarm key",
            "the old swarm key is refused",
        ]


@pytest.mark.parametrize("what", ["gone", "another swarm's"])
async def test_a_file_that_is_no_good_is_told_and_changes_nothing(watching, what):
    async with watching as (path, _, events, used):
        path.unlink()
        if what != "gone":
            write_swarm_key(path)
        await asyncio.sleep(6)
        assert used == []
        assert "goes on with the keys that it has" in words(events)[0]


async def test_operators_that_the_file_names_are_taken_at_once(watching):
    alice = Operator(Identity(b"a" * 32).public_key, "alice")
    async with watching as (path, _, events, used):
        rotate_swarm_key(path, HOUR_S, NOW_S, add=[alice])
        await asyncio.sleep(10)
        assert watching.operators == [(alice,)]
        assert f"root operators are {alice.words} from now on" in words(events)
        assert len(used) == 1


async def test_a_file_that_was_cut_off_lets_nobody_else_command(watching, tmp_path):
    """As while it is copied; what its operators have signed would be dropped for good."""
    alice = Operator(Identity(b"a" * 32).public_key, "alice")
    watching.path = tmp_path / "commanded.key"
    write_swarm_key(watching.path, (alice,))
    async with watching as (path, _, events, used):
        whole = path.read_bytes()
        path.write_bytes(whole.split(b" ")[0])
        await asyncio.sleep(12)
        assert used == watching.operators == []
        (told,) = words(events)
        assert "names no operators any more, so all could command: is it whole?; goes on" in told
        path.write_bytes(whole)
        await asyncio.sleep(6)
        assert used == watching.operators == []
