"""From what people type after ``mode set`` to a strategy's options, and back to words; ``stop set`` alike.

    mode set gossip --set protocol=dsgd --set topology=torus

Read by the same rules as every other source of configuration: typed by the schema, unknown names get the
nearest valid one, combinations that can't work are refused. Both the command line and the node call it:
the one to report mistakes at once, the other because it trusts nobody.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

import msgspec

from p2pdrl.config import schema
from p2pdrl.config.checks import strategy_problems
from p2pdrl.config.schema import coerce_text, shown
from p2pdrl.config.strategy import Mode, StrategyConfig
from p2pdrl.config.task import StopConfig
from p2pdrl.errors import ConfigError, did_you_mean

__all__ = [
    "PROTOCOLS",
    "changed_options",
    "mode_words",
    "protocol_of",
    "stop_from",
    "strategy_from",
    "told_options",
]

STRATEGIES: dict[str, type[StrategyConfig]] = {
    str(struct.__struct_config__.tag): struct for struct in get_args(StrategyConfig)
}
"""By name, the options of each strategy."""
PROTOCOLS: dict[Mode, tuple[str, ...]] = {
    mode: tuple(name for name, struct in STRATEGIES.items() if mode in struct.modes)
    for mode in get_args(Mode)
}
"""The strategies of each mode; the first is taken when nobody names one."""
ALIASES = {"ddp": "grad_average", "downpour": "server_async", "mapreduce_sync": "server_sync"}
PROTOCOL = "protocol"
"""The key that names the strategy; every other key is one of its options."""


def protocol_of(strategy: StrategyConfig) -> str:
    """The name of a strategy: ``adpsgd``, ``server_sync``."""
    return str(strategy.__struct_config__.tag)


def changed_options(strategy: StrategyConfig) -> dict[str, Any]:
    """The options that differ from their defaults, as JSON types."""
    options: dict[str, Any] = msgspec.to_builtins(strategy)
    defaults: dict[str, Any] = msgspec.to_builtins(type(strategy)())
    return {name: value for name, value in options.items() if value != defaults[name]}


def told_options(strategy: StrategyConfig) -> dict[str, Any]:
    """What people are told of a strategy, as JSON types: what says most first, then all that was changed."""
    options: dict[str, Any] = msgspec.to_builtins(strategy)
    first = {name: options[name] for name in strategy.told}
    return first | changed_options(strategy)


def mode_words(strategy: StrategyConfig) -> str:
    """A mode in a few words: ``gossip: adpsgd (weight=0.3)``, ``server-sync (servers=1)``.

    Example:
        >>> from p2pdrl.config.strategy import AdpsgdConfig
        >>> mode_words(AdpsgdConfig(weight=0.3))
        'gossip: adpsgd (weight=0.3)'
    """
    mode, protocol = strategy.mode, protocol_of(strategy)
    words = mode if protocol.replace("_", "-") == mode else f"{mode}: {protocol}"
    options = ", ".join(f"{name}={_value(value)}" for name, value in told_options(strategy).items())
    return f"{words} ({options})" if options else words


def strategy_from(mode: str, sets: Sequence[str] = ()) -> StrategyConfig:
    """Read what a person typed.

    Args:
        mode: one of `PROTOCOLS`.
        sets: ``key=value`` texts; options that aren't named take their defaults; of two for one key the
            later counts.

    Raises:
        ConfigError: an unknown mode, strategy or option, a bad value, or options that can't work together.
    """
    family = _family(mode)
    given = dict(_split(text) for text in sets)
    protocol = _protocol(family, given.pop(PROTOCOL, PROTOCOLS[family][0]))
    options = {key: _option(protocol, key, text) for key, text in given.items()}
    if protocol == "hogwild":
        options.setdefault("between_nodes", family == "gossip")
    try:
        strategy: StrategyConfig = msgspec.convert({**options, schema.TAG: protocol}, StrategyConfig)
    except msgspec.ValidationError as error:  # every value passed alone: a rule between fields
        raise ConfigError(f"{protocol}: {error}") from error
    if strategy.mode != family:
        raise ConfigError(f"{protocol} with these options is mode {strategy.mode}, not {family}")
    problem = next(strategy_problems(strategy), None)
    if problem is not None:
        raise ConfigError(f"{problem.key.removeprefix('task.strategy.')}: {problem.message}")
    return strategy


def stop_from(sets: Sequence[str]) -> StopConfig:
    """Read a stop condition that a person typed; what isn't named is off.

    Args:
        sets: ``key=value`` texts; of two for one key the later counts.

    Raises:
        ConfigError: an unknown condition, a bad value, or none at all.
    """
    fields: Mapping[str, schema.Field] = schema.fields(StopConfig)
    given: dict[str, Any] = {}
    for key, text in (_split(one, "env_steps=1000000") for one in sets):
        if key not in fields:
            key = {"steps": "env_steps", "return": "mean_return", "time": "time_s"}.get(key, key)
            near = f"did you mean {key}?" if key in fields else _nearest(key, list(fields), "there are")
            raise ConfigError(f"no stop condition {shown(key)}; {near}")
        try:
            given[key] = coerce_text(text, fields[key].annotation)
        except ValueError as error:
            raise ConfigError(f"{key} = {shown(text)}: {error}") from error
    if not given:
        raise ConfigError(f"name a condition, such as env_steps=1000000; there are {', '.join(fields)}")
    return StopConfig(**given)


def _family(text: str) -> Mode:
    name = text.strip().lower().replace("_", "-")
    for mode, protocols in PROTOCOLS.items():
        if name == mode:
            return mode
        if name.replace("-", "_") in protocols or ALIASES.get(name.replace("-", "_")) in protocols:
            protocol = name.replace("-", "_")
            raise ConfigError(f"{protocol} is a protocol: write `mode set {mode} --set protocol={protocol}`")
    raise ConfigError(f"no mode is named {shown(text)}; {_nearest(name, list(PROTOCOLS), 'the modes are')}")


def _protocol(family: Mode, text: str) -> str:
    wanted = text.strip().strip("\"'").lower().replace("-", "_")
    name = ALIASES.get(wanted, wanted)
    protocols = PROTOCOLS[family]
    if name in protocols:
        return name
    for mode, others in PROTOCOLS.items():
        if name in others:
            raise ConfigError(f"protocol {name} belongs to mode {mode}; {family} has {', '.join(protocols)}")
    raise ConfigError(f"{family} has no protocol {shown(text)}; {_nearest(name, protocols, f'{family} has')}")


def _split(text: str, example: str = "--set weight=0.5") -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"{shown(text)} isn't written KEY=VALUE, as in {example}")
    return key.strip(), value.strip()


def _option(protocol: str, key: str, text: str) -> Any:
    fields: Mapping[str, schema.Field] = schema.fields(STRATEGIES[protocol])
    if key not in fields:
        owners = [name for name, struct in STRATEGIES.items() if key in schema.fields(struct)]
        if owners:
            raise ConfigError(f"{protocol} has no option {shown(key)}: {_belongs(owners)}")
        known = [*fields, PROTOCOL]
        raise ConfigError(f"{protocol} has no option {shown(key)}; {_nearest(key, known, 'it has')}")
    try:
        return coerce_text(text, fields[key].annotation)
    except ValueError as error:
        raise ConfigError(f"{key} = {shown(text)}: {error}") from error


def _belongs(owners: Sequence[str]) -> str:
    """Whose an option is: ``it belongs to mode pipeline``."""
    modes = [mode for mode, protocols in PROTOCOLS.items() if set(owners) <= set(protocols)]
    if len(owners) > 1 or not modes:
        return f"{', '.join(owners[:-1])} and {owners[-1]} have it"
    protocol = "" if PROTOCOLS[modes[0]] == (owners[0],) else f"protocol {owners[0]} of "
    return f"it belongs to {protocol}mode {modes[0]}"


def _value(value: Any) -> str:
    """An option's value as people type it."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _nearest(name: str, known: Sequence[str], has: str) -> str:
    return did_you_mean(name, known, f"{has} {', '.join(known)}")
