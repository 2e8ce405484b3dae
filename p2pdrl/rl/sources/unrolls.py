"""Unrolls as batches: scaled, from environments in the learner's process, or packed by actor processes.

Actors ship raw observations and rewards; the learner scales them when it reads them, by what the whole
swarm has counted so far, and counts them afterwards: within an unroll all rows are scaled alike.

Shape suffixes: as in ``rollout``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from p2pdrl.rl.normalize import RewardScaler, RunningNormalizer
from p2pdrl.rl.policy import Policy
from p2pdrl.rl.rollout import Collector, RawUnroll, Unroll
from p2pdrl.rl.sources.source import Batch, BatchT, Source, on_device
from p2pdrl.tensors.inference_slots import StepItem, StepSpec
from p2pdrl.tensors.unroll_ring import ENVIRONMENTS, UnrollItem

__all__ = [
    "InlineSource",
    "OverlappingUnrolls",
    "RewardClipper",
    "UnrollPart",
    "UnrollReader",
    "UnrollScaler",
    "joined",
    "pack",
    "step_spec",
    "unroll_items",
]

Array = npt.NDArray[Any]
LEAST_STEPS = 8
"""Of an environment's share of an unroll: returns that look ahead less than this lean on values too much."""
SHORT_STEPS = 32
"""Returns look ahead far enough: rather than from fewer steps, a share is made in fewer environments."""
CUT_STEPS = 16
"""Of a share that is cut further: learners that have more in common learn more from fewer steps."""
LEAST_ENVIRONMENTS = 8
"""That such a share is made in: with fewer its rows are too much alike."""
SWARM_ENVIRONMENTS = 2
"""Times the task's environments that all learners together act in at least, for the same reason."""
BatchT_co = TypeVar("BatchT_co", bound=Batch, covariant=True)


class UnrollReader(Protocol[BatchT_co]):
    """Makes an algorithm's batch of each raw unroll."""

    def read(self, raw: RawUnroll) -> BatchT_co:
        """Return a batch; arrays of the unroll may be overwritten once the update with it is done."""


class UnrollScaler:
    """Scales unrolls and counts what is in them.

    Args:
        device: where the algorithm wants its batches.
        normalizer: of observations; None leaves them as they are.
        reward_scaler: of rewards; None likewise.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        normalizer: RunningNormalizer | None = None,
        reward_scaler: RewardScaler | None = None,
    ) -> None:
        self._device = device
        self._normalizer = normalizer
        self._reward_scaler = reward_scaler

    def read(self, raw: RawUnroll) -> Unroll:
        """Return the unroll, scaled; count it."""
        device, normalizer = self._device, self._normalizer
        seen_T1BX = raw.seen_T1BX
        if seen_T1BX is None:
            obs_T1BX = raw.obs_T1BX if normalizer is None else normalizer.normalize(raw.obs_T1BX)
            seen_T1BX = torch.from_numpy(obs_T1BX)
        rewards_TB = raw.rewards_TB
        if self._reward_scaler is not None:
            ends_TB = raw.terminated_TB | raw.truncated_TB
            rewards_TB = self._reward_scaler.scale(
                rewards_TB, ends_TB, raw.valid_TB, columns_B=raw.columns_B, restarts_B=raw.restarts_B
            )
        if normalizer is not None:
            normalizer.update(raw.obs_T1BX[:-1][raw.valid_TB])
        return Unroll(
            obs_T1BX=on_device(seen_T1BX, device),
            actions=on_device(raw.actions, device),
            log_probs_TB=on_device(raw.log_probs_TB, device),
            values_T1B=on_device(raw.values_T1B, device),
            rewards_TB=on_device(torch.from_numpy(rewards_TB), device),
            terminated_TB=on_device(torch.from_numpy(raw.terminated_TB), device),
            truncated_TB=on_device(torch.from_numpy(raw.truncated_TB), device),
            valid_TB=on_device(torch.from_numpy(raw.valid_TB), device),
            env_steps=int(raw.valid_TB.sum()),
            episodes=raw.episodes,
            state_BS=None if raw.state_BS is None else on_device(raw.state_BS, device),
        )


class OverlappingUnrolls(UnrollScaler):
    """Scales unrolls, and lets each begin with the last step of the one before: T+1 steps.

    What was done after that step is known by then. Its row isn't valid where there is no such step: in an
    environment's first unroll, and where unrolls between were lost. For policies without memory.

    Args:
        device: as in ``UnrollScaler``.
        environments: of all actors together.
        normalizer: as there, like ``reward_scaler``.
    """

    def __init__(
        self,
        device: torch.device,
        environments: int,
        *,
        normalizer: RunningNormalizer | None = None,
        reward_scaler: RewardScaler | None = None,
    ) -> None:
        super().__init__(device, normalizer=normalizer, reward_scaler=reward_scaler)
        self._environments = environments
        self._last: dict[str, Tensor] = {}

    def read(self, raw: RawUnroll) -> Unroll:
        """Return the unroll with a step more, scaled; count it."""
        unroll = super().read(raw)
        device = unroll.valid_TB.device
        columns = np.arange(self._environments) if raw.columns_B is None else raw.columns_B
        columns_B = torch.from_numpy(columns).to(device)
        if raw.restarts_B is not None and "valid_TB" in self._last:
            self._last["valid_TB"][columns_B[torch.from_numpy(raw.restarts_B).to(device)]] = False

        def longer(name: str, *, behind: int = 0) -> Tensor:
            """Return an array with the last step before it, and keep its own; rows behind are no steps."""
            rows: Tensor = getattr(unroll, name)
            last = self._last.get(name)
            if last is None:
                last = self._last[name] = rows.new_zeros((self._environments, *rows.shape[2:]))
            whole = torch.cat((last[columns_B].unsqueeze(0), rows))
            last[columns_B] = rows[-1 - behind]
            return whole

        return replace(
            unroll,
            obs_T1BX=longer("obs_T1BX", behind=1),
            actions=longer("actions"),
            log_probs_TB=longer("log_probs_TB"),
            values_T1B=longer("values_T1B", behind=1),
            rewards_TB=longer("rewards_TB"),
            terminated_TB=longer("terminated_TB"),
            truncated_TB=longer("truncated_TB"),
            valid_TB=longer("valid_TB"),
        )


class RewardClipper(Generic[BatchT]):
    """Reads unrolls, each reward replaced by its sign (Mnih 2015, Methods); episodes' returns stay raw."""

    def __init__(self, reader: UnrollReader[BatchT]) -> None:
        self._reader = reader

    def read(self, raw: RawUnroll) -> BatchT:
        """See ``UnrollReader``."""
        return self._reader.read(replace(raw, rewards_TB=np.sign(raw.rewards_TB)))


class InlineSource(Source[BatchT]):
    """Collects unrolls in the learner's own process, with the current parameters; closes the collector.

    A short share is made in the first of the environments; the others stand still.
    """

    def __init__(self, collector: Collector, reader: UnrollReader[BatchT]) -> None:
        self._collector = collector
        self._reader = reader
        self._steps = collector.unroll_steps
        self._environments = collector.num_envs

    @property
    def acts(self) -> bool:
        """It does."""
        return True

    def next(self) -> BatchT:
        """Run T steps in every environment, or our share of them; fewer where it is preempted."""
        collector = self._collector
        return self._reader.read(
            collector.collect(self.preempted, steps=self._steps, environments=self._environments)
        )

    def share(self, rank: int, learners: int, part: float, cuts: int = 1) -> None:
        """Divide the steps of each environment down to `SHORT_STEPS`, then the environments.

        Where there are too few of these, steps again; no learner makes fewer than `LEAST_STEPS` of them.
        """
        del rank, learners
        T, B = self._collector.unroll_steps, self._collector.num_envs
        steps = T * part / cuts
        wanted = min(B, round(B * steps / min(T, SHORT_STEPS)))
        self._environments = max(wanted, self._fewest(part))
        self._steps = min(T, max(round(steps * B / self._environments), LEAST_STEPS))

    @property
    def batch_share(self) -> float:
        """See ``Source.batch_share``."""
        collector = self._collector
        return self._steps * self._environments / (collector.unroll_steps * collector.num_envs)

    def most_cuts(self, part: float) -> int:
        """A share is cut to `CUT_STEPS` in the fewest environments; where all step, to `SHORT_STEPS`."""
        T, B = self._collector.unroll_steps, self._collector.num_envs
        if not self._collector.collects_some:
            return max(1, round(T * part) // SHORT_STEPS)
        return max(1, round(T * B * part) // (CUT_STEPS * self._fewest(part)))

    def _fewest(self, part: float) -> int:
        """Return the fewest environments to act in with such a part of an update."""
        B = self._collector.num_envs
        if not self._collector.collects_some:
            return B
        return min(B, max(LEAST_ENVIRONMENTS, math.ceil(round(SWARM_ENVIRONMENTS * B * part, 6))))

    def close(self) -> None:
        """Close the environments."""
        self._collector.close()


def unroll_items(policy: Policy, steps: int) -> tuple[UnrollItem, ...]:
    """Return the arrays of a policy's unroll of T = ``steps``."""
    spec, B = policy.spec, ENVIRONMENTS
    most_ends = steps // 2 + 1  # a reset follows each
    obs = UnrollItem("obs", spec.obs_dtype, (steps + 1, B, *spec.obs_shape))
    if spec.frame_stack > 1:  # each frame once, not in every observation that shows it
        obs = UnrollItem("frames", spec.obs_dtype, (steps + spec.frame_stack, B, *spec.obs_shape[1:]))
    items = [
        obs,
        UnrollItem("actions", spec.action.dtype, (steps, B, *spec.action.shape), spec.action.choices),
        UnrollItem("log_probs", "float32", (steps, B)),
        UnrollItem("values", "float32", (steps + 1, B)),
        UnrollItem("rewards", "float32", (steps, B)),
        UnrollItem("terminated", "bool", (steps, B)),
        UnrollItem("truncated", "bool", (steps, B)),
        UnrollItem("valid", "bool", (steps, B)),
        UnrollItem("episode_returns", "float64", (most_ends, B)),
        UnrollItem("episode_lengths", "int64", (most_ends, B)),
    ]
    if policy.judges:
        items.append(UnrollItem("taken", "float32", (steps, B)))
    state = policy.initial_state(1)
    if state is not None:
        items.append(UnrollItem("state", "float32", (B, state.shape[1])))
    return tuple(items)


def step_spec(policy: Policy, shares: tuple[int, ...]) -> StepSpec:
    """Return what actors with so many environments each ask an inference process with, and what it answers.

    Args:
        policy: not told yet which environments it acts in.
    """
    spec, state = policy.spec, policy.initial_state(1)
    noise = policy.noise((1,), torch.Generator())
    asked = [
        StepItem("obs", spec.obs_dtype, spec.obs_shape),
        StepItem("noise", str(noise.dtype).removeprefix("torch."), tuple(noise.shape[1:])),
    ]
    answered = [
        StepItem("actions", spec.action.dtype, spec.action.shape),
        StepItem("log_probs", "float32", ()),
        StepItem("values", "float32", ()),
    ]
    if policy.judges:
        answered.append(StepItem("taken", "float32", ()))
    if state is not None:
        asked.append(StepItem("state", "float32", (state.shape[1],)))
        answered.append(StepItem("state", "float32", (state.shape[1],)))
    return StepSpec(asked=tuple(asked), answered=tuple(answered), shares=shares)


def pack(raw: RawUnroll, arrays: Mapping[str, Array]) -> None:
    """Copy an unroll into a slot's arrays."""
    if "obs" in arrays:
        np.copyto(arrays["obs"], raw.obs_T1BX)
    else:
        lead = len(arrays["frames"]) - len(raw.obs_T1BX)
        np.copyto(arrays["frames"][:lead], np.moveaxis(raw.obs_T1BX[0, :, :lead], 1, 0))
        np.copyto(arrays["frames"][lead:], raw.obs_T1BX[:, :, -1])
    np.copyto(arrays["actions"], raw.actions.numpy())
    np.copyto(arrays["log_probs"], raw.log_probs_TB.numpy())
    np.copyto(arrays["values"], raw.values_T1B.numpy())
    np.copyto(arrays["rewards"], raw.rewards_TB)
    np.copyto(arrays["terminated"], raw.terminated_TB)
    np.copyto(arrays["truncated"], raw.truncated_TB)
    np.copyto(arrays["valid"], raw.valid_TB)
    for name in ("episode_returns", "episode_lengths"):
        arrays[name][...] = 0  # an unroll of another number of environments may have lain there
    for number, (total, length) in enumerate(raw.episodes):
        arrays["episode_returns"].reshape(-1)[number] = total
        arrays["episode_lengths"].reshape(-1)[number] = length
    if raw.taken_TB is not None:
        np.copyto(arrays["taken"], raw.taken_TB.numpy())
    if raw.state_BS is not None:
        np.copyto(arrays["state"], raw.state_BS.numpy())


@dataclass(frozen=True)
class UnrollPart:
    """One actor's unroll.

    Attributes:
        episodes: how many ended.
        columns: numbers of its environments among all of the learner's.
        restarted: whether its streams begin anew: unrolls before this one were lost.
    """

    arrays: Mapping[str, Array]
    episodes: int
    columns: range
    restarted: bool


def joined(parts: Sequence[UnrollPart], environments: int) -> RawUnroll:
    """Return several actors' unrolls as one, environments side by side.

    Args:
        parts: at least one, in the order of their columns. A single one isn't copied.
        environments: of all actors; fewer may be here.
    """

    def whole(name: str, axis: int = 1) -> Array:
        if len(parts) == 1:
            return parts[0].arrays[name]
        return np.concatenate([part.arrays[name] for part in parts], axis)

    columns_B = np.concatenate([np.asarray(part.columns) for part in parts])
    restarts_B = np.concatenate([np.full(len(part.columns), part.restarted) for part in parts])
    episodes: list[tuple[float, int]] = []
    for part in parts:
        returns = part.arrays["episode_returns"].reshape(-1)[: part.episodes]
        lengths = part.arrays["episode_lengths"].reshape(-1)[: part.episodes]
        episodes += zip(returns.tolist(), lengths.tolist(), strict=True)
    state_BS = torch.from_numpy(whole("state", 0)) if "state" in parts[0].arrays else None
    return RawUnroll(
        obs_T1BX=whole("obs") if "obs" in parts[0].arrays else _stacked(whole("frames"), whole("valid")),
        seen_T1BX=None,
        actions=torch.from_numpy(whole("actions")),
        log_probs_TB=torch.from_numpy(whole("log_probs")),
        values_T1B=torch.from_numpy(whole("values")),
        rewards_TB=whole("rewards"),
        terminated_TB=whole("terminated"),
        truncated_TB=whole("truncated"),
        valid_TB=whole("valid"),
        episodes=episodes,
        state_BS=state_BS,
        taken_TB=torch.from_numpy(whole("taken")) if "taken" in parts[0].arrays else None,
        columns_B=None if len(columns_B) == environments else columns_B,
        restarts_B=restarts_B if restarts_B.any() else None,
    )


def _stacked(frames: Array, valid_TB: Array) -> Array:
    """Return T1 x B x K x H x W of frames (T+K) x B x H x W: stacks of K, newest last.

    Behind a reset the frames of the episode before are zero, as environments show it.
    """
    T, B = valid_TB.shape
    K = len(frames) - T
    obs = np.empty((T + 1, B, K, *frames.shape[2:]), frames.dtype)
    for number in range(K):
        obs[:, :, number] = frames[number : number + T + 1]
    begins_T1B = np.zeros((T + 1, B), np.int64)
    np.multiply(~valid_TB, np.arange(1, T + 1)[:, None], out=begins_T1B[1:])
    np.maximum.accumulate(begins_T1B, axis=0, out=begins_T1B)
    ages_T1B = np.arange(T + 1)[:, None] - begins_T1B
    for row, column in np.argwhere((begins_T1B > 0) & (ages_T1B < K - 1)).tolist():
        obs[row, column, : K - 1 - ages_T1B[row, column]] = 0
    return obs
