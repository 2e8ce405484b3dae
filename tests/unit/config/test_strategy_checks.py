"""Every pair of options of every strategy is either accepted or refused with a reason."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import get_args

import pytest

from p2pdrl.config.checks import strategy_problems, trust_problems
from p2pdrl.config.loader import resolve
from p2pdrl.config.mode import protocol_of
from p2pdrl.config.strategy import (
    AdpsgdConfig,
    Compression,
    Content,
    FederatedConfig,
    GalaConfig,
    GradAverageConfig,
    HogwildConfig,
    Mixing,
    Mode,
    Paced,
    ParamAverageConfig,
    PipelineConfig,
    ServerAsyncConfig,
    ServerSyncConfig,
    StrategyConfig,
)
from p2pdrl.errors import ConfigError

ALL = get_args(StrategyConfig)
LOSSY = {"int8", "topk", "threshold"}
SPARSE = {"topk", "threshold"}


def cells():
    """Every strategy with every compression, mixing and content that it has a key for."""
    for struct in ALL:
        fields = struct.__struct_fields__
        for compression, mixing, content in itertools.product(
            get_args(Compression) if "compression" in fields else [None],
            get_args(Mixing) if "mixing" in fields else [None],
            get_args(Content) if "exchanges" in fields else [None],
        ):
            given = {"compression": compression, "mixing": mixing, "exchanges": content}
            yield struct(**{key: value for key, value in given.items() if value is not None})


def refused_keys(config: StrategyConfig) -> set[str]:
    """An account of the rules by itself: the keys to change for one cell of the matrix."""
    name, keys = protocol_of(config), set()
    compression = getattr(config, "compression", "none")
    mixing = getattr(config, "mixing", "mean")
    parameters = name == "sgp" or getattr(config, "exchanges", None) == "parameters"
    if compression in LOSSY and (parameters or name == "strom"):
        keys.add("compression")
    if mixing == "trimmed" and (
        compression in SPARSE or name in {"adpsgd", "hogwild", "gala", "sgp", "strom", "server_async"}
    ):
        keys.add("mixing")
    if mixing == "clipped" and name == "strom":
        keys.add("mixing")
    if name == "hogwild" and config.exchanges == "gradients":
        keys.add("exchanges")
    if compression not in getattr(config, "compressions", ("none",)):
        keys.add("compression")
    if mixing not in getattr(config, "mixings", ("mean",)):
        keys.add("mixing")
    return {f"task.strategy.{key}" for key in keys}


def test_the_matrix_is_whole() -> None:
    assert {type(config) for config in cells()} == set(ALL)
    # D-PSGD has 5 compressions × 3 ways of mixing × 2 contents, SGP 5 × 3, a pipeline one cell.
    counts = Counter(protocol_of(config) for config in cells())
    assert (counts["dsgd"], counts["sgp"], counts["pipeline"]) == (30, 15, 1)


def test_each_cell_is_accepted_or_refused_with_a_reason() -> None:
    wrong = []
    for config in cells():
        found = list(strategy_problems(config))
        keys = {problem.key for problem in found}
        if keys != refused_keys(config):
            wrong.append(f"{config}: {keys}, but {refused_keys(config)} is expected")
        wrong += [
            f"{config}: {problem}"
            for problem in found
            if problem.key.removeprefix("task.strategy.") not in config.__struct_fields__
            or len(problem.message) <= 40
            or not ("set " in problem.message or "take " in problem.message)
        ]
    assert not wrong, "\n".join(["", *wrong])


class NewGossipConfig(Paced, frozen=True, kw_only=True, tag_field="name", tag="new_gossip"):
    """Inherits options that need code of a strategy's own, and declares nothing."""

    modes = ("gossip",)


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"compression": "int8"}, "compression"),
        ({"compression": "topk", "mixing": "clipped"}, "mixing"),
        ({"mixing": "trimmed"}, "mixing"),
        ({"every_updates": 0}, "every_updates"),
    ],
)
def test_what_a_strategy_inherits_and_doesnt_declare_is_refused(options: dict[str, object], key: str) -> None:
    config = NewGossipConfig(**options)
    assert f"task.strategy.{key}" in {problem.key for problem in strategy_problems(config)}
    assert list(strategy_problems(NewGossipConfig(compression="none"))) == []


@pytest.mark.parametrize("struct", ALL)
def test_every_strategy_belongs_to_a_mode(struct: type) -> None:
    assert struct().mode in struct.modes
    assert set(struct.modes) <= set(get_args(Mode))
    assert set(struct.told) <= set(struct.__struct_fields__)


@pytest.mark.parametrize("struct", ALL)
def test_defaults_work(struct: type) -> None:
    assert list(strategy_problems(struct())) == []


@pytest.mark.parametrize("struct", [s for s in ALL if "every_s" in s.__struct_fields__])
def test_exchanges_that_never_begin(struct: type) -> None:
    assert [p.key for p in strategy_problems(struct(every_updates=0))] == ["task.strategy.every_updates"]
    assert list(strategy_problems(struct(every_updates=0, every_s=1.0))) == []


def test_hogwild_within_a_node_has_no_exchanges_to_check() -> None:
    assert (
        list(strategy_problems(HogwildConfig(every_updates=0, mixing="trimmed", between_nodes=False))) == []
    )


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (ServerSyncConfig(pinned=("a", "a"), servers=2), "pinned"),
        (ServerSyncConfig(pinned=("a", "b")), "pinned"),
        (ServerSyncConfig(reduce="sum", mixing="trimmed"), "reduce"),
        (ServerAsyncConfig(pinned=("a", "b")), "pinned"),
        (ServerAsyncConfig(ahead=4, max_staleness=3, stale="drop"), "max_staleness"),
        (ServerAsyncConfig(fetch_every=200, stale="drop"), "max_staleness"),
        (ParamAverageConfig(outer_learning_rate=0.0), "outer_learning_rate"),
        (ParamAverageConfig(outer_momentum=1.0), "outer_momentum"),
        (FederatedConfig(outer_learning_rate=0.0), "outer_learning_rate"),
        (FederatedConfig(noise_multiplier=1.0), "weighting"),
        (FederatedConfig(noise_multiplier=1.0, weighting="equal", mixing="trimmed"), "mixing"),
        (FederatedConfig(noise_multiplier=1.0, weighting="equal", mixing="clipped"), "mixing"),
        (FederatedConfig(noise_multiplier=1.0, weighting="equal", compression="topk"), "compression"),
        (GradAverageConfig(backend="torch", compression="int8"), "compression"),
        (GradAverageConfig(backend="torch", mixing="clipped"), "mixing"),
        (ParamAverageConfig(backend="torch", mixing="trimmed"), "mixing"),
        (PipelineConfig(chunks=2), "chunks"),
        (PipelineConfig(schedule="interleaved"), "chunks"),
        (PipelineConfig(cuts=(1, 2)), "cuts"),
        (PipelineConfig(stages=3, cuts=(2, 2)), "cuts"),
        (PipelineConfig(stages=3, cuts=(3, 2)), "cuts"),
        (PipelineConfig(schedule="interleaved", chunks=2, cuts=(1,)), "cuts"),
    ],
)
def test_other_rules(config: StrategyConfig, key: str) -> None:
    assert [problem.key for problem in strategy_problems(config)] == [f"task.strategy.{key}"]


@pytest.mark.parametrize(
    "config",
    [
        ServerSyncConfig(reduce="sum", mixing="clipped", backups=2, quorum=0.5),
        ServerSyncConfig(pinned=("a", "b"), servers=3, compression="topk"),
        ServerAsyncConfig(push_every=5, fetch_every=5, local_steps=True, stale="scale"),
        ServerAsyncConfig(ahead=0, max_staleness=1, fetch_every=2, stale="drop"),
        ServerAsyncConfig(max_staleness=0),
        ParamAverageConfig(outer_learning_rate=0.7, outer_momentum=0.9, compression="int8"),
        FederatedConfig(noise_multiplier=1.0, weighting="equal", compression="bf16"),
        FederatedConfig(compression="topk", mixing="clipped"),
        GalaConfig(partners="exponential", mixing="trimmed"),
        GradAverageConfig(backend="torch", compression="none"),
        PipelineConfig(stages=3, cuts=(1, 4), schedule="gpipe"),
        PipelineConfig(schedule="interleaved", chunks=2, cuts=(1, 2, 3)),
        PipelineConfig(stages=1, backend="torch"),
    ],
)
def test_what_the_rules_let_pass(config: StrategyConfig) -> None:
    assert list(strategy_problems(config)) == []


@pytest.mark.parametrize("name", ["grad_average", "param_average", "pipeline"])
def test_torch_distributed_wants_a_trusted_network(name: str) -> None:
    sets = [f"task.strategy.name={name}", "task.strategy.backend=torch"]
    with pytest.raises(ConfigError, match=r"node\.trusted_network = true"):
        resolve(sets=sets)
    resolve(sets=[*sets, "node.trusted_network=true"])
    assert list(trust_problems(AdpsgdConfig(), trusted_network=False)) == []


def test_the_loader_names_the_source_of_what_it_refuses() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(sets=["task.strategy.compression=topk"])
    assert str(caught.value).startswith("task.strategy.compression (in --set): a quantised or sparse copy")
