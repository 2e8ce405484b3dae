"""What people type after ``mode set``, read as every other source of configuration is."""

from __future__ import annotations

from typing import get_args

import pytest

from p2pdrl.config.mode import (
    PROTOCOLS,
    changed_options,
    mode_words,
    protocol_of,
    strategy_from,
    told_options,
)
from p2pdrl.config.strategy import (
    AdpsgdConfig,
    DsgdConfig,
    FederatedConfig,
    GradAverageConfig,
    HogwildConfig,
    LocalConfig,
    Mode,
    PipelineConfig,
    ServerSyncConfig,
    StrategyConfig,
)
from p2pdrl.errors import ConfigError


def test_every_mode_and_every_strategy_can_be_typed() -> None:
    assert set(PROTOCOLS) == set(get_args(Mode))
    structs = {str(struct.__struct_config__.tag) for struct in get_args(StrategyConfig)}
    assert {name for names in PROTOCOLS.values() for name in names} == structs
    for mode, protocols in PROTOCOLS.items():
        for protocol in protocols:
            strategy = strategy_from(mode, [f"protocol={protocol}"])
            assert (strategy.mode, protocol_of(strategy)) == (mode, protocol)


@pytest.mark.parametrize(
    ("mode", "sets", "strategy"),
    [
        ("gossip", [], AdpsgdConfig()),
        ("gossip", ["weight=0.25", "weight=0.3"], AdpsgdConfig(weight=0.3)),
        ("gossip", ["protocol=dsgd", "topology=torus"], DsgdConfig(topology="torus")),
        ("gossip", ['protocol="dsgd"', 'topology = "torus"'], DsgdConfig(topology="torus")),
        ("gossip", ["protocol=hogwild"], HogwildConfig()),
        ("local", ["protocol=hogwild", "learners=4"], HogwildConfig(between_nodes=False, learners=4)),
        ("local", [], LocalConfig()),
        ("allreduce", ["protocol=ddp"], GradAverageConfig()),
        ("server_sync", ["servers=2", "pinned=a,b"], ServerSyncConfig(servers=2, pinned=("a", "b"))),
        ("server-sync", ["learning_rate=none"], ServerSyncConfig()),
        ("Server-Sync", ["learning_rate=0.1"], ServerSyncConfig(learning_rate=0.1)),
        ("pipeline", [], PipelineConfig()),
        ("pipeline", ["stages=3", "cuts=2,4"], PipelineConfig(stages=3, cuts=(2, 4))),
        ("pipeline", ["microbatches=auto"], PipelineConfig(microbatches="auto")),
    ],
)
def test_what_is_typed(mode: str, sets: list[str], strategy: StrategyConfig) -> None:
    assert strategy_from(mode, sets) == strategy


@pytest.mark.parametrize(
    ("mode", "sets", "says"),
    [
        ("pipeline", ["stages=0"], "≥ 1"),
        ("pipeline", ["stages=4", "cuts=3"], "need 3 cuts, not 1"),
        ("gosip", [], "did you mean gossip?"),
        ("x", [], "the modes are gossip, server-sync"),
        ("adpsgd", [], "mode set gossip --set protocol=adpsgd"),
        ("ddp", [], "mode set allreduce --set protocol=ddp"),
        ("gossip", ["wieght=0.3"], "did you mean weight?"),
        ("gossip", ["zzz=0.3"], "it has compression"),
        ("gossip", ["weight=0.9"], "weight = '0.9': must be a number > 0 and ≤ 0.5"),
        ("gossip", ["weight=nan"], "finite"),
        ("gossip", ["weight"], "KEY=VALUE"),
        ("gossip", ["=3"], "KEY=VALUE"),
        ("gossip", ["protocol=grad_average"], "belongs to mode allreduce"),
        ("gossip", ["protocol=adspgd"], "did you mean adpsgd?"),
        ("gossip", ["name=dsgd"], "has no option"),
        ("gossip", ["stages=2"], "adpsgd has no option 'stages': it belongs to mode pipeline"),
        ("gossip", ["degree=2"], "it belongs to protocol dsgd of mode gossip"),
        ("allreduce", ["servers=2"], "grad_average has no option 'servers': server_sync and server_async"),
        ("gossip", ["every_updates=0"], "no exchange ever begins"),
        ("gossip", ["compression=topk"], "isn't an average"),
        ("local", ["protocol=hogwild", "between_nodes=true"], "is mode gossip, not local"),
        ("local", ["weight=0.3"], "local has no option"),
        ("server-sync", ["servers=0"], "≥ 1"),
    ],
)
def test_what_is_refused(mode: str, sets: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        strategy_from(mode, sets)
    assert says in str(caught.value)


def test_changed_options_are_those_that_differ() -> None:
    assert changed_options(AdpsgdConfig()) == {}
    assert changed_options(ServerSyncConfig(pinned=("a",), eps=0.1)) == {"pinned": ("a",), "eps": 0.1}
    assert changed_options(FederatedConfig(participation=1.0)) == {"participation": 1.0}


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        (AdpsgdConfig(), "gossip: adpsgd"),
        (AdpsgdConfig(weight=0.3), "gossip: adpsgd (weight=0.3)"),
        (ServerSyncConfig(), "server-sync (servers=1)"),
        (HogwildConfig(between_nodes=False), "local: hogwild (learners=2, between_nodes=false)"),
        (PipelineConfig(), "pipeline (stages=2, schedule=1f1b, microbatches=4, backend=auto)"),
        (
            PipelineConfig(stages=3, cuts=(2, 4), backend="stream"),
            "pipeline (stages=3, schedule=1f1b, microbatches=4, backend=stream, cuts=[2, 4])",
        ),
    ],
)
def test_a_mode_is_told_with_what_matters_and_what_was_changed(strategy: StrategyConfig, words: str) -> None:
    assert mode_words(strategy) == words


def test_options_that_say_what_a_mode_is_are_told_even_as_defaults() -> None:
    assert told_options(PipelineConfig(stages=2))["stages"] == 2
    assert told_options(LocalConfig()) == {}
    for struct in get_args(StrategyConfig):
        told_options(struct())  # names only options that there are
