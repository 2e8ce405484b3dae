from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest

from p2pdrl.config.node import NodeConfig
from p2pdrl.config.root import Config
from p2pdrl.config.task import EnvConfig, StopConfig, TaskConfig, task_hash
from p2pdrl.errors import JoinRefusedError
from p2pdrl.membership.joining import Sighting
from p2pdrl.node.admission import JoinAdmission
from p2pdrl.node.bootstrap.joining import JoinInfo, decode_info
from p2pdrl.transport.protocol import Address, Refusal

pytestmark = pytest.mark.looptime

OWN = Address("10.0.0.9", 7700)
SEED = "10.0.0.1:7700"
OTHER = TaskConfig(env=EnvConfig(id="Acrobot-v1"))


class FakeJoins:
    """The joiner as the admission sees it."""

    def __init__(self, *seen: Sighting) -> None:
        self.node_id = "5" * 32
        self.seen = seen
        self.joined = asyncio.Event()
        self.refused: dict[str, str] = {}
        self.failed: dict[str, str] = {}
        self.own_address_among_seeds = False

    def sightings(self) -> list[Sighting]:
        return list(self.seen)

    async def once(self) -> bool:
        now = asyncio.get_running_loop().time()
        self.seen = [replace(sighting, began_s=max(now, sighting.began_s)) for sighting in self.seen]
        return self.joined.is_set()

    def troubles(self) -> dict[str, str]:
        return self.failed

    def refusals(self) -> dict[str, str]:
        return self.refused


def admission(events, clock, *peers: str, task_given: bool = False) -> JoinAdmission:
    return JoinAdmission(
        Config(node=NodeConfig(peers=peers)), task_given=task_given, events=events, clock=clock
    )


def welcome(task: TaskConfig = OTHER) -> bytes:
    return msgspec.msgpack.encode(JoinInfo(task, task_hash(task), "ab" * 8, 5, 100.0))


def silent(address: str, *, given: bool = True) -> Sighting:
    return Sighting(address, given, "silent", 1e9)


def now_s() -> float:
    return asyncio.get_running_loop().time()


async def later(seconds: float, act) -> None:
    await asyncio.sleep(seconds)
    act()


async def test_without_seeds_it_founds_at_once(events, clock, kinds):
    one = admission(events, clock)
    origin = await one.find_swarm(FakeJoins(), OWN, remembers=False)
    assert (origin.how, origin.info) == ("founded", None)
    assert origin.task == TaskConfig()
    assert now_s() == 0.0
    assert kinds() == []  # that is told once the learner has taken the task
    one.tell_founded(origin)
    assert kinds() == ["founded"]


async def test_with_memories_it_waits_a_moment(events, clock):
    joins = FakeJoins(silent("10.0.0.7:7700", given=False))
    origin = await admission(events, clock).find_swarm(joins, OWN, remembers=True)
    assert origin.how == "founded"
    assert now_s() == pytest.approx(3.0)


async def test_it_takes_the_swarms_task(events, clock, kinds):
    one, joins = admission(events, clock, SEED), FakeJoins(silent(SEED))

    def join() -> None:
        assert one.hooks.check_welcome(welcome()) is None
        joins.joined.set()

    waiting = asyncio.create_task(later(25.0, join))
    origin = await one.find_swarm(joins, OWN, remembers=False)
    await waiting
    assert origin.how == "joined"
    assert origin.task == OTHER
    assert origin.info.lineage == "ab" * 8
    assert now_s() == pytest.approx(25.0)
    # It said every ten seconds that it goes on trying.
    one.tell_founded(origin)
    assert kinds() == ["joining", "still-trying", "still-trying", "joined"]


async def test_why_a_seed_doesnt_answer_is_told(events, clock):
    one, joins = admission(events, clock, "nonsense", SEED), FakeJoins(silent(SEED))
    joins.failed = {"nonsense:7700": "name or service not known"}
    waiting = asyncio.create_task(later(15.0, joins.joined.set))
    one.hooks.check_welcome(welcome())
    await one.find_swarm(joins, OWN, remembers=False)
    await waiting
    (told,) = [event for event in events.since(0) if event["kind"] == "still-trying"]
    assert f"no answer from nonsense, {SEED} yet (nonsense:7700: name or service not known)" in told["text"]


async def test_its_own_address_among_the_seeds(events, clock):
    joins = FakeJoins(silent(SEED), Sighting(str(OWN), True, "own"))
    origin = await admission(events, clock, SEED, str(OWN)).find_swarm(joins, OWN, remembers=False)
    assert origin.how == "founded"
    assert now_s() == pytest.approx(3.0)


async def test_its_own_address_under_another_name(events, clock):
    joins = FakeJoins(silent("127.0.0.1:7700"))

    def notice() -> None:
        joins.own_address_among_seeds = True
        joins.seen = [Sighting("127.0.0.1:7700", True, "own")]

    waiting = asyncio.create_task(later(2.0, notice))
    origin = await admission(events, clock, "localhost:7700").find_swarm(joins, OWN, remembers=False)
    await waiting
    assert origin.how == "founded"
    assert now_s() <= 2.0 + 0.5 + 3.0 + 0.01


async def test_refused_by_every_seed(events, clock, kinds):
    one, joins = admission(events, clock, SEED, "10.0.0.2:7700"), FakeJoins(silent(SEED))

    def refuse(*addresses: str) -> None:
        joins.refused = dict.fromkeys(addresses, "another task")
        one.hooks.on_refused(addresses[0], "another task")

    some = asyncio.create_task(later(1.0, lambda: refuse(SEED)))
    both = asyncio.create_task(later(4.0, lambda: refuse(SEED, "10.0.0.2:7700")))
    with pytest.raises(JoinRefusedError, match=r"10\.0\.0\.1:7700 doesn't take this node in: another task"):
        await one.find_swarm(joins, OWN, remembers=False)
    await asyncio.gather(some, both)
    assert now_s() >= 4.0
    assert kinds().count("refused") == 2


async def test_a_welcome_is_judged(events, clock):
    task_given = admission(events, clock, SEED, task_given=True)
    assert "you ask for another task" in task_given.hooks.check_welcome(welcome())
    assert task_given.hooks.check_welcome(welcome(TaskConfig())) is None
    assert task_given.hooks.meta() == task_hash(TaskConfig()).encode()
    takes_any = admission(events, clock, SEED)
    assert takes_any.hooks.meta() == b""
    assert "another release" in takes_any.hooks.check_welcome(b"\xc1")
    assert takes_any.hooks.check_welcome(welcome()) is None


async def test_a_peers_task_imports_only_what_the_owner_has_named(events, clock):
    pole = TaskConfig(env=EnvConfig(id="my_pole:Pole"))

    def answer(**node) -> str | None:
        one = JoinAdmission(
            Config(node=NodeConfig(peers=(SEED,), **node)), task_given=False, events=events, clock=clock
        )
        return one.hooks.check_welcome(welcome(pole))

    assert "my_pole:Pole imports a Python module" in answer()
    assert "node.imports" in answer(allow_import=True)  # its own configuration names no such thing
    assert answer(imports=("my_pole:Pole",)) is None


async def test_a_task_whose_environment_cant_run_here_is_refused(events, clock):
    one = admission(events, clock, SEED)
    old = TaskConfig(env=EnvConfig(id="LunarLander-v2"))
    assert "take LunarLander-v3" in one.hooks.check_welcome(welcome(old))


async def test_the_first_welcome_counts(events, clock):
    one, joins = admission(events, clock, SEED), FakeJoins(silent(SEED))
    one.hooks.check_welcome(welcome())
    one.hooks.check_welcome(welcome(TaskConfig()))
    joins.joined.set()
    assert (await one.find_swarm(joins, OWN, remembers=False)).task == OTHER


async def test_newcomers_are_judged_once_there_is_a_task(events, clock):
    one = admission(events, clock)
    with pytest.raises(Refusal) as caught:
        one.hooks.check_join(b"")
    assert caught.value.status == 503
    one.training = SimpleNamespace(
        task=OTHER, task_hash=task_hash(OTHER), lineage="cd" * 8, lineage_steps=90, policy_version=9
    )
    assert one.hooks.check_join(b"") is None
    assert one.hooks.check_join(task_hash(OTHER).encode()) is None
    assert "Acrobot-v1" in one.hooks.check_join(task_hash(TaskConfig()).encode())
    assert one.hooks.check_join(b"\xff\xfe") is not None
    assert "you ask for another task" in one.hooks.check_welcome(welcome(TaskConfig()))
    info = decode_info(one.hooks.info())
    assert (info.task, info.lineage, info.policy_version, info.founded_at) == (
        OTHER,
        "cd" * 8,
        9,
        clock.wall(),
    )
    one.founded_at = lambda: 77.0
    assert decode_info(one.hooks.info()).founded_at == 77.0


@pytest.mark.parametrize(
    ("own", "overruled"),
    [(StopConfig(), False), (StopConfig(env_steps=5), False), (StopConfig(env_steps=9), True)],
)
async def test_options_that_the_swarm_overrules_are_told(events, clock, kinds, own, overruled):
    config = Config(task=TaskConfig(stop=own), node=NodeConfig(peers=(SEED,)))
    one, joins = JoinAdmission(config, task_given=False, events=events, clock=clock), FakeJoins(silent(SEED))
    assert one.hooks.check_welcome(welcome(TaskConfig(stop=StopConfig(env_steps=5)))) is None
    joins.joined.set()
    await one.find_swarm(joins, OWN, remembers=False)
    assert ("overruled" in kinds()) is overruled
