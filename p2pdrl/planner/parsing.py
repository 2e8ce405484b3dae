"""Descriptions of swarms from what people type.

lan                       a link by name: loopback, lan, wan
20,40,0.001               20 Mbit/s both ways, 40 ms from node to node, one packet in a thousand lost
1x10                      one machine, ten times slower
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec

from p2pdrl.config.loader import preset_names, resolve
from p2pdrl.config.mode import PROTOCOLS, strategy_from
from p2pdrl.config.schema import shown
from p2pdrl.config.strategy import (
    AdpsgdConfig,
    DsgdConfig,
    FederatedConfig,
    GalaConfig,
    GradAverageConfig,
    HogwildConfig,
    LocalConfig,
    ParamAverageConfig,
    ServerAsyncConfig,
    ServerSyncConfig,
    SgpConfig,
    StrategyConfig,
    StromConfig,
)
from p2pdrl.errors import ConfigError, UsageError, did_you_mean
from p2pdrl.planner.description import LAN, LOOPBACK, WAN, Machine, NodeLink, SwarmDescription

__all__ = ["ALL_STRATEGIES", "link_of", "machines_of", "strategy_of", "swarm_of"]

LINKS = {"loopback": LOOPBACK, "lan": LAN, "wan": WAN}
BYTES_PER_MBIT = 125_000.0
ALL_STRATEGIES: tuple[StrategyConfig, ...] = (
    AdpsgdConfig(),
    SgpConfig(),
    GalaConfig(),
    DsgdConfig(),
    StromConfig(),
    GradAverageConfig(),
    ParamAverageConfig(),
    FederatedConfig(),
    ServerSyncConfig(),
    ServerAsyncConfig(),
    HogwildConfig(),
    LocalConfig(),
)
"""Each strategy that can be predicted, with the options it has when nobody sets any."""


def link_of(text: str) -> NodeLink:
    """Read a link: a name, or ``MBPS,DELAY_MS,LOSS`` where the delay is that from node to node.

    Raises:
        UsageError: it is neither.
    """
    if text in LINKS:
        return LINKS[text]
    try:
        mbps, delay_ms, loss = (float(number) for number in text.split(","))
        return msgspec.convert(
            {
                "delay_s": delay_ms / 2000.0,
                "out_bytes_s": mbps * BYTES_PER_MBIT,
                "in_bytes_s": mbps * BYTES_PER_MBIT,
                "loss": loss,
            },
            NodeLink,
        )
    except ValueError as error:  # msgspec's ValidationError is one
        raise UsageError(
            f"--link {text}: give {', '.join(LINKS)}, or MBPS,DELAY_MS,LOSS as in 100,20,0.01"
        ) from error


def machines_of(
    nodes: int, update_s: float, slow: Sequence[str], jitter: float = 0.05
) -> tuple[Machine, ...]:
    """Build the machines of ``nodes`` nodes; slow ones come last.

    Args:
        nodes: how many.
        update_s: one update of the fast ones.
        slow: ``COUNTxFACTOR`` each.
        jitter: of all.

    Raises:
        UsageError: a text is malformed, or there are more slow machines than nodes.
    """
    factors: list[float] = []
    for text in slow:
        count, _, factor = text.partition("x")
        try:
            number, times = int(count), float(factor)
        except ValueError:
            number, times = 0, 0.0
        if not 1 <= number <= nodes or not 0 < times < float("inf"):
            raise UsageError(f"--slow {text}: give COUNTxFACTOR, as in 1x10 for one ten times slower")
        factors += [times] * number
    if len(factors) > nodes:
        raise UsageError(f"there are {len(factors)} slow machines, but only {nodes} nodes")
    fast = [1.0] * (nodes - len(factors))
    return tuple(Machine(update_s=update_s, jitter=jitter, factor=factor) for factor in [*fast, *factors])


def swarm_of(document: dict[str, object]) -> SwarmDescription:
    """Read a description from a TOML document; a link may be a text there, see `link_of`.

    Raises:
        UsageError: a key is unknown or a value is bad.
    """
    links = document.get("links")
    if isinstance(links, str):
        links = [links]
    if isinstance(links, list):
        links = [msgspec.to_builtins(link_of(one)) if isinstance(one, str) else one for one in links]
        document = {**document, "links": links}
    try:
        return msgspec.convert(document, SwarmDescription)
    except msgspec.ValidationError as error:
        raise UsageError(f"the swarm's description: {error}") from error


def strategy_of(text: str) -> StrategyConfig:
    """Read ``NAME`` or ``NAME:KEY=VALUE,KEY=VALUE``.

    The name is a strategy's, with the defaults of its options, or else a preset's, with the preset's.

    Raises:
        UsageError: there is no such strategy or option, or a value is bad.

    Example:
        >>> strategy_of("param_average:every_updates=4").every_updates
        4
        >>> strategy_of("downpour").push_every
        1
    """
    name, _, rest = text.partition(":")
    pairs = [pair.strip() for pair in rest.split(",") if pair.strip()]
    modes = [mode for mode, protocols in PROTOCOLS.items() if name in protocols]
    try:
        if modes:
            return _of_modes(modes, name, pairs)
        if name in preset_names():
            sets = [f"task.strategy.{pair}" for pair in pairs]
            return resolve(files=[name], sets=sets).config.task.strategy
    except ConfigError as error:
        raise UsageError(f"{text}: {error}") from error
    known = dict.fromkeys([*itertools.chain(*PROTOCOLS.values()), *preset_names()])
    hint = did_you_mean(name, known, f"there are {', '.join(known)}")
    raise UsageError(f"no strategy or preset is named {shown(name)}; {hint}")


def _of_modes(modes: Sequence[str], protocol: str, pairs: Sequence[str]) -> StrategyConfig:
    """Read a strategy's options; one that belongs to two modes may have those of either."""
    first: ConfigError | None = None
    for mode in modes:
        try:
            return strategy_from(mode, [f"protocol={protocol}", *pairs])
        except ConfigError as error:
            first = first or error
    assert first is not None  # noqa: S101 - there are modes
    raise first
