"""The commands that README and docs tell people to type, and how each is run by a test.

Whatever isn't named in `RUNS` or `NOT_RUN` is run as it stands: beside a swarm with a key, in a folder that
has the key, until it ends, or until it has said what it is there for.
"""

# Commands are long.
# ruff: noqa: E501

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
_BLOCK = re.compile(r"^```(console|sh|bash)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_INLINE = re.compile(r"`((?:p2pdrl|scripts/\w+\.py|python scripts/\w+\.py|make) [^`\n]+)`")


def commands(page: Path) -> Iterator[list[str]]:
    """Each command of a page once: of its blocks, and those in a line."""
    text, found = page.read_text(), []
    for kind, block in _BLOCK.findall(text):
        lines = block.replace("\\\n", " ").splitlines()
        prompted = [line[2:] for line in lines if line.startswith("$ ")]
        found += prompted if kind == "console" else lines
    found += [one for one in _INLINE.findall(_BLOCK.sub("", text)) if "…" not in one and "[" not in one]
    for line in dict.fromkeys(found):
        for part in re.split(r"\s(?:&&|\|)\s", re.split(r"  #| > ", line)[0].rstrip(" &")):
            words = shlex.split(part, comments=True)
            while words and (re.match(r"^[A-Z_]+=", words[0]) or words[0] in {"sudo", "nice", "python"}):
                words = words[1:]
            if words:
                yield words


def documented() -> dict[str, list[str]]:
    """All of them, by their text."""
    return {" ".join(words): words for page in PAGES for words in commands(page)}


@dataclass(frozen=True)
class Run:
    """How a command is run.

    Attributes:
        more: words after its own, mostly to have it take seconds in place of hours.
        instead: the line that is typed in place of it.
        before: lines that come first, in the same folder; "{printed}" is the last that one of them printed.
        after: lines that undo what it did.
        beside: a node that goes on meanwhile, for the command alone; addresses stand for it. Without one they
            stand for a node of a swarm that has a key.
        member: the name of one more that has joined that one.
        until: what has to be printed by a command that goes on until it is interrupted.
        says: what has to be in its output.
        wants: the package of an extra.
    """

    more: tuple[str, ...] = ()
    instead: str = ""
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    beside: str = ""
    member: str = ""
    until: str = ""
    says: str = ""
    wants: str = ""


def _ending(steps: int, **given: str) -> Run:
    """A training that ends after some steps."""
    return Run(more=("--set", f"task.stop.env_steps={steps}"), **given)  # type: ignore[arg-type]


KEYED = "p2pdrl node --swarm-key-file swarm.key --config cartpole --set node.learner.max_updates_per_s=2"
OPEN = "p2pdrl node --config cartpole --set node.learner.max_updates_per_s=2"
_TRAINS = '"kind": "training"'
_MEMBER = Run(more=("--swarm-key-file", "swarm.key"), until=_TRAINS)
_BOB = "p2pdrl keygen --operator-only bob.operator --name bob"
_LANDER = (
    "p2pdrl node --config lunarlander --data-dir data/node-1 --set task.stop.env_steps=9000",
    "cp $(find data/node-1 -name last.safetensors) best.safetensors",
)
_NEWEST = 'import json, sys; print([one["id"] for one in json.load(sys.stdin) if one["state"] == "open"][-1])'
_MODE = Run(after=("p2pdrl mode set gossip",))
_PIPELINE = ("p2pdrl mode set pipeline --stages 2", "p2pdrl wait --training 3 --timeout 60", "sleep 3")
_LEARNER = "p2pdrl node --config impala --roles learner"
_ACTS = Run(beside=_LEARNER, until=_TRAINS)

# fmt: off
RUNS: dict[str, Run] = {
    "curl -s -H Content-Type: application/json -d "
    '{"observations": [0.1, 0.0, -0.2, 0.3], "greedy": true} 127.0.0.1:7700/v1/act': Run(
        beside=OPEN, says="actions"
    ),
    "p2pdrl config init": Run(says="[task.env]"),
    "p2pdrl config show --origin --config my.toml --set task.algorithm.learning_rate=3e-4": Run(
        before=("p2pdrl config init > my.toml",), says='learning_rate = 0.0003'
    ),
    "p2pdrl doctor": Run(beside=OPEN),
    "p2pdrl doctor --peers 10.0.0.1:7700": Run(more=("--swarm-key-file", "swarm.key")),
    "p2pdrl doctor --peers HOST:7700": Run(more=("--swarm-key-file", "swarm.key")),
    "p2pdrl doctor --peers HOST:PORT": Run(more=("--swarm-key-file", "swarm.key")),
    "p2pdrl eval CHECKPOINT --video film.mp4": Run(more=("--episodes", "1"), wants="moviepy"),
    "p2pdrl events -f": Run(until="training"),
    "p2pdrl export CHECKPOINT --out policy.onnx": Run(wants="onnx"),
    "p2pdrl halt": Run(beside=KEYED),
    "p2pdrl invite revoke ID": Run(before=("p2pdrl invite", f"p2pdrl invite list --json | python -c '{_NEWEST}'")),
    "p2pdrl key rotate swarm.key --remove-operator carol": Run(
        before=(
            "p2pdrl keygen --operator-only carol.operator --name carol",
            "p2pdrl key rotate swarm.key --add-operator {printed}",
        )
    ),
    "p2pdrl leave": Run(beside=OPEN),
    "p2pdrl mode set allreduce --set protocol=param_average --set every_updates=16": _MODE,
    "p2pdrl mode set pipeline --stages 2": _MODE,
    "p2pdrl mode set pipeline --stages 2 --set backend=stream": _MODE,
    "p2pdrl mode set server-sync --servers 2": _MODE,
    "p2pdrl node --config amb_pp": Run(until=_TRAINS),
    "p2pdrl node --config apex_dqn --roles learner": Run(until='"kind": "founded"'),
    "p2pdrl node --config cartpole --set node.log.writers=[\"csv\", \"wandb\"] --set node.log.wandb_mode=offline":
        _ending(3000, wants="wandb"),
    "p2pdrl node --config impala --roles learner": Run(until='"kind": "founded"'),
    "p2pdrl node --config lunarlander": _ending(9000, wants="Box2D"),
    "p2pdrl node --config lunarlander --from 10.0.0.1:7700": _ending(
        9000, beside="p2pdrl node --config lunarlander", wants="Box2D"
    ),
    "p2pdrl node --config lunarlander --from data/node-1 --set task.env.kwargs.gravity=-8.0": Run(
        before=_LANDER, until=_TRAINS, wants="Box2D"
    ),
    "p2pdrl node --config lunarlander --set node.video.every=100000": _ending(9000, wants="moviepy"),
    "p2pdrl node --config sweep-cartpole/best.toml": Run(
        before=("p2pdrl sweep cartpole --steps 2000 --trials 1 --set task.env.num_envs='choice(8, 16)'",),
        until=_TRAINS, wants="optuna",
    ),
    "p2pdrl node --from CHECKPOINT": Run(until=_TRAINS),
    "p2pdrl node --join p2pdrl://AZfEEOK…": Run(before=("p2pdrl invite",), until=_TRAINS),
    "p2pdrl node --listen 0.0.0.0:7700 --swarm-key-file swarm.key --config lunarlander": _ending(
        9000, wants="Box2D"
    ),
    "p2pdrl node --peers 10.0.0.1:7700": _MEMBER,
    "p2pdrl node --peers 10.0.0.1:7700 --roles actor --actors 8": _ACTS,
    "p2pdrl node --peers 10.0.0.1:7700 --roles replay": Run(
        beside="p2pdrl node --config apex_dqn --roles learner", until=_TRAINS
    ),
    "p2pdrl node --peers 127.0.0.1:7700": Run(beside=OPEN, until=_TRAINS),
    "p2pdrl node --peers HOST:7700 --roles actor --actors 8": _ACTS,
    "p2pdrl node --peers HOST:PORT --set node.limits.cpus=2 --set node.limits.memory_bytes=4e9 "
    "--set node.limits.upload_bytes_s=5e6 --set node.limits.download_bytes_s=20e6": _MEMBER,
    "p2pdrl node --peers lan": _ending(3000, wants="zeroconf"),
    "p2pdrl operators add 5d7e…:bob": Run(before=(_BOB,), beside=KEYED),
    "p2pdrl operators remove bob": Run(before=(_BOB, "p2pdrl operators add {printed}"), beside=KEYED),
    "p2pdrl page --open": Run(instead="p2pdrl page"),
    "p2pdrl node --peers HOST:PORT --set node.imports=[\"my_pole:Pole\"]": Run(
        beside="p2pdrl node --config ppo --allow-import --set task.env.id=my_pole:Pole "
        "--set task.env.max_episode_steps=200",
        until=_TRAINS,
    ),
    "p2pdrl pause --swarm": Run(after=("p2pdrl resume --swarm",)),
    "p2pdrl peers ban NAME": Run(beside=KEYED, member="node-3"),
    "p2pdrl peers ban node-3": Run(beside=KEYED, member="node-3"),
    "p2pdrl peers unban NAME": Run(before=("p2pdrl peers ban node-3",), beside=KEYED, member="node-3"),
    "p2pdrl pipeline plan": Run(more=("--stages", "2")),
    "p2pdrl pipeline trace -o trace.json": Run(before=_PIPELINE, after=("p2pdrl mode set gossip",)),
    "p2pdrl resume --swarm": Run(before=("p2pdrl pause --swarm",)),
    "p2pdrl rounds --watch": Run(until="node-"),
    "p2pdrl stop set env_steps=1000000": Run(beside=KEYED),
    "p2pdrl stop set env_steps=2000000": Run(beside=KEYED),
    "p2pdrl swarm up 3 --config cartpole": _ending(6000),
    "p2pdrl swarm up 3 --config impala --learners 1": _ending(3000),
    "p2pdrl swarm up 4 --config cartpole": _ending(6000),
    "p2pdrl swarm up 4 --config lunarlander --from best.safetensors": Run(
        before=_LANDER, more=("--set", "task.stop.env_steps=9000"), wants="Box2D"
    ),
    "p2pdrl swarm up 4 --config sgp": _ending(6000),
    "p2pdrl swarm up 5 --config apex_dqn --learners 1 --replays 2": _ending(3000),
    "p2pdrl sweep cartpole --steps 100000 --trials 30 --jobs 2 --seeds 2 "
    "--set task.algorithm.learning_rate=loguniform(1e-4, 1e-2) "
    "--set task.network.hidden=choice([64, 64], [128, 128]) --set task.env.num_envs=16": Run(
        more=("--steps", "2000", "--trials", "2", "--seeds", "1"), wants="optuna"
    ),
    "p2pdrl top": Run(until="node-3"),
    "scripts/bench_actors.py --nodes 1 2 4 --step-ms 5 --ahead 1 --algorithm impala": Run(
        more=("--nodes", "1", "--actors", "1", "--step-ms", "1", "--seconds", "3", "--repeats", "1")
    ),
    "scripts/bench_learner.py --presets pong": Run(more=("--updates", "1", "--turns", "1"), wants="ale_py"),
    "scripts/bench_pipeline.py --rows 512 --stages 2 3 --schedules 1f1b --rounds 3 --steps 1 --markdown": Run(
        more=("--rows", "64", "--stages", "2", "--rounds", "1", "--parameters", "100000"), says="stream"
    ),
    "scripts/bench_stalls.py --repeats 2": Run(
        more=("--repeats", "1", "--parameters", "100000", "--strategies", "gossip")
    ),
    "scripts/bench_transport.py --rounds 9": Run(more=("--rounds", "1", "--megabytes", "4"), says="GMAC"),
    "scripts/chaos.py --minutes 15 --seed 1": Run(
        more=("--minutes", "2", "--nodes", "4", "--only", "kill", "leave"), says="All promises were kept"
    ),
    "scripts/compare_strategies.py --pace-s 0.012 --plot strategies.png": Run(
        more=("--strategies", "adpsgd", "--weathers", "fair", "--budget-s", "8"), wants="matplotlib"
    ),
    "scripts/compare_systems.py --seeds 51 --pace-ms 0.5 --after-s 10 --out docs/results/systems": Run(
        more=("--only", "a3c", "--nodes", "2", "--budget-s", "8", "--out", "systems"), wants="matplotlib"
    ),
    "scripts/loss_traces.py --updates 20 --golden tests/unit/rl/loss_traces.json": Run(
        more=("--updates", "2", "--golden", "traces.json", "--cases", "ppo"), says="ppo"
    ),
    "scripts/loss_traces.py --updates 20 --golden tests/unit/rl/loss_traces.json --cases NAME": Run(
        more=("--updates", "2", "--golden", "traces.json", "--cases", "ppo"), says="ppo"
    ),
    "scripts/peer_health.py --peers 10.0.0.1:7700": Run(more=("--swarm-key-file", "swarm.key"), says="node-3"),
    "scripts/peer_health.py --peers HOST:7700": Run(more=("--swarm-key-file", "swarm.key"), says="node-3"),
    "scripts/reproduce.py --suite small": Run(
        more=("--suite", "tiny", "--seeds", "1", "--library", "ours", "--points", "2", "--curve-episodes", "1",
              "--episodes", "1", "--out", "small"), wants="matplotlib",
    ),
    "torchrun --nnodes 4 --nproc-per-node 1 --rdzv-endpoint gpu1:29500 --rdzv-backend c10d --no-python p2pdrl node "
    "--swarm-key-file swarm.key --config lunarlander": Run(
        instead="torchrun --nnodes 1 --nproc-per-node 1 --rdzv-endpoint 127.0.0.1:0 --rdzv-backend c10d "
        "--no-python p2pdrl node --swarm-key-file swarm.key --config cartpole --set task.stop.env_steps=3000"
    ),
}
"""Commands that want something before, beside or after them, or would take long as they stand."""

_MAKES = "it is what runs this test, or sets up for it"
_INSTALLS = "it is what scripts/check_extras.py does in empty environments, with a wheel"
_SSH = "hosts that there are: tests/integration/test_hosts.py"

NOT_RUN: dict[str, str] = {
    ". p2pdrl-venv/bin/activate": _INSTALLS,
    "make bench": "it takes hours; each script is run by itself",
    "make demo": _MAKES,
    "make docs": "p2pdrl[docs]: scripts/check_extras.py builds the site",
    "make lint": _MAKES,
    "make test": _MAKES,
    "make test-extras": "it installs some gigabytes",
    "make test-slow": _MAKES,
    "make venv": _MAKES,
    "pip install p2pdrl": _INSTALLS,
    "pip install p2pdrl[ray]": _INSTALLS,
    "pip install p2pdrl[sweep]": _INSTALLS,
    "pip install torch --index-url https://download.pytorch.org/whl/cpu": _INSTALLS,
    "podman build --format docker -f scripts/deploy/Containerfile -t p2pdrl .": "it wants podman and a registry",
    "podman build --format docker -f scripts/deploy/Containerfile --build-arg TORCH=cu126 -t p2pdrl:cuda .":
        "it wants podman and a registry",
    "python3 -m venv p2pdrl-venv": _INSTALLS,
    "sbatch --nodes 8 scripts/deploy/slurm.sbatch --config lunarlander": "tests/integration/test_deploy.py",
    "scripts/compare_traces.py main .": "it checks out two commits beside the repository",
    "scripts/on_ray.py --address auto --config lunarlander": "tests/integration/test_deploy.py",
    "p2pdrl swarm up --hosts a,b,user@c:2222 --config cartpole": _SSH,
    "p2pdrl swarm up --hosts gpu1,gpu2,me@lab:2222 --config lunarlander": _SSH,
}
# fmt: on
"""Why a command isn't run here, or where it is."""
