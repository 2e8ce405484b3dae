"""Runs one rank's actions for one minibatch: what ``pipeline.schedule`` says, on tensors, measured."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, Protocol

import torch
from torch import Tensor

from p2pdrl.pipeline.schedule import peak_activations
from p2pdrl.pipeline.trace import MOST_SPANS, TraceSpan
from p2pdrl.rl.gradients import Minibatch, Objective, Outputs
from p2pdrl.rl.networks.lstm import RecurrentContext
from p2pdrl.rl.pipeline.links import Links, Way, receive
from p2pdrl.rl.pipeline.messages import Activation, Buffers, Gradient, Message, Opening, RowSpec, TensorSlot
from p2pdrl.rl.pipeline.stage_parameters import StageParameters
from p2pdrl.rl.sequential import saved_bytes

__all__ = ["ActivationBytes", "ActivationMemory", "Recorder", "Running", "ScheduleRunner"]


class Recorder:
    """Keeps the last spans. One thread adds; any may read.

    Attributes:
        activation_bytes: most that was kept for backwards at once, since it was set to 0.
    """

    def __init__(self, most: int = MOST_SPANS) -> None:
        self._spans: deque[TraceSpan] = deque(maxlen=most)
        self._lock = threading.Lock()
        self.activation_bytes = 0

    def add(self, span: TraceSpan) -> None:
        """Note what was done."""
        with self._lock:
            self._spans.append(span)

    def kept(self, nbytes: int) -> None:
        """Note how many bytes are kept now."""
        self.activation_bytes = max(self.activation_bytes, nbytes)

    def spans(self, since_s: float = float("-inf")) -> list[TraceSpan]:
        """Return the spans that ended after a time, in the order in which they ended."""
        with self._lock:
            return [span for span in self._spans if span.end_s > since_s]


class ActivationBytes(NamedTuple):
    """Of one microbatch in one stage, beside what comes in and what goes out.

    Attributes:
        waiting_bytes: from its forward to its backward.
        anew_bytes: more in its backward, where they are computed anew for it.
    """

    waiting_bytes: int
    anew_bytes: int


class ActivationMemory(Generic[Outputs]):
    """Runs a share's stages. The first microbatch of each length is looked at.

    Where activations are computed anew, looking takes another forward: what autograd keeps of the real one
    isn't there yet. Of a recurrent policy, a microbatch in which episodes begin keeps more than one in which
    none does: the first stands for all.
    """

    def __init__(self, share: StageParameters[Outputs]) -> None:
        self._share = share
        self._inner_bytes: dict[tuple[int, int], int] = {}

    def forward(
        self, stage: int, x: Tensor, context: RecurrentContext, *, stored: int
    ) -> tuple[Tensor, ActivationBytes]:
        """Return what `StageParameters.forward` does, and what is kept of it."""
        share, key, output = self._share, (stage, len(x)), None
        anew = share.computes_anew(stored)
        if key not in self._inner_bytes:
            known = [share.parameters_P, x, *(tensor for tensor in context if tensor is not None)]
            output, self._inner_bytes[key] = saved_bytes(
                lambda: share.forward(stage, x, context, stored=1), known
            )
        if output is None or anew:
            output = None  # lets go of what it took to look
            output = share.forward(stage, x, context, stored=stored)
        inner_bytes = self._inner_bytes[key]
        return output, ActivationBytes(0, inner_bytes) if anew else ActivationBytes(inner_bytes, 0)


class Running(Protocol):
    """Computes the gradients of one share, minibatch by minibatch.

    Attributes:
        waited_s: seconds spent waiting for neighbours, since its rank set it to 0.
        ran_s: seconds that minibatches took, waiting included, since then.
        recorder: told of each action, with what it keeps. Its rank sets it.
    """

    waited_s: float
    ran_s: float
    recorder: Recorder

    def begin(self, opening: Opening, batches: Sequence[Minibatch] = ()) -> None:
        """Forget the minibatch before and prepare for another; the first rank is given its microbatches.

        Raises:
            WireError: this is the last rank, and the opening doesn't say what its objective is.
        """

    def room(self, stage: int, microbatch: int) -> list[TensorSlot]:
        """Return where the tensors go that come with the opening, which is with the rank's first message."""

    def run(self) -> Tensor | None:
        """Do all that is to be done; the gradients are in the share then.

        Returns:
            The objective's terms, where this is the last rank.

        Raises:
            TransportError: a neighbour is gone, late or sent what doesn't fit.
        """

    def forget(self) -> None:
        """Let go of all that a minibatch keeps, wherever it was broken off: no other follows."""


Key = tuple[int, int]
"""A stage and a microbatch."""


class ScheduleRunner(Generic[Outputs]):
    """Implements `Running` over links, which are None where one rank is all.

    ``timeout_s`` bounds each wait for a message.
    """

    def __init__(
        self,
        share: StageParameters[Outputs],
        links: Links | None,
        timeout_s: float,
        clock: Callable[[], float] = time.perf_counter,
        recorder: Recorder | None = None,
    ) -> None:
        self._share = share
        self._plan = share.plan
        self._links = links
        self._timeout_s = timeout_s
        self._clock = clock
        self.recorder = recorder or Recorder()
        self._buffers = Buffers(share.device)
        self._activations = ActivationMemory(share)
        self.waited_s = self.ran_s = 0.0
        self._do = {
            "recv_activation": self._recv_activation,
            "forward": self._forward,
            "send_activation": self._send_activation,
            "recv_gradient": self._recv_gradient,
            "backward": self._backward,
            "send_gradient": self._send_gradient,
        }

    def begin(self, opening: Opening, batches: Sequence[Minibatch] = ()) -> None:
        """See ``Running.begin``."""
        share = self._share
        self.forget()
        self._opening = opening
        self._sizes = opening.sizes
        self._actions = self._plan.actions(share.rank, opening.parts)
        self._stored = peak_activations(self._actions)
        self._objective: Objective[Outputs] | None = None
        if share.rank == self._plan.ranks - 1:
            self._objective = share.parts.objective_of(opening)
        for microbatch, batch in enumerate(batches):
            self._inputs[0, microbatch] = batch.inputs.to(share.device)
            self._extras[microbatch] = {
                name: tensor.to(share.device)
                for name, tensor in (*batch.targets.items(), *batch.context._asdict().items())
                if tensor is not None
            }
        share.begin()

    def forget(self) -> None:
        """See ``Running.forget``."""
        self._inputs: dict[Key, Tensor] = {}
        self._roots: dict[Key, Tensor] = {}
        self._gradients: dict[Key, Tensor] = {}
        self._extras: dict[int, dict[str, Tensor]] = {}
        self._lent: dict[Key, list[tuple[RowSpec, Tensor]]] = {}
        self._terms: Tensor | None = None
        self._kept: dict[Key, ActivationBytes] = {}
        self._kept_bytes = 0

    def run(self) -> Tensor | None:
        """See ``Running.run``."""
        begin = before = self._clock()
        for action in self._actions:
            kind, stage, microbatch = action
            self._do[kind](stage, microbatch)
            now = self._clock()
            self.recorder.add(TraceSpan(kind, before, now, stage, microbatch, self._opening.step))
            before = now
        # by now all that was sent has arrived: its gradient has come back
        for key in list(self._lent):
            self._give_back(key)
        self._extras.clear()
        self.ran_s += self._clock() - begin
        return self._terms

    def room(self, stage: int, microbatch: int) -> list[TensorSlot]:
        """Return where an activation goes that comes with targets and context, or without."""
        parts, rows = self._share.parts, self._sizes[microbatch]
        spec = parts.outputs[self._plan.blocks_of(stage)[0] - 1]
        memory = self._borrow((stage, microbatch), spec, rows)
        self._inputs[stage, microbatch] = memory.detach().requires_grad_()
        slots = [TensorSlot(memory)]
        if self._first_lap(stage):
            extras = {name: self._borrow((-1, microbatch), extra, rows) for name, extra in parts.extras}
            self._extras[microbatch] = extras
            slots += [TensorSlot(extras[name], extra.below) for name, extra in parts.extras]
        return slots

    def _recv_activation(self, stage: int, microbatch: int) -> None:
        if (stage, microbatch) in self._inputs:  # came with the opening
            return
        wanted = Activation(stage, microbatch)
        self._receive("down", wanted, lambda: self.room(stage, microbatch))

    def _forward(self, stage: int, microbatch: int) -> None:
        share, inputs = self._share, self._inputs[stage, microbatch]
        extras = self._extras.get(microbatch, {})
        context = RecurrentContext(extras.get("starts_BT"), extras.get("state_BS"))
        output, kept = self._activations.forward(stage, inputs, context, stored=self._stored)
        self._keep((stage, microbatch), inputs, output, kept)
        if stage == self._plan.stages - 1:
            assert self._objective is not None  # noqa: S101 - this is the last rank
            targets = {name: extras[name] for name in share.parts.targets}
            output, terms = self._objective(share.outputs(output), targets)
            self._terms = terms if self._terms is None else self._terms + terms
        elif self._links is None:
            self._inputs[stage + 1, microbatch] = output.detach().requires_grad_()
        self._roots[stage, microbatch] = output

    def _send_activation(self, stage: int, microbatch: int) -> None:
        tensors = [self._roots[stage, microbatch].detach()]
        opening = None
        if self._first_lap(stage + 1):
            extras = self._extras[microbatch]
            tensors += [extras[name].contiguous() for name, _ in self._share.parts.extras]
            opening = self._opening if microbatch == 0 else None
        self._send("down", Activation(stage + 1, microbatch, opening), tensors)

    def _recv_gradient(self, stage: int, microbatch: int) -> None:
        def room() -> list[TensorSlot]:
            spec = self._share.parts.outputs[self._plan.blocks_of(stage)[-1]]
            memory = self._borrow((stage, microbatch), spec, self._sizes[microbatch])
            self._gradients[stage, microbatch] = memory
            return [TensorSlot(memory)]

        self._receive("up", Gradient(stage, microbatch), room)

    def _backward(self, stage: int, microbatch: int) -> None:
        key = stage, microbatch
        root, leaf, given = self._roots.pop(key), self._inputs.pop(key), self._gradients.pop(key, None)
        kept = self._kept.pop(key)
        self.recorder.kept(self._kept_bytes + kept.anew_bytes)
        if root.requires_grad:
            torch.autograd.backward(root, given)
        if stage > 0:
            found = leaf.grad
            assert found is not None  # noqa: S101 - the loss depends on every input
            # blocks that only look at their input otherwise hand on the memory that is about to be used again
            same = given is not None and _memory(found) == _memory(given)
            self._gradients[stage - 1, microbatch] = found.clone() if same else found
        self._give_back(key)
        self._kept_bytes -= kept.waiting_bytes

    def _send_gradient(self, stage: int, microbatch: int) -> None:
        gradient = self._gradients.pop((stage - 1, microbatch)).contiguous()
        self._send("up", Gradient(stage - 1, microbatch), [gradient])

    def _send(self, way: Way, message: Message, tensors: Sequence[Tensor]) -> None:
        assert self._links is not None  # noqa: S101 - or there is nobody to send to
        self._links.send(way, message, tensors)

    def _receive(self, way: Way, wanted: Message, room: Callable[[], list[TensorSlot]]) -> None:
        assert self._links is not None  # noqa: S101 - or there is nobody to hear from
        begin = self._clock()
        receive(self._links, way, wanted, room, self._timeout_s)
        self.waited_s += self._clock() - begin

    def _keep(self, key: Key, inputs: Tensor, output: Tensor, inner: ActivationBytes) -> None:
        """Count what is kept until the backward: what comes into the stage, what comes out, and between."""
        came = 0 if self._links is None and key[0] > 0 else inputs.nbytes  # else the stage before has it
        self._kept[key] = kept = inner._replace(waiting_bytes=came + output.nbytes + inner.waiting_bytes)
        self._kept_bytes += kept.waiting_bytes
        self.recorder.kept(self._kept_bytes)

    def _borrow(self, key: Key, spec: RowSpec, rows: int) -> Tensor:
        memory = self._buffers.take(spec, rows)
        self._lent.setdefault(key, []).append((spec, memory))
        return memory[:rows]

    def _give_back(self, key: Key) -> None:
        for spec, memory in self._lent.pop(key, ()):
            self._buffers.give(spec, memory)

    def _first_lap(self, stage: int) -> bool:
        """Whether the message to a stage is the first that its rank gets of the microbatch."""
        return stage < self._plan.ranks


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
