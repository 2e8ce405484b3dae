"""Unrolls, and the collector that runs the policy in the environments to make them.

Sources call ``collect``: in the learner's process (``sources.unrolls``) once per update, in actor processes
(`workers.actor`) over and over. On the hot path there is one forward pass of the actor and
one environment step; noise is drawn for the whole unroll before it, log-probabilities and values are
computed for the whole unroll after it: from the features that acting has computed already, where policy and
value function share layers, else from observations; for a recurrent policy from the state that it had at the
beginning, just as training will compute them.

Where the policy is in another process (`AskedPolicy`), the noise is drawn here all the same and goes along
with the observation, as the recurrent state does: the unroll is the one that the same parameters would have
made here, whoever else asked, and that process keeps nothing.

Shape suffixes: T unroll, T1 unroll with the bootstrap step (T+1), B environments, X the observation's
own dimensions, S state, F features. Discrete actions are TB, those of several parts and continuous ones TBA.
"""

# ruff: noqa: N802, N815 (fields carry shape suffixes)
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from p2pdrl.config.fields import Precision
from p2pdrl.rl.distributions import PolicyOutputs
from p2pdrl.rl.envs import VectorEnv
from p2pdrl.rl.networks.lstm import RecurrentContext
from p2pdrl.rl.normalize import RunningNormalizer
from p2pdrl.rl.policy import Acted, ActorCritic, Policy
from p2pdrl.rl.sources.source import Batch

__all__ = ["AskedPolicy", "Collector", "RawUnroll", "Unroll"]

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Unroll(Batch):
    """T steps of B environments, as the algorithm sees them: on its device, normalised.

    The step after an episode's end only resets (see ``envs``): it is a row of the arrays like any other,
    with ``valid_TB`` false, and must not enter a loss. The observation after a truncation is the true
    final one, so ``values_T1B[t + 1]`` is the right bootstrap there as everywhere.

    A recurrent policy still remembers the old episode in that row, and has forgotten it in the next, the
    first of the new one. Its batches are whole environments: every array transposed to BT…, rows that aren't
    valid left in and masked, and ``context``.

    Attributes:
        obs_T1BX: observations; the last row is the bootstrap's.
        actions: int64 TB or TBA, or float32 TBA, as sampled: neither clipped, nor what
            ``Policy.to_environment`` makes of them.
        log_probs_TB: of the actions under the policy that took them (the behaviour policy).
        values_T1B: v of each observation, by the same policy.
        rewards_TB: float32, scaled where the task asks for it.
        terminated_TB: the episode ended in a terminal state: worth nothing from there on.
        truncated_TB: the episode was cut: the last state keeps its value.
        valid_TB: false where the step was a reset.
        state_BS: of a recurrent policy, before the first row; zeros where that begins an episode. Else None.
    """

    obs_T1BX: Tensor
    actions: Tensor
    log_probs_TB: Tensor
    values_T1B: Tensor
    rewards_TB: Tensor
    terminated_TB: Tensor
    truncated_TB: Tensor
    valid_TB: Tensor
    state_BS: Tensor | None = None

    @property
    def ends_TB(self) -> Tensor:
        """Whether the next row belongs to another episode."""
        return self.terminated_TB | self.truncated_TB

    @property
    def starts_T1B(self) -> Tensor:
        """Whether the row is the first of an episode; not row 0, whose state is known anyway."""
        return _starts_T1B(self.valid_TB)

    @property
    def context(self) -> RecurrentContext:
        """The context that a recurrent policy needs beside ``obs_T1BX[:-1].transpose(0, 1)``."""
        return RecurrentContext(self.starts_T1B[:-1].T, self.state_BS)


@dataclass(frozen=True)
class RawUnroll:
    """T steps of B environments as whoever acted made them: observations and rewards are raw.

    Attributes:
        obs_T1BX: as the environments gave them.
        seen_T1BX: as the policy saw them; None leaves it to the learner to normalise them again.
        actions: as in ``Unroll``, like all that isn't named here.
        rewards_TB: as the environments paid them.
        taken_TB: Q(s, a) of the actions; then ``values_T1B`` are those of the best. None where not asked for.
        columns_B: numbers of its environments among all of the learner's; None means all, in order.
        restarts_B: whether an environment's stream restarts here: steps before were lost; None means none.
    """

    obs_T1BX: Array
    seen_T1BX: Tensor | None
    actions: Tensor
    log_probs_TB: Tensor
    values_T1B: Tensor
    rewards_TB: Array
    terminated_TB: Array
    truncated_TB: Array
    valid_TB: Array
    episodes: list[tuple[float, int]]
    state_BS: Tensor | None = None
    taken_TB: Tensor | None = None
    columns_B: Array | None = None
    restarts_B: Array | None = None


class _Judged(NamedTuple):
    """What a policy says of an unroll; fields as in `RawUnroll`."""

    seen_T1BX: Tensor | None
    log_probs_TB: Tensor
    values_T1B: Tensor
    taken_TB: Tensor | None = None


class AskedPolicy(Protocol):
    """A policy in another process, which normalises observations itself."""

    def ask(self, obs_BX: Array, noise_B: Tensor, state_BS: Tensor | None) -> Acted:
        """Return what ``Policy.step`` does with its newest parameters; overwrites ``state_BS``.

        The tensors are overwritten by the next call.

        Args:
            obs_BX: raw.
        """


class Collector:
    """Collects unrolls; episodes and the recurrent state continue from one to the next.

    The arrays of an unroll are overwritten by the next ``collect``.

    Args:
        env: stepped here and nowhere else.
        policy: its parameters may change between calls.
        unroll_steps: T, at most.
        generator: source of the action noise, on the policy's device.
        normalizer: applied to observations before the policy sees them. The learner updates it
            afterwards, so that all inputs of an unroll are scaled alike.
        precision: with ``bf16`` the layers that policy and value function share run in it; heads, and
            policies that share nothing, stay float32, like everything with ``fp16``, which processors are
            slow at.
        asked: acts in place of ``policy``, which draws noise then and may be on the meta device.
    """

    def __init__(
        self,
        env: VectorEnv,
        policy: Policy,
        unroll_steps: int,
        generator: torch.Generator,
        *,
        normalizer: RunningNormalizer | None = None,
        precision: Precision = "float32",
        asked: AskedPolicy | None = None,
    ) -> None:
        self._env = env
        self.unroll_steps = unroll_steps
        self._policy = policy
        self._asked = asked
        self._generator = generator
        self._normalizer = normalizer
        self._narrow = precision == "bf16"
        T, B, spec = unroll_steps, env.num_envs, env.spec
        self._obs_T1BX = torch.zeros((T + 1, B, *spec.obs_shape), dtype=getattr(torch, spec.obs_dtype))
        self._actions = torch.zeros((T, B, *spec.action.shape), dtype=getattr(torch, spec.action.dtype))
        self._raw_obs_T1BX: Array = self._obs_T1BX.numpy()
        if normalizer is not None:
            self._raw_obs_T1BX = np.zeros((T + 1, B, *spec.obs_shape), dtype=spec.obs_dtype)
        self._rewards_TB = np.zeros((T, B), dtype=np.float32)
        self._terminated_TB = np.zeros((T, B), dtype=np.bool_)
        self._truncated_TB = np.zeros((T, B), dtype=np.bool_)
        self._valid_TB = np.zeros((T, B), dtype=np.bool_)
        self._running_B = np.ones(B, dtype=np.bool_)
        state_BS = policy.initial_state(B)
        if state_BS is not None:
            state_BS = torch.zeros(state_BS.shape, dtype=state_BS.dtype, device=generator.device)
        self._state_BS = state_BS
        self._returns_B = np.zeros(B)
        self._lengths_B = np.zeros(B, dtype=np.int64)
        self._raw_obs_T1BX[-1] = env.reset()
        self._newest_B = np.full(B, T)
        """Row of each environment's last observation."""
        self._running = B
        """The first so many environments made the last unroll."""
        self._steps = T
        """Of the last unroll."""

    @property
    def num_envs(self) -> int:
        """B of an unroll of all environments."""
        return self._env.num_envs

    @property
    def collects_some(self) -> bool:
        """Whether `collect` can leave environments where they are."""
        return self._env.steps_some

    def collect(
        self,
        preempted: Callable[[], bool] | None = None,
        *,
        steps: int | None = None,
        environments: int | None = None,
    ) -> RawUnroll:
        """Run T steps in every environment with the policy as it is now.

        Args:
            preempted: asked after each step: whether to end here. The unroll has fewer steps then, but at
                least one that is valid.
            steps: in place of T, which is the most; at least 2, as all environments may begin with a reset.
            environments: the first so many run, where `collects_some`; None means all.
        """
        self._running = B = environments or self.num_envs
        state_BS = None if self._state_BS is None else self._state_BS[:B].clone()
        if self._asked is None:
            episodes, features = self._act_and_step(steps or self.unroll_steps, preempted)
            judged = self._judged(features, state_BS)
        else:
            episodes, judged = self._ask_and_step(self._asked, steps or self.unroll_steps, preempted)
        T = self._steps
        return RawUnroll(
            obs_T1BX=self._raw_obs_T1BX[: T + 1, :B],
            seen_T1BX=judged.seen_T1BX,
            actions=self._actions[:T, :B].to(self._generator.device),
            log_probs_TB=judged.log_probs_TB,
            values_T1B=judged.values_T1B,
            rewards_TB=self._rewards_TB[:T, :B],
            terminated_TB=self._terminated_TB[:T, :B],
            truncated_TB=self._truncated_TB[:T, :B],
            valid_TB=self._valid_TB[:T, :B],
            episodes=episodes,
            state_BS=state_BS,
            taken_TB=judged.taken_TB,
            columns_B=None if self.num_envs == B else np.arange(B),
        )

    def close(self) -> None:
        """Close the environments."""
        self._env.close()

    @torch.no_grad()
    def _judged(self, features: list[Tensor], state_BS: Tensor | None) -> _Judged:
        device, T, B = self._generator.device, self._steps, self._running
        obs_T1BX, actions = self._obs_T1BX[: T + 1, :B].to(device), self._actions[:T, :B].to(device)
        if (judged := self._policy.judge(obs_T1BX, actions)) is not None:
            taken_TB, values_T1B = judged
            return _Judged(obs_T1BX, torch.zeros_like(taken_TB), values_T1B, taken_TB)
        if isinstance(self._policy, ActorCritic) and (features or state_BS is None):
            if features:
                outputs = self._policy.outputs_on(torch.cat(features), obs_T1BX)
            else:
                outputs = self._policy.outputs(obs_T1BX)
            return _Judged(obs_T1BX, _log_probs(outputs, actions), outputs.values)
        if state_BS is None:
            log_probs_TB, values_TB = self._policy.evaluate(obs_T1BX[:-1], actions)
            values_T1B = torch.cat((values_TB, self._policy.values(obs_T1BX[-1:])))
            return _Judged(obs_T1BX, log_probs_TB, values_T1B)
        valid_TB = torch.from_numpy(self._valid_TB[:T, :B]).to(device)
        context = RecurrentContext(_starts_T1B(valid_TB).T, state_BS)
        outputs = self._policy.outputs(obs_T1BX.transpose(0, 1), context)
        log_std = outputs.log_std
        if log_std is not None and log_std.dim() > 1:
            outputs = outputs._replace(log_std=log_std.transpose(0, 1))
        outputs = outputs._replace(policy=outputs.policy.transpose(0, 1))
        return _Judged(obs_T1BX, _log_probs(outputs, actions), outputs.values.T)

    @torch.inference_mode()
    def _act_and_step(
        self, steps: int, preempted: Callable[[], bool] | None
    ) -> tuple[list[tuple[float, int]], list[Tensor]]:
        """Fill the buffers with so many steps; return the episodes that ended, and features, T+1 times BF.

        There are none where policy and value function share no layers.
        """
        device, policy, normalizer = self._generator.device, self._policy, self._normalizer
        B, state_BS = self._running, self._running_state()
        raw, obs_T1BX = self._raw_obs_T1BX[:, :B], self._obs_T1BX.numpy()[:, :B]
        obs_views = self._obs_T1BX[:, :B].unbind()
        noise_views = policy.noise((steps, B), self._generator).unbind()
        shared = policy if isinstance(policy, ActorCritic) and policy.shares_features else None
        kept: list[Tensor] = []

        def seen(t: int) -> Tensor:
            if normalizer is not None:
                obs_T1BX[t] = normalizer.normalize(raw[t])
            return obs_views[t].to(device)

        def act(t: int) -> Tensor:
            obs_BX = seen(t)
            if shared is None:
                return policy.act(obs_BX, noise_views[t], state_BS)
            kept.append(shared.lasting_features(obs_BX, state_BS, narrow=self._narrow))
            return shared.act_on(kept[t], obs_BX, noise_views[t])

        episodes = self._step_through(act, steps, preempted)
        last_BX = seen(self._steps)
        if shared is not None:
            after_BS = None if state_BS is None else state_BS.clone()
            kept.append(shared.lasting_features(last_BX, after_BS, narrow=self._narrow))
        return episodes, kept

    @torch.inference_mode()
    def _ask_and_step(
        self, asked: AskedPolicy, steps: int, preempted: Callable[[], bool] | None
    ) -> tuple[list[tuple[float, int]], _Judged]:
        """Fill the buffers with so many steps; return ended episodes, and what the other process said."""
        B, state_BS = self._running, self._running_state()
        raw = self._raw_obs_T1BX[:, :B]
        noise_views = self._policy.noise((steps, B), self._generator).unbind()
        log_probs: list[Tensor] = []
        values: list[Tensor] = []
        taken: list[Tensor] = []

        def act(t: int) -> Tensor:
            found = asked.ask(raw[t], noise_views[t], state_BS)
            log_probs.append(found.log_probs_B.clone())
            values.append(found.values_B.clone())
            if found.taken_B is not None:
                taken.append(found.taken_B.clone())
            return found.actions

        episodes = self._step_through(act, steps, preempted)
        # the noise counts for nothing: who learns asks for the last observation's value alone
        after_BS = None if state_BS is None else state_BS.clone()
        values.append(asked.ask(raw[self._steps], noise_views[-1], after_BS).values_B.clone())
        taken_TB = torch.stack(taken) if taken else None
        return episodes, _Judged(None, torch.stack(log_probs), torch.stack(values), taken_TB)

    def _step_through(
        self, act: Callable[[int], Tensor], steps: int, preempted: Callable[[], bool] | None
    ) -> list[tuple[float, int]]:
        """Run so many steps with the actions that ``act`` returns for each; return the episodes that ended.

        Fills the raw observations and all that environments say of steps, and counts the steps.
        """
        B, state_BS = self._running, self._running_state()
        raw, running_B = self._raw_obs_T1BX[:, :B], self._running_B[:B]
        returns_B, lengths_B = self._returns_B[:B], self._lengths_B[:B]
        raw[0] = raw[self._newest_B[:B], np.arange(B)]
        action_views = self._actions[:, :B].unbind()
        episodes: list[tuple[float, int]] = []
        for t in range(steps):
            actions = act(t).cpu()
            action_views[t].copy_(actions)
            done = self._policy.to_environment(actions.numpy())
            raw[t + 1], rewards_B, terminated_B, truncated_B = self._env.step(done)
            # a step that only resets pays nobody, also where a lost life's game goes on and pays
            np.multiply(rewards_B, running_B, out=self._rewards_TB[t, :B], casting="same_kind")
            self._terminated_TB[t, :B] = terminated_B
            self._truncated_TB[t, :B] = truncated_B
            self._valid_TB[t, :B] = running_B
            returns_B += rewards_B
            lengths_B += running_B
            if state_BS is not None and not running_B.all():  # that step was a reset
                state_BS[torch.from_numpy(~running_B).to(state_BS.device)] = 0.0
            ends_B = terminated_B | truncated_B
            if ends_B.any():
                over_B = self._env.games_over(ends_B)
                ended = zip(returns_B[over_B].tolist(), lengths_B[over_B].tolist(), strict=True)
                episodes.extend(ended)
                returns_B[over_B] = 0.0
                lengths_B[over_B] = 0
            np.logical_not(ends_B, out=running_B)
            if preempted is not None and preempted() and self._valid_TB[: t + 1, :B].any():
                steps = t + 1
                break
        self._steps = self._newest_B[:B] = steps
        return episodes

    def _running_state(self) -> Tensor | None:
        """Return the recurrent state of the environments that run: a view."""
        return None if self._state_BS is None else self._state_BS[: self._running]


def _log_probs(outputs: PolicyOutputs, actions: Tensor) -> Tensor:
    """Return log-probabilities of T steps' actions from outputs of T+1 steps, time first."""
    return outputs.distribution((slice(None, -1),)).log_prob(actions)


def _starts_T1B(valid_TB: Tensor) -> Tensor:
    """Return which rows begin an episode: those behind a reset."""
    return torch.cat((torch.zeros_like(valid_TB[:1]), ~valid_TB))
