"""The evaluator process: real children, small episodes."""

from __future__ import annotations

import asyncio
import os
import signal
from importlib.util import find_spec

import msgspec
import numpy as np
import pytest

from p2pdrl.config.task import EnvConfig, NetworkConfig, TaskConfig
from p2pdrl.errors import ConfigError, WorkerError
from p2pdrl.node.children.evaluator import EvaluatorProcess
from p2pdrl.rl.evaluate import evaluate
from p2pdrl.rl.registry import build_trainer
from p2pdrl.tensors.checkpoint import Checkpoint, chunks

TASK = TaskConfig(env=EnvConfig(num_envs=2, max_episode_steps=40), network=NetworkConfig(hidden=(8,)), seed=5)


def checkpoint_of(task: TaskConfig, seed: int = 0) -> Checkpoint:
    trainer = build_trainer(task, seed, "cpu")
    params = trainer.flat + np.random.default_rng(seed).normal(size=trainer.layout.size).astype(np.float32)
    meta = {"layout": trainer.layout.to_wire(), "task": msgspec.to_builtins(task)}
    trainer.close()
    return Checkpoint(params, {}, meta)


@pytest.fixture
async def process():
    made = EvaluatorProcess(threads=1, allow_import=False)
    yield made
    await made.stop()


async def test_it_plays_what_evaluate_plays_again_and_again_in_one_process(process):
    pids = set()
    for seed in (3, 4):
        checkpoint = checkpoint_of(TASK, seed)
        played = await process.play(chunks(checkpoint), 5, greedy=False, seed=seed)
        pids.add(process.pid)
        trainer = build_trainer(TASK, 0, "cpu")
        trainer.set_state(checkpoint.params, None)
        expected = evaluate(trainer.policy, TASK.env, 5, greedy=False, seed=seed)
        trainer.close()
        assert (played.mean, played.std) == (expected.mean, expected.std)
        assert played.length == pytest.approx(np.mean(expected.lengths))
        assert played.seconds > 0
    assert len(pids) == 1
    larger = msgspec.structs.replace(TASK, network=NetworkConfig(hidden=(300, 300)))
    await process.play(chunks(checkpoint_of(larger)), 1, greedy=True, seed=0)
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match="killed by signal 9"):
        await process.play(chunks(checkpoint_of(TASK)), 1, greedy=True, seed=0)
    await process.play(chunks(checkpoint_of(TASK)), 1, greedy=True, seed=0)


async def test_what_can_t_be_played_is_told(process):
    checkpoint = checkpoint_of(TASK)
    task = msgspec.structs.replace(TASK, env=EnvConfig(id="NoSuchThing-v0"))
    wrong = Checkpoint(checkpoint.params, {}, {**checkpoint.meta, "task": msgspec.to_builtins(task)})
    with pytest.raises(ConfigError, match="NoSuchThing"):
        await process.play(chunks(wrong), 1, greedy=True, seed=0)
    assert process.pid is None


async def test_one_that_takes_too_long_is_ended():
    process = EvaluatorProcess(threads=1, allow_import=False, longest_s=0.2)
    with pytest.raises(WorkerError, match=r"wasn't done after 0\.2 s"):
        await process.play(chunks(checkpoint_of(TASK)), 1, greedy=True, seed=0)
    assert process.pid is None
    await process.stop()
    await asyncio.sleep(0)


@pytest.mark.skipif(find_spec("moviepy") is None or find_spec("pygame") is None, reason="wants p2pdrl[video]")
async def test_it_films_an_episode_at_the_lowest_priority(process, tmp_path, monkeypatch):
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    film = tmp_path / "new" / "film.mp4"
    filmed = await process.film(chunks(checkpoint_of(TASK)), film, seed=1)
    assert 1 <= filmed.episode_return <= 40
    assert b"ftyp" in film.read_bytes()[:16]
    assert os.getpriority(os.PRIO_PROCESS, process.pid) == 19


@pytest.mark.skipif(find_spec("moviepy") is not None, reason="moviepy is installed here")
async def test_without_the_packages_the_one_to_install_is_named(process, tmp_path):
    with pytest.raises(ConfigError, match=r"pip install 'p2pdrl\[video\]'"):
        await process.film(chunks(checkpoint_of(TASK)), tmp_path / "film.mp4", seed=1)
