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
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

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


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=CASES, metavar="'PRESET KEY=VALUE …'")
    parser.add_argument("--updates", type=int, default=2)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--mb-per-s", type=float, default=125.0, help="of a link; 125 is 1 Gbit/s")
    parser.add_argument("--call-ms", type=float, default=2.0, help="of a message, whatever its size")
    parser.add_argument("--bytes", type=int, default=2, help="of an element on the way; 2 is bf16")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    link = Link(arguments.nodes, arguments.mb_per_s * 1e6, arguments.call_ms / 1e3, arguments.bytes)
    print(f"{'case':50} {'parameters':>10} {'rows':>6} {'grads':>5} {'backward':>9} {'exchange':>9} "
          f"{'share':>6} {'bound':>6} {'buckets':>7}")  # fmt: skip
    for case in arguments.cases:
        print(measure(case, arguments.updates, link), flush=True)


if __name__ == "__main__":
    main()
