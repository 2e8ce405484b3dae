"""Models to be cut, and pipelines of threads that run them."""

from __future__ import annotations

import dataclasses
import queue
import threading

import torch

from p2pdrl.config.task import NetworkConfig
from p2pdrl.errors import PeerTimeoutError, PeerUnreachableError, TransportError
from p2pdrl.pipeline.plan import PipelinePlan
from p2pdrl.rl.actor_critic_q import DeterministicActorCritic
from p2pdrl.rl.algorithms.a2c import A2CObjective
from p2pdrl.rl.algorithms.ddpg import JointObjective
from p2pdrl.rl.algorithms.ppo import PPOObjective
from p2pdrl.rl.engines import policy_forward
from p2pdrl.rl.envs import Discrete
from p2pdrl.rl.flat import FlatModule
from p2pdrl.rl.gradients import Minibatch
from p2pdrl.rl.optimizers import Optimizer
from p2pdrl.rl.pipeline.links import FramedLinks, ring
from p2pdrl.rl.pipeline.messages import RowSpec
from p2pdrl.rl.pipeline.parts import joint_parts, policy_parts
from p2pdrl.rl.pipeline.rank import Pipelined, StageServer
from p2pdrl.rl.pipeline.stage_parameters import StageParameters
from p2pdrl.rl.policy import ActorCritic
from p2pdrl.tensors.optimizers import Adam

from ..gradient_cases import Case
from ..policies import CONTROL, FRAMES, LSTM, PICTURE, RESNET, TRANSFORMER, VECTOR, make_inputs

CPU = torch.device("cpu")
ROWS = 11
"""Odd, so that most cuts are uneven."""
STEPS = 5
TIMEOUT_S = 30.0
"""No test waits for it."""
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5}
"""How far a pipeline may be from the model in one piece; see `relative`."""

PPO = PPOObjective(clip=0.2, value_clip=0.3, value_coef=0.7, entropy_coef=0.01)
A2C = A2CObjective(value_coef=0.5, entropy_coef=0.01)

MODELS = {
    "mlp": (VECTOR, NetworkConfig(hidden=(8, 7, 6, 5, 4))),
    "mlp-control": (CONTROL, NetworkConfig(hidden=(8, 7, 6))),
    "cnn": (FRAMES, NetworkConfig(hidden=(16,))),
    "resnet": (PICTURE, RESNET),
    "transformer": (CONTROL, TRANSFORMER),
    "lstm": (VECTOR, LSTM),
}


def make_case(name, dtype=torch.float64, objective=PPO, rows=ROWS, precision="float32"):
    """A policy with one batch, and its parts."""
    spec, network = MODELS[name]
    policy = ActorCritic(spec, network, 0)
    flat = FlatModule(policy, CPU, dtype)
    generator = torch.Generator().manual_seed(1)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    if not spec.is_image:
        flat.parameters_D.add_(0.3 * draw(flat.layout.size))  # heads begin near zero
    obs, context = _inputs(spec, network, rows, dtype)
    leading = (rows,) if policy.core is None else (rows, STEPS)
    discrete = isinstance(spec.action, Discrete)
    targets = {
        "actions": torch.randint(spec.action.n, leading, generator=generator)
        if discrete
        else draw(*leading, spec.action.dim),
        "advantages": draw(*leading),
        "returns": draw(*leading),
    }
    if isinstance(objective, PPOObjective):
        targets |= {"log_probs": -1.0 + 0.3 * draw(*leading), "values": draw(*leading)}
    batch = Minibatch(obs, targets, rows)
    if policy.core is not None:
        targets["valid"] = draw(*leading) > -1.0
        batch = Minibatch(obs, targets, int(targets["valid"].sum()), context)
    parts = policy_parts(
        policy,
        objective,
        Optimizer(Adam(), flat),
        steps=STEPS,
        most_rows=rows,
        precision=precision,
    )
    parts = dataclasses.replace(parts, inputs=RowSpec(parts.inputs.shape, obs.dtype))
    return Case(flat, policy, batch, objective, policy_forward(policy, precision)), parts


def make_joint_case(dtype=torch.float64, hidden=(8, 7, 6), rows=ROWS):
    """An actor with its critic, one batch, and their parts."""
    policy = DeterministicActorCritic(CONTROL, NetworkConfig(hidden=hidden), 0, critics=1)
    flat = FlatModule(policy, CPU, dtype)
    generator = torch.Generator().manual_seed(1)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    flat.parameters_D.add_(0.3 * draw(flat.layout.size))
    inputs = torch.cat((draw(rows, *CONTROL.obs_shape), draw(rows, policy.dim).tanh()), 1)
    targets = {"targets": draw(rows), "weights": draw(rows).abs(), "errors": torch.empty(rows, dtype=dtype)}
    objective = JointObjective()
    parts = joint_parts(policy, objective, Optimizer(Adam(), flat), most_rows=rows)
    batch = Minibatch(inputs, targets, rows)
    return Case(flat, policy, batch, objective, lambda x, _: policy.q_values_and_own(x)), parts


def _inputs(spec, network, rows, dtype):
    from ..policies import POLICIES

    name = next(name for name, (other, net) in POLICIES.items() if other == spec and net.core == network.core)
    obs, context = make_inputs(name, rows, steps=STEPS)
    state = context.state_BS
    return obs.to(dtype), context._replace(state_BS=None if state is None else state.to(dtype))


def even_cuts(blocks, stages):
    return tuple(blocks * stage // stages for stage in range(1, stages))


def make_plan(parts, stages, microbatches, schedule="1f1b", ranks=None):
    blocks = len(parts.blocks)
    return PipelinePlan(blocks, even_cuts(blocks, stages), schedule, microbatches, ranks or stages)


class Pipes:
    """A carrier on queues of frames, whose bytes are copied when they are sent."""

    def __init__(self, incoming, outgoing):
        self._incoming, self._outgoing = incoming, outgoing

    def send(self, way, message, tensors):
        assert all(view.format == "B" and view.c_contiguous for view in tensors)
        self._outgoing[way].put((bytes(message), memoryview(b"".join(tensors))))

    def receive(self, way, timeout_s):
        try:
            frame = self._incoming[way].get(timeout=timeout_s)
        except queue.Empty:
            raise PeerTimeoutError("late") from None
        if frame is None:
            self._incoming[way].put(None)
            raise PeerUnreachableError("closed")
        return frame

    def close(self):
        for pipe in (*self._incoming.values(), *self._outgoing.values()):
            pipe.put(None)


def framed_ring(ranks, carrier=Pipes):
    down, up = [[queue.SimpleQueue() for _ in range(ranks)] for _ in range(2)]
    return [
        FramedLinks(
            carrier(
                {"down": down[rank - 1], "up": up[(rank + 1) % ranks]}, {"down": down[rank], "up": up[rank]}
            )
        )
        for rank in range(ranks)
    ]


class Pipeline:
    """All ranks but the first in threads of their own."""

    def __init__(
        self,
        parts,
        plan,
        make_links=ring,
        generation=7,
        shares=None,
        state_every=None,
        spread=False,
        **options,
    ):
        links = make_links(plan.ranks)
        if shares is None:
            shares = [StageParameters(parts, plan, rank, CPU, **options) for rank in range(plan.ranks)]
        self.shares = shares
        alone = plan.ranks == 1
        self.head = Pipelined(
            shares[0],
            None if alone else links[0],
            generation=generation,
            timeout_s=TIMEOUT_S,
            state_every=state_every,
            spread=spread,
        )
        self.servers = [
            StageServer(
                shares[rank],
                links[rank],
                generation=generation,
                timeout_s=TIMEOUT_S,
                idle_timeout_s=TIMEOUT_S,
            )
            for rank in range(1, plan.ranks)
        ]
        self.results = {rank: [] for rank in range(1, plan.ranks)}
        self.errors = {}
        self._threads = [
            threading.Thread(target=self._serve, args=(rank, server))
            for rank, server in enumerate(self.servers, 1)
        ]

    def _serve(self, rank, server):
        torch.set_num_threads(1)
        try:
            while True:
                self.results[rank].append(server.serve())
        except TransportError as error:
            self.errors[rank] = error
        finally:
            server.close()

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self.head.close()
        self.join()

    def join(self):
        for thread in self._threads:
            thread.join(TIMEOUT_S)
            assert not thread.is_alive()

    def gradient(self, parts):
        """The whole gradient, as it lies on the ranks."""
        whole = torch.full((parts.block_map.layout.size,), float("nan"), dtype=parts.dtype)
        for share in self.shares:
            numbers = share.plan.numbers(share.rank)
            parts.block_map.put(share.gradients_P.numpy(), whole.numpy(), numbers)
        return whole


def step_with(pipeline, learning_rate=1e-2, max_grad_norm=0.5):
    """A step of all ranks; returns the norm."""
    return pipeline.head.step(
        None, learning_rate=learning_rate, max_grad_norm=max_grad_norm, samples=0, left=0
    )


def relative(found, expected):
    """The largest difference, in the scale of the largest number."""
    return float((found - expected).abs().max() / expected.abs().max())
