"""Each schedule against PyTorch's own, and what `check_schedule` lets through."""

# torch's schedules are the reference, and tell nobody what they do when.
# ruff: noqa: SLF001

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pdrl.errors import ConfigError
from p2pdrl.pipeline.schedule import Action, check_schedule, make_schedule, peak_activations, route

STAGES = [1, 2, 3, 4, 8]
MICROBATCHES = [*range(1, 9), 16]


def computes(actions):
    return [("FB"[a.kind == "backward"], a.stage, a.microbatch) for a in actions if "ward" in a.kind]


def rounds_fit(ranks, microbatches):
    return microbatches % max(1, microbatches // ranks) == 0


class RecordingStage:
    """What PyTorch's loops over microbatches call, without any tensors."""

    def __init__(self, rank):
        self.stage_index, self.is_last, self.done = rank, False, []

    def forward_one_chunk(self, microbatch, *_args, **_kwargs):
        self.done.append(("F", self.stage_index, microbatch))

    def backward_one_chunk(self, microbatch, **_kwargs):
        self.done.append(("B", self.stage_index, microbatch))

    def get_fwd_recv_ops(self, _microbatch):
        return []

    get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = get_fwd_recv_ops

    def perform_reduce_grad(self, _factor):
        pass


def torch_runs(name, rank, stages, microbatches):
    """The order in which PyTorch's schedule really calls one stage."""
    from torch.distributed.pipelining import schedules

    cls = {"gpipe": schedules.ScheduleGPipe, "1f1b": schedules.Schedule1F1B}[name]
    schedule = cls.__new__(cls)  # the constructor wants a process group, and of 1F1B also M ≥ S
    schedule._stage = RecordingStage(rank)
    schedule._num_stages, schedule._n_microbatches = stages, microbatches
    schedule.scale_grads = False
    schedule._check_inputs = lambda *_args: ([()] * microbatches, [{}] * microbatches)
    schedule._initialize_stage = schedule._update_losses = lambda *_args: None
    schedule._maybe_compute_loss = schedule._maybe_get_loss = lambda *_args: None
    schedule._step_microbatches()
    return schedule._stage.done


def torch_plans(cls_name, stages, microbatches, ranks):
    """PyTorch's table of the forwards and backwards of each rank."""
    from torch.distributed.pipelining import schedules

    cls = getattr(schedules, cls_name)
    schedule = cls.__new__(cls)
    schedule._num_stages, schedule._n_microbatches = stages, microbatches
    schedule.pp_group_size, schedule.n_local_stages = ranks, stages // ranks
    schedule.number_of_rounds = max(1, microbatches // ranks)
    schedule.microbatches_per_round = microbatches // schedule.number_of_rounds
    if cls_name == "ScheduleInterleaved1F1B":
        orders = {rank: schedule._calculate_single_rank_operations(rank) for rank in range(ranks)}
    else:
        orders = schedule._get_pipeline_order()
    return {
        rank: [
            (action.computation_type.value, action.stage_index, action.microbatch_index)
            for action in order
            if action and action.computation_type.value in "FB"
        ]
        for rank, order in orders.items()
    }


@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_one_stage_per_rank_is_what_torch_runs(name, stages):
    for microbatches in MICROBATCHES:
        made = make_schedule(name, stages, microbatches)
        for rank, actions in enumerate(made):
            assert computes(actions) == torch_runs(name, rank, stages, microbatches)


@pytest.mark.parametrize("stages", STAGES)
def test_one_stage_per_rank_is_what_torch_plans(stages):
    for microbatches in MICROBATCHES:
        plan = torch_plans("ScheduleGPipe", stages, microbatches, stages)
        assert {r: computes(a) for r, a in enumerate(make_schedule("gpipe", stages, microbatches))} == plan
        if microbatches < stages:  # torch's own table of 1F1B is for M ≥ S
            continue
        plan = torch_plans("Schedule1F1B", stages, microbatches, stages)
        # The table, unlike the run, counts the forwards of the last rank from 1.
        plan[stages - 1] = [(kind, s, m - (kind == "F")) for kind, s, m in plan[stages - 1]]
        assert {r: computes(a) for r, a in enumerate(make_schedule("1f1b", stages, microbatches))} == plan


@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize("ranks", STAGES)
def test_interleaved_is_what_torch_plans(ranks, chunks):
    for microbatches in MICROBATCHES:
        if not rounds_fit(ranks, microbatches):
            continue
        stages = ranks * chunks
        made = make_schedule("interleaved", stages, microbatches, ranks=ranks)
        plan = torch_plans("ScheduleInterleaved1F1B", stages, microbatches, ranks)
        assert {rank: computes(actions) for rank, actions in enumerate(made)} == plan


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_interleaved_demands_of_microbatches_what_torch_does(ranks):
    for microbatches in range(1, 25):
        if rounds_fit(ranks, microbatches):
            make_schedule("interleaved", 2 * ranks, microbatches, ranks=ranks)
        else:
            with pytest.raises(ConfigError, match="make them a multiple"):
                make_schedule("interleaved", 2 * ranks, microbatches, ranks=ranks)


def test_messages_stand_beside_what_needs_and_makes_them():
    first, last = make_schedule("1f1b", 2, 2)
    assert first == (
        Action("forward", 0, 0), Action("send_activation", 0, 0),
        Action("forward", 0, 1), Action("send_activation", 0, 1),
        Action("recv_gradient", 0, 0), Action("backward", 0, 0),
        Action("recv_gradient", 0, 1), Action("backward", 0, 1),
    )  # fmt: skip
    assert last == (
        Action("recv_activation", 1, 0), Action("forward", 1, 0),
        Action("backward", 1, 0), Action("send_gradient", 1, 0),
        Action("recv_activation", 1, 1), Action("forward", 1, 1),
        Action("backward", 1, 1), Action("send_gradient", 1, 1),
    )  # fmt: skip


def test_routes():
    assert route(Action("send_activation", 2, 0)) == route(Action("recv_activation", 3, 0)) == (2, 3)
    assert route(Action("send_gradient", 3, 0)) == route(Action("recv_gradient", 2, 0)) == (3, 2)
    with pytest.raises(ValueError, match="sends nothing"):
        route(Action("forward", 0, 0))


@pytest.mark.parametrize(
    ("name", "stages", "microbatches", "ranks", "why"),
    [
        ("zigzag", 2, 2, None, "no schedule 'zigzag': take gpipe, 1f1b, interleaved"),
        ("gpipe", 0, 2, None, "0 stages and 2 microbatches"),
        ("1f1b", 2, 0, None, "2 stages and 0 microbatches"),
        ("1f1b", 4, 4, 2, "one stage per rank, not 4 on 2"),
        ("interleaved", 4, 4, None, "needs the number of ranks"),
        ("interleaved", 4, 4, 0, "needs the number of ranks"),
        ("interleaved", 5, 4, 2, "5 don't fit 2 ranks so: take 4 or 6 stages"),
        ("interleaved", 4, 4, 4, "or 1f1b"),
        ("interleaved", 2, 4, 4, "take 8 or 12 stages"),
        ("interleaved", 8, 9, 4, r"a multiple of 4 \(8 or 12\), or fewer than 8"),
    ],
)
def test_numbers_that_dont_fit_are_told(name, stages, microbatches, ranks, why):
    with pytest.raises(ConfigError, match=why):
        make_schedule(name, stages, microbatches, ranks=ranks)


@st.composite
def schedules(draw):
    """A schedule, its stages and its microbatches."""
    name = draw(st.sampled_from(["gpipe", "1f1b", "interleaved"]))
    microbatches = draw(st.integers(1, 20))
    if name != "interleaved":
        stages = draw(st.integers(1, 9))
        return make_schedule(name, stages, microbatches), stages, microbatches
    ranks, chunks = draw(st.integers(1, 6)), draw(st.integers(2, 4))
    if not rounds_fit(ranks, microbatches):
        microbatches = ranks * draw(st.integers(1, 4))
    return make_schedule(name, ranks * chunks, microbatches, ranks=ranks), ranks * chunks, microbatches


@given(schedules())
@settings(deadline=None)
def test_what_is_made_passes_the_check(case):
    check_schedule(*case)


@given(schedules())
@settings(deadline=None)
def test_stored_activations_keep_their_bound(case):
    schedule, stages, microbatches = case
    ranks = len(schedule)
    chunks, size = stages // ranks, microbatches // max(1, microbatches // ranks)
    for rank, actions in enumerate(schedule):
        peak = peak_activations(actions)
        if chunks > 1:
            bound = (chunks - 1) * size + 2 * (ranks - rank - 1) + 1
            assert peak == min(chunks * microbatches, bound)
        else:
            assert peak in {microbatches, min(microbatches, ranks - rank)}


@pytest.mark.parametrize("stages", STAGES)
def test_1f1b_stores_fewer_than_gpipe(stages):
    gpipe, plain = make_schedule("gpipe", stages, 16), make_schedule("1f1b", stages, 16)
    assert [peak_activations(a) for a in gpipe] == [16] * stages
    assert [peak_activations(a) for a in plain] == [stages - rank for rank in range(stages)]


@given(schedules(), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_streams_never_hold_more_than_the_nearer_rank_stores(case, rng):
    """Ranks are run in a random order; only receives wait."""
    schedule, _stages, _microbatches = case
    ranks = len(schedule)
    todo, held, stored = [list(reversed(a)) for a in schedule], {}, [0] * ranks
    while any(todo):
        rank = rng.choice([r for r in range(ranks) if todo[r]])
        action = todo[rank][-1]
        stored[rank] += (action.kind == "forward") - (action.kind == "backward")
        if "_" in action.kind:
            way = route(action)
            stream = held.setdefault((way.source % ranks, way.target % ranks, way.target > way.source), [])
            if action.kind.startswith("recv"):
                if not stream:
                    continue
                assert stream.pop(0) == (way, action.microbatch)
            else:
                stream.append((way, action.microbatch))
                nearer = min(way) % ranks
                assert len(stream) <= stored[nearer]
        todo[rank].pop()


@given(schedules(), st.data())
@settings(deadline=None)
def test_a_schedule_with_one_action_lost_doubled_or_changed_is_refused(case, data):
    schedule, stages, microbatches = case
    rank = data.draw(st.integers(0, len(schedule) - 1))
    actions = list(schedule[rank])
    at = data.draw(st.integers(0, len(actions) - 1))
    how = data.draw(st.sampled_from(["lose", "double", "replace", "change"]))
    if how == "lose":
        del actions[at]
    elif how == "double":
        actions.insert(at, actions[at])
    elif how == "replace":
        actions[at] = actions[at - 1] if len(actions) > 1 else Action("backward", 7, 7)
    else:
        actions[at] = actions[at]._replace(microbatch=microbatches)
    with pytest.raises(ConfigError):
        check_schedule((*schedule[:rank], actions, *schedule[rank + 1 :]), stages, microbatches)


@given(schedules(), st.data())
@settings(deadline=None)
def test_a_check_that_passes_means_that_it_runs_in_any_order_of_ranks(case, data):
    """Two neighbouring actions swapped: refused, or it runs to the end whichever rank comes first."""
    schedule, stages, microbatches = case
    rank = data.draw(st.integers(0, len(schedule) - 1))
    actions = list(schedule[rank])
    if len(actions) < 2:
        return
    at = data.draw(st.integers(1, len(actions) - 1))
    actions[at - 1], actions[at] = actions[at], actions[at - 1]
    swapped = (*schedule[:rank], tuple(actions), *schedule[rank + 1 :])
    try:
        check_schedule(swapped, stages, microbatches)
    except ConfigError:
        return
    run_backwards(swapped)


def run_backwards(schedule):
    """Run it with the last rank always tried first, and matching messages by what they are."""
    todo, sent = [list(reversed(a)) for a in schedule], set()
    while any(todo):
        for rank in reversed(range(len(todo))):
            action = todo[rank][-1] if todo[rank] else None
            if action is None:
                continue
            if action.kind.startswith("recv") and (route(action), action.microbatch) not in sent:
                continue
            if action.kind.startswith("send"):
                sent.add((route(action), action.microbatch))
            todo[rank].pop()
            break
        else:
            pytest.fail("nobody can go on")


def one_and_two():
    return [list(actions) for actions in make_schedule("1f1b", 2, 2)]


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda a: a.pop(), "no schedule of 2 microbatches through 3 stages|rank 0|1 ranks"),
        (lambda a: a[0].pop(), "rank 0 has 7 actions, not 8"),
        (lambda a: a[0].reverse(), "rank 0: backward of stage 0, microbatch 1 comes before"),
        (lambda a: a[1].__setitem__(0, Action("forward", 0, 0)), "rank 1: forward of stage 0.* isn't its"),
        (lambda a: a[1].__setitem__(0, a[1][1]), "forward of stage 1, microbatch 0 .*comes twice"),
        (lambda a: a.reverse(), "rank 0: .* isn't its to do"),
        (lambda a: a[0].insert(0, a[0].pop(4)), "never ends: rank 0 for recv_g.*, rank 1 for recv_a"),
        (
            lambda a: a[0].__setitem__(slice(0, 4), [*a[0][2:4], *a[0][:2]]),
            "rank 1: another message arrives before that of recv_activation of stage 1, microbatch 0",
        ),
    ],
)
def test_what_is_wrong_is_told(spoil, why):
    schedule = one_and_two()
    spoil(schedule)
    with pytest.raises(ConfigError, match=why):
        check_schedule(schedule, 2, 2)


def test_a_schedule_of_other_numbers_is_refused_before_work_is_done():
    schedule = make_schedule("gpipe", 2, 2)
    for stages, microbatches in [(2, 10**12), (0, 2), (2, 0), (3, 2), (4, 2)]:
        with pytest.raises(ConfigError):
            check_schedule(schedule, stages, microbatches)
    with pytest.raises(ConfigError):
        check_schedule((), 2, 2)


def test_microbatches_of_a_stage_may_come_in_any_order_that_all_ranks_share():
    """The check isn't bound to the three schedules: GPipe's paper runs the backwards from last to first."""
    rng = random.Random(3)
    order = rng.sample(range(5), 5)
    made = make_schedule("1f1b", 3, 5)
    check_schedule([[a._replace(microbatch=order[a.microbatch]) for a in row] for row in made], 3, 5)
    (only,) = make_schedule("gpipe", 1, 4)
    check_schedule([only[:4] + only[:3:-1]], 1, 4)
