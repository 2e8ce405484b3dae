"""Processes that run what is in `torch_world`, one for each rank.

A process imports torch and forks the ranks, so that it is imported once. ``python -m`` runs this module.
"""

from __future__ import annotations

import multiprocessing
import pickle
import subprocess
import sys
import traceback
from pathlib import Path

from .torch_world import TIMEOUT_S, World

ROOT = Path(__file__).parents[4]


def run(job, ranks, frozen=(), **arguments):
    """Run a generator of `torch_world` in each rank; return what it yields, by rank, and what is on stderr.

    Those that freeze are killed after the others.
    """
    call = pickle.dumps((job, ranks, frozen, arguments))
    found = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.unit.rl.pipeline.torch_processes"],
        input=call,
        capture_output=True,
        cwd=ROOT,
        timeout=TIMEOUT_S * 4,
        check=False,
    )
    assert found.returncode == 0, found.stderr.decode()[-4000:]
    results, errors = pickle.loads(found.stdout)
    assert not errors, "\n".join(errors.values())
    return results, found.stderr.decode()


def _rank(job, arguments, world, sender):
    import torch

    torch.set_num_threads(1)
    try:
        for value in job(world, **arguments):
            sender.send((True, value))
    except BaseException:
        sender.send((False, traceback.format_exc()))
        raise


def main():
    # before the fork, so that it is done once
    from p2pdrl.workers.pipeline import pipe_carrier, torch_stages  # noqa: F401

    torch_stages.import_schedules()

    from . import pipelines  # noqa: F401

    job, ranks, frozen, arguments = pickle.load(sys.stdin.buffer)
    context = multiprocessing.get_context("fork")
    ports, clock = [context.SimpleQueue() for _ in range(ranks)], context.Value("d", 0.0)
    receivers, processes = [], []
    for rank in range(ranks):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_rank, args=(job, arguments, World(rank, ports, clock), sender))
        process.start()
        sender.close()
        receivers.append(receiver)
        processes.append(process)
    results, errors = {}, {}
    for rank, receiver in sorted(enumerate(receivers), key=lambda pair: pair[0] in frozen):
        if rank in frozen:
            processes[rank].kill()
        results[rank] = []
        try:
            while True:
                good, value = receiver.recv() if receiver.poll(TIMEOUT_S) else (False, "late")
                if not good:
                    errors[rank] = value
                    break
                results[rank].append(value)
        except EOFError:
            pass
    for process in processes:
        process.kill()
        process.join()
    sys.stdout.buffer.write(pickle.dumps((results, errors)))


if __name__ == "__main__":
    main()
