"""Six real nodes on a network of packets: two halves, a way cut in one direction, loss on slow links.

Scenes and judgements are those of ``scripts/chaos.py``. Wants root.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from p2pdrl.testing.packet_network import PacketNetwork

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SCRIPTS = str(Path(__file__).parents[2] / "scripts")
NODES = 6
CUT_S = 60.0
REST_S = 3.0
MINUTES = 5.0
BUSY = 0.9


def test_cut_lossy_and_slow_networks_kill_nobody_and_heal(tmp_path, monkeypatch):
    if why := PacketNetwork.missing():
        pytest.skip(why)
    monkeypatch.syspath_prepend(SCRIPTS)
    import chaos
    from support.fault_schedule import Scene
    from support.fault_swarm import FaultSwarm

    scenes = [
        Scene("halves", (0, 2, 4), CUT_S, REST_S),
        Scene("one way", (1, 4), CUT_S, REST_S),
        Scene("slow, loss", (), CUT_S, REST_S),
    ]
    folder = tmp_path / "swarm"
    folder.mkdir()
    task = folder / "task.toml"
    task.write_text(chaos.TASK.format(time_s=60 * MINUTES + chaos.COME_UP_S))
    pace = "--set=node.learner.step_delay_s=0.02"
    with FaultSwarm(NODES, folder, ["--config", str(task), pace], seed=7) as swarm:
        if swarm.no_packets:
            pytest.skip(swarm.no_packets)
        campaign = chaos.Campaign(swarm, scenes, MINUTES, 1.0)
        campaign.run()
        machine = campaign.machine()
    print(machine, {name: figure.worst for name, figure in campaign.figures.items()})
    assert len(campaign.played) == len(scenes), machine
    if campaign.violations and campaign.busy > BUSY:
        pytest.skip(f"the machine is too busy to judge by: {machine}: {campaign.violations}")
    assert campaign.violations == []
