"""Measure a gradient step of a large policy: in one process, and in stages over several processes.

A step is forward, backward, clipping by the norm of the whole gradient, and Adam, from the first rank's
beginning to the end of the last rank's step. Processes on loopback, each with one thread but one, take
turns within one run: each round runs each contender once, in another order, so that what else the machine
does falls on all alike. Ratios are medians of those of the same round.

| contender | what |
|---|---|
| one process | the whole batch (M = 1), and the same cut into M microbatches: what cutting costs |
| one process, all cores | the whole batch, a thread on each core: this machine without a pipeline |
| stream | our stages over pipes between the nodes; ``stream, key`` with a swarm key |
| torch | our stages over torch.distributed |
| plain torch | torch.distributed.pipelining over gloo: the same blocks, objective, clipping and Adam |

``x plain`` is the time over plain torch's; ``speed-up`` is over one process with the whole batch; ``ideal``
is S·M/(M+S-1), where only the bubble costs; ``effic.`` is the part of it that is reached once what cutting
costs in one process is taken out: speed-up x (one process with M / whole) / ideal. ``bubble`` is the share of
a step in which our ranks neither compute nor step, their mean. ``collect`` is not part of a step: it is what
the first rank needs to fetch the parameters once per update, however many steps that has. Plain torch's 1F1B
wants as many microbatches as stages. The learning rate is 0, so that all must find the same gradient each
time; its norm is compared.

    python scripts/bench_pipeline.py --key --plot pipeline.png
    python scripts/bench_pipeline.py --network transformer --schedules 1f1b gpipe interleaved
    python scripts/bench_pipeline.py --wan

Memory is looked at in a round of its own: what a process takes at most beyond what it took before it had a
model, and what autograd keeps of it between forward and backward. A rank of ours takes its stage (parameters,
gradients, Adam's state, activations), the policy that its learner acts with, and what parameters are fetched
into once an update. Plain torch has its stage and no more: what it learns isn't put together anywhere. Not
counted is what learners publish, in memory that they share with their daemons, with and without a pipeline.

``--wan`` measures a smaller policy through fault proxies: 100 Mbit/s, 40 ms each way, and both. They stand
in every connection of ours and of torch's alike (`pipeline_bench.redirected` says how), work within this
process, and hold up to 1 MiB each way, as a router does.

Where there is a GPU, all stages share it and compute in bf16; plain torch is left out then, because gloo
moves no tensors between GPUs and NCCL wants one for each rank.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from p2pdrl.errors import ConfigError
from p2pdrl.pipeline.layers import Layer
from pipeline_bench.figures import (
    ALL_CORES,
    ALONE,
    PLAIN,
    Case,
    CaseSamples,
    Figures,
    draw,
    show,
    show_memory,
)
from pipeline_bench.markdown import markdown
from pipeline_bench.model import CHUNKS, NETWORKS, SIZES, cuts_of
from pipeline_bench.teams import Held, Network, Outcome
from support.plots import check_path
from support.worker_team import WorkerLostError

SCHEDULES = ("1f1b", "gpipe", "interleaved")
CONTENDERS = {"stream": "stream", "torch": "torch", PLAIN: "gloo"}
"""What they are called, and what their processes are."""
WAN_PARAMETERS = 2_000_000
MEGABIT = 1e6 / 8
LINKS = {"100 Mbit/s": (100 * MEGABIT, 0.0), "40 ms": (0.0, 0.04), "100 Mbit/s, 40 ms": (100 * MEGABIT, 0.04)}
"""Bytes per second (0: as many as go) and seconds of delay, each way."""
NORM_TOLERANCE = {"cpu": 1e-2, "cuda": 5e-2}
"""How far the gradient's norm may differ: float32 sums up the squares of a large vector no better."""


class Entrant(NamedTuple):
    """A case, and who runs it."""

    case: Case
    held: Held
    key: bool


class Bench:
    """All processes; enter it to have them ended.

    Args:
        arguments: of the command line.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._model = {name: getattr(arguments, name) for name in ("network", "parameters", "rows")}
        self._stack = ExitStack()
        self.network = Network(proxied=arguments.wan)
        self._alone = Held("alone", 1)
        self._all_cores = Held("alone", 1)
        self._held = [self._alone, self._all_cores]

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for held in self._held:
            held.close(at_once=kind is not None)
        self.network.close()

    def prepare(self) -> dict[str, Any]:
        """Make the model in one process and measure its blocks; return what it says of the model."""
        said = self._alone.make(self._model)
        self._all_cores.make(self._model | {"threads": os.cpu_count() or 1})
        self._layers = [Layer(*cost) for cost in self._alone.costs(max(self._arguments.rows // 4, 1))]
        return said

    def entrants(self) -> Iterator[Entrant]:
        """Start all contenders, and yield what they can do; print what they can't."""
        arguments = self._arguments
        for microbatches in sorted({1, *arguments.microbatches}):
            yield Entrant(Case("", 1, "", microbatches, ALONE), self._alone, key=False)
        yield Entrant(Case("", 1, "", 1, ALL_CORES), self._all_cores, key=False)
        for stages in arguments.stages:
            for chunks in (1, CHUNKS):
                schedules = [name for name in arguments.schedules if (name == "interleaved") == (chunks > 1)]
                if schedules:
                    yield from self._pipelines(stages, chunks, schedules)

    def _pipelines(self, stages: int, chunks: int, schedules: Sequence[str]) -> Iterator[Entrant]:
        arguments = self._arguments
        cuts = cuts_of(self._layers, stages * chunks)
        note(f"{stages} ranks, {stages * chunks} stages: cut before blocks {', '.join(map(str, cuts))}")
        for name in arguments.contenders:
            held = Held(CONTENDERS[name], stages)
            self._held.append(held)
            held.make(self._model)
            held.hold(cuts, schedules[0], max(arguments.microbatches))
            for key in (False, True) if arguments.key and name == "stream" else (False,):
                held.meet(self.network, key=key)
                title = f"{name}, key" if key else name
                for schedule in schedules:
                    for microbatches in arguments.microbatches:
                        case = Case("", stages, schedule, microbatches, title, chunks)
                        why = held.prepare(**trial(case, 1, key=key))
                        if why:
                            note(f"without {title}, {schedule}, M = {microbatches}: {why}")
                        else:
                            yield Entrant(case, held, key)


def trial(case: Case, steps: int, *, key: bool) -> dict[str, Any]:
    """Return what processes are told."""
    return {"schedule": case.schedule, "microbatches": case.microbatches, "steps": steps, "key": key}


def measure(
    bench: Bench, entrants: Sequence[Entrant], arguments: argparse.Namespace, link: str, tolerance: float
) -> dict[Case, CaseSamples]:
    """Run all rounds over one kind of link; the first is for memory, or not counted."""
    by_case = {entrant.case: CaseSamples() for entrant in entrants}
    bench.network.slow_down(*LINKS.get(link, (0.0, 0.0)))
    for turn in range(arguments.rounds + 1):
        first = turn % len(entrants)
        for case, held, key in (*entrants[first:], *entrants[:first]):
            outcome = held.run(look=turn == 0, **trial(case, arguments.steps, key=key))
            if turn == 0:
                by_case[case].memory = outcome
            else:
                by_case[case].rounds.append(outcome)
        note(f"{link + ': ' if link else ''}round {turn} of {arguments.rounds}")
        if turn == 0:
            check({case: samples.memory for case, samples in by_case.items() if samples.memory}, tolerance)
    return {case._replace(link=link): samples for case, samples in by_case.items()}


def check(outcomes: dict[Case, Outcome], tolerance: float) -> None:
    """Make sure that all found the same gradient.

    Raises:
        SystemExit: they didn't: whoever is faster by computing something else is no measure.
    """
    right = next(iter(outcomes.values())).norm
    for case, outcome in outcomes.items():
        if not abs(outcome.norm / right - 1.0) < tolerance:
            raise SystemExit(f"{case}: a gradient of norm {outcome.norm}, not {right}")


def note(text: str) -> None:
    """Say how it goes, beside what is printed."""
    print(text, file=sys.stderr, flush=True)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--network", choices=NETWORKS, default="mlp")
    parser.add_argument("--parameters", type=int, default=0, help="about; 0 chooses by network")
    parser.add_argument("--rows", type=int, default=0, help="of a batch; 0 chooses by network")
    parser.add_argument("--stages", type=int, nargs="+", default=[2], help="ranks of a pipeline")
    parser.add_argument("--schedules", nargs="+", default=["1f1b", "gpipe"], choices=SCHEDULES)
    parser.add_argument("--microbatches", type=int, nargs="+", help="1 2 4 8; with --wan 1 4")
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=CONTENDERS)
    parser.add_argument("--rounds", type=int, default=0, help="5; with --wan 3")
    parser.add_argument("--steps", type=int, default=2, help="of one trial")
    parser.add_argument("--key", action="store_true", help="also with a swarm key")
    parser.add_argument("--wan", action="store_true", help="through slow links; a smaller policy")
    parser.add_argument("--json", action="store_true", help="print figures for machines")
    parser.add_argument("--markdown", action="store_true", help="print the table that README has")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the times")
    arguments = parser.parse_args()
    parameters, rows = SIZES[arguments.network]
    arguments.rows = arguments.rows or rows
    arguments.rounds = arguments.rounds or (3 if arguments.wan else 5)
    arguments.microbatches = arguments.microbatches or ([1, 4] if arguments.wan else [1, 2, 4, 8])
    arguments.parameters = arguments.parameters or (WAN_PARAMETERS if arguments.wan else parameters)
    if arguments.markdown and (arguments.wan or len(arguments.schedules) > 1):
        parser.error("--markdown is for one schedule on loopback: --schedules 1f1b, without --wan")
    if any(arguments.rows % microbatches for microbatches in arguments.microbatches):
        parser.error("plain torch wants microbatches of one size: --rows must be a multiple of each number")
    if arguments.plot is not None:
        check_path(arguments.plot)
    return arguments


def main() -> None:
    """Measure and print."""
    arguments = parse()
    with Bench(arguments) as bench:
        said = bench.prepare()
        cpu = said["device"] == "cpu"
        if not cpu:
            arguments.contenders = [name for name in arguments.contenders if name != PLAIN]
        tolerance = NORM_TOLERANCE["cpu" if cpu else "cuda"]
        entrants = list(bench.entrants())
        by_case: dict[Case, CaseSamples] = {}
        for link in LINKS if arguments.wan else ("",):
            by_case |= measure(bench, entrants, arguments, link, tolerance)
    rows = Figures(by_case).rows()
    title = f"{arguments.network}, {said['parameters']:,} parameters, {arguments.rows} rows"
    if arguments.plot is not None:
        draw([row for row in rows if row["link"] == rows[-1]["link"]], arguments.plot, title)
    if arguments.json:
        print(json.dumps(rows))
        return
    if arguments.markdown:
        print(markdown(rows))
        return
    print(f"{title}, {'float32' if cpu else 'bf16'} on {said['device']}")
    show(rows)
    if not arguments.wan:
        show_memory(rows)
    print(f"\nmedians of {arguments.rounds} rounds of {arguments.steps} steps, {os.cpu_count()} cores")
    print("no GPU here: nothing is measured on one" if cpu else "all stages share the GPU")


if __name__ == "__main__":
    try:
        main()
    except (WorkerLostError, ConfigError) as error:
        raise SystemExit(str(error)) from error
