"""Whether two commits compute the same, to the bit: the test of a change that shouldn't alter any number.

Each commit is checked out beside the repository, and its own ``loss_traces.py`` runs with its own package;
``.`` stands for the working tree as it is. Printed per case: identical, or the first update and metric that
differ, with both values. Progress goes to stderr.

    python scripts/compare_traces.py main . --updates 200
    python scripts/compare_traces.py HEAD~3 HEAD --cases ppo ppo-lstm --json

Exit status: 0 all identical, 1 something differs, 2 the comparison can't be made.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

SCRIPT = Path("scripts") / "loss_traces.py"
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
STEPS = ("env_steps", "episodes")
AFTER = "after the last"

Line = Mapping[str, Any]
"""What ``loss_traces.py`` says of one case."""


class UnusableError(Exception):
    """The comparison can't be made; says why."""


class Difference(NamedTuple):
    """Where two traces part.

    Args:
        update: counted from 1; None for what belongs to no update.
        metric: its name, or what else differs.
        values: of both, for people.
    """

    update: int | None
    metric: str
    values: tuple[str, str]


class Row(NamedTuple):
    """What was found about one case.

    Args:
        case: its name.
        updates: how many were compared.
        difference: the first one; None if there is none.
    """

    case: str
    updates: int
    difference: Difference | None


def compare(first: Sequence[Line], second: Sequence[Line]) -> list[Row]:
    """Compare all cases of two runs; one that only one of them has differs."""
    by_name = [{line["case"]: line for line in lines} for lines in (first, second)]
    rows = []
    for name in dict.fromkeys(itertools.chain(*by_name)):
        a, b = (lines.get(name) for lines in by_name)
        if a is None or b is None:
            values = "missing" if a is None else "there", "missing" if b is None else "there"
            rows.append(Row(name, 0, Difference(None, "case", values)))
        else:
            rows.append(Row(name, min(a["updates"], b["updates"]), difference(a, b)))
    return rows


def difference(a: Line, b: Line) -> Difference | None:
    """Return the first difference of two lines about the same case."""
    for update, (one, other) in enumerate(itertools.zip_longest(_updates(a), _updates(b), fillvalue={}), 1):
        for metric in {**one, **other}:
            if one.get(metric) != other.get(metric):
                return Difference(update, metric, (_shown(one.get(metric)), _shown(other.get(metric))))
    for name in {**a["sidecar"], **b["sidecar"]}:
        values = a["sidecar"].get(name), b["sidecar"].get(name)
        if values[0] != values[1]:
            return Difference(None, name, (_shown(values[0]), _shown(values[1])))
    return None


def _updates(line: Line) -> Iterator[dict[str, Any]]:
    """Yield all there is about each update, by name, in the order in which it came about."""
    columns = {name: line[name] for name in STEPS} | line["metrics"] | {"parameters": line["vector"]}
    for update in range(line["updates"]):
        yield {name: column[update] for name, column in columns.items()}


def _shown(value: Any) -> str:
    if isinstance(value, str) and "0x" in value:
        return repr(float.fromhex(value))
    if isinstance(value, str):
        return value[:12]
    if isinstance(value, list):
        return str([(float.fromhex(total), length) for total, length in value])
    return "missing" if value is None else str(value)


def table(rows: Sequence[Row], names: tuple[str, str]) -> str:
    """Return what is printed."""
    width = max(len(row.case) for row in rows)
    lines = [f"{'case':{width}}  updates  result"]
    for row in rows:
        result = "identical"
        if row.difference is not None:
            update, metric, values = row.difference
            where = AFTER if update is None else f"update {update}"
            result = f"{where}: {metric} {values[0]} ({names[0]}), {values[1]} ({names[1]})"
        lines.append(f"{row.case:{width}}  {row.updates:7}  {result}")
    return "\n".join(lines)


def git(*words: str) -> str:
    """Run git where we are; return what it says.

    Raises:
        UnusableError: it refuses.
    """
    try:
        done = subprocess.run(["git", *words], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise UnusableError("git isn't installed") from None
    if done.returncode:
        raise UnusableError(done.stderr.strip())
    return done.stdout.strip()


@contextlib.contextmanager
def tree(revision: str, folder: Path) -> Iterator[Path]:
    """Check a revision out at ``folder`` for a while; ``.`` is the working tree, where it is.

    Raises:
        UnusableError: there is no such revision, or it has no script.
    """
    with contextlib.ExitStack() as stack:
        if revision == ".":
            folder = Path(git("rev-parse", "--show-toplevel"))
        else:
            git("worktree", "add", "--detach", str(folder), revision)
            stack.callback(git, "worktree", "remove", "--force", str(folder))
        if not (folder / SCRIPT).exists():
            raise UnusableError(
                f"{revision} has no {SCRIPT}; commits since the one that adds it can be compared"
            )
        yield folder


def traces(name: str, folder: Path, words: Sequence[str]) -> list[Line]:
    """Run the script of a tree with the package of the same tree.

    Raises:
        UnusableError: it fails, or Python finds the package elsewhere.
    """
    environment = {**os.environ, **ONE_THREAD, "PYTHONPATH": str(folder), "PYTHONHASHSEED": "0"}
    asked = [sys.executable, "-c", "import p2pdrl; print(p2pdrl.__file__)"]
    here = (folder / SCRIPT).parent  # -c looks for packages where it is started
    done = subprocess.run(asked, env=environment, cwd=here, capture_output=True, text=True, check=False)
    found = done.stdout.strip()
    if not Path(found).resolve().is_relative_to(folder.resolve()):
        raise UnusableError(f"{name}: Python imports p2pdrl from {found or 'nowhere'}, not from {folder}")
    with (
        tempfile.TemporaryFile("w+") as lines,
        subprocess.Popen(
            [sys.executable, str(folder / SCRIPT), *words],
            env=environment,
            stdout=lines,
            stderr=subprocess.PIPE,
            text=True,
        ) as process,
    ):
        assert process.stderr is not None  # noqa: S101 - it is a pipe
        for line in process.stderr:
            print(f"{name}: {line}", end="", file=sys.stderr, flush=True)
        if process.wait():
            raise UnusableError(f"{name}: {SCRIPT} ended with status {process.returncode}")
        lines.seek(0)
        return [json.loads(line) for line in lines]


def run(revisions: tuple[str, str], words: Sequence[str]) -> list[Row]:
    """Run both revisions at the same time and compare them.

    Raises:
        UnusableError: that can't be done.
    """
    with contextlib.ExitStack() as stack:
        parent = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="traces-")))
        folders = [
            stack.enter_context(tree(revision, parent / side))
            for revision, side in zip(revisions, "ab", strict=True)
        ]
        with ThreadPoolExecutor(2) as both:
            first, second = both.map(
                lambda names: traces(*names, words), zip(revisions, folders, strict=True)
            )
    return compare(first, second)


class Options(argparse.Namespace):
    """What the command line says."""

    first: str
    second: str
    updates: int
    cases: list[str] | None
    json: bool


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what was found; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("first", metavar="REV_A", help="a commit, or . for the working tree")
    parser.add_argument("second", metavar="REV_B", help="likewise")
    parser.add_argument("--updates", type=int, default=200, help="of each case (default: 200)")
    parser.add_argument(
        "--cases", nargs="+", metavar="CASE", help="only these; loss_traces.py --list has all"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    options = parser.parse_args(arguments, namespace=Options())
    words = ["--updates", str(options.updates)]
    if options.cases is not None:
        words += ["--cases", *options.cases]
    revisions = options.first, options.second
    try:
        rows = run(revisions, words)
    except UnusableError as error:
        print(f"compare_traces.py: {error}", file=sys.stderr)
        return 2
    identical = all(row.difference is None for row in rows)
    if options.json:
        cases = [{**row._asdict(), "difference": row.difference and row.difference._asdict()} for row in rows]
        print(json.dumps({"revisions": revisions, "identical": identical, "cases": cases}, indent=2))
    else:
        print(table(rows, revisions))
    return 0 if identical else 1


if __name__ == "__main__":
    sys.exit(main())
