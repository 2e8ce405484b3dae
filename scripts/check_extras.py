"""Install the wheel in empty environments: with every Python there is, then with each optional extra.

    make test-extras
    python scripts/check_extras.py video onnx python3.12

Each Python gets an environment with the wheel and what it needs, under constraints.txt. Each extra gets one
of its own on top of that of the Python that runs this, so that no extra lives by what another brought.
Nothing is imported from the checkout, but ``ray``, ``plots``, ``bench`` and ``docs`` use its scripts and
pages, as their extras are for.

PyPI's torch for Linux brings CUDA, 5 GB for each Python; PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
has pip take the small one.

Prints a line per extra as it goes, on standard error, and a table at the end: ok, fail or skip, how long it
took, what it weighs, and why. What the package index doesn't have is skipped, and Pythons that aren't on the
path. The exit code is 1 if one fails.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
INSTALL_S = 1800.0
USE_S = 300.0
SHORT = ["--config", "cartpole", "--set", "task.stop.env_steps=2000", "--set", "task.evaluation.every=0"]
"""A run of some seconds."""
NO_INDEX = (
    "No matching distribution", "Could not find a version", "Temporary failure in name resolution",
    "Network is unreachable",
)  # fmt: skip
"""What pip says where an index lacks a package, or there is no index."""
PYTHONS = ("python3.11", "python3.12", "python3.13")
"""Those that pyproject.toml promises."""


# What follows runs in the environment of one extra, in an empty folder.


def p2pdrl(*arguments: str) -> str:
    """Run a command and return what it printed.

    Raises:
        SystemExit: it failed; tells its last words.
    """
    done = subprocess.run(
        [sys.executable, "-m", "p2pdrl", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=USE_S,
    )
    if done.returncode:
        sys.exit(f"p2pdrl {arguments[0]} ended with {done.returncode}: {done.stderr.strip()[-600:]}")
    return done.stdout + done.stderr


def train(*arguments: str) -> str:
    """Run a node for some seconds and return its log."""
    return p2pdrl("node", *SHORT, "--listen", "127.0.0.1:0", "--data-dir", "node", *arguments)


def checkpoint() -> str:
    """Train one, and return its path."""
    train()
    return str(next(Path("node/checkpoints").rglob("last.safetensors")))


def steps(env_id: str, count: int = 8) -> str:
    """Take random steps in an environment, made as a learner makes it."""
    from p2pdrl.config.task import EnvConfig
    from p2pdrl.rl.envs import make_scalar_env

    env = make_scalar_env(EnvConfig(id=env_id))
    try:
        seen, _ = env.reset(seed=0)
        env.action_space.seed(0)
        for _ in range(count):
            seen, _, ended, cut, _ = env.step(env.action_space.sample())
            if ended or cut:
                seen, _ = env.reset()
    finally:
        env.close()
    return f"{count} steps of {env_id}, observations {seen.shape if hasattr(seen, 'shape') else sorted(seen)}"


def use_tensorboard() -> str:
    """Have a node write charts, and read them with the package's own reader."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    train("--set", "node.log.tensorboard_dir=charts")
    file = next(Path("charts").rglob("events.out.*"))
    events = list(EventFileLoader(str(file)).Load())
    points = sum(len(event.summary.value) for event in events)
    if not points:
        sys.exit(f"{file} holds {len(events)} events, and no point of a chart")
    return f"{points} points of charts in {len(events)} events"


def use_wandb() -> str:
    """Have a node log a run, offline."""
    os.environ |= {"WANDB_MODE": "offline", "WANDB_DIR": "."}
    train("--set", 'node.log.writers=["wandb"]')
    files = [file for file in Path().rglob("*.wandb") if file.stat().st_size]
    if not files:
        sys.exit("W&B wrote no run")
    return f"{len(files)} offline runs, {files[0].stat().st_size:,} bytes"


def use_mlflow() -> str:
    """Have a node log a run into a database beside it, and count its figures."""
    import mlflow

    where = f"sqlite:///{Path('mlflow.db').resolve()}"
    os.environ["MLFLOW_TRACKING_URI"] = where
    train("--set", 'node.log.writers=["mlflow"]')
    mlflow.set_tracking_uri(where)
    runs = mlflow.search_runs(search_all_experiments=True, output_format="list")
    if not runs or not runs[0].data.metrics:
        sys.exit(f"MLflow holds {len(runs)} runs, and no figure")
    return f"{len(runs[0].data.metrics)} figures of {len(runs)} runs"


def use_otel() -> str:
    """Have two nodes print the spans of their rounds."""
    os.environ |= {"OTEL_TRACES_EXPORTER": "console", "OTEL_SERVICE_NAME": "check"}
    p2pdrl(
        "swarm", "up", "2", "--config", "cartpole", "--data-root", "swarm", "--base-port", "17900",
        "--set", "task.stop.env_steps=40000", "--set", "task.evaluation.every=0",
        "--set", "node.log.opentelemetry=true",
    )  # fmt: skip
    spans = sum(path.read_text().count("trace_id") for path in Path("swarm").rglob("*.log"))
    if not spans:
        sys.exit("two nodes that averaged printed no span")
    return f"two nodes printed {spans} spans of their rounds"


def use_sweep() -> str:
    """Search two settings by one short training each."""
    choice = "task.algorithm.learning_rate=choice(0.001, 0.003)"
    found = p2pdrl(
        "sweep",
        "cartpole",
        "--set",
        choice,
        "--trials",
        "2",
        "--steps",
        "2000",
        "--folder",
        "sweep",
        "--json",
    )
    return f"best of 2 trials: {found[:60]}"


def use_video() -> str:
    """Film an episode, and decode the film."""
    import imageio.v3 as iio

    p2pdrl("eval", checkpoint(), "--episodes", "1", "--video", "film.mp4")
    frames = sum(1 for _ in iio.imiter("film.mp4"))
    return f"a film of {frames} frames, {Path('film.mp4').stat().st_size:,} bytes"


def use_onnx() -> str:
    """Write a policy and run it where p2pdrl isn't asked; it acts as before."""
    import numpy as np
    import onnxruntime

    import p2pdrl as library

    path = checkpoint()
    p2pdrl("export", path, "--out", "policy.onnx")
    card = json.loads(Path("policy.onnx.json").read_text())
    rng = np.random.default_rng(0)
    obs = rng.uniform(-0.05, 0.05, size=(64, 4)).astype(np.float32)
    session = onnxruntime.InferenceSession("policy.onnx")
    names = [info["name"] for info in card["outputs"]]
    found = session.run(names, {card["inputs"][0]["name"]: obs})[names.index("action")]
    wanted = library.load(path).act(obs, deterministic=True)
    same = float(np.mean(np.asarray(wanted).reshape(-1) == np.asarray(found).reshape(-1)))
    if same < 1.0:
        sys.exit(f"{same:.0%} of the exported policy's actions are the same")
    return "64 actions alike in ONNX Runtime"


def use_lan() -> str:
    """Start a node that looks on the local network."""
    log = train("--peers", "lan")
    return f"a node looked, founded a swarm and trained ({len(log.splitlines())} lines of log)"


def use_nat() -> str:
    """Start a node that asks the router."""
    log = train("--set", "node.port_mapping=true")
    told = [json.loads(line) for line in log.splitlines() if line.startswith('{"kind"')]
    words = [event["event"] for event in told if "router" in event["event"]]
    return f"a node asked and trained: {words[0]}" if words else "a node with it trained"


def try_wheel() -> str:
    """Train with nothing but the wheel; load what came of it, and have it act."""
    import p2pdrl as library

    policy = library.load(checkpoint())
    action = policy.act([[0.0, 0.0, 0.05, 0.0]] * 3, deterministic=True)
    return f"Python {sys.version.split()[0]}: a node trained, and its policy acts ({action.tolist()})"


def use_plots() -> str:
    """Draw with the helpers that all scripts share."""
    sys.path.insert(0, str(ROOT / "scripts"))
    from support.plots import bars, pyplot, save

    figure, axis = pyplot().subplots()
    bars(axis, ["a", "b"], {"one": [1.0, 2.0]}, "seconds")
    save(figure, Path("plot.png"))
    return f"a picture of {Path('plot.png').stat().st_size:,} bytes"


def use_ray() -> str:
    """Run a swarm of one node on a cluster of one machine."""
    command = [sys.executable, str(ROOT / "scripts" / "on_ray.py"), "--machines", "1", "--", *SHORT]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=USE_S)
    if done.returncode:
        sys.exit(f"on_ray.py ended with {done.returncode}: {done.stderr.strip()[-600:]}")
    return "one node ran on a cluster of one machine"


def use_docs() -> str:
    """Build the site."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-f", str(ROOT / "mkdocs.yml")]
    done = subprocess.run(
        [*command, "-d", str(Path("site").absolute())], capture_output=True, text=True, check=False,
        timeout=USE_S, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"mkdocs ended with {done.returncode}: {(done.stdout + done.stderr).strip()[-600:]}")
    return f"{sum(1 for _ in Path('site').rglob('*.html'))} pages"


def use_bench() -> str:
    """Train with the library that results are compared with."""
    from stable_baselines3 import PPO

    PPO("MlpPolicy", "CartPole-v1", n_steps=64, batch_size=64).learn(128)
    return "128 steps of Stable-Baselines3's PPO"


def use_environments() -> str:
    """One environment of each family."""
    for use in (use_atari, use_box2d, use_minatar, use_minigrid, use_mujoco):
        use()
    return "one environment of each family"


def use_atari() -> str:
    """Play with the preprocessing that games get."""
    return steps("ALE/Pong-v5")


def use_box2d() -> str:
    """Play, and have the one environment that draws what it observes."""
    steps("CarRacing-v3", 2)
    return steps("LunarLander-v3")


def use_minatar() -> str:
    """Play one game."""
    return steps("MinAtar/Breakout-v1")


def use_minigrid() -> str:
    """Play one grid."""
    return steps("MiniGrid-Empty-5x5-v0")


def use_mujoco() -> str:
    """Move one body."""
    return steps("Hopper-v5")


USES: dict[str, Callable[[], str]] = dict.fromkeys(PYTHONS, try_wheel) | {
    name.removeprefix("use_"): use for name, use in list(globals().items()) if name.startswith("use_")
}
"""By Python and by extra: what tries it, and says what it did."""


# What follows runs in the contributor's own environment.


@dataclass(frozen=True)
class Outcome:
    """How it went with one extra, or one Python."""

    name: str
    result: str
    seconds: float
    megabytes: float
    why: str


def declared() -> list[str]:
    """The extras that pyproject.toml names."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        return list(tomllib.load(file)["project"]["optional-dependencies"])


def make_environment(folder: Path, beneath: Path | None = None, interpreter: str = sys.executable) -> Path:
    """Make one of an interpreter, that sees the packages of another; return its Python."""
    subprocess.run([interpreter, "-m", "venv", str(folder)], check=True, timeout=INSTALL_S)
    python = folder / "bin" / "python"
    if beneath is not None:
        (site_packages(folder) / "beneath.pth").write_text(f"{site_packages(beneath)}\n")
    return python


def site_packages(folder: Path) -> Path:
    """Where an environment's packages are."""
    return next(folder.glob("lib/python*/site-packages"))


def install(python: Path, *what: str) -> str:
    """Install under constraints.txt; return pip's complaint, empty when all is well."""
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command += ["--no-compile", "-c", str(ROOT / "constraints.txt"), *what]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=INSTALL_S, cwd="/")
    return "" if done.returncode == 0 else done.stderr.strip() or f"pip ended with {done.returncode}"


def weight_mb(folder: Path) -> float:
    """What an environment's own packages weigh."""
    files = (path for path in site_packages(folder).rglob("*") if path.is_file() and not path.is_symlink())
    return sum(path.stat().st_size for path in files) / 1e6


def build_wheel(into: Path) -> Path:
    """Build this checkout's."""
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(into), str(ROOT)]
    done = subprocess.run([*command, "--no-isolation"], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"the wheel can't be built: {(done.stdout + done.stderr).strip()[-600:]}")
    return next(into.glob("*.whl"))


def is_there(interpreter: str) -> bool:
    """Whether a Python is on the path, and runs (a shim may be of a version that isn't installed)."""
    try:
        return subprocess.run([interpreter, "--version"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def check(name: str, base: Path, wheels: Path, folder: Path) -> Outcome:
    """Install one extra on top of the base, or the wheel alone with another Python, and use it."""
    began_s = time.monotonic()
    if name in PYTHONS and not is_there(name):
        return Outcome(name, "skip", 0.0, 0.0, "it isn't on the path")
    python = make_environment(folder, interpreter=name) if name in PYTHONS else make_environment(folder, base)
    what = "p2pdrl" if name in PYTHONS else f"p2pdrl[{name}]"
    bare_mb = weight_mb(folder)

    def outcome(result: str, why: str) -> Outcome:
        seconds = time.monotonic() - began_s
        return Outcome(name, result, seconds, max(0.0, weight_mb(folder) - bare_mb), why)

    complaint = install(python, "--find-links", str(wheels), what)
    if complaint:
        last = complaint.splitlines()[-1]
        return outcome("skip" if any(word in complaint for word in NO_INDEX) else "fail", last)
    place = folder / "work"
    place.mkdir()
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("P2PDRL_", "PYTHON"))}
    clean |= {"P2PDRL_DATA_ROOT": str(place / "data"), "SDL_VIDEODRIVER": "dummy", "MPLBACKEND": "Agg"}
    clean |= {"PATH": f"{python.parent}{os.pathsep}{clean.get('PATH', '')}"}
    command = [str(python), str(Path(__file__).resolve()), "--use", name]
    try:
        done = subprocess.run(
            command, cwd=place, env=clean, capture_output=True, text=True, check=False, timeout=2 * USE_S
        )
    except subprocess.TimeoutExpired:
        return outcome("fail", f"not done within {2 * USE_S:g} s")
    words = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    return outcome("fail" if done.returncode else "ok", words[-1] if words else f"exit {done.returncode}")


def check_all(names: list[str], keep: Path | None) -> list[Outcome]:
    """Check one after the other; environments are removed as it goes, unless they are to be kept."""
    with tempfile.TemporaryDirectory(prefix="p2pdrl-extras-", ignore_cleanup_errors=True) as temporary:
        root = keep or Path(temporary)
        wheels = root / "dist"
        wheel = build_wheel(wheels)
        print(f"{wheel.name}, and what it needs …", file=sys.stderr, flush=True)
        base = root / "base"
        complaint = install(make_environment(base), str(wheel))
        if complaint:
            sys.exit(f"the wheel can't be installed: {complaint[-600:]}")
        outcomes = []
        for name in names:
            print(f"{name} …", file=sys.stderr, flush=True)
            outcomes.append(check(name, base, wheels, root / name))
            print(f"{name}: {outcomes[-1].result}, {outcomes[-1].why}", file=sys.stderr, flush=True)
            if keep is None:
                shutil.rmtree(root / name, ignore_errors=True)
        return outcomes


def table(outcomes: list[Outcome]) -> str:
    """One line each."""
    wide = max(len("extra"), *(len(one.name) for one in outcomes))
    lines = [f"{'extra':<{wide}}  result  seconds      MB  what happened"]
    lines += [
        f"{one.name:<{wide}}  {one.result:<6}  {one.seconds:>7.0f}  {one.megabytes:>6.0f}  {one.why[:160]}"
        for one in outcomes
    ]
    return "\n".join(lines)


def main() -> int:
    """Check the extras and Pythons that are named, or all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("extras", nargs="*", help="names of pyproject.toml, or python3.12; without any all")
    parser.add_argument("--keep", type=Path, help="make the environments in this folder, and keep them")
    parser.add_argument("--use", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.use:
        sys.path.remove(str(Path(__file__).resolve().parent))
        print(USES[arguments.use]())
        return 0
    every = [*PYTHONS, *declared()]
    unknown = sorted(set(arguments.extras) - set(every))
    if unknown:
        parser.error(f"pyproject.toml has no extra {', '.join(unknown)}; there are {', '.join(every)}")
    names = arguments.extras or every
    untried = sorted(set(names) - USES.keys())
    if untried:
        sys.exit(f"nothing here tries {', '.join(untried)}: write a function use_{untried[0]}")
    if arguments.keep is not None:
        arguments.keep.mkdir(parents=True, exist_ok=True)
    outcomes = check_all(names, arguments.keep)
    print(table(outcomes))
    return 1 if any(one.result == "fail" for one in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
