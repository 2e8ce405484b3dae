"""Every command that README and docs tell people to type does what they say, and so does README's Python."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ..documented import FOUNDS, ROOT, RUNS, SLOWLY, TRAINS, Run, documented
from .conftest import RealNode, RealSwarm, free_port, wait_until

OK, INTERRUPTED = 0, 130
ENDS_S = 240.0
"""For one command, on a busy machine."""

STANDS_FOR = {
    "--listen 0.0.0.0:7700": "--listen 127.0.0.1:0",
    r"10\.0\.0\.1:7700|127\.0\.0\.1:7700|HOST:PORT|HOST:7700": "{api}",
    r"\bCHECKPOINT\b": "{checkpoint}",
    r"\bHOURS\b": "24",
    r"\bFILE\b": "swarm.key",
    r"presets show NAME": "presets show impala",
    r"\bNAME\b": "node-3",
    r"'?p2pdrl://AZfEEOK…'?|'?5d7e…:bob'?|\bID\b": "{printed}",
}
"""What is typed for placeholders; in braces what differs from swarm to swarm."""


def line_of(words: list[str], run: Run) -> str:
    """What is typed for a command."""
    line = run.instead or shlex.join([*words, *run.more])
    if words[0].startswith("scripts/") and not os.access(ROOT / words[0], os.X_OK):
        line = f"python {line}"
    line = line.replace("{", "{{").replace("}", "}}")
    for holder, meant in STANDS_FOR.items():
        line = re.sub(holder, meant, line)
    return line


COMMANDS = {(line_of(documented()[text], run), run): text for text, run in RUNS.items()}
"""Those of which the same is typed are one."""


def cases() -> Iterator[object]:
    """Each with the number of the swarm that it is typed beside: a new one once one has been ended."""
    swarm = 0
    for (line, run), text in COMMANDS.items():
        yield pytest.param(swarm, line, run, id=text)
        swarm += run.ends


PROGRAMS = {"p2pdrl": "-m p2pdrl", "torchrun": "-m torch.distributed.run", "python": "", "python3": ""}
"""What the shell finds, as in an environment that was activated."""


@dataclass
class Typed:
    """A line that was typed, and what it printed."""

    line: str
    process: subprocess.Popen[bytes]
    out: Path
    err: Path

    def text(self) -> str:
        """All that it printed, after the line itself."""
        return f"{self.line}: {self.process.poll()}\n{self.printed(self.out)}{self.printed(self.err)}"

    def printed(self, stream: Path) -> str:
        return stream.read_text(errors="replace")

    def wait(self) -> int:
        """Until it ends; return its code."""
        try:
            return self.process.wait(ENDS_S)
        except subprocess.TimeoutExpired:
            self.interrupt()
            raise AssertionError(f"it doesn't end: {self.text()[-3000:]}") from None

    def said(self, pattern: str) -> Typed:
        """Wait until it has printed something, or ended."""
        done = lambda: self.process.poll() is not None or re.search(pattern, self.text(), re.M)  # noqa: E731
        wait_until(done, 90, f"it says {pattern}: {self.text()[-3000:]}")
        return self

    def interrupt(self) -> int:
        """Press Ctrl-C; return the code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(40)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"it doesn't end when it is interrupted: {self.text()[-3000:]}") from None


@dataclass
class Folder:
    """Where commands are typed: it has the swarm's key, a shell that finds the package, and own code."""

    path: Path
    api: str
    checkpoint: Path
    started: list[Typed] = field(default_factory=list)

    def __post_init__(self) -> None:
        programs = self.path / "bin"
        programs.mkdir(parents=True)
        for name, module in PROGRAMS.items():
            (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} {module} "$@"\n')
            (programs / name).chmod(0o755)
        (self.path / "scripts").symlink_to(ROOT / "scripts")
        for page, kind in re.findall(
            r"^```python (\w+\.py)\n(.*?)^```", (ROOT / "docs" / "own_code.md").read_text(), re.M | re.S
        ):
            (self.path / page).write_text(kind)

    @property
    def environment(self) -> dict[str, str]:
        """Of each command."""
        own = {"P2PDRL_API": self.api, "P2PDRL_DATA_ROOT": str(self.path / "data"), "MPLBACKEND": "Agg"}
        own["PATH"] = f"{self.path / 'bin'}{os.pathsep}{os.environ['PATH']}"
        own["PYTHONPATH"] = os.pathsep.join(
            [str(self.path), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        )
        return os.environ | own

    def start(self, line: str) -> Typed:
        """Type a line."""
        number = len(list(self.path.glob("*.out")))
        paths = self.path / f"{number}.out", self.path / f"{number}.err"
        with paths[0].open("wb") as out, paths[1].open("wb") as err:
            process = subprocess.Popen(
                ["bash", "-c", line if re.search(r"\||>|\$\(|^[A-Z]", line) else f"exec {line}"],
                cwd=self.path, env=self.environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
            )  # fmt: skip
        self.started.append(Typed(line, process, *paths))
        return self.started[-1]

    def close(self) -> None:
        """Leave nothing that goes on."""
        going = [typed for typed in self.started if typed.process.poll() is None]
        for typed in going:
            typed.process.send_signal(signal.SIGINT)
        for typed in going:
            typed.interrupt()

    def do(self, lines: tuple[str, ...]) -> str:
        """Type lines that must go well; return the last line that one printed."""
        printed = ""
        for line in lines:
            typed = self.start(line.replace("{printed}", printed))
            assert typed.wait() == 0, typed.text()
            printed = (typed.out.read_text().split("\n")[-2:] or [printed])[0] or printed
        return printed


@pytest.fixture(scope="module")
def nodes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[RealNode]]:
    """A swarm of three with a key that trains slowly; another one for each parameter."""
    folder = tmp_path_factory.mktemp(f"swarm-{request.param}")
    swarm = RealSwarm(folder)
    swarm.temporary.mkdir()
    keygen = [sys.executable, "-m", "p2pdrl", "keygen", "swarm.key"]
    subprocess.run(keygen, cwd=folder, check=True, timeout=60, capture_output=True)
    options = ["--swarm-key-file", str(folder / "swarm.key"), *SLOWLY, "--set=task.stop.mean_return=1000"]
    try:
        for name in ("node-1", "node-2", "node-3"):
            peers = swarm.nodes[0] if swarm.nodes else None
            swarm.start(name, *options, "--set=node.checkpoint.every_s=2", peers=peers)
        for node in swarm.nodes:
            wait_until(lambda node=node: TRAINS in node.text(), 90, f"{node.name} trains")
        wait_until(lambda: checkpoints(swarm.nodes[0]), 30, "a checkpoint")
        yield swarm.nodes
    finally:
        swarm.close()


def checkpoints(node: RealNode) -> list[Path]:
    return sorted(node.data.rglob("last.safetensors"))


@pytest.fixture
def folder(nodes: list[RealNode], tmp_path: Path) -> Iterator[Folder]:
    made = Folder(tmp_path / "typed", nodes[0].api, checkpoints(nodes[0])[0])
    for name in ("swarm.key", "swarm.key.operator"):
        shutil.copy(nodes[0].data.parent / name, made.path / name)
    # A shell that put the tests in the background has had them ignore SIGINT, and all that they start.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield made
    finally:
        made.close()
        signal.signal(signal.SIGINT, before)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("nodes", [0], indirect=True)
def test_readme_s_python_does_what_is_said(nodes, folder):
    """Its comments name a node, which here is one of the swarm that has the key."""
    (block,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    (folder.path / "readme.py").write_text(
        block.replace("10.0.0.1:7700", folder.api) + "print(f'does {action}')\n"
    )
    try:
        typed = folder.start("P2PDRL_TASK__STOP__ENV_STEPS=3000 python readme.py")
        assert typed.wait() == OK, typed.text()[-3000:]
        assert re.search(r"^\d+ .*\n(.|\n)*^does [01]$", typed.printed(typed.out), re.M), typed.text()[-3000:]
        assert nodes[1].ask("/v1/mode")["protocol"] == "sgp"
    finally:
        folder.do(("p2pdrl mode set gossip --set protocol=adpsgd",))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("nodes", "line", "run"), list(cases()), indirect=["nodes"], scope="module")
def test_it_does_what_is_said(nodes, line, run, folder):
    if run.wants and importlib.util.find_spec(run.wants) is None:
        pytest.skip(f"wants the extra that brings {run.wants}")
    if "keygen" in line:
        for path in folder.path.glob("swarm.key*"):
            path.unlink()
    if run.beside:
        port = free_port()
        beside = folder.start(f"{run.beside} --listen 127.0.0.1:{port} --data-dir beside --name beside")
        beside.said(FOUNDS if "--roles" in run.beside else TRAINS)
        folder.api = f"127.0.0.1:{port}"
    try:
        printed = folder.do(run.before)
        typed = folder.start(line.format(api=folder.api, checkpoint=folder.checkpoint, printed=printed))
        if run.until:
            typed.said(run.until)
            time.sleep(0.5)
            code = typed.interrupt()
            assert re.search(run.until, typed.text(), re.MULTILINE), typed.text()[-3000:]
            assert code == (OK if "p2pdrl node" in line else INTERRUPTED), typed.text()[-3000:]
        else:
            assert typed.wait() == OK, typed.text()[-3000:]
        assert "Traceback" not in typed.text(), typed.text()[-5000:]
        assert re.search(run.says, typed.printed(typed.out), re.MULTILINE), typed.text()[-5000:]
        assert re.search(run.logs, typed.printed(typed.err), re.MULTILINE), typed.text()[-5000:]
    finally:
        folder.do(run.after)
