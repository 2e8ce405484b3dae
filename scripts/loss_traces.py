"""Records what learners compute, update by update: the net under changes that shouldn't alter any number.

Each case trains one learner from fixed seeds on one thread: an algorithm with a network, an environment, a
way of computing gradients. One JSON line per case on stdout: every metric of every update as a hexadecimal
float, which is exact, with environment steps, episodes and the SHA-256 of the parameters; at the end those of
the arrays that travel beside them (optimizer state, normalisers). The clock stands still: durations are 0.

The same commit on the same machine gives the same lines; another processor rounds the last bits otherwise.
``compare_traces.py`` runs two commits and compares them. The test suite keeps a few numbers of each case's
first updates; a change that is meant to alter them records them anew:

    python scripts/loss_traces.py --updates 20 --golden tests/unit/rl/loss_traces.json
    python scripts/loss_traces.py --cases ppo a2c --updates 50 > before.jsonl
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import torch

from p2pdrl.config.loader import resolve
from p2pdrl.pipeline.plan import PipelinePlan
from p2pdrl.rl.engines import EngineOptions
from p2pdrl.rl.pipeline.model_split import ModelSplit
from p2pdrl.rl.registry import build_trainer
from p2pdrl.rl.trainer import Trainer

SEED = 3
"""Of the learner: its environments, actions, shuffles and batches."""
DIGITS = 8
"""Of the numbers that the test suite keeps."""
KEPT = ("policy_loss", "value_loss", "entropy", "loss", "evaluation_loss", "gradient_norm")
"""Metrics that the test suite keeps, beside all that are named ``…_loss``."""


class Spots(gym.Env[npt.NDArray[np.uint8], np.int64]):
    """A spot falls through a picture; going left, staying or going right, a bar below is to catch it."""

    SIZE = 36
    observation_space = gym.spaces.Box(0, 255, (SIZE, SIZE, 1), np.uint8)
    action_space = gym.spaces.Discrete(3)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[npt.NDArray[np.uint8], dict[str, Any]]:
        """Put spot and bar anywhere, the spot at the top."""
        super().reset(seed=seed, options=options)
        self._spot, self._bar = (int(place) for place in self.np_random.integers(0, self.SIZE - 6, 2))
        self._height = 0
        return self._picture(), {}

    def step(self, action: np.int64) -> tuple[npt.NDArray[np.uint8], float, bool, bool, dict[str, Any]]:
        """Move both; the end pays 1 for a spot that is caught, less the further it falls from the bar."""
        self._bar = int(np.clip(self._bar + 6 * (int(action) - 1), 0, self.SIZE - 6))
        self._height += 4
        ended = self._height + 6 > self.SIZE - 6
        reward = 1.0 - abs(self._spot - self._bar) / 10 if ended else 0.0
        return self._picture(), reward, ended, False, {}

    def _picture(self) -> npt.NDArray[np.uint8]:
        picture = np.zeros((self.SIZE, self.SIZE, 1), dtype=np.uint8)
        picture[self._height : self._height + 6, self._spot : self._spot + 6] = 255
        picture[-4:, self._bar : self._bar + 6] = 128
        return picture


SPOTS = "p2pdrl/Spots-v0"
if SPOTS not in gym.registry:
    gym.register(SPOTS, entry_point=Spots)


@dataclass(frozen=True)
class Case:
    """One learner.

    Attributes:
        settings: values by key of the configuration, below ``task`` unless they begin with ``node``.
        schedule: of a pipeline that computes and steps, all of its ranks in this process; empty for none.
        cuts: number of the first block of each of its stages but the first.
        ranks: threads over which these are dealt out.
    """

    settings: Mapping[str, Any]
    schedule: Any = ""
    cuts: tuple[int, ...] = ()
    ranks: int = 2


PPO = {
    "env.num_envs": 4,
    "network.hidden": [16, 16],
    "algorithm.name": "ppo",
    "algorithm.unroll_steps": 16,
    "algorithm.epochs": 2,
    "algorithm.minibatches": 2,
}
A2C = {"env.num_envs": 4, "network.hidden": [16, 16], "algorithm.name": "a2c"}
DQN = {
    "env.num_envs": 4,
    "env.normalize_returns": False,
    "network.hidden": [16, 16],
    "algorithm.name": "dqn",
    "algorithm.learning_starts": 32,
    "algorithm.buffer_size": 1000,
    "algorithm.batch_size": 16,
    "algorithm.gradient_steps": 2,
    "algorithm.target_every": 4,
    "algorithm.exploration_steps": 200,
}
ONLINE_Q = {
    "env.num_envs": 4,
    "env.normalize_returns": False,
    "network.hidden": [16, 16],
    "algorithm.target_every": 64,
    "algorithm.exploration_steps": 200,
    "stop.env_steps": 5000,
}
OFF_POLICY = {
    "env.num_envs": 4,
    "env.normalize_returns": False,
    "network.hidden": [16, 16],
    "network.activation": "relu",
    "algorithm.learning_starts": 32,
    "algorithm.buffer_size": 1000,
    "algorithm.batch_size": 16,
    "algorithm.unroll_steps": 4,
    "algorithm.gradient_steps": 3,
    "algorithm.target_tau": 0.05,
}
CONTINUOUS = {**OFF_POLICY, "env.id": "Pendulum-v1", "env.max_episode_steps": 24}
SAC = {**CONTINUOUS, "algorithm.name": "sac"}
TD3 = {**CONTINUOUS, "algorithm.name": "td3"}
DDPG = {**CONTINUOUS, "algorithm.name": "ddpg"}
SAC_DISCRETE = {**OFF_POLICY, "algorithm.name": "sac_discrete"}
REGRESSION = {
    "algorithm.name": "regression",
    "algorithm.features": 8,
    "algorithm.rows": 256,
    "algorithm.batch_size": 16,
}
CLASSIFIER = {**REGRESSION, "algorithm.kind": "classifier", "algorithm.hidden": [16, 8]}
IMPALA = {
    "env.num_envs": 4,
    "network.hidden": [16, 16],
    "algorithm.name": "impala",
    "algorithm.optimizer": "adam",
}
LSTM = {"network.core": "lstm", "network.core_size": 8, "env.num_envs": 6}
PENDULUM = {"env.id": "Pendulum-v1", "env.max_episode_steps": 24, "env.normalize_observations": True}
SQUASH = {"network.squash": "tanh", "algorithm.entropy_coef": 0.01}
SDE = {
    "network.exploration_noise": "sde",
    "network.sde_sample_freq": 4,
    "network.log_std_init": -1.0,
    "algorithm.entropy_coef": 0.01,
}
PICTURES = {
    "env.id": SPOTS,
    "env.num_envs": 2,
    "algorithm.unroll_steps": 8,
    "algorithm.learning_rate": 2e-4,
    "network.hidden": [16],
}
MICROBATCHES = {"node.learner.microbatches": 3}
CHECKPOINTS = {"node.learner.checkpoint_activations": True}
ANNEALED = {"algorithm.anneal": "linear", "stop.env_steps": 5000}
BF16 = {"gradients.precision": "bf16"}
SPLIT = {"node.learner.split_devices": ["cpu", "cpu"], "node.learner.split_cuts": [1], **MICROBATCHES}


def _ways(name: str, base: Mapping[str, object], hidden: str = "network.hidden") -> dict[str, Case]:
    """One learner in every way of computing its gradients."""
    four: dict[str, object] = {"node.learner.microbatches": 4}
    deep = {**base, **four, hidden: [16, 16, 16]}
    return {
        name: Case(base),
        f"{name}-accumulated": Case({**base, **MICROBATCHES}),
        f"{name}-checkpointed": Case({**base, **CHECKPOINTS}),
        f"{name}-bf16": Case({**base, **BF16}),
        f"{name}-split": Case({**base, **SPLIT}),
        f"{name}-split-checkpointed": Case({**base, **SPLIT, **CHECKPOINTS}),
        f"{name}-pipeline-1f1b": Case({**base, **four}, "1f1b", (1, 2), 3),
        f"{name}-pipeline-gpipe": Case({**base, **four}, "gpipe", (1,)),
        f"{name}-pipeline-interleaved": Case(deep, "interleaved", (1, 2, 3)),
    }


CASES: dict[str, Case] = {
    **_ways("ppo", PPO),
    "ppo-lstm": Case({**PPO, **LSTM}),
    "ppo-lstm-accumulated": Case({**PPO, **LSTM, **MICROBATCHES}),
    "ppo-lstm-pipeline-1f1b": Case({**PPO, **LSTM, **MICROBATCHES}, "1f1b", (2,)),
    "ppo-lstm-split": Case({**PPO, **LSTM, **SPLIT}),
    "ppo-continuous": Case({**PPO, **PENDULUM}),
    "ppo-continuous-lstm": Case({**PPO, **PENDULUM, **LSTM}),
    "ppo-squash": Case({**PPO, **PENDULUM, **SQUASH}),
    "ppo-squash-accumulated": Case({**PPO, **PENDULUM, **SQUASH, **MICROBATCHES}),
    "ppo-squash-pipeline-1f1b": Case({**PPO, **PENDULUM, **SQUASH, **MICROBATCHES}, "1f1b", (1,)),
    "ppo-rescale": Case({**PPO, **PENDULUM, "network.rescale_actions": True, "network.log_std_init": -0.5}),
    "ppo-sde": Case({**PPO, **PENDULUM, **SDE}),
    "ppo-sde-lstm": Case({**PPO, **PENDULUM, **LSTM, **SDE}),
    "ppo-sde-pipeline-1f1b": Case({**PPO, **PENDULUM, **SDE, **MICROBATCHES}, "1f1b", (1,)),
    "ppo-clip-anneal": Case({**PPO, "algorithm.clip_anneal": "linear", "stop.env_steps": 5000}),
    "ppo-normalize-minibatch": Case({**PPO, "algorithm.normalize_over": "minibatch"}),
    "ppo-target-kl-minibatch": Case(
        {**PPO, "algorithm.target_kl": 1e-3, "algorithm.target_kl_per": "minibatch"}
    ),
    "ppo-raw-returns": Case({**PPO, "env.normalize_returns": False}),
    "ppo-clipped-values": Case(
        {**PPO, "algorithm.value_clip": 0.2, "algorithm.target_kl": 0.01, "algorithm.entropy_coef": 0.01}
    ),
    "ppo-annealed": Case({**PPO, **ANNEALED}),
    "ppo-relu": Case({**PPO, "network.activation": "relu", "algorithm.normalize_advantages": False}),
    "ppo-nature-cnn": Case({**PPO, **PICTURES}),
    "ppo-impala-resnet": Case(
        {**PPO, **PICTURES, "network.kind": "impala_resnet", "network.channels": [4, 8]}
    ),
    "ppo-transformer": Case({**PPO, "network.kind": "transformer", "network.width": 16, "network.heads": 2}),
    **_ways("a2c", A2C),
    "a2c-lstm": Case({**A2C, **LSTM}),
    "a2c-lstm-accumulated": Case({**A2C, **LSTM, **MICROBATCHES}),
    "a2c-lstm-pipeline-1f1b": Case({**A2C, **LSTM, **MICROBATCHES}, "1f1b", (2,)),
    "a2c-lstm-split": Case({**A2C, **LSTM, **SPLIT}),
    "a2c-continuous": Case({**A2C, **PENDULUM}),
    "a2c-squash-sde": Case({**A2C, **PENDULUM, **SDE, **SQUASH}),
    "a2c-adam": Case({**A2C, "algorithm.optimizer": "adam", "algorithm.normalize_advantages": True}),
    "a2c-annealed": Case({**A2C, **ANNEALED}),
    "a2c-nature-cnn": Case({**A2C, **PICTURES}),
    "dqn": Case(DQN),
    "dqn-accumulated": Case({**DQN, **MICROBATCHES}),
    "dqn-dueling-prioritized-n-step": Case(
        {
            **DQN,
            "network.dueling": True,
            "algorithm.prioritized": True,
            "algorithm.n_step": 3,
            "algorithm.target_tau": 0.1,
        }
    ),
    "dqn-noisy-dueling": Case({**DQN, "network.noisy": True, "network.dueling": True}),
    "dqn-noisy-accumulated": Case({**DQN, **MICROBATCHES, "network.noisy": True}),
    "dqn-pictures": Case({**DQN, **PICTURES}),
    "one-step-q": Case({**ONLINE_Q, "algorithm.name": "one_step_q"}),
    "one-step-sarsa": Case({**ONLINE_Q, "algorithm.name": "one_step_sarsa"}),
    "n-step-q": Case({**ONLINE_Q, "algorithm.name": "n_step_q", "algorithm.rmsprop_eps_in_root": True}),
    "n-step-q-dueling-accumulated": Case(
        {
            **ONLINE_Q,
            **MICROBATCHES,
            "algorithm.name": "n_step_q",
            "network.dueling": True,
            "algorithm.optimizer": "adam",
        }
    ),
    "a2c-a3c": Case({**A2C, "algorithm.rmsprop_eps": 0.1 / 20**2, "algorithm.rmsprop_eps_in_root": True}),
    "impala": Case(IMPALA),
    "impala-accumulated": Case({**IMPALA, **MICROBATCHES}),
    "impala-lstm": Case({**IMPALA, **LSTM}),
    "impala-pipeline-1f1b": Case({**IMPALA, **MICROBATCHES}, "1f1b", (1, 2), 3),
    "impala-continuous": Case({**IMPALA, **PENDULUM, "algorithm.optimizer": "rmsprop"}),
    "ddpg": Case(DDPG),
    "ddpg-gaussian-normalized": Case(
        {
            **DDPG,
            "env.normalize_observations": True,
            "env.normalize_returns": True,
            "algorithm.noise": "gaussian",
        }
    ),
    "td3": Case(TD3),
    "td3-accumulated": Case({**TD3, **MICROBATCHES}),
    "td3-prioritized-n-step": Case(
        {**TD3, "algorithm.prioritized": True, "algorithm.n_step": 3, "algorithm.policy_delay": 3}
    ),
    "sac": Case(SAC),
    "sac-accumulated": Case({**SAC, **MICROBATCHES}),
    "sac-fixed-temperature-prioritized-n-step": Case(
        {**SAC, "algorithm.temperature": 0.2, "algorithm.prioritized": True, "algorithm.n_step": 3}
    ),
    "sac-sde": Case(
        {
            **SAC,
            "network.exploration_noise": "sde",
            "network.sde_sample_freq": 2,
            "network.log_std_init": -2.0,
        }
    ),
    "sac-discrete": Case(SAC_DISCRETE),
    "sac-discrete-pictures": Case({**SAC_DISCRETE, **PICTURES}),
    **_ways("classifier", CLASSIFIER, "algorithm.hidden"),
    "regression": Case(REGRESSION),
    "regression-sparse": Case({**REGRESSION, "algorithm.density": 0.2}),
    "regression-sequence": Case({**REGRESSION, "algorithm.sample": "sequence", "algorithm.workers": 4}),
    "regression-annealed": Case({**REGRESSION, **ANNEALED}),
    **{
        f"regression-{optimizer}": Case({**REGRESSION, "algorithm.optimizer": optimizer})
        for optimizer in ("momentum", "rmsprop", "adagrad", "adam")
    },
    "regression-nesterov": Case(
        {**REGRESSION, "algorithm.optimizer": "momentum", "algorithm.nesterov": True}
    ),
}


@contextlib.contextmanager
def learner(case: Case) -> Iterator[Trainer]:
    """Build the case's learner. Only here it is said of what one is made.

    The rest of this script asks it for ``step()`` (with ``metrics``, ``env_steps`` and ``episodes`` of the
    update), ``flat``, ``sidecar()`` and ``set_progress(fraction)``.
    """
    keys = {key if key.startswith("node.") else f"task.{key}": value for key, value in case.settings.items()}
    config = resolve(sets=[f"{key}={json.dumps(value)}" for key, value in keys.items()]).config
    chosen = config.node.learner
    options = EngineOptions(
        microbatches=chosen.microbatches,
        checkpoint_activations=chosen.checkpoint_activations,
        split_devices=chosen.split_devices,
        split_cuts=chosen.split_cuts,
        clock=stopped,
    )
    with contextlib.ExitStack() as stack:
        trainer = build_trainer(config.task, SEED, "cpu", engine=options)
        stack.callback(trainer.close)
        if case.schedule:
            parts = trainer.parts()
            assert isinstance(chosen.microbatches, int)  # noqa: S101 - no case has it measured
            plan = PipelinePlan(len(parts.blocks), case.cuts, case.schedule, chosen.microbatches, case.ranks)
            pipeline = ModelSplit(parts, plan, [torch.device("cpu")] * case.ranks, clock=stopped)
            stack.callback(pipeline.close)
            trainer.engine = trainer.stepper = pipeline
        yield trainer


def stopped() -> float:
    """Tell the time of a clock that doesn't go: how long something took is nobody's number."""
    return 0.0


def trace(name: str, updates: int) -> dict[str, Any]:
    """Train a case's learner and return the line about it."""
    case = CASES[name]
    metrics: dict[str, list[str | None]] = {}
    env_steps: list[int] = []
    episodes: list[list[tuple[str, int]]] = []
    hashes: list[str] = []
    probes: list[str] = []
    end = case.settings.get("stop.env_steps")
    with learner(case) as trainer:
        for update in range(updates):
            if end is not None:
                trainer.set_progress(sum(env_steps) / end, sum(env_steps))
            stats = trainer.step()
            for metric in {**metrics, **stats.metrics}:
                value = stats.metrics.get(metric)
                row = metrics.setdefault(metric, [None] * update)
                row.append(None if value is None else float(value).hex())
            env_steps.append(stats.env_steps)
            episodes.append([(float(total).hex(), int(length)) for total, length in stats.episodes])
            hashes.append(sha256(trainer.flat))
            probes.append(probe(trainer.flat).hex())
        sidecar = {key: sha256(array) for key, array in sorted(trainer.sidecar().items())}
        size = trainer.flat.size
    return {
        "case": name,
        "updates": updates,
        "parameters": size,
        "metrics": metrics,
        "env_steps": env_steps,
        "episodes": episodes,
        "vector": hashes,
        "probe": probes,
        "sidecar": sidecar,
    }


def sha256(array: npt.NDArray[Any]) -> str:
    """Return the hash of an array's bytes, its type and its shape."""
    head = f"{array.dtype.str}{array.shape}".encode()
    return hashlib.sha256(head + np.ascontiguousarray(array).tobytes()).hexdigest()


def probe(parameters: npt.NDArray[np.float32]) -> float:
    """Return one number to which each parameter matters, in a proportion of its own: Σ cos(i) x_i."""
    return float(np.cos(np.arange(parameters.size)) @ parameters.astype(np.float64))


Golden = Mapping[str, list[float | None]]
"""The few numbers of a case that the test suite keeps, by name, one of each per update."""


def golden(line: Mapping[str, Any]) -> Golden:
    """Return the numbers of a case's line that are kept; None stands for an update without one."""
    rows = {
        name: value for name, value in line["metrics"].items() if name in KEPT or name.endswith("_loss")
    } | {"probe": line["probe"]}
    kept = {name: [rounded(one) for one in row] for name, row in rows.items()}
    return {**kept, "env_steps": line["env_steps"]}


def rounded(number: str | None) -> float | None:
    """Return a hexadecimal float with the digits that are kept; None where an update had none."""
    return None if number is None else float(f"{float.fromhex(number):.{DIGITS}g}")


def write_golden(path: Path, traces: Mapping[str, Golden]) -> None:
    """Write cases to a file, a line for each row; others that it has stay, as long as they are cases."""
    known: dict[str, Golden] = json.loads(path.read_text()) if path.exists() else {}
    cases = []
    for name in CASES:
        rows = traces.get(name) or known.get(name)
        if rows is None:
            continue
        lines = ",\n".join(f"    {json.dumps(row)}: {json.dumps(numbers)}" for row, numbers in rows.items())
        cases.append(f"  {json.dumps(name)}: {{\n{lines}\n  }}")
    path.write_text("{\n" + ",\n".join(cases) + "\n}\n")


def be_deterministic() -> None:
    """Let torch compute everything in one order."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(mode=True)


class Options(argparse.Namespace):
    """What the command line says."""

    updates: int
    cases: list[str]
    list: bool
    golden: Path | None


def count(text: str) -> int:
    """Read a positive number."""
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def main(arguments: list[str] | None = None) -> None:
    """Write the lines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--updates", type=count, default=200)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES), metavar="CASE")
    parser.add_argument("--list", action="store_true", help="print the names of all cases, and train nothing")
    parser.add_argument(
        "--golden",
        type=Path,
        help="write what the test suite keeps to this file, in place of what it has of these cases",
    )
    options = parser.parse_args(arguments, namespace=Options())
    if options.list:
        print("\n".join(CASES))
        return
    be_deterministic()
    found = {}
    for name in options.cases:
        line = trace(name, options.updates)
        if options.golden is None:
            print(json.dumps(line), flush=True)
        found[name] = golden(line)
        print(f"{name}: {options.updates} updates", file=sys.stderr, flush=True)
    if options.golden is not None:
        write_golden(options.golden, found)


if __name__ == "__main__":
    main()
