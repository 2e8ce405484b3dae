"""Searches a configuration's settings with Optuna (extra ``sweep``): trials on nodes of this machine.

A trial trains one node for each seed, one after the other, for the same number of environment steps. Its
value is the mean over the seeds. While it trains, its learning curve is compared with those of earlier trials
at the same steps, and one that is below their median ends early (median pruner). The study lies in a folder,
as a journal, so that a sweep which was ended goes on there.

``p2pdrl sweep`` runs it. Trials run in threads, each of which mostly waits for its node.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import math
import os
import secrets
import subprocess
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from p2pdrl.api.client import NodeClient
from p2pdrl.atomic import write_atomic
from p2pdrl.config import schema
from p2pdrl.config.describe import toml_value
from p2pdrl.config.loader import Resolved, resolve
from p2pdrl.config.schema import dotted
from p2pdrl.config.task import RegressionConfig
from p2pdrl.errors import ConfigError, P2PDRLError, StorageError, UsageError, WorkerError
from p2pdrl.library.node_process import NodeProcess, reserved_ports
from p2pdrl.library.ranges import SearchRange, read_settings
from p2pdrl.transport.protocol import Address

__all__ = [
    "CurvePoint",
    "Objective",
    "Sweep",
    "SweepPlan",
    "TrialRow",
    "make_plan",
    "require_optuna",
    "train_node",
]

Objective = Literal["return", "evaluation", "area"]
"""What is maximised: the mean return of the last training episodes, that of the last evaluation, or the mean
of the training curve, which favours who learns early."""

POINTS = 20
"""Of a learning curve: what is compared with other trials."""
COMPARED_FROM = POINTS // 4
"""No trial ends earlier."""
UNPRUNED = 5
"""Trials that are trained to their end before any is compared."""
MOST_FAILURES = 3
"""Of the first trials; if none ends well the sweep is given up."""
ASK_S = 0.5
GRACE_S = 12.0
FIRST_PORT = 7700
BEST = "best.toml"
PLAN = "sweep.json"
JOURNAL = "journal.log"


class SweepPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is searched: the same whenever a sweep goes on.

    Attributes:
        files: configuration files and presets.
        fixed: ``KEY=VALUE`` of all trials.
        ranges: by key, as they were written.
        settings: what files and fixed ones come to, by key.
        steps: environment steps of each training.
        seeds: trainings of a trial.
    """

    files: tuple[str, ...]
    fixed: tuple[str, ...]
    ranges: dict[str, str]
    settings: dict[str, str]
    steps: int
    seeds: int
    objective: Objective


class CurvePoint(msgspec.Struct, frozen=True):
    """How far a training is.

    Attributes:
        mean_return: of the last training episodes; None before the first has ended.
        evaluation: mean return of the last evaluation, likewise.
    """

    env_steps: int
    mean_return: float | None = None
    evaluation: float | None = None


Train = Callable[[int, int, Sequence[str]], Generator[CurvePoint, None, None]]
"""``(number of the trial, seed, KEY=VALUE …)`` → its curve until it is done; closing it ends the training."""

State = Literal["running", "done", "pruned", "failed"]


@dataclass
class TrialRow:
    """One trial, for people.

    Attributes:
        params: values by key, as texts.
        values: of the seeds that are done.
        value: the mean over seeds; of a running one so far.
        part: of its training that is done, 0 … 1.
        why: it failed.
    """

    number: int
    state: State
    params: dict[str, str]
    values: list[float] = field(default_factory=list)
    value: float | None = None
    part: float = 0.0
    seconds: float = 0.0
    why: str = ""


def require_optuna() -> None:
    """Check that Optuna is installed.

    Raises:
        UsageError: it isn't.
    """
    if importlib.util.find_spec("optuna") is None:
        raise UsageError(
            "p2pdrl sweep needs optuna, which isn't installed here; run: pip install 'p2pdrl[sweep]'"
        )


def make_plan(
    files: Sequence[str],
    settings: Sequence[str],
    *,
    steps: int | None = None,
    seeds: int = 1,
    objective: Objective = "return",
    environ: Mapping[str, str] | None = None,
) -> SweepPlan:
    """Read what is to be searched, and check it.

    Args:
        settings: ``KEY=VALUE``, or ``KEY=`` a range; see `library.ranges`.
        steps: None takes ``task.stop.env_steps``.

    Raises:
        UsageError: a range can't be read, there is none, or no trial would end.
        ConfigError: a key is unknown, or the ends of a range aren't valid.
    """
    fixed, ranges = read_settings(settings)
    if not ranges:
        raise UsageError(
            "nothing to search: give a range, as in --set "
            "'task.algorithm.learning_rate=loguniform(1e-4, 1e-2)'"
        )
    firsts = {key: one.ends[0] for key, one in ranges.items()}
    for key, one in ranges.items():
        for end in one.ends:
            sets = [f"{name}={value}" for name, value in (firsts | {key: end}).items()]
            resolved = resolve(files=files, sets=[*fixed, *sets], environ=environ)
    task, node = resolved.config.task, resolved.config.node
    if node.peers or node.discover:
        raise UsageError("each trial is a swarm of its own: leave out node.peers and node.discover")
    if isinstance(task.algorithm, RegressionConfig):
        raise UsageError("a regression has no returns to be compared: sweep a task with an environment")
    if objective == "evaluation" and not task.evaluated:
        raise UsageError("--objective evaluation wants evaluations: set task.evaluation.every")
    budget = task.stop.env_steps if steps is None else steps
    if budget <= 0:
        raise UsageError("trials have no end: give --steps N, or set task.stop.env_steps")
    given = _given(resolved, without=set(ranges))
    return SweepPlan(
        files=tuple(files),
        fixed=tuple(fixed),
        ranges={key: one.text for key, one in ranges.items()},
        settings=given,
        steps=budget,
        seeds=seeds,
        objective=objective,
    )


def _given(resolved: Resolved, *, without: set[str]) -> dict[str, str]:
    """Return what isn't a default, as TOML, by dotted key."""
    leaves = {dotted(path): value for path, value in schema.leaves(resolved.config)}
    return {key: toml_value(leaves[key]) for key in leaves if key in resolved.given() and key not in without}


class _Ended(Exception):  # noqa: N818 - no error
    """The sweep is ended from outside."""


class Sweep:
    """A study, from its first trial to its last.

    Args:
        folder: keeps it; made if missing, and locked.
        train: trains one node.
        prune: end trials early.

    Raises:
        UsageError: the folder holds another sweep, or somebody works there.
        StorageError: it can't be used.
    """

    def __init__(self, plan: SweepPlan, folder: Path, train: Train, *, prune: bool = True) -> None:
        import optuna
        from optuna.storages.journal import JournalFileBackend

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.plan = plan
        self.folder = folder
        self.rows: dict[int, TrialRow] = {}
        self._train = train
        self._ranges = {key: SearchRange.parse(text) for key, text in plan.ranges.items()}
        self._ended = threading.Event()
        self._mutex = threading.RLock()
        self._lock = _claim(folder)
        try:
            _keep_plan(plan, folder / PLAN)
            backend = JournalFileBackend(str(folder / JOURNAL))
            pruner: Any = optuna.pruners.NopPruner()
            if prune:
                pruner = optuna.pruners.MedianPruner(UNPRUNED, n_warmup_steps=COMPARED_FROM)
            self._study: Any = optuna.create_study(
                storage=optuna.storages.JournalStorage(backend),
                study_name="sweep",
                direction="maximize",
                pruner=pruner,
                load_if_exists=True,
            )
            self._states = optuna.trial.TrialState
            self._distributions = {key: _distribution(one) for key, one in self._ranges.items()}
            self._recall()
            self._study.sampler = optuna.samplers.TPESampler(seed=len(self._study.trials))
        except BaseException:
            os.close(self._lock)
            raise

    def close(self) -> None:
        """Let go of the folder."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def run(self, trials: int, jobs: int, show: Callable[[], object], *, every_s: float = 1.0) -> None:
        """Run trials until there are so many, earlier runs' included; return when all are done.

        Args:
            jobs: trials at a time.
            show: called now and then, and whenever one has ended.

        Raises:
            WorkerError: the first ones all failed.
            ConfigError: a node refuses what all of them have.
        """
        running: set[Future[None]] = set()
        with ThreadPoolExecutor(max_workers=jobs, thread_name_prefix="trial") as pool:
            try:
                while True:
                    while len(running) < jobs and len(self.rows) < trials:
                        running.add(pool.submit(self._run_one, self._begin()))
                    if not running:
                        return
                    done, running = wait(running, timeout=every_s, return_when=FIRST_COMPLETED)
                    for one in done:
                        one.result()
                    show()
                    self._give_up_if_all_fail()
            except BaseException:
                self._ended.set()
                raise

    @property
    def best(self) -> TrialRow | None:
        """The trial of the greatest value so far, of those that were trained to their end."""
        with self._mutex:
            done = [row for row in self.rows.values() if row.state == "done" and row.value is not None]
        return max(done, key=lambda row: row.value or 0.0, default=None)

    def document(self) -> dict[str, Any]:
        """All of it, as JSON types."""
        best = self.best
        with self._mutex:
            rows = [msgspec.to_builtins(row) for _, row in sorted(self.rows.items())]
        return {
            "folder": str(self.folder),
            "objective": self.plan.objective,
            "steps": self.plan.steps,
            "seeds": self.plan.seeds,
            "best": None if best is None else {**msgspec.to_builtins(best), "file": str(self.folder / BEST)},
            "trials": rows,
        }

    def _recall(self) -> None:
        """Take up what an earlier run has done; trials that were cut are made again."""
        states = self._states
        for one in self._study.get_trials(deepcopy=False):
            params = self._texts(one.params)
            why = str(one.user_attrs.get("why", ""))
            if one.state == states.RUNNING:
                self._study.tell(one.number, state=states.FAIL)
                self._study.enqueue_trial(one.params)
            elif one.state in (states.COMPLETE, states.PRUNED) or why:
                state: State = "done" if one.state == states.COMPLETE else "pruned"
                self.rows[one.number] = TrialRow(
                    one.number,
                    "failed" if why else state,
                    params,
                    values=list(one.user_attrs.get("values", [])),
                    value=one.value if one.state == states.COMPLETE else None,
                    part=1.0 if one.state == states.COMPLETE else 0.0,
                    seconds=float(one.user_attrs.get("seconds", 0.0)),
                    why=why,
                )

    def _texts(self, params: Mapping[str, Any]) -> dict[str, str]:
        return {key: self._ranges[key].write(value) for key, value in params.items()}

    def _begin(self) -> Any:
        with self._mutex:
            one = self._study.ask(self._distributions)
            self.rows[one.number] = TrialRow(one.number, "running", self._texts(one.params))
            return one

    def _run_one(self, one: Any) -> None:
        """Run a trial to its end, and tell the study."""
        row, began_s, states = self.rows[one.number], time.monotonic(), self._states
        try:
            pruned = self._all_seeds(one, row)
        except _Ended:
            with self._mutex:
                self._study.tell(one, state=states.FAIL)
                self._study.enqueue_trial(one.params)
                del self.rows[one.number]
            return
        except (WorkerError, ConfigError, UsageError) as error:
            row.why = " ".join(str(error).split())
            row.state = "failed"
        else:
            row.state = "pruned" if pruned else "done"
        row.seconds = round(time.monotonic() - began_s, 1)
        with self._mutex:
            one.set_user_attr("seconds", row.seconds)
            one.set_user_attr("values", row.values)
            if row.state == "failed":
                one.set_user_attr("why", row.why)
                self._study.tell(one, state=states.FAIL)
            elif row.state == "pruned":
                row.value = None
                self._study.tell(one, state=states.PRUNED)
            else:
                self._study.tell(one, row.value)
                self._keep_best(row)

    def _all_seeds(self, one: Any, row: TrialRow) -> bool:
        """Train with each seed; tell whether it was ended early."""
        sets = [f"{key}={value}" for key, value in row.params.items()]
        for seed in range(self.plan.seeds):
            curve = _TrialCurve(self.plan)
            training = self._train(one.number, seed, [*self.plan.fixed, *sets])
            with contextlib.closing(training):
                for point in training:
                    if self._ended.is_set():
                        raise _Ended
                    marks = curve.add(point)
                    row.part = (seed + curve.part) / self.plan.seeds
                    now = curve.now
                    if now is None:
                        continue
                    row.value = math.fsum([*row.values, now]) / (seed + 1)
                    for mark in marks:
                        one.report(row.value, seed * POINTS + mark)
                    if marks and curve.part < 1.0 and one.should_prune():
                        return True
            row.values.append(curve.value)
        row.value, row.part = math.fsum(row.values) / len(row.values), 1.0
        return False

    def _keep_best(self, row: TrialRow) -> None:
        """Write the settings of the best trial, if it is this one."""
        if self.best is not row:
            return
        sets = [f"{key}={value}" for key, value in row.params.items()]
        resolved = resolve(files=self.plan.files, sets=[*self.plan.fixed, *sets], environ=os.environ)
        what = f"{self.plan.objective} {row.value:.6g}, trial {row.number}, seeds: {self.plan.seeds}"
        lines = [
            f"# The best so far, of {len(self.rows)} trials of {self.plan.steps:,} steps ({what}).",
            f"# p2pdrl node --config {BEST}",
            *(f"{key} = {value}" for key, value in _given(resolved, without=set()).items()),
        ]
        try:
            write_atomic(self.folder / BEST, ("\n".join(lines) + "\n").encode())
        except OSError as error:
            raise StorageError(f"can't write {self.folder / BEST}: {error.strerror}") from error

    def _give_up_if_all_fail(self) -> None:
        with self._mutex:
            ended = [row for row in self.rows.values() if row.state != "running"]
            failed = [row for row in ended if row.state == "failed"]
        if len(failed) == len(ended) >= MOST_FAILURES:
            raise WorkerError(
                f"the first {len(failed)} trials all failed; the last one said: {failed[-1].why}"
            )


class _TrialCurve:
    """The learning curve of one training, and what it comes to."""

    def __init__(self, plan: SweepPlan) -> None:
        self._plan = plan
        self._mark = 0
        self._returns: list[tuple[int, float]] = []
        self._evaluation: float | None = None
        self.part = 0.0

    def add(self, point: CurvePoint) -> list[int]:
        """Take a point in; return the marks that it passes, of `POINTS`."""
        self.part = min(1.0, point.env_steps / self._plan.steps)
        if point.mean_return is not None and math.isfinite(point.mean_return):
            self._returns.append((point.env_steps, point.mean_return))
        if point.evaluation is not None and math.isfinite(point.evaluation):
            self._evaluation = point.evaluation
        mark = int(self.part * POINTS)
        if mark <= self._mark or self.now is None:
            return []
        self._mark = mark
        return [mark]

    @property
    def now(self) -> float | None:
        """The value so far; None while there is none."""
        if self._plan.objective == "evaluation":
            return self._evaluation
        if not self._returns:
            return None
        return self._area() if self._plan.objective == "area" else self._returns[-1][1]

    @property
    def value(self) -> float:
        """The value of all of it.

        Raises:
            WorkerError: there is none.
        """
        now = self.now
        if now is None:
            what = "evaluation was made" if self._plan.objective == "evaluation" else "episode ended"
            raise WorkerError(f"no {what} within {self._plan.steps:,} steps: give more --steps")
        return now

    def _area(self) -> float:
        """The mean over steps, each value standing for the steps before it."""
        total, before = 0.0, 0
        for steps, value in self._returns:
            total += (steps - before) * value
            before = steps
        return total / before if before else self._returns[-1][1]


def train_node(plan: SweepPlan, folder: Path, *, allow_import: bool = False) -> Train:
    """Return what trains a node of this machine in a process of its own, its data in a folder of `folder`."""

    def train(number: int, seed: int, sets: Sequence[str]) -> Generator[CurvePoint, None, None]:
        own = [f"task.stop.env_steps={plan.steps}", "task.stop.mean_return=none", f"node.seed={seed}"]
        place = folder / f"trial-{number:04}-seed-{seed}"
        try:
            place.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise StorageError(f"can't make {place}: {error.strerror}") from error
        arguments = [part for file in plan.files for part in ("--config", file)]
        arguments += [part for one in (*sets, *own) for part in ("--set", one)]
        arguments += ["--swarm", f"sweep-{secrets.token_hex(4)}", "--leave-with", str(os.getpid())]
        arguments += ["--allow-import"] if allow_import else []
        environ = {name: value for name, value in os.environ.items() if name != "P2PDRL_JOIN"}
        with reserved_ports(1, FIRST_PORT) as (port,):
            address = Address("127.0.0.1", port)
            process = NodeProcess.start(
                address, place, place / "node.log", arguments, name=f"trial-{number}", environ=environ
            )
            try:
                yield from _follow(process)
            finally:
                _end(process)

    return train


def _follow(process: NodeProcess) -> Iterator[CurvePoint]:
    while process.exit_code is None:
        token = (process.folder / "token").exists()  # counts only where a swarm key closes the API
        folder = str(process.folder) if token else None
        with contextlib.suppress(P2PDRLError):
            process.status = NodeClient(process.address, data_dir=folder, timeout_s=5.0).status()
        yield _point(process.status)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.process.wait(ASK_S)
    summary = process.summary()
    if process.exit_code or summary is None:
        words = process.last_words() or f"it ended with {process.exit_code}"
        raise (ConfigError if process.exit_code == 2 else WorkerError)(words)
    yield _point(summary["status"])


def _point(status: Mapping[str, Any]) -> CurvePoint:
    evaluation = status.get("evaluation")
    return CurvePoint(
        int(status.get("swarm_env_steps") or 0),
        _number(status.get("mean_return")),
        _number(evaluation.get("mean")) if isinstance(evaluation, dict) else None,
    )


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _end(process: NodeProcess) -> None:
    if process.exit_code is None:
        process.process.terminate()
        try:
            process.process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            process.process.kill()
            process.process.wait()


def _claim(folder: Path) -> int:
    """Make and lock a folder; return the lock's descriptor."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UsageError(
            f"can't use the folder {folder}: {error.strerror}; name another with --folder"
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise UsageError(f"another sweep works in {folder}: name another with --folder") from error
    return descriptor


def _keep_plan(plan: SweepPlan, path: Path) -> None:
    """Write the plan, or check that it is the one that is there."""
    try:
        if not path.exists():
            write_atomic(path, msgspec.json.format(msgspec.json.encode(plan), indent=2) + b"\n")
            return
        earlier = msgspec.json.decode(path.read_bytes(), type=SweepPlan)
    except OSError as error:
        raise StorageError(f"can't use {path}: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise UsageError(f"{path} isn't the plan of a sweep: {error}; name another --folder") from error
    unlike = [name for name in SweepPlan.__struct_fields__ if getattr(plan, name) != getattr(earlier, name)]
    if unlike:
        raise UsageError(
            f"{path.parent} holds another sweep ({', '.join(unlike)} differ): name another --folder, or give "
            "the same again to go on with it"
        )


def _distribution(one: SearchRange) -> Any:
    from optuna import distributions

    if one.kind == "choice":
        return distributions.CategoricalDistribution(one.choices)
    if one.kind == "int":
        step = 1 if one.step is None else int(one.step)
        return distributions.IntDistribution(int(one.low), int(one.high), log=one.log, step=step)
    return distributions.FloatDistribution(one.low, one.high, log=one.log, step=one.step)


OBJECTIVES: tuple[str, ...] = get_args(Objective)
