"""Over the sockets that nodes talk over, sealed as theirs, a pipeline's gradients are those of the whole."""

from __future__ import annotations

import itertools

import pytest

from p2pdrl.rl.pipeline.links import FramedLinks
from p2pdrl.workers.pipeline.pipe_carrier import PipeCarrier

from ..rl.gradient_cases import reference
from ..rl.pipeline.pipelines import BOUNDS, MODELS, Pipeline, make_case, make_plan, relative, step_with
from .pipes import joined

LAYOUTS = [
    *[(schedule, stages, stages) for schedule in ("gpipe", "1f1b") for stages in (2, 3, 4)],
    ("interleaved", 4, 2),
    ("interleaved", 6, 3),
]


def over_sockets(plan, parts):
    """What makes the links of each rank."""
    circle = plan.stages > plan.ranks > 1

    def links(ranks):
        return [FramedLinks(PipeCarrier(pipes, parts.longest_nbytes)) for pipes in joined(ranks, circle)]

    return links


def some_by_default():
    """The smallest model and one that remembers, and each of the others once."""
    for name, layout, dtype in itertools.product(MODELS, LAYOUTS, BOUNDS):
        if layout[1] == 6 and name != "mlp":
            continue  # the others have fewer blocks
        quick = name in ("mlp", "lstm") or layout == ("1f1b", 3, 3)
        yield pytest.param(name, *layout, dtype, marks=[] if quick else pytest.mark.slow)


@pytest.mark.parametrize(("name", "schedule", "stages", "ranks", "dtype"), list(some_by_default()))
def test_gradients_terms_and_clipped_steps_are_the_full_batchs(name, schedule, stages, ranks, dtype):
    case, parts = make_case(name, dtype)
    expected, expected_terms = reference(case)
    norm = float(expected.norm())
    for microbatches in (1, 2, 4, 8):  # of 11 rows: uneven
        plan = make_plan(parts, stages, microbatches, schedule, ranks)
        with Pipeline(parts, plan, over_sockets(plan, parts)) as pipeline:
            terms = pipeline.head.gradients(case.batch, case.objective)
            clipped = norm / 2
            found = step_with(pipeline, learning_rate=0.0, max_grad_norm=clipped)
            pipeline.head.collect(state=False)  # all have stepped
            assert found == pytest.approx(norm, rel=BOUNDS[dtype])
            assert relative(pipeline.gradient(parts), expected * (clipped / norm)) < BOUNDS[dtype]
            assert relative(terms, expected_terms) < BOUNDS[dtype]
