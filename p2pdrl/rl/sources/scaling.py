"""From a raw unroll to what algorithms learn from: observations normalised, rewards scaled, both counted.

Actors ship raw observations and rewards; the learner scales them when it reads them, by what the whole
swarm has counted so far, and counts them afterwards: within an unroll all rows are scaled alike.

Shape suffixes: as in ``rollout``.
"""

from __future__ import annotations

import torch

from p2pdrl.rl.normalize import RewardScaler, RunningNormalizer
from p2pdrl.rl.rollout import RawUnroll, Unroll

__all__ = ["UnrollScaler"]


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

    def scale(self, raw: RawUnroll) -> Unroll:
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
                rewards_TB, ends_TB, raw.valid_TB, columns_B=raw.columns_B, anew_B=raw.anew_B
            )
        if normalizer is not None:
            normalizer.update(raw.obs_T1BX[:-1][raw.valid_TB])
        return Unroll(
            obs_T1BX=seen_T1BX.to(device),
            actions=raw.actions.to(device),
            log_probs_TB=raw.log_probs_TB.to(device),
            values_T1B=raw.values_T1B.to(device),
            rewards_TB=torch.from_numpy(rewards_TB).to(device),
            terminated_TB=torch.from_numpy(raw.terminated_TB).to(device),
            truncated_TB=torch.from_numpy(raw.truncated_TB).to(device),
            valid_TB=torch.from_numpy(raw.valid_TB).to(device),
            env_steps=int(raw.valid_TB.sum()),
            episodes=raw.episodes,
            state_BS=None if raw.state_BS is None else raw.state_BS.to(device),
        )
