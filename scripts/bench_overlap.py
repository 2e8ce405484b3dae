"""What it would bring to send gradients while the backward pass goes on, as DDP and Horovod do.

A learner trains as ever. When each parameter's gradient is ready is noted on the way, in processor time, so
that what else the machine does has no part in it. From that, and from a link that is described by
``--mb-per-s``, ``--call-ms`` and ``--bytes`` an element, follows how long the learner would stand still: with
one message after the backward pass, as `grad_average` sends it, and with buckets that leave as they fill, one
after the other (Li 2020, arXiv 2006.15704, section 3.2). The exchange is one of ``--nodes`` that each send
and receive 2·(n−1)/n of the vector, and takes no processor time from the learner: a bound from above.

Printed per preset: parameters, gradients and their rows, the backward pass and the exchange (milliseconds of
a gradient), the exchange's share of all time of training, collecting experience included, what overlapping
saves of that time at best (`bound`: the shorter of backward pass and exchange), and what buckets do.

    python scripts/bench_overlap.py
    python scripts/bench_overlap.py --mb-per-s 1250 --bytes 4

``--measure`` does it for real: processes that learn together through torch.distributed's gloo, each with one
thread, over a loopback of their own (`unshare`) that the kernel holds to the links' rate (`tc tbf`; root's
business, or that of a user namespace). Each update is made once per way, in turns: its gradients in one
all-reduce after the backward pass; then, too, but in buckets, of which one is on its way while others are
copied (`late`); and in buckets that leave as soon as their gradients are there (`early`). Printed: median
seconds of an update, wall and processor, and the ratio of one message's wall seconds to theirs.

    python scripts/bench_overlap.py --measure --nodes 2 --bytes 4
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import os
import shlex
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed
from torch import Tensor

from p2pdrl.config.loader import resolve
from p2pdrl.rl.gradients import OwnStepper
from p2pdrl.rl.optimizers import Optimizer
from p2pdrl.rl.registry import build_trainer

CASES = (
    "grad_average",
    "grad_average task.network.hidden=[256,256]",
    "grad_average task.network.hidden=[2048,2048,2048]",
    "pong",
    "pong task.algorithm.minibatches=32",
)
BUCKETS_MB = (25.0, 4.0, 1.0, 0.25)
DTYPES = {2: torch.bfloat16, 4: torch.float32}


@dataclass(frozen=True)
class Link:
    """What an exchange takes: ``call_s`` for each message, and its bytes at ``bytes_per_s``."""

    nodes: int
    bytes_per_s: float
    call_s: float
    element_bytes: int

    def exchange_s(self, elements: int) -> float:
        """Seconds of an all-reduce of so many elements."""
        share = 2 * (self.nodes - 1) / self.nodes
        return self.call_s + share * self.element_bytes * elements / self.bytes_per_s

    def waits_s(self, ready: Sequence[tuple[float, int]], bucket: float) -> float:
        """Return how long the learner stands still after the backward pass.

        Args:
            ready: (seconds before the end of the backward pass, elements) of each parameter, in order.
            bucket: elements after which a message leaves; infinite for one message at the end.
        """
        free_s, gathered = -float("inf"), 0
        for before_s, elements in ready:
            gathered += elements
            if gathered >= bucket:
                free_s, gathered = max(free_s, -before_s) + self.exchange_s(gathered), 0
        if gathered:
            free_s = max(free_s, 0.0) + self.exchange_s(gathered)
        return max(free_s, 0.0)


class NotingStepper(OwnStepper):
    """Steps alone, and keeps when the gradients that it steps with were ready.

    Attributes:
        gradients: of each, what `Link.waits_s` takes.
        rows: of each.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.gradients: list[list[tuple[float, int]]] = []
        self.rows: list[int] = []
        self._marks: list[tuple[float, int]] = []
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(self._mark)  # type: ignore[no-untyped-call]

    def _mark(self, parameter: torch.Tensor) -> None:
        self._marks.append((time.process_time(), parameter.numel()))

    def step(
        self,
        optimizer: Optimizer,
        *,
        learning_rate: float,
        max_grad_norm: float,
        samples: int,
        left: int,
    ) -> float:
        """See `OwnStepper`."""
        ended_s = self._marks[-1][0]
        self.gradients.append([(ended_s - at_s, elements) for at_s, elements in self._marks])
        self.rows.append(samples)
        self._marks.clear()
        return super().step(
            optimizer, learning_rate=learning_rate, max_grad_norm=max_grad_norm, samples=samples, left=left
        )


def measure(case: str, updates: int, link: Link) -> str:
    """Train a little; return the line of the table."""
    preset, *sets = case.split()
    trainer = build_trainer(resolve(files=[preset], sets=sets).config.task, 1, "cpu")
    with contextlib.closing(trainer):
        stepper = NotingStepper(trainer.policy)
        trainer.stepper = stepper
        trainer.step()
        stepper.gradients.clear()
        stepper.rows.clear()
        began_s = time.process_time()
        for _ in range(updates):
            trainer.step()
        trained_s = time.process_time() - began_s
    gradients = stepper.gradients
    size = sum(elements for _, elements in gradients[0])
    whole_s = len(gradients) * link.exchange_s(size)
    all_s = trained_s + whole_s
    backward_s = [max(before_s for before_s, _ in ready) for ready in gradients]
    bound_s = sum(min(seconds, link.exchange_s(size)) for seconds in backward_s)
    saved = {
        mb: (whole_s - sum(link.waits_s(ready, mb * 1e6 / 4) for ready in gradients)) / all_s
        for mb in BUCKETS_MB
    }
    best = max(saved, key=lambda mb: saved[mb])
    return (
        f"{case:50} {size:>10,} {statistics.median(stepper.rows):>6g} {len(gradients):>5} "
        f"{1e3 * statistics.median(backward_s):>9.1f} {1e3 * link.exchange_s(size):>9.1f} "
        f"{whole_s / all_s:>6.0%} {bound_s / all_s:>6.0%} {saved[best]:>7.1%} with {best:g} MB"
    )


class SumStepper(OwnStepper):
    """Steps with the mean of all ranks' gradients, which travel as ``dtype``.

    Attributes:
        bucket: bytes of float32 after which gradients leave; 0 for all at once.
        early: whether they leave while the backward pass goes on.
    """

    def __init__(self, module: torch.nn.Module, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self.bucket, self.early = 0, False
        self._full: list[list[Tensor]] = []
        self._open: list[Tensor] = []
        self._gathered = 0
        self._on_their_way: list[tuple[torch.distributed.Work, Tensor, list[Tensor]]] = []
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(self._ready)  # type: ignore[no-untyped-call]

    def _ready(self, parameter: Tensor) -> None:
        if parameter.grad is None:
            return
        self._open.append(parameter.grad)
        self._gathered += 4 * parameter.numel()
        if self.bucket and self._gathered >= self.bucket:
            self._close()
            if self.early:
                self._leave()

    def _close(self) -> None:
        """The next gradient begins another bucket."""
        if self._open:
            self._full.append(self._open)
        self._open, self._gathered = [], 0

    def _leave(self) -> None:
        """Begin to sum what is full, as everywhere in the order in which it became so."""
        for bucket in self._full:
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket]).to(self._dtype)
            if (work := torch.distributed.all_reduce(flat, async_op=True)) is not None:
                self._on_their_way.append((work, flat, bucket))
        self._full = []

    def step(
        self,
        optimizer: Optimizer,
        *,
        learning_rate: float,
        max_grad_norm: float,
        samples: int,
        left: int,
    ) -> float:
        """See `OwnStepper`."""
        self._close()
        self._leave()
        ranks = torch.distributed.get_world_size()
        for work, flat, gradients in self._on_their_way:
            work.wait()
            parts = flat.float().div_(ranks).split([gradient.numel() for gradient in gradients])
            for gradient, part in zip(gradients, parts, strict=True):
                gradient.copy_(part.view_as(gradient))
        self._on_their_way.clear()
        return super().step(
            optimizer, learning_rate=learning_rate, max_grad_norm=max_grad_norm, samples=samples, left=left
        )


def run_rank(arguments: argparse.Namespace) -> None:
    """Train as one of ``nodes`` processes, every way in turn; the first prints the table's lines."""
    case, rank, nodes = arguments.cases[0], arguments.rank, arguments.nodes
    preset, *sets = case.split()
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{arguments.port}",
        rank=rank,
        world_size=nodes,
        timeout=dt.timedelta(seconds=120),
    )
    trainer = build_trainer(resolve(files=[preset], sets=sets).config.task, 1, "cpu")
    ways = ((0.0, False), *((size, early) for size in BUCKETS_MB for early in (False, True)))
    walls: dict[tuple[float, bool], list[float]] = {way: [] for way in ways}
    processors: dict[tuple[float, bool], list[float]] = {way: [] for way in ways}
    with contextlib.closing(trainer):
        stepper = SumStepper(trainer.policy, DTYPES[arguments.bytes])
        trainer.stepper = stepper
        trainer.step()
        for _ in range(arguments.updates):
            for way in ways:
                stepper.bucket, stepper.early = int(way[0] * 1e6), way[1]
                torch.distributed.barrier()
                began_s, used_s = time.perf_counter(), time.process_time()
                trainer.step()
                torch.distributed.barrier()
                walls[way].append(time.perf_counter() - began_s)
                processors[way].append(time.process_time() - used_s)
        size = len(trainer.flat)
        digest = torch.from_numpy(trainer.flat.copy()).double().sum()
    sums = [torch.zeros_like(digest) for _ in range(nodes)]
    torch.distributed.all_gather(sums, digest)
    if len({float(total) for total in sums}) > 1:
        raise SystemExit(f"the ranks' parameters differ: {sums}")
    if rank == 0:
        whole_s = statistics.median(walls[ways[0]])
        for way in ways:
            wall_s = statistics.median(walls[way])
            print(
                f"{case:50} {size:>10,} {words(way):>14} {wall_s:>8.3f} "
                f"{statistics.median(processors[way]):>8.3f} {whole_s / wall_s:>6.3f}",
                flush=True,
            )
    torch.distributed.destroy_process_group()


def words(way: tuple[float, bool]) -> str:
    """Name a way for the table."""
    size, early = way
    return f"{size:g} MB {'early' if early else 'late'}" if size else "one message"


def measure_together(arguments: argparse.Namespace) -> None:
    """Have each case trained by ``nodes`` processes behind links of ``mb_per_s`` each."""
    if shutil.which("unshare") is None or shutil.which("tc") is None:
        raise SystemExit("this takes Linux with unshare (util-linux), ip and tc (iproute2)")
    print(f"{'case':50} {'parameters':>10} {'way':>14} {'wall s':>8} {'CPU s':>8} {'ratio':>6}")
    for case in arguments.cases:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        # All nodes' bytes pass the same loopback: it carries as many links as there are nodes.
        kbit = round(8e3 * arguments.mb_per_s * arguments.nodes)
        ranks = " & ".join(
            shlex.join(
                [
                    *(sys.executable, __file__, "--measure", "--rank", str(rank), "--port", str(port)),
                    *("--nodes", str(arguments.nodes), "--updates", str(arguments.updates)),
                    *("--bytes", str(arguments.bytes), "--cases", case),
                ]
            )
            for rank in range(arguments.nodes)
        )
        shape = f"tc qdisc add dev lo root tbf rate {kbit}kbit burst 512kb latency 100ms"
        subprocess.run(
            ["unshare", "--user", "--map-root-user", "--net", "sh", "-c",
             f"ip link set lo mtu 1500 up && {shape} && ({ranks} & wait)"],
            check=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=CASES, metavar="'PRESET KEY=VALUE …'")
    parser.add_argument("--updates", type=int, default=2)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--mb-per-s", type=float, default=125.0, help="of a link; 125 is 1 Gbit/s")
    parser.add_argument("--call-ms", type=float, default=2.0, help="of a message, whatever its size")
    parser.add_argument("--bytes", type=int, default=2, help="of an element on the way; 2 is bf16")
    parser.add_argument("--measure", action="store_true", help="let processes do it, in place of reckoning")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.rank is not None:
        run_rank(arguments)
        return
    if arguments.measure:
        measure_together(arguments)
        return
    link = Link(arguments.nodes, arguments.mb_per_s * 1e6, arguments.call_ms / 1e3, arguments.bytes)
    print(f"{'case':50} {'parameters':>10} {'rows':>6} {'grads':>5} {'backward':>9} {'exchange':>9} "
          f"{'share':>6} {'bound':>6} {'buckets':>7}")  # fmt: skip
    for case in arguments.cases:
        print(measure(case, arguments.updates, link), flush=True)


if __name__ == "__main__":
    main()
