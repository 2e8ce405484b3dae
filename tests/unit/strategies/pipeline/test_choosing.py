"""Swarms whose configuration leaves the backend open: what they choose, tell and do when that fails."""

from __future__ import annotations

import msgspec
import pytest

from p2pdrl.errors import PeerRefusedError
from p2pdrl.group.service import Group
from p2pdrl.strategies.pipeline.port import PIPE_ROUTE

from .forms import make_form
from .swarms import CONFIG, Swarm, strategy, swarm_of

pytestmark = pytest.mark.looptime

AUTO = msgspec.structs.replace(CONFIG, backend="auto")


def with_gpus(swarm: Swarm) -> None:
    for number, node in enumerate(swarm.nodes):
        node.stages.device, node.stages.gpu, node.stages.usable_bytes = "cuda:0", f"G{number}", 10**9


async def formed(swarm: Swarm, backend: str) -> None:
    """Wait until all nodes show this backend, and have such an order."""
    await swarm.until(lambda: all(strategy(node).figures.backend == backend for node in swarm.nodes), 60.0)
    assert [node.stages.order.backend for node in swarm.nodes] == [backend] * len(swarm.nodes)


def told(node, kind: str) -> list[str]:
    return [text for one, text in node.swarm.told if one == kind]


async def test_torch_where_every_rank_has_what_it_needs():
    config = msgspec.structs.replace(AUTO, stages=3)
    async with swarm_of(3, config, start=False, trusted=True) as swarm:
        with_gpus(swarm)
        await swarm.start()
        await formed(swarm, "torch")
        head, *others = swarm.nodes
        assert all(node.stages.order.meeting.port == 4242 for node in others)
        assert [node.pipes.opened for node in swarm.nodes] == [0, 0, 0]
        assert all(node.stages.imported for node in swarm.nodes), "so that they meet quickly"
        assert "over torch, for all trust" in strategy(head).figures.why
        assert "over torch, for all trust" in told(head, "pipeline")[-1]
        await swarm.progress()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda node: setattr(node, "trusted", False), "doesn't trust its network"),
        (lambda node: setattr(node, "direct", False), "isn't reached at any port"),
        (lambda node: setattr(node.stages, "gpu", ""), "computes on cuda:0, where NCCL doesn't reach"),
        (lambda node: setattr(node.stages, "gpu", "G2"), "share a GPU"),
    ],
)
async def test_stream_where_one_of_them_has_not(rank: int, change, why: str):
    async with swarm_of(2, AUTO, start=False, trusted=True) as swarm:
        with_gpus(swarm)
        swarm.nodes[1 - rank].stages.gpu = "G2"
        change(swarm.nodes[rank])
        for node in swarm.nodes:
            node.strategy = type(node.strategy)(AUTO, node.context())
        await swarm.start()
        await swarm.working("01")
        await formed(swarm, "stream")
        assert why in strategy(swarm.nodes[0]).figures.why
        imported = [node.stages.imported for node in swarm.nodes]
        alone_could = [bool(n.trusted and n.direct and n.stages.gpu) for n in swarm.nodes]
        assert imported == alone_could, "torch is slow to import"


async def test_a_rank_that_doesnt_reach_another_one_has_it_run_over_stream(monkeypatch):
    config = msgspec.structs.replace(AUTO, stages=3)
    async with swarm_of(3, config, start=False, trusted=True) as swarm:
        with_gpus(swarm)
        _, one, other = swarm.nodes

        async def lives(group: Group, asked: str) -> bool:
            # Pings make the group as well, so a network that loses them would form another one.
            return group is not one.group or asked != other.id

        monkeypatch.setattr(Group, "lives", lives)
        await swarm.start()
        await formed(swarm, "stream")
        assert f"{one.id} isn't reached at any port, or doesn't" in strategy(swarm.nodes[0]).figures.why


@pytest.mark.parametrize("fails", ["meeting", "updates"])
@pytest.mark.parametrize("rank", [0, 1])
async def test_what_cant_meet_or_breaks_at_once_goes_on_over_stream(fails, rank: int):
    async with swarm_of(2, AUTO, start=False, trusted=True) as swarm:
        with_gpus(swarm)
        swarm.nodes[0 if fails == "updates" else rank].stages.torch_fails = fails
        await swarm.start()
        await swarm.working("01", within_s=60.0)
        await formed(swarm, "stream")
        head = swarm.nodes[0]
        (text,) = told(head, "pipeline-backend")
        assert ("couldn't meet over torch" if fails == "meeting" else "before its first update") in text
        assert "over stream, for" in strategy(head).figures.why
        assert "over torch" in strategy(head).figures.why
        before = len(head.stages.began)
        head.stages.die()
        head.stages.revive()
        await swarm.until(lambda: len(head.stages.began) > before, 60.0)
        assert head.stages.began[-1].order.backend == "stream", "torch isn't tried again"


async def test_what_broke_later_is_tried_again():
    async with swarm_of(2, AUTO, start=False, trusted=True) as swarm:
        with_gpus(swarm)
        await swarm.start()
        await formed(swarm, "torch")
        head = swarm.nodes[0]
        await swarm.until(lambda: strategy(head).figures.copies > 0)
        head.stages.die()
        head.stages.revive()
        await swarm.until(lambda: len(head.stages.began) > 1, 60.0)
        assert head.stages.began[-1].order.backend == "torch"
        assert not told(head, "pipeline-backend")


async def test_an_order_that_contradicts_itself_or_the_configuration_is_refused():
    async with swarm_of(2, trusted=True) as swarm:
        await swarm.working("01")
        head, rank = swarm.nodes
        key = rank.group.view.key
        form = make_form(key=key, generation=rank.stages.order.generation + 5, members=(head.id, rank.id))
        for changes in ({"port": 99}, {"backend": "torch"}, {"backend": "torch", "port": 99}):
            meta = msgspec.msgpack.encode(msgspec.structs.replace(form, **changes))
            with pytest.raises(PeerRefusedError) as refused:
                await head.transport.call(rank.address, rank.id, PIPE_ROUTE, meta, deadline_s=3.0)
            assert refused.value.status in (400, 409), changes
        assert len(rank.stages.began) == 1
