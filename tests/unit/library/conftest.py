"""Policies with the parameters of checkpoints, in an environment that says nothing."""

from __future__ import annotations

import pytest
import torch

from p2pdrl.library.policy import TrainedPolicy
from p2pdrl.rl.inference import PolicyInference

from .spaces import TASKS, checkpoint


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    for name in ["P2PDRL_TOKEN", "P2PDRL_SWARM_KEY_FILE"]:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def inference_of():
    """Make what acts for a task in `TASKS`."""

    def made(name: str) -> PolicyInference:
        inference = PolicyInference(TASKS[name], 0)
        inference.restore(checkpoint(TASKS[name]))
        return inference

    return made


@pytest.fixture
def policy_of(inference_of):
    """Make the policy of a task in `TASKS`."""

    def made(name: str) -> TrainedPolicy:
        return TrainedPolicy(inference_of(name), checkpoint(TASKS[name]))

    return made
