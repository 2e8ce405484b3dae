"""Unrolls on their way through shared memory: they arrive as they were made."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from p2pdrl.rl.envs import Discrete, EnvSpec
from p2pdrl.rl.rollout import RawUnroll
from p2pdrl.rl.sources.unrolls import UnrollPart, joined, pack, unroll_items
from p2pdrl.tensors.unroll_ring import UnrollSpec

SIZE = 3


def played(rng, steps, environments, stack, resets):
    """Stacks as environments show them over T1 steps, and which steps were valid."""
    obs = np.zeros((steps + 1, environments, stack, SIZE, SIZE), np.uint8)
    valid = rng.random((steps, environments)) >= resets
    current = rng.integers(1, 255, obs.shape[1:], np.uint8)
    current[0, : stack // 2] = 0  # an episode that is young already
    obs[0] = current
    for step in range(steps):
        for column in range(environments):
            frame = rng.integers(1, 255, (SIZE, SIZE), np.uint8)
            shown = np.concatenate((current[column, 1:], frame[None]))
            if not valid[step, column]:
                shown[:-1] = 0
            current[column] = obs[step + 1, column] = shown
    return obs, valid


@pytest.mark.parametrize("stack", [1, 2, 4])
@pytest.mark.parametrize("steps", [1, 3, 20])
@pytest.mark.parametrize("resets", [0.0, 0.2, 0.9])
def test_stacked_pictures_travel_once_and_arrive_stacked(stack, steps, resets):
    rng = np.random.default_rng(stack + steps)
    obs, valid = played(rng, steps, 5, stack, resets)
    policy = SimpleNamespace(
        judges=False,
        spec=EnvSpec((stack, SIZE, SIZE), "uint8", Discrete(2), frame_stack=stack),
        initial_state=lambda batch: None,
    )
    spec = UnrollSpec(unroll_items(policy, steps), (5,), 1)
    arrays = spec.views(memoryview(bytearray(spec.content_nbytes(5))), 5)
    zeros = torch.zeros(steps, 5)
    raw = RawUnroll(
        obs_T1BX=obs,
        seen_T1BX=None,
        actions=zeros.long(),
        log_probs_TB=zeros,
        values_T1B=torch.zeros(steps + 1, 5),
        rewards_TB=np.zeros((steps, 5), np.float32),
        terminated_TB=np.zeros((steps, 5), np.bool_),
        truncated_TB=np.zeros((steps, 5), np.bool_),
        valid_TB=valid,
        episodes=[],
    )
    pack(raw, arrays)
    found = joined([UnrollPart(arrays, 0, range(5), restarted=False)], 5)
    np.testing.assert_array_equal(found.obs_T1BX, obs)
    (pictures,) = [array for name, array in arrays.items() if name in ("obs", "frames")]
    assert pictures.nbytes == (steps + stack) * 5 * SIZE * SIZE
