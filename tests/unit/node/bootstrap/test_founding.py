"""Nodes that start at once, with membership as it is, on an in-memory network and virtual time."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace

import pytest

from p2pdrl.clock import LoopClock
from p2pdrl.config.node import NodeConfig
from p2pdrl.config.root import Config
from p2pdrl.config.task import EnvConfig, TaskConfig, task_hash
from p2pdrl.membership.identity import Identity
from p2pdrl.membership.known_members import KnownMember, KnownMembers
from p2pdrl.membership.parameters import MembershipConfig
from p2pdrl.membership.service import MembershipService
from p2pdrl.membership.state import open_core
from p2pdrl.node.admission import JoinAdmission
from p2pdrl.node.bootstrap.joining import SwarmOrigin
from p2pdrl.node.events import EventLog
from p2pdrl.node.state.swarm_memory import RememberedSwarm
from p2pdrl.testing.memory_transport import MemoryNetwork
from p2pdrl.transport.protocol import Address, Refusal

pytestmark = pytest.mark.looptime

ACROBOT = TaskConfig(env=EnvConfig(id="Acrobot-v1"))


def at(number: int) -> str:
    return f"10.0.0.{number}:7700"


class Node:
    """Membership and admission of one node; its training is there some time after it has a task."""

    def __init__(
        self,
        network: MemoryNetwork,
        number: int,
        seeds: tuple[int, ...] = (),
        *,
        knows: tuple[int, ...] = (),
        memory: RememberedSwarm | None = None,
        builds_s: float = 2.0,
        hesitates_s: float = 0.0,
        roles: tuple[str, ...] = (),
    ) -> None:
        self.network, self.number, self.builds_s = network, number, builds_s
        self.hesitates_s = hesitates_s
        """Between answering others and first looking for a swarm: a busy machine."""
        self.identity = Identity(bytes([number]) * 32)
        clock = LoopClock()
        self.events = EventLog(200, clock)
        peers = tuple(map(at, seeds))
        self.admission = JoinAdmission(
            Config(node=NodeConfig(peers=peers, roles=roles)),
            task_given=False,
            events=self.events,
            clock=clock,
        )
        self.own = Address.parse(at(number))
        self.transport = network.join(self.identity.node_id, self.own)
        known = KnownMembers(None)
        known.members = tuple(KnownMember(f"{other:032x}", f"n{other}", at(other)) for other in knows)
        core = open_core(
            config=MembershipConfig.lan(),
            signer=self.identity,
            swarm_id="swarm",
            name=f"n{number}",
            address=at(number),
            clock=clock,
            rng=random.Random(number),
            known=known,
        )
        self.service = MembershipService(
            core,
            self.transport,
            clock,
            list(map(Address.parse, peers)),
            hooks=self.admission.hooks,
            known=known,
            rng=random.Random(number),
            listens=self._listens,
        )
        self.remembers, self.memory = bool(knows), memory
        self.origin: SwarmOrigin | None = None
        self.task: asyncio.Task[None] | None = None

    async def _listens(self, address: Address) -> bool:
        return str(address) in FROZEN

    async def live(self, after_s: float = 0.0) -> None:
        await asyncio.sleep(after_s)
        await self.transport.start()
        await self.service.start()
        await asyncio.sleep(self.hesitates_s)
        self.origin = await self.admission.find_swarm(
            self.service.joiner, self.own, remembers=self.remembers, memory=self.memory
        )
        await asyncio.sleep(self.builds_s)
        task, info = self.origin.task, self.origin.info
        self.admission.training = SimpleNamespace(
            task=task,
            task_hash=task_hash(task),
            lineage=self.origin.lineage or (f"of {self.number}" if info is None else info.lineage),
            lineage_steps=0,
            policy_version=0,
        )

    def start(self, after_s: float = 0.0) -> Node:
        self.task = asyncio.create_task(self.live(after_s))
        return self

    async def close(self) -> None:
        if self.task is not None:
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)
        await self.service.close()
        await self.transport.close()

    @property
    def how(self) -> str | None:
        return None if self.origin is None else self.origin.how

    def told(self, kind: str) -> list[str]:
        return [str(event["text"]) for event in self.events.since(0) if event["kind"] == kind]


FROZEN: set[str] = set()


@pytest.fixture
async def make():
    FROZEN.clear()
    network = MemoryNetwork(random.Random(0), delay_s=(0.001, 0.003))
    nodes: list[Node] = []

    def one(number: int, seeds: tuple[int, ...] = (), **options: object) -> Node:
        nodes.append(Node(network, number, seeds, **options))
        return nodes[-1]

    one.network = network
    yield one
    for node in nodes:
        await node.close()


class Stranger:
    """A member of a swarm that doesn't take anybody in."""

    def __init__(self, network: MemoryNetwork, number: int, answers: Refusal | None) -> None:
        self.transport = network.join(f"{number:032x}", Address.parse(at(number)))
        self._answers = answers

    async def start(self) -> None:
        self.transport.serve("swim/join", self._serve, max_meta_bytes=1 << 20)
        await self.transport.start()

    async def _serve(self, incoming):
        if self._answers is None:
            await asyncio.Event().wait()
        raise self._answers


async def test_who_only_acts_never_founds_and_nobody_waits_for_it(make):
    actors = [make(number, (1, 2, 3), roles=("actor",)).start() for number in (1, 2)]
    await asyncio.sleep(120)
    assert [node.how for node in actors] == [None, None]
    learner = make(3, (1, 2, 3)).start()
    await asyncio.sleep(30)
    assert learner.how == "founded"
    assert [node.how for node in actors] == ["joined", "joined"]


async def test_who_only_acts_never_resumes_a_swarm(make):
    memory = RememberedSwarm("swarm", ACROBOT, "ab" * 8, 10**6, others=True)
    actor = make(1, (2,), knows=(2,), memory=memory, roles=("actor",)).start()
    await asyncio.sleep(120)
    assert actor.how is None


@pytest.mark.parametrize("own_among", [False, True])
async def test_a_frozen_seed_is_somebody_there(make, own_among):
    stranger = Stranger(make.network, 1, None)
    await stranger.start()
    FROZEN.add(at(1))
    node = make(2, (1, 2) if own_among else (1,)).start()
    await asyncio.sleep(120)
    assert node.how is None
    assert any("takes connections and doesn't answer" in text for text in node.told("waiting"))
    await stranger.transport.close()


@pytest.mark.parametrize("status", [409, 429, 500, 503])
async def test_any_answer_of_a_seed_forbids_founding(make, status):
    stranger = Stranger(make.network, 1, Refusal(status, "this node is only just starting"))
    await stranger.start()
    node = make(2, (1, 2)).start()
    await asyncio.sleep(120)
    assert node.how is None
    assert (
        "answers, and doesn't take this node in yet (this node is only just starting)"
        in node.told("waiting")[0]
    )
    await stranger.transport.close()


async def test_a_remembered_member_that_is_frozen_forbids_founding(make):
    stranger = Stranger(make.network, 1, None)
    await stranger.start()
    FROZEN.add(at(1))
    node = make(2, knows=(1, 3)).start()
    await asyncio.sleep(60)
    assert node.how is None
    await stranger.transport.close()
    FROZEN.clear()
    await asyncio.sleep(60)
    assert node.how == "founded"


async def test_nobody_at_a_remembered_address_is_no_reason_to_wait(make):
    """Another swarm's node lives there now."""
    stranger = Stranger(make.network, 1, Refusal(403, "another swarm"))
    await stranger.start()
    node = make(2, knows=(1,)).start()
    await asyncio.sleep(10)
    assert node.how == "founded"
    await stranger.transport.close()


async def test_alone_with_its_memories_it_resumes_the_swarm(make):
    memory = RememberedSwarm("swarm", ACROBOT, "ab" * 8, 77)
    node = make(2, knows=(1, 3), memory=memory).start()
    await asyncio.sleep(10)
    assert node.how == "resumed"
    assert (node.origin.task, node.origin.lineage) == (ACROBOT, "ab" * 8)


async def test_a_swarm_is_remembered_even_if_its_members_addresses_are_not(make):
    node = make(2, memory=RememberedSwarm("swarm", ACROBOT, "ab" * 8, 77, others=True)).start()
    await asyncio.sleep(10)
    assert (node.how, node.origin.task) == ("resumed", ACROBOT)


async def test_a_lone_node_begins_as_its_configuration_says(make):
    node = make(2, memory=RememberedSwarm("swarm", ACROBOT, "ab" * 8, 77)).start()
    await asyncio.sleep(1)
    assert (node.how, node.origin.task) == ("founded", TaskConfig())


@pytest.mark.parametrize("own_among", [False, True])
async def test_a_cluster_that_starts_at_once_has_one_founder(make, own_among):
    numbers = (1, 2, 3, 4)
    nodes = [make(n, tuple(m for m in numbers if own_among or m != n)).start(0.1 * n) for n in numbers]
    await asyncio.sleep(20)
    assert sorted(node.how for node in nodes) == ["founded", "joined", "joined", "joined"]
    first = min(nodes, key=lambda node: node.identity.node_id)
    assert first.how == "founded"


@pytest.mark.parametrize("count", [3, 8, pytest.param(24, marks=pytest.mark.slow)])
@pytest.mark.parametrize("late_s", [0.0, 1.0, 4.0])
async def test_leaves_that_know_their_seed_alone_have_one_founder(make, count, late_s):
    """The seed comes up last or is slow, and hears of all of them before it has looked around itself."""
    ids = sorted(range(1, count + 1), key=lambda n: Identity(bytes([n]) * 32).node_id)
    hub = ids[-1]  # each leaf goes before the one node that it knows
    nodes = [make(n, (hub,)).start(0.005 * n) for n in ids[:-1]]
    nodes.append(make(hub, hesitates_s=2.0).start(late_s))
    await asyncio.sleep(30)
    assert [node.how for node in nodes].count("founded") == 1
    assert [node.how for node in nodes].count("joined") == count - 1


async def test_a_chain_of_seeds_has_one_founder(make):
    nodes = [
        make(1, (2,)).start(),
        make(2, (3,)).start(),
        make(3, (4,)).start(),
        make(4, hesitates_s=2.0).start(),
    ]
    await asyncio.sleep(30)
    assert sorted(node.how for node in nodes) == ["founded", "joined", "joined", "joined"]


async def test_being_told_of_itself_does_not_count_it_among_the_first(make):
    """An absent seed is waited for, whatever others that are starting tell."""
    nodes = [make(1, (2, 9)).start(), make(2, (1, 9)).start(), make(3, (1, 2, 9)).start()]
    await asyncio.sleep(120)
    assert [node.how for node in nodes] == [None, None, None]


async def test_two_that_know_each_other_one_way_have_one_founder(make):
    nodes = [make(1, (2,)).start(), make(2, (2,)).start()]
    await asyncio.sleep(20)
    assert sorted(node.how for node in nodes) == ["founded", "joined"]


async def test_with_an_absent_seed_a_cluster_without_itself_keeps_trying(make):
    nodes = [make(1, (2, 9)).start(), make(2, (1, 9)).start()]
    await asyncio.sleep(120)
    assert [node.how for node in nodes] == [None, None]
    ninth = make(9, (9,)).start()
    await asyncio.sleep(45)
    assert [node.how for node in (*nodes, ninth)].count("founded") == 1
    assert None not in [node.how for node in (*nodes, ninth)]


async def test_restarted_all_at_once_who_remembers_most_resumes_and_the_others_join(make):
    steps = {1: 500, 2: 9000, 3: 700}
    nodes = [
        make(
            n,
            () if n == 1 else (1,),
            knows=tuple(m for m in steps if m != n),
            memory=RememberedSwarm("swarm", ACROBOT, "ab" * 8, steps[n]),
        ).start(0.2 * n)
        for n in steps
    ]
    newcomer = make(4, (1,)).start()
    await asyncio.sleep(20)
    assert [node.how for node in nodes] == ["joined", "resumed", "joined"]
    assert newcomer.how == "joined"
    assert all(node.origin.task == ACROBOT for node in (*nodes, newcomer))
    assert {node.origin.info.lineage for node in nodes if node.how == "joined"} == {"ab" * 8}


@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(n, marks=pytest.mark.slow) for n in range(3, 18))]
)
async def test_however_they_start_one_leads(make, seed):
    """Random counts, delays, times of building and memories; each knows all others, some count themselves."""
    rng = random.Random(seed)
    count = rng.randint(2, 6)
    numbers = rng.sample(range(1, 50), count)
    nodes = []
    for n in numbers:
        others = tuple(m for m in numbers if m != n or rng.random() < 0.5)
        remembers = rng.random() < 0.5
        memory = RememberedSwarm("swarm", ACROBOT, "ab" * 8, rng.randint(0, 3)) if remembers else None
        knows = tuple(m for m in numbers if m != n) if remembers else ()
        nodes.append(
            make(n, others, knows=knows, memory=memory, builds_s=rng.uniform(0.5, 20.0)).start(
                rng.choice((0.0, rng.uniform(0.0, 0.1), rng.uniform(0.0, 8.0)))
            )
        )
    await asyncio.sleep(90)
    how = [node.how for node in nodes]
    assert None not in how
    assert len([one for one in how if one != "joined"]) == 1


async def test_a_claim_that_meets_another_waits_until_it_is_taken_back(make):
    """The same instant, no delay: ids decide, never both."""
    make.network.delay_s = (0.0, 0.0)
    nodes = [make(11, (12,)).start(), make(12, (11,)).start()]
    await asyncio.sleep(15)
    assert sorted(node.how for node in nodes) == ["founded", "joined"]


class Campaign:
    """Five nodes that start in any order, of which two are all's seeds; some freeze, or die and come back.

    What a node's data folder remembers, it knows when it comes back. Training is time: a lineage has as many
    steps as it is seconds old, and a node that meets a greater one adopts it, as `RecordFollower` does.
    """

    SEEDS = (1, 2)

    def __init__(self, make, seed: int) -> None:
        self.make, self.rng = make, random.Random(seed)
        self.nodes: dict[int, Node] = {}
        self.memories: dict[int, RememberedSwarm | None] = {}
        self.known: dict[int, tuple[int, ...]] = {}
        self.began: dict[str, float] = {}
        self.foundings: list[int] = []

    def start(self, number: int) -> None:
        slow = self.rng.random() < 0.4
        self.nodes[number] = self.make(
            number,
            self.SEEDS,
            knows=self.known.get(number, ()),
            memory=self.memories.get(number),
            builds_s=self.rng.uniform(5.0, 20.0) if slow else self.rng.uniform(0.2, 2.0),
            hesitates_s=self.rng.uniform(0.0, 4.0) if slow else 0.0,
        ).start()

    def lineage(self, number: int) -> str:
        node = self.nodes.get(number)
        return "" if node is None or node.admission.training is None else node.admission.training.lineage

    def look(self, now_s: float) -> None:
        """Note what data folders get to remember, and let greater lineages be adopted."""
        by_id = {node.identity.node_id: number for number, node in self.nodes.items()}
        for number, node in self.nodes.items():
            if not (mine := self.lineage(number)):
                continue
            if mine not in self.began:
                self.began[mine] = now_s
                self.foundings.append(number)
            members = node.service.members()
            for member in members:
                theirs = self.lineage(by_id[member.id]) if member.id in by_id else ""
                if member.state == "alive" and theirs and self.began.get(theirs, now_s) < self.began[mine]:
                    mine = node.admission.training.lineage = theirs
            others = tuple(by_id[member.id] for member in members if by_id.get(member.id, number) != number)
            self.known[number] = tuple(sorted({*self.known.get(number, ()), *others}))
            steps = int(now_s - self.began[mine])
            self.memories[number] = RememberedSwarm(
                "swarm", TaskConfig(), mine, steps, others=bool(self.known[number])
            )

    async def run(self, seconds: float) -> None:
        for tick in range(int(4 * seconds)):
            self.look(tick / 4)
            await asyncio.sleep(0.25)

    async def kill(self, number: int) -> None:
        await self.nodes.pop(number).close()

    def freeze(self, number: int) -> None:
        FROZEN.add(at(number))
        self.make.network.freeze(self.nodes[number].identity.node_id)

    def thaw(self, number: int) -> None:
        FROZEN.discard(at(number))
        self.make.network.thaw(self.nodes[number].identity.node_id)


@pytest.mark.parametrize(
    "seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 50))]
)
async def test_whatever_happens_to_the_seeds_there_is_one_swarm_of_the_oldest_lineage(make, seed):
    one = Campaign(make, seed)
    order = one.rng.sample(range(1, 6), 5)
    running = asyncio.create_task(one.run(160.0))

    async def live(number: int) -> None:
        await asyncio.sleep(one.rng.choice((0.0, one.rng.uniform(0.0, 30.0))))
        one.start(number)
        for _ in range(one.rng.randint(0, 2)):
            await asyncio.sleep(one.rng.uniform(1.0, 15.0))
            if one.nodes[number].how is not None and one.rng.random() < 0.5:
                one.freeze(number)
                await asyncio.sleep(one.rng.uniform(2.0, 20.0))
                one.thaw(number)
            else:
                await one.kill(number)
                await asyncio.sleep(one.rng.uniform(0.5, 10.0))
                one.start(number)

    await asyncio.gather(*map(live, order), running)
    assert {one.lineage(number) for number in order} == {min(one.began, key=one.began.get)}
    assert len(one.foundings) == len({*one.foundings}), "nothing is founded twice on one data folder"
    for number in order:
        alive = [member for member in one.nodes[number].service.members() if member.state == "alive"]
        assert len(alive) == 5
