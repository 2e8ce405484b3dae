"""Ranks of pipelines over torch.distributed, and what they find; `torch_processes` runs them."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time

TIMEOUT_S = 60.0
COME_S = 20.0
"""How long all may take to come to a meeting: on a busy machine longer than the group may take for a step."""


class World:
    """What a rank knows of the others."""

    def __init__(self, rank, ports, clock):
        self.rank = rank
        self._ports = ports  # by process: who sits out a meeting must not take another's place
        self.clock = clock

    def meet(self, ranks, timeout_s=TIMEOUT_S, rank=None, ahead=list, others=None):
        import torch

        from p2pdrl.pipeline.plan import Rendezvous, StageOrder
        from p2pdrl.workers.pipeline.torch_stages import TorchStages

        rank = self.rank if rank is None else rank
        port = 0 if rank == 0 else self._ports[self.rank].get()
        order = StageOrder(
            generation=1,
            rank=rank,
            blocks=ranks,
            cuts=tuple(range(1, ranks)),
            schedule="gpipe",
            microbatches=1,
            ranks=ranks,
            timeout_s=timeout_s,
            idle_timeout_s=timeout_s,
            state_every=1,
            backend="torch",
            meeting=Rendezvous("127.0.0.1", port, max(timeout_s, COME_S)),
        )

        def say(port):
            for other in range(1, ranks) if others is None else others:
                self._ports[other].put(port)

        return TorchStages(order, torch.device("cpu"), say, ahead=ahead)


class Member:
    """One rank of a pipeline."""

    def __init__(self, stages, links, share, generation, carrier=None):
        from p2pdrl.rl.pipeline.rank import Pipelined, StageServer

        self.share = share
        self.runner = stages.runner(share, links, carrier)
        options = {"generation": generation, "timeout_s": TIMEOUT_S, "runner": self.runner}
        if share.rank == 0:
            self.head = Pipelined(share, links, **options)
        else:
            self.server = StageServer(share, links, idle_timeout_s=TIMEOUT_S, **options)


def links_of(stages):
    from p2pdrl.rl.pipeline.links import FramedLinks
    from p2pdrl.workers.pipeline.pipe_carrier import PipeCarrier

    carrier = PipeCarrier(stages.pipes, 1 << 24)
    return carrier, FramedLinks(carrier)


# --- jobs ----------------------------------------------------------------------------------------


def agreement(world, rounds):
    """Each rank's greatest relative deviation from the model in one piece, by case."""
    import torch

    from p2pdrl.errors import TransportError
    from p2pdrl.rl.pipeline.stage_parameters import StageParameters

    from .pipelines import CPU, make_case, make_plan

    found, numbers = {}, itertools.count()
    for ranks, cases in rounds:
        if world.rank >= ranks:
            continue
        with world.meet(ranks) as stages:
            carrier, links = links_of(stages)
            for key in cases:
                kind, name, dtype, schedule, count, microbatches, rows = key
                case, parts = (
                    make_case(name, torch.float32, rows=rows, precision="bf16")
                    if dtype == "bf16"
                    else make_case(name, getattr(torch, dtype), rows=rows)
                )
                plan = make_plan(parts, count, microbatches, schedule, ranks)
                share = StageParameters(parts, plan, world.rank, CPU, checkpoint_activations=kind == "anew")
                member = Member(stages, links, share, next(numbers))
                found[key] = {"gradients": _gradients, "anew": _gradients, "steps": _steps}[kind](
                    member, case, parts
                )
                kept_bytes = check_spans(member)
                if (name, dtype) == ("mlp", "float64") and schedule != "interleaved":
                    assert kept_bytes == expected_bytes(share, plan.parts(rows), rows), key
            with contextlib.suppress(TransportError):  # who has got all may be gone
                carrier.flush(TIMEOUT_S)  # the last slice
            links.close()
    yield found


def _gradients(member, case, parts):
    import torch

    from ..gradient_cases import reference

    share = member.share
    expected, expected_terms = reference(case)
    own = torch.from_numpy(parts.block_map.take(expected.numpy(), share.plan.numbers(share.rank)))
    if share.rank > 0:
        member.server.serve()
        return relative(share.gradients_P, own, expected)
    deviations = []
    for _ in range(2):  # a second time: nothing is left of the first
        terms = member.head.gradients(case.batch, case.objective)
        norm = step(member.head, learning_rate=0.0, max_grad_norm=1e9)
        deviations += [
            relative(share.gradients_P, own, expected),
            relative(terms, expected_terms, expected_terms),
            abs(norm / float(expected.norm()) - 1.0),
        ]
    member.head.collect(state=False)
    return max(deviations)


def _steps(member, case, parts):
    """Three steps that are clipped, and the whole state afterwards."""
    import torch

    from p2pdrl.rl.gradients import OwnStepper, WholeBatch

    if member.share.rank > 0:
        member.server.serve()
        return 0.0
    how = {"learning_rate": 1e-2, "max_grad_norm": 0.01}
    engine, stepper = WholeBatch(case.flat, case.forward), OwnStepper()
    for _ in range(3):
        member.head.gradients(case.batch, case.objective)
        engine.gradients(case.batch, case.objective)
        norm = step(member.head, **how)
        expected = stepper.step(parts.optimizer, samples=0, left=0, **how)
        assert norm > how["max_grad_norm"]
        assert abs(norm / expected - 1.0) < 1e-6
    whole = member.head.collect(state=True)
    moments = torch.from_numpy(whole.optimizer["optimizer.m"])
    expected = torch.from_numpy(parts.optimizer.state()["optimizer.m"])
    parameters = case.flat.parameters_D
    return max(
        relative(torch.from_numpy(whole.vector_D), parameters, parameters),
        relative(moments, expected, expected),
    )


def check_spans(member):
    """Each stage of this rank has done each microbatch forwards and backwards, one after another.

    Returns:
        The most bytes that it has kept at once.
    """
    metrics = (member.head if member.share.rank == 0 else member.server).metrics()
    assert 0.0 <= metrics["bubble"] < 1.0
    assert metrics["activation_bytes"] > 0
    spans = member.runner.recorder.spans()
    for what in ("forward", "backward"):
        done = [(span.step, span.stage, span.microbatch) for span in spans if span.what == what]
        assert len(done) == len(set(done))
        assert {stage for _, stage, _ in done} == set(member.share.plan.stages_of(member.share.rank))
    last_s = 0.0
    for span in spans:
        if span.stage >= 0:
            assert last_s <= span.start_s <= span.end_s
            last_s = span.end_s
    return metrics["activation_bytes"]


def expected_bytes(share, parts, rows):
    """What the only stage of a rank keeps: of each microbatch that it stores what comes, what goes, and what
    each tanh between gives; computed anew, the last of them of one microbatch only."""
    plan, outputs = share.plan, share.parts.outputs
    numbers = plan.blocks_of(share.rank)
    as_gpipe = plan.schedule == "gpipe" or parts < plan.stages
    stored = parts if as_gpipe else min(parts, plan.stages - share.rank)
    longest = -(-rows // parts)
    before = outputs[numbers[0] - 1] if share.rank > 0 else share.parts.inputs
    passing = before.nbytes(longest) + outputs[numbers[-1]].nbytes(longest)
    itemsize = share.parts.dtype.itemsize
    inner = sum(longest * itemsize * outputs[number].shape[-1] for number in numbers[:-1])
    return stored * passing + inner * (1 if share.computes_anew(stored) else stored)


def step(head, learning_rate, max_grad_norm):
    return head.step(None, learning_rate=learning_rate, max_grad_norm=max_grad_norm, samples=0, left=0)


def failures(world, schedule, timeout_s, frozen_rank=1):
    """A rank of 3 freezes in mid-step; the others go on without it, and the last of them is killed.

    Yields:
        What the others raise, and how many seconds after the fault.
    """
    import torch

    from p2pdrl.errors import TransportError
    from p2pdrl.rl.pipeline.stage_parameters import StageParameters

    from .pipelines import CPU, make_case, make_plan

    case, parts = make_case("mlp", torch.float64)
    chunks = 2 if schedule == "interleaved" else 1
    rank = world.rank
    for generation, (ranks, victim, fault) in enumerate(
        [(3, frozen_rank, signal.SIGSTOP), (2, 1, signal.SIGKILL)]
    ):
        bound_s = timeout_s if generation == 0 else TIMEOUT_S
        left = [other for other in range(3) if generation == 0 or other != frozen_rank]
        with world.meet(ranks, bound_s, rank, others=left[1:]) as stages:
            carrier, links = links_of(stages)
            plan = make_plan(parts, ranks * chunks, 4, schedule, ranks)
            share = StageParameters(parts, plan, rank, CPU)
            member = Member(stages, links, share, generation, carrier)
            if rank == victim:
                fail_in_second_minibatch(share, fault, world.clock)
            try:
                if rank == 0:
                    for _ in range(3):
                        member.head.gradients(case.batch, case.objective)
                        step(member.head, learning_rate=0.01, max_grad_norm=1.0)
                else:
                    member.server.serve()
            except TransportError as error:
                seconds = time.monotonic() - world.clock.value
                yield type(error).__name__, seconds, share.steps, carrier.side
        rank -= rank > frozen_rank


def frozen_host(world, phase, timeout_s, wanted_s=None):
    """The first of 3 ranks, who has the store, freezes while they meet.

    Args:
        phase: ``opened``: the store is there; ``come``: all are; ``joined``: the group is; ``met``: all else.
        timeout_s: of the group.
        wanted_s: after so long the survivors' daemons want something else; None for never.

    Yields:
        How the meeting ended for the others, and how many seconds after the freeze they have left.
    """
    from p2pdrl.errors import TransportError
    from p2pdrl.workers.pipeline import torch_stages
    from p2pdrl.workers.protocol import Stop

    def freeze():
        world.clock.value = time.monotonic()
        os.kill(os.getpid(), signal.SIGSTOP)

    if world.rank == 0:
        come, join = torch_stages.wait_for_all, torch_stages.join

        def coming(*args, **options):
            if phase == "opened":
                time.sleep(0.2)  # the others connect
                freeze()
            came = come(*args, **options)
            if phase == "come":
                freeze()
            return came

        def joining(*args, **options):
            nccl = join(*args, **options)
            if phase == "joined":
                freeze()
            return nccl

        torch_stages.wait_for_all, torch_stages.join = coming, joining

    def ahead():
        frozen_s = world.clock.value
        wanted = wanted_s is not None and 0.0 < frozen_s < time.monotonic() - wanted_s
        return [Stop()] if wanted else []

    how = "met"
    try:
        with world.meet(3, timeout_s, ahead=ahead) as stages:
            if world.rank == 0:
                freeze()
            while not world.clock.value:
                time.sleep(0.01)
            for fd, _ in stages.pipes.values():
                os.close(fd)
    except TransportError as error:
        how = type(error).__name__
    yield how, time.monotonic() - world.clock.value


def both(world, rounds, **failing):
    yield from agreement(world, rounds)
    yield from failures(world, **failing)


def fail_in_second_minibatch(share, fault, clock):
    forward, calls = share.forward, itertools.count()

    def failing(stage, x, context, *, stored):
        if share.steps == 1 and next(calls) == 1:
            clock.value = time.monotonic()
            os.kill(os.getpid(), fault)
        return forward(stage, x, context, stored=stored)

    share.forward = failing


def relative(found, expected, whole):
    return float((found - expected).abs().max() / whole.abs().max())
