"""What people type."""

from __future__ import annotations

import msgspec
import pytest

from p2pdrl.config.loader import preset_names, resolve
from p2pdrl.config.mode import PROTOCOLS, protocol_of
from p2pdrl.errors import UsageError
from p2pdrl.planner.description import LAN, WAN
from p2pdrl.planner.parsing import link_of, machines_of, strategy_of, swarm_of

STRATEGIES = {name for names in PROTOCOLS.values() for name in names}


def test_links():
    assert link_of("wan") is WAN
    link = link_of("20,40,0.001")
    assert link.out_bytes_s == 2.5e6
    assert link.delay_s == pytest.approx(0.02)
    assert link.loss == 0.001


@pytest.mark.parametrize("text", ["", "moon", "1,2", "a,b,c", "-1,2,0", "1,2,1", "nan,1,0", "1,-5,0"])
def test_bad_links(text):
    with pytest.raises(UsageError, match="MBPS"):
        link_of(text)


def test_slow_machines_come_last():
    assert [one.factor for one in machines_of(4, 0.1, ["1x10", "1x2.5"])] == [1, 1, 10, 2.5]


@pytest.mark.parametrize("text", ["", "x", "0x10", "1x", "1x0", "1xinf", "5x2", "-1x2", "axb"])
def test_bad_slow_machines(text):
    with pytest.raises(UsageError):
        machines_of(4, 0.1, [text])


def test_more_slow_machines_than_nodes():
    with pytest.raises(UsageError, match="only 4"):
        machines_of(4, 0.1, ["3x2", "2x3"])


def test_a_file():
    swarm = swarm_of(
        {"nodes": 3, "links": "lan", "machines": [{"update_s": 0.5}], "churn": {"detect_s": 1.0}}
    )
    assert swarm.links == (LAN,)
    assert swarm.machine(2).update_s == 0.5
    mixed = swarm_of({"links": ["wan", {"delay_s": 0.1}]})
    assert mixed.links[0] == WAN
    assert mixed.links[1].delay_s == 0.1


@pytest.mark.parametrize(
    "document", [{"nods": 3}, {"nodes": 0}, {"nodes": 1001}, {"machines": []}, {"size": "x"}]
)
def test_bad_files(document):
    with pytest.raises(UsageError):
        swarm_of(document)


def test_strategies():
    assert strategy_of("param_average:every_updates=4,outer_momentum=0.9").outer_momentum == 0.9
    assert strategy_of("hogwild").between_nodes
    assert not strategy_of("hogwild:between_nodes=false, learners=3").between_nodes


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_stands_for_its_strategy(name):
    config = resolve(files=[name]).config.task.strategy
    assert protocol_of(strategy_of(name)) == protocol_of(config)
    if name not in STRATEGIES:
        assert strategy_of(name) == config


def test_a_presets_options_can_be_changed():
    assert strategy_of("amb_pp:stages=3") == msgspec.structs.replace(strategy_of("amb_pp"), stages=3)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("pipelin", "no strategy or preset is named 'pipelin'; did you mean pipeline?"),
        ("downpuor", "did you mean downpour?"),
        ("zzz", "there are adpsgd, dsgd, .*amb_pp"),
        ("adpsgd:wieght=1", "did you mean weight?"),
        ("amb_pp:stags=1", "did you mean task.strategy.stages?"),
        ("adpsgd:stages=2", "belongs to mode pipeline"),
    ],
)
def test_what_is_wrong_with_a_strategy_is_told(text, why):
    with pytest.raises(UsageError, match=why.replace("?", "[?]")):
        strategy_of(text)


@pytest.mark.parametrize("text", ["", "adpsdg", "adpsgd:every", "adpsgd:nope=1", "dsgd:degree=1"])
def test_bad_strategies(text):
    with pytest.raises(UsageError):
        strategy_of(text)
