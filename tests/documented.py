"""The commands that README and docs tell people to type, and how each is run by a test.

Each is in `RUNS`, which says how it is run and what a reader may expect of it, or in `NOT_RUN`, which says why
it isn't or what does it in its place.
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
_INLINE = re.compile(
    r"`((?:p2pdrl|make|pip install|uv pip|pytest)\s[^`]+|(?:python\s)?scripts/\w+\.py(?:\s[^`]+)?)`"
)
_OPTIONAL = re.compile(r" \[(--[\w-]+)\]")
_BARE = re.compile(r"(?<!python )(scripts/\w+\.py) ")


def _lines(page: Path) -> Iterator[str]:
    """What is typed, by a page: lines of its blocks, and commands within its sentences."""
    text = page.read_text()
    for kind, block in _BLOCK.findall(text):
        lines = block.replace("\\\n", " ").splitlines()
        yield from (line[2:] for line in lines if line.startswith("$ ")) if kind == "console" else lines
    for found in _INLINE.findall(_BLOCK.sub("", text)):
        one = " ".join(found.split())
        if "…" in one.split():  # it stands for others
            continue
        yield _OPTIONAL.sub("", one)
        if _OPTIONAL.search(one):
            yield _OPTIONAL.sub(r" \1", one)


def commands(page: Path) -> Iterator[list[str]]:
    """Each command of a page once."""
    for line in dict.fromkeys(_lines(page)):
        for part in re.split(r"\s(?:&&|\|)\s", re.split(r"  #| > ", line)[0].rstrip(" &")):
            words = shlex.split(part, comments=True)
            while words and (re.match(r"^[A-Z_]+=", words[0]) or words[0] in {"sudo", "nice", "python"}):
                words = words[1:]
            if words:
                yield words


def blocks(page: Path) -> list[str]:
    """The kinds of a page's blocks: "console", "python" and so on."""
    return re.findall(r"^[ ]*```(\w+)", page.read_text(), re.MULTILINE)


def typed_as_programs() -> set[str]:
    """Scripts that pages have people type, with arguments, without naming a Python."""
    return {match[1] for page in PAGES for line in _lines(page) for match in _BARE.finditer(line)}


def documented() -> dict[str, list[str]]:
    """All of them, by their text."""
    return {" ".join(words): words for page in PAGES for words in commands(page)}


@dataclass(frozen=True)
class Run:
    """How a command is run: beside a swarm of three nodes with a key, in a folder that has the key.

    Attributes:
        says: what has to be on its standard output, a regular expression.
        logs: what has to be on its standard error.
        until: what is printed by a command that goes on; then Ctrl-C ends it.
        more: words after its own, mostly to have it take seconds in place of hours.
        instead: the line that is typed in place of it.
        before: lines that come first, in the same folder; "{printed}" is the last that one of them printed.
        after: lines that undo what it did.
        beside: a node without a key that goes on meanwhile, for the command alone; addresses stand for it.
            Without one they stand for a node of the swarm.
        ends: whether the next command is to find another swarm.
        wants: the package of an extra.
    """

    says: str = ""
    logs: str = ""
    until: str = ""
    more: tuple[str, ...] = ()
    instead: str = ""
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    beside: str = ""
    ends: bool = False
    wants: str = ""


SLOWLY = ("--config", "cartpole", "--set", "node.learner.max_updates_per_s=2")
"""How nodes train that commands are typed beside."""
TRAINS = '"kind": "training"'
FOUNDS = '"kind": "founded"'
_OPEN = f"p2pdrl node {' '.join(SLOWLY)}"
_DONE = "the swarm is done: .* environment steps"
_NODE = Run(until=TRAINS)
_KEYED = ("--swarm-key-file", "swarm.key")
_MEMBER = Run(more=_KEYED, until=TRAINS)
_BOB = "p2pdrl keygen --operator-only bob.operator --name bob"
_NEWEST = 'import json, sys; print([one["id"] for one in json.load(sys.stdin) if one["state"] == "open"][-1])'
_GOES_ON = ("p2pdrl stop set env_steps=1000000000",)
_UNBAN = ("p2pdrl peers unban node-3",)
_DEFAULT_MODE = ("p2pdrl mode set gossip --set protocol=adpsgd",)
_PIPELINE = (
    "p2pdrl mode set pipeline --stages 3 --set backend=stream",
    "for _ in $(seq 60); do p2pdrl pipeline trace -o first.json && exit; sleep 1; done; exit 1",
)
_ACTS = Run(beside="p2pdrl node --config impala --roles learner", until=TRAINS)
_HEALTH = Run(more=_KEYED, says=r"node-3\s")
_DOCTOR = Run(more=_KEYED, says=r"ok +peer .* answers")
_HISTORY = Run(says=r"steps +mean +std")
_EVAL = Run(more=("--episodes", "4"), says=r"sampled +[\d.]+(.|\n)*greedy +[\d.]+")
_TRACES = Run(more=("--updates", "2", "--golden", "traces.json", "--cases", "ppo"), logs="ppo: 2 updates")


def _lunarlander(**given: object) -> Run:
    """A training that ends after some seconds."""
    return Run(more=("--set", "task.stop.env_steps=5000"), logs=_DONE, wants="Box2D", **given)  # type: ignore[arg-type]


def _mode(name: str) -> Run:
    return Run(says=f"mode is {name}", after=_DEFAULT_MODE)


def _swarm(steps: int, says: str, **given: object) -> Run:
    return Run(more=("--set", f"task.stop.env_steps={steps}"), says=says, **given)  # type: ignore[arg-type]


def _smaller(words: str, says: str, wants: str = "") -> Run:
    """A script with arguments that have it take seconds."""
    return Run(more=tuple(words.split()), says=says, wants=wants)


_LANDER = (
    "p2pdrl node --config lunarlander --data-dir data/node-1 --set task.stop.env_steps=3000",
    "cp $(find data/node-1 -name last.safetensors) best.safetensors",
)

# fmt: off
RUNS: dict[str, Run] = {
    # Keys, operators, invites
    "p2pdrl keygen": Run(says="swarm.key", logs="copy .* to every machine"),
    "p2pdrl keygen swarm.key": Run(says="^swarm.key$", logs="swarm.key.operator is the key of operator root"),
    _BOB: Run(says=r"^[0-9a-f]{64}:bob$"),
    "p2pdrl key show FILE": Run(says="operator .* root"),
    "p2pdrl key rotate FILE": Run(says="taken, shown from", logs="copy .* to every machine"),
    "p2pdrl key rotate swarm.key": Run(says="taken, shown from", logs="copy .* to every machine"),
    "p2pdrl key rotate FILE --overlap HOURS": Run(says="taken until"),
    "p2pdrl key rotate swarm.key --remove-operator carol": Run(
        before=("rm swarm.key swarm.key.operator", "p2pdrl keygen swarm.key --name carol", _BOB),
        more=("--add-operator", "5d7e…:bob"), says="^operator .* bob",
    ),
    "p2pdrl invite": Run(says="^p2pdrl://A", logs="take it back with: p2pdrl invite revoke"),
    "p2pdrl invite --roles actor": Run(says="^p2pdrl://A", logs="as actor"),
    "p2pdrl invite list": Run(before=("p2pdrl invite",), says="open +until"),
    "p2pdrl invite revoke ID": Run(
        before=("p2pdrl invite", f"p2pdrl invite list --json | python -c '{_NEWEST}'"), says="is revoked"
    ),
    "p2pdrl node --join p2pdrl://AZfEEOK…": Run(before=("p2pdrl invite",), until=TRAINS),
    "p2pdrl operators list": Run(says="root +[0-9a-f]{8} +the swarm's key"),
    "p2pdrl operators add 5d7e…:bob": Run(before=(_BOB,), says="bob", after=("p2pdrl operators remove bob",)),
    "p2pdrl operators remove bob": Run(before=(_BOB, "p2pdrl operators add {printed}"), says="bob"),
    # Looking
    "p2pdrl --version": Run(says=r"^p2pdrl \d"),
    "p2pdrl completion bash": Run(says="complete .* p2pdrl"),
    "p2pdrl status": Run(says="state +training"),
    "p2pdrl peers": Run(says="node-3 +127.0.0.1:.* alive"),
    "p2pdrl peers --json": Run(says='"release"(.|\\n)*"protocols"'),
    "p2pdrl top": Run(until="node-3"),
    "p2pdrl page": Run(says=r"^http://127\.0\.0\.1:\d+/#token=\w+$"),
    "p2pdrl page --open": Run(instead="p2pdrl page", says=r"^http://127\.0\.0\.1:\d+/#token=\w+$"),
    "p2pdrl events": Run(says="training +trains CartPole-v1"),
    "p2pdrl events -f": Run(until=r"^\d\d:\d\d:\d\d +\w"),
    "p2pdrl rounds --watch": Run(until=r"node-\d×"),
    "p2pdrl wait --training 3 --timeout 60": Run(says=r"[3-9] members train"),
    "p2pdrl mode show": Run(says="mode +gossip: adpsgd"),
    "p2pdrl roles show": Run(says="node-2 +actor, learner"),
    "p2pdrl checkpoint": Run(says=r"/node-1/checkpoints/.*\.safetensors$"),
    "p2pdrl doctor": Run(beside=_OPEN, says="ok +torch"),
    "p2pdrl doctor --peers 10.0.0.1:7700": _DOCTOR,
    "p2pdrl doctor --peers HOST:7700": _DOCTOR,
    "p2pdrl doctor --peers HOST:PORT": _DOCTOR,
    "p2pdrl doctor --peers 10.0.0.1:7700 --swarm-key-file swarm.key": Run(says=r"ok +peer .* answers"),
    "scripts/peer_health.py --peers 10.0.0.1:7700": _HEALTH,
    "scripts/peer_health.py --peers HOST:7700": _HEALTH,
    "p2pdrl eval --api 127.0.0.1:7700 --history": _HISTORY,
    "p2pdrl eval --api HOST:7700 --history": _HISTORY,
    "p2pdrl eval --api HOST:PORT --history": _HISTORY,
    "p2pdrl eval --api HOST:PORT": _EVAL,
    "p2pdrl eval --api 127.0.0.1:7700 --episodes 20": _EVAL,
    "p2pdrl eval CHECKPOINT": _EVAL,
    "p2pdrl eval CHECKPOINT --video film.mp4": Run(
        more=("--episodes", "1"), says=r"sampled +[\d.]+", wants="moviepy"
    ),
    "p2pdrl export CHECKPOINT --out policy.onnx": Run(says="^policy.onnx: onnx", wants="onnx"),
    "curl -s -H Content-Type: application/json -d "
    '{"observations": [0.1, 0.0, -0.2, 0.3], "greedy": true} 127.0.0.1:7700/v1/act': Run(
        beside=_OPEN, says=r'"actions": ?\[[01]\]'
    ),
    "p2pdrl pipeline plan --config amb_pp": Run(says="stage"),
    "p2pdrl pipeline trace -o trace.json": Run(
        before=_PIPELINE, after=_DEFAULT_MODE, says="boxes are in trace.json"
    ),
    # Presets and configuration
    "p2pdrl presets": Run(says="(?m)^lunarlander .*PPO(.|\\n)*^sgp "),
    "p2pdrl presets --matrix": Run(says="(?m)^ppo +✓"),
    "p2pdrl presets show NAME": Run(says="IMPALA"),
    "p2pdrl presets show impala": Run(says="IMPALA"),
    "p2pdrl config init": Run(says=r"\[task.env\]"),
    "p2pdrl config show --origin --config my.toml --set task.algorithm.learning_rate=3e-4": Run(
        before=("p2pdrl config init > my.toml",), says="learning_rate = 0.0003 +set$"
    ),
    # Commanding
    "p2pdrl pause": Run(says="the node is paus", after=("p2pdrl resume",)),
    "p2pdrl pause --swarm": Run(says="the swarm is paus", after=("p2pdrl resume --swarm",)),
    "p2pdrl resume": Run(before=("p2pdrl pause",), says="the node trains again"),
    "p2pdrl resume --swarm": Run(before=("p2pdrl pause --swarm",), says="the swarm trains again"),
    "p2pdrl stop set env_steps=1000000": Run(says="stops at env_steps=1000000", after=_GOES_ON),
    "p2pdrl stop set env_steps=2000000": Run(says="stops at env_steps=2000000", after=_GOES_ON),
    "p2pdrl roles set learner,actor": Run(says="the node is learner, actor"),
    "p2pdrl roles set learner,actor --api HOST:PORT": Run(says="the node is learner, actor"),
    "p2pdrl mode set gossip --set protocol=sgp": _mode("gossip: sgp"),
    "p2pdrl mode set server-sync --servers 2": _mode("server-sync"),
    "p2pdrl mode set allreduce --set protocol=param_average --set every_updates=16": _mode(
        "allreduce: param_average"
    ),
    "p2pdrl mode set pipeline --stages 2": _mode("pipeline"),
    "p2pdrl mode set pipeline --stages 2 --set backend=stream": _mode("pipeline"),
    # Nodes
    "p2pdrl node": _NODE,
    "p2pdrl node --config cartpole": _NODE,
    "p2pdrl node --config ppo --set task.env.id=Acrobot-v1": Run(until="trains Acrobot-v1"),
    "p2pdrl node --config amb_pp": _NODE,
    "p2pdrl node --config apex_dqn --roles learner": Run(until=FOUNDS),
    "p2pdrl node --config impala --roles learner": Run(until=FOUNDS),
    "p2pdrl node --config cartpole --set node.log.writers=[\"csv\", \"wandb\"] --set node.log.wandb_mode=offline":
        Run(more=("--set", "task.stop.env_steps=3000"), logs=_DONE, wants="wandb"),
    "p2pdrl node --config lunarlander": _lunarlander(),
    "p2pdrl node --config lunarlander --from 10.0.0.1:7700": _lunarlander(
        beside="p2pdrl node --config lunarlander --set node.learner.max_updates_per_s=1"
    ),
    "p2pdrl node --config lunarlander --from data/node-1 --set task.env.kwargs.gravity=-8.0": Run(
        before=_LANDER, until=TRAINS, wants="Box2D"
    ),
    "p2pdrl node --config lunarlander --set node.video.every=100000": Run(
        more=("--set", "task.stop.env_steps=5000"), logs=_DONE, wants="moviepy"
    ),
    "p2pdrl node --config ppo --allow-import --set task.env.id=my_pole:Pole --set task.env.max_episode_steps=200":
        Run(until="trains my_pole:Pole"),
    "p2pdrl node --config ppo --allow-import --set task.network.kind=own --set task.network.own=my_network:Residual":
        _NODE,
    "p2pdrl node --config sweep-cartpole/best.toml": Run(
        before=("p2pdrl sweep cartpole --steps 2000 --trials 1 --set task.env.num_envs='choice(8, 16)'",),
        until=TRAINS, wants="optuna",
    ),
    "p2pdrl node --from CHECKPOINT": _NODE,
    "p2pdrl node --listen 0.0.0.0:7700 --swarm-key-file swarm.key --config cartpole": _NODE,
    "p2pdrl node --listen 0.0.0.0:7700 --swarm-key-file swarm.key --config lunarlander": _lunarlander(),
    "p2pdrl node --listen 0.0.0.0:7700 --swarm-key-file swarm.key --peers 10.0.0.1:7700": Run(
        until="joined a swarm that trains CartPole-v1(.|\\n)*" + TRAINS
    ),
    "p2pdrl node --peers 10.0.0.1:7700": _MEMBER,
    "p2pdrl node --peers 10.0.0.1:7700 --roles actor --actors 8": _ACTS,
    "p2pdrl node --peers HOST:7700 --roles actor --actors 8": _ACTS,
    "p2pdrl node --peers 10.0.0.1:7700 --roles replay": Run(
        beside="p2pdrl node --config apex_dqn --roles learner", until=TRAINS
    ),
    "p2pdrl node --peers 127.0.0.1:7700": Run(beside=_OPEN, until=TRAINS),
    "p2pdrl node --peers HOST:PORT --set node.limits.cpus=2 --set node.limits.memory_bytes=4e9 "
    "--set node.limits.upload_bytes_s=5e6 --set node.limits.download_bytes_s=20e6": _MEMBER,
    'p2pdrl node --peers HOST:PORT --set node.imports=["my_pole:Pole"]': Run(
        beside="p2pdrl node --config ppo --allow-import --set task.env.id=my_pole:Pole "
        "--set task.env.max_episode_steps=200",
        until="trains my_pole:Pole",
    ),
    "p2pdrl node --peers lan": Run(more=("--set", "task.stop.env_steps=3000"), logs=_DONE, wants="zeroconf"),
    # Swarms on this machine
    "p2pdrl swarm up 3 --config cartpole": _swarm(6000, "node-3"),
    "p2pdrl swarm up 3 --config impala --learners 1": _swarm(3000, "node-3"),
    "p2pdrl swarm up 4 --config cartpole": _swarm(6000, "node-4"),
    "p2pdrl swarm up 4 --config lunarlander --from best.safetensors": _swarm(
        3000, "node-4", before=_LANDER, wants="Box2D"
    ),
    "p2pdrl swarm up 4 --config sgp": _swarm(6000, "node-4"),
    "p2pdrl swarm up 5 --config apex_dqn --learners 1 --replays 2": _swarm(3000, "node-5"),
    "p2pdrl sweep cartpole --steps 100000 --trials 30 --jobs 2 --seeds 2 "
    "--set task.algorithm.learning_rate=loguniform(1e-4, 1e-2) "
    "--set task.network.hidden=choice([64, 64], [128, 128]) --set task.env.num_envs=16": Run(
        more=("--steps", "2000", "--trials", "2", "--seeds", "1"), says="best: trial", wants="optuna"
    ),
    "torchrun --nnodes 4 --nproc-per-node 1 --rdzv-endpoint gpu1:29500 --rdzv-backend c10d --no-python p2pdrl node "
    "--swarm-key-file swarm.key --config lunarlander": Run(
        instead="torchrun --nnodes 1 --nproc-per-node 1 --rdzv-endpoint 127.0.0.1:0 --rdzv-backend c10d "
        "--no-python p2pdrl node --swarm-key-file swarm.key --config cartpole --set task.stop.env_steps=3000",
        logs=_DONE,
    ),
    # Scripts
    "scripts/attack.py": _smaller("--rows malformed", "held"),
    "scripts/bench_act.py": _smaller("--rounds 1 --seconds 0.5 --callers 1 --batch 8 --pace 50", "JSON, 1 each"),
    "scripts/bench_actors.py --nodes 1 2 4 --step-ms 5 --ahead 1 --algorithm impala": _smaller(
        "--nodes 1 --actors 1 --step-ms 1 --seconds 3 --repeats 1", r"\d"
    ),
    "scripts/bench_experience.py": _smaller(
        "--rounds 1 --seconds 0.5 --actors 1 --environments 2", r"whole way +\d"
    ),
    "scripts/bench_inference.py": _smaller("--counts 1 --networks mlp --rounds 1", "mlp +1 actors"),
    "scripts/bench_learner.py --presets pong": _smaller("--presets cartpole --updates 1 --turns 1", "cartpole"),
    "scripts/bench_libraries.py": _smaller("--cases ppo --turns 1", "ppo", "stable_baselines3"),
    "scripts/bench_pipeline.py --rows 512 --stages 2 3 --schedules 1f1b --rounds 3 --steps 1 --markdown": _smaller(
        "--rows 64 --stages 2 --rounds 1 --parameters 100000 --microbatches 2 --contenders stream torch", "stream"
    ),
    "scripts/bench_stalls.py --repeats 2": _smaller(
        "--repeats 1 --parameters 100000 --strategies gossip", "gossip"
    ),
    "scripts/bench_transport.py --rounds 9": _smaller("--rounds 1 --megabytes 4", "GMAC"),
    "scripts/chaos.py --minutes 15 --seed 1": _smaller(
        "--minutes 2 --nodes 4 --only kill leave --patience 3", r"report\.md$"
    ),
    "scripts/compare_strategies.py --pace-s 0.012 --plot strategies.png": _smaller(
        "--strategies adpsgd --weathers fair --budget-s 8", "adpsgd", "matplotlib"
    ),
    "scripts/compare_systems.py --seeds 51 --pace-ms 0.5 --after-s 10 --out docs/results/systems": _smaller(
        "--only a3c --nodes 2 --budget-s 8 --out systems", "a3c", "matplotlib"
    ),
    "scripts/fuzz.py": Run(more=("--minutes", "0.1"), logs="inputs at .* decoders"),
    "scripts/liars.py": _smaller(
        "--strategies adpsgd --attacks flip --rules mean --nodes 4 --env-steps 2000 --seeds 51 --out liars",
        r"\| adpsgd \| mean \| \d",
    ),
    "scripts/loss_traces.py --updates 20 --golden tests/unit/rl/loss_traces.json": _TRACES,
    "scripts/loss_traces.py --updates 20 --golden tests/unit/rl/loss_traces.json --cases NAME": Run(
        instead="scripts/loss_traces.py --updates 2 --golden traces.json --cases ppo", logs="ppo: 2 updates"
    ),
    "scripts/plan_swarm.py": Run(says="adpsgd"),
    "scripts/reproduce.py --suite small": Run(
        more=("--suite", "tiny", "--seeds", "1", "--library", "ours", "--points", "2", "--curve-episodes", "1",
              "--episodes", "1", "--out", "small"), says=r"\d", wants="matplotlib",
    ),
    "scripts/time_to_solve.py cartpole --goal 475 --set task.strategy.mixing=clipped --nodes 4 8 "
    "--seeds 51 52 53 54 55": _smaller(
        "--goal 20 --nodes 2 --seeds 51 --budget-s 20 --out times",
        r"\| adpsgd task\.strategy\.mixing=clipped \| 2 \| \d",
    ),
    # What ends nodes of the swarm
    "p2pdrl peers ban NAME": Run(says="is banned", after=_UNBAN),
    "p2pdrl peers ban node-3": Run(says="is banned", after=_UNBAN),
    "p2pdrl leave": Run(says="the node has left", ends=True),
    "p2pdrl peers unban NAME": Run(before=("p2pdrl peers ban node-3",), says="may join again"),
    "p2pdrl halt": Run(says="the swarm is ending", ends=True),
}
"""How commands are run, and what is expected of them."""

_MAKES = "it is what runs this test, or sets up for it"
_INSTALLS = "it is what scripts/check_extras.py does in empty environments, with a wheel"
_SSH = "hosts that there are: tests/integration/test_hosts.py"
_AS = "it takes long as it stands; it is run as "

NOT_RUN: dict[str, str] = {
    ". .venv/bin/activate": _MAKES,
    ". p2pdrl-venv/bin/activate": _INSTALLS,
    "make bench": "it takes hours; the scripts that pages name by themselves are run",
    "make demo": _MAKES,
    "make docs": "p2pdrl[docs]: scripts/check_extras.py builds the site",
    "make lint": _MAKES,
    "make test": _MAKES,
    "make test-extras": "it installs some gigabytes",
    "make test-slow": _MAKES,
    "make venv": _MAKES,
    "pip install -c constraints.txt .": _INSTALLS,
    "pip install p2pdrl": _INSTALLS,
    "pip install p2pdrl[environments]": _INSTALLS,
    "pip install p2pdrl[onnx]": _INSTALLS,
    "pip install p2pdrl[otel]": _INSTALLS,
    "pip install p2pdrl[ray]": _INSTALLS,
    "pip install p2pdrl[sweep]": _INSTALLS,
    "pip install torch": _INSTALLS,
    "pip install torch --index-url https://download.pytorch.org/whl/cpu": _INSTALLS,
    "uv pip install p2pdrl --torch-backend auto": "it wants uv, and a release on the index",
    "podman build --format docker -f scripts/deploy/Containerfile -t p2pdrl .": "it wants podman and a registry",
    "podman build --format docker -f scripts/deploy/Containerfile --build-arg TORCH=cu126 -t p2pdrl:cuda .":
        "it wants podman and a registry",
    "pytest -m slow -s tests/integration/test_gpu.py": "it is a test by itself, and wants a GPU",
    "pytest -m slow or not slow tests/contract/strategies/test_liars.py": "it is a test by itself",
    "python3 -m venv p2pdrl-venv": _INSTALLS,
    "sbatch --nodes 8 scripts/deploy/slurm.sbatch --config lunarlander": "tests/integration/test_deploy.py",
    "scripts/chaos.py": _AS + "scripts/chaos.py --minutes 15 --seed 1",
    "scripts/compare_systems.py": _AS + "scripts/compare_systems.py --seeds 51 …",
    "scripts/compare_traces.py main .": "it checks out two commits: tests/unit/rl/test_compare_traces.py",
    "scripts/loss_traces.py": _AS + "scripts/loss_traces.py --updates 20 …",
    "scripts/on_ray.py": "tests/integration/test_deploy.py",
    "scripts/on_ray.py --address auto --config lunarlander": "tests/integration/test_deploy.py",
    "scripts/time_to_solve.py": _AS + "scripts/time_to_solve.py cartpole …",
    "p2pdrl swarm up --hosts a,b,user@c:2222 --config cartpole": _SSH,
    "p2pdrl swarm up --hosts gpu1,gpu2,me@lab:2222 --config lunarlander": _SSH,
}
# fmt: on
"""Why a command isn't run here, or where it is."""
