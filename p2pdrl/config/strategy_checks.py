"""Combinations of a strategy's options that can't work, each with the reason and what to do.

`checks` applies them to a configuration, `mode` to what a person types on a live swarm, and a node to
the record that a peer proposed. Whatever isn't refused here must run.
"""

from __future__ import annotations

from collections.abc import Iterator

from p2pdrl.config.problem import Problem
from p2pdrl.config.strategy import (
    AdpsgdConfig,
    DsgdConfig,
    FederatedConfig,
    GalaConfig,
    GradAverageConfig,
    HogwildConfig,
    LocalConfig,
    ParamAverageConfig,
    PipelineConfig,
    ServerAsyncConfig,
    ServerSyncConfig,
    SgpConfig,
    StrategyConfig,
    StromConfig,
)
from p2pdrl.config.strategy_bases import Compressed, Robust

__all__ = ["strategy_problems"]

LOSSY = ("int8", "topk", "threshold")
"""What loses too much at once for a copy of parameters, whose error nothing feeds back."""
SPARSE = ("topk", "threshold")


def strategy_problems(strategy: StrategyConfig) -> Iterator[Problem]:
    """Every rule that ``strategy`` breaks."""
    if isinstance(strategy, LocalConfig) or _no_exchange(strategy):
        return
    if isinstance(strategy, PipelineConfig):
        yield from _stages(strategy)
        return
    yield from _begins(strategy)
    yield from _compression(strategy)
    yield from _mixing(strategy)
    match strategy:
        case HogwildConfig(exchanges="gradients"):
            yield _problem(
                "exchanges",
                "learners that share one vector step at once and post no gradients; set exchanges = "
                "parameters, or name = adpsgd",
            )
        case ServerSyncConfig() | ServerAsyncConfig():
            yield from _servers(strategy)
        case GradAverageConfig():
            yield from _torch(strategy)
        case ParamAverageConfig():
            yield from _torch(strategy)
            yield from _outer(strategy)
        case FederatedConfig():
            yield from _outer(strategy)
            yield from _privacy(strategy)
        case _:
            pass


def _no_exchange(strategy: StrategyConfig) -> bool:
    return isinstance(strategy, HogwildConfig) and not strategy.between_nodes


def _problem(key: str, message: str) -> Problem:
    return Problem(f"task.strategy.{key}", message)


def _begins(strategy: StrategyConfig) -> Iterator[Problem]:
    if not isinstance(strategy, AdpsgdConfig | SgpConfig | GalaConfig):
        return
    if strategy.every_updates == 0 and strategy.every_s == 0:
        yield _problem(
            "every_updates",
            "with this and every_s both 0 no exchange ever begins; set one, or task.strategy.name = local",
        )


def _compression(strategy: Compressed) -> Iterator[Problem]:
    kind = strategy.compression
    if kind not in LOSSY:
        return
    if isinstance(strategy, StromConfig):
        yield _problem(
            "compression",
            f"strom sends nothing but ±tau, so {kind} has nothing left to compress; set tau, "
            "and leave compression at bf16 or none",
        )
    elif isinstance(strategy, SgpConfig):
        yield _problem(
            "compression",
            f"a quantised or sparse copy of parameters isn't an average, and sgp pushes parameters: {kind} "
            "would lose what the weights count on; take bf16 or none",
        )
    elif isinstance(strategy, AdpsgdConfig | GalaConfig | DsgdConfig) and strategy.exchanges == "parameters":
        yield _problem(
            "compression",
            f"a quantised or sparse copy of parameters isn't an average: {kind} is for gradients and "
            "differences; take bf16 or none, or set exchanges = gradients",
        )


def _mixing(strategy: Robust) -> Iterator[Problem]:
    match strategy:
        case SgpConfig(mixing="clipped" | "trimmed"):
            yield _problem(
                "mixing",
                f"push-sum counts on every share that is sent arriving whole; {strategy.mixing} takes mass "
                "away, and the mean with it; set mixing = mean, or take gala or dsgd",
            )
        case StromConfig(mixing="clipped" | "trimmed"):
            yield _problem(
                "mixing",
                "every node adds the same ±tau, or replicas drift apart for good; there is nothing to be "
                f"{strategy.mixing}: set mixing = mean, and bound messages by tau",
            )
        case AdpsgdConfig(mixing="trimmed"):
            yield _problem(
                "mixing",
                "an exchange has two vectors, and two vectors can't be trimmed; set mixing = clipped, "
                "or take dsgd with a denser topology",
            )
        case GalaConfig(mixing="trimmed", partners="ring"):
            yield _problem(
                "mixing",
                "on a ring each node hears of one other, and two vectors can't be trimmed; set mixing = "
                "clipped, or partners = exponential or random",
            )
        case ServerAsyncConfig(mixing="clipped" | "trimmed"):
            yield _problem(
                "mixing",
                "a server applies each gradient alone as it comes: there are no others that it could be "
                f"{strategy.mixing} against; set mixing = mean, or take server_sync",
            )
        case ServerSyncConfig(mixing="trimmed", reduce="sum"):
            yield _problem(
                "reduce",
                "what was trimmed is missing from a sum; set reduce = mean or count, or mixing = clipped",
            )
        case _:
            pass
    if strategy.mixing == "trimmed" and strategy.compression in SPARSE:
        yield _problem(
            "mixing",
            f"with compression = {strategy.compression} most values of an entry are zero, so trimming leaves "
            "out just what was sent; set mixing = clipped or mean, or compression = int8, bf16 or none",
        )


def _stages(strategy: PipelineConfig) -> Iterator[Problem]:
    """Whether schedule, chunks and cuts go together."""
    if strategy.schedule == "interleaved" and strategy.chunks == 1:
        yield _problem(
            "chunks",
            "interleaved takes turns between several stages of each peer; set chunks = 2 or more, or "
            "schedule = 1f1b",
        )
    if strategy.schedule != "interleaved" and strategy.chunks > 1:
        yield _problem(
            "chunks",
            f"with {strategy.schedule} each peer holds one stage, not {strategy.chunks}; set schedule = "
            "interleaved, or chunks = 1",
        )
    cuts, wanted = strategy.cuts, strategy.stages * strategy.chunks - 1
    if not cuts:
        return
    if len(cuts) != wanted:
        yield _problem(
            "cuts",
            f"{_count(strategy.stages, 'peer')} with {_count(strategy.chunks, 'stage')} each "
            f"need{'s' if strategy.stages == 1 else ''} {_count(wanted, 'cut')}, not {len(cuts)}; "
            "set that many, or none to have the stages balanced",
        )
    elif list(cuts) != sorted(set(cuts)):
        yield _problem(
            "cuts",
            f"{', '.join(map(str, cuts))} don't rise: each is the number of a stage's first block, and no "
            "stage is empty; set rising numbers, or none to have the stages balanced",
        )


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def _servers(strategy: ServerSyncConfig | ServerAsyncConfig) -> Iterator[Problem]:
    if len(set(strategy.pinned)) != len(strategy.pinned):
        yield _problem("pinned", "a node is named twice; name each server once")
    if len(strategy.pinned) > strategy.servers:
        yield _problem(
            "pinned",
            f"{len(strategy.pinned)} nodes are pinned and servers = {strategy.servers}; raise servers, "
            "or pin fewer",
        )
    if isinstance(strategy, ServerAsyncConfig):
        own = strategy.fetch_every - 1 + strategy.ahead
        if strategy.stale == "drop" and strategy.max_staleness < own:
            yield _problem(
                "max_staleness",
                f"with fetch_every = {strategy.fetch_every} and ahead = {strategy.ahead} a worker's own "
                f"pushes make its gradients up to {own} steps old: even alone it would have them dropped; "
                "raise max_staleness, lower the others, or set stale = scale",
            )


def _torch(strategy: GradAverageConfig | ParamAverageConfig) -> Iterator[Problem]:
    if strategy.backend != "torch":
        return
    if strategy.compression in LOSSY:
        yield _problem(
            "compression",
            f"torch.distributed adds numbers, not {strategy.compression} messages; take bf16 or none, "
            "or backend = own",
        )
    if strategy.mixing != "mean":
        yield _problem(
            "mixing",
            f"torch.distributed hands out the sum alone, so there is nothing to be {strategy.mixing}; "
            "set mixing = mean, or backend = own",
        )


def _outer(strategy: ParamAverageConfig | FederatedConfig) -> Iterator[Problem]:
    if strategy.outer_learning_rate == 0:
        yield _problem(
            "outer_learning_rate",
            "0 takes everybody back to where the round began, so nothing is ever learnt; 1 is the plain mean",
        )
    if strategy.outer_momentum == 1:
        yield _problem("outer_momentum", "1 never forgets a round, so the steps grow without bound; lower it")


def _privacy(strategy: FederatedConfig) -> Iterator[Problem]:
    """What the reported (ε, δ) rests on: a member moves its round's sum by S at most, and no other round."""
    if strategy.noise_multiplier == 0:
        return
    if strategy.mixing != "mean":
        yield _problem(
            "mixing",
            f"the noise is made for a sum in which each member moves at most clip_norm; {strategy.mixing} "
            "has another sensitivity, and the privacy told would be wrong; set mixing = mean, or "
            "noise_multiplier = 0",
        )
    if strategy.compression in LOSSY:
        yield _problem(
            "compression",
            f"what {strategy.compression} leaves out comes with a later round, beyond clip_norm and perhaps "
            "with its member not drawn; the privacy told would be wrong; take bf16 or none, or "
            "noise_multiplier = 0",
        )
    if strategy.weighting != "equal":
        yield _problem(
            "weighting",
            "the noise is made for members that count the same; one with many samples would show through: "
            "set weighting = equal, or noise_multiplier = 0",
        )
