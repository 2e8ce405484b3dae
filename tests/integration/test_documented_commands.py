"""Every command that README and docs tell people to type does what they say."""

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
from dataclasses import dataclass
from pathlib import Path

import pytest

from ..documented import KEYED, NOT_RUN, ROOT, RUNS, Run, documented
from .conftest import RealNode, RealSwarm, free_port, wait_until

OK, INTERRUPTED = 0, 130
ENDS_S = 240.0
"""For one command, on a busy machine."""

UNTIL = {"node": '"kind": "training"'}
"""What commands that go on until they are interrupted have to say first, where `RUNS` doesn't say it."""


@dataclass
class Typed:
    """A line that was typed, and what it printed."""

    line: str
    process: subprocess.Popen[bytes]
    out: Path
    err: Path

    def text(self) -> str:
        """All that it printed, after the line itself."""
        printed = [path.read_text(errors="replace") for path in (self.out, self.err)]
        return f"{self.line}: {self.process.poll()}\n" + "".join(printed)

    def wait(self) -> int:
        """Until it ends; return its code."""
        try:
            return self.process.wait(ENDS_S)
        except subprocess.TimeoutExpired:
            self.interrupt()
            raise AssertionError(f"it doesn't end: {self.text()[-3000:]}") from None

    def said(self, pattern: str) -> Typed:
        """Wait until it has printed something, or ended."""
        done = lambda: self.process.poll() is not None or re.search(pattern, self.text())  # noqa: E731
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

    def __post_init__(self) -> None:
        programs = self.path / "bin"
        programs.mkdir(parents=True)
        for name, module in {"p2pdrl": "p2pdrl", "torchrun": "torch.distributed.run", "python": ""}.items():
            python = f"{sys.executable} {module and '-m'} {module}"
            (programs / name).write_text(f'#!/bin/sh\nexec {python} "$@"\n')
            (programs / name).chmod(0o755)
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
                ["bash", "-c", line if re.search(r"\||>|\$\(", line) else f"exec {line}"],
                cwd=self.path, env=self.environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
            )  # fmt: skip
        return Typed(line, process, *paths)

    def do(self, lines: tuple[str, ...]) -> str:
        """Type lines that must go well; return the last line that one printed."""
        printed = ""
        for line in lines:
            typed = self.start(line.replace("{printed}", printed))
            assert typed.wait() == 0, typed.text()
            printed = (typed.out.read_text().split("\n")[-2:] or [printed])[0] or printed
        return printed

    def typed(self, words: list[str], run: Run, printed: str) -> str:
        """A command with what its placeholders stand for."""
        line = run.instead or shlex.join([*words, *run.more])
        if words[0].startswith("scripts/"):
            line = line.replace(words[0], f"python {ROOT / words[0]}", 1)
        stands_for = {
            "--listen 0.0.0.0:7700": "--listen 127.0.0.1:0",
            r"'?p2pdrl://AZfEEOK…'?|'?5d7e…:bob'?|\bID\b": printed,
            r"10\.0\.0\.1:7700|127\.0\.0\.1:7700|HOST:PORT|HOST:7700": self.api,
            r"\bCHECKPOINT\b": str(self.checkpoint),
            r"\bHOURS\b": "24",
            r"\bFILE\b": "swarm.key",
            r"presets show NAME": "presets show impala",
            r"\bNAME\b": "node-3",
        }
        for holder, meant in stands_for.items():
            line = re.sub(holder, lambda _found, meant=meant: meant, line)
        return line


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RealNode]]:
    """A swarm of three with a key, that trains slowly for as long as it is needed."""
    folder = tmp_path_factory.mktemp("swarm")
    swarm = RealSwarm(folder)
    swarm.temporary.mkdir()
    subprocess.run(
        [sys.executable, "-m", "p2pdrl", "keygen", "swarm.key"], cwd=folder, check=True, timeout=60
    )
    options = [*shlex.split(KEYED)[2:], "--set=task.stop.mean_return=1000", "--set=node.checkpoint.every_s=2"]
    options[options.index("swarm.key")] = str(folder / "swarm.key")
    try:
        for name in ("node-1", "node-2", "node-3"):
            swarm.start(name, *options, peers=swarm.nodes[0] if swarm.nodes else None)
        for node in swarm.nodes:
            wait_until(lambda node=node: '"kind": "training"' in node.text(), 60, f"{node.name} trains")
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
    yield made
    signal.signal(signal.SIGINT, before)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("command", [one for one in documented() if one not in NOT_RUN])
def test_it_does_what_is_said(command, folder):
    words, run = documented()[command], RUNS.get(command, Run())
    if run.wants and importlib.util.find_spec(run.wants) is None:
        pytest.skip(f"wants the extra that brings {run.wants}")
    if words[:2] == ["p2pdrl", "keygen"]:
        for path in folder.path.glob("swarm.key*"):
            path.unlink()
    others = []
    if run.beside:
        port = free_port()
        others = [folder.start(f"{run.beside} --listen 127.0.0.1:{port} --data-dir beside --name beside")]
        others[0].said('"kind": "founded"' if "--roles" in run.beside else '"kind": "training"')
        folder.api = f"127.0.0.1:{port}"
    if run.member:
        joins = f"--peers {folder.api} --listen 127.0.0.1:0 --data-dir member --name {run.member}"
        others.append(folder.start(f"{run.beside} {joins}").said('"kind": "training"'))
    try:
        line = folder.typed(words, run, folder.do(run.before))
        typed = folder.start(line)
        until = run.until or ("" if "task.stop.env_steps" in line else UNTIL.get(" ".join(words[1:2]), ""))
        if until:
            typed.said(until)
            time.sleep(0.5)
            code = typed.interrupt()
            assert re.search(until, typed.text()), typed.text()[-3000:]
            assert code == (OK if words[1] == "node" else INTERRUPTED), typed.text()[-3000:]
        else:
            assert typed.wait() == OK, typed.text()[-3000:]
        text = typed.text()
        assert "Traceback" not in text, text[-5000:]
        assert run.says in text, text[-5000:]
        assert len(text.splitlines()) > 1, f"{line} said nothing"
    finally:
        folder.do(run.after)
        for other in others:
            other.interrupt()
