"""What members of an averaging group say to each other on the route ``reduce``.

Lists travel without field names; everything is bounded before it is believed.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from p2pdrl.group.compatibility import Natural
from p2pdrl.group.view import MAX_MEMBERS, ViewKey

__all__ = ["ROUTE", "Digest", "ReduceAnswer", "ReduceRequest"]

ROUTE = "reduce"
MAX_WEIGHT = 1e12
MAX_LEARNING_RATE = 1e6

Digest = Annotated[bytes, Meta(max_length=16)]
LearningRate = Annotated[float, Meta(ge=0, le=MAX_LEARNING_RATE)]
Finite = Annotated[float, Meta(ge=0, le=1e300)]


class ReduceRequest(msgspec.Struct, frozen=True, array_like=True):
    """What a member wants of another one.

    Attributes:
        what: ``part``: take my piece, and give me the average once all have come; ``alive``: are you there,
            I wait for you; ``result``: the last round's whole average; ``state``: what a newcomer needs;
            ``store``: the port where your process opened the group's store, as the answer's number.
        key: the view that the sender acts in.
        number: of the round.
        weight: of the part; a part of weight 0 has no vector.
        policy_version: the part's.
        learning_rate: at which the sender would step.
        call: number of the call, for those whose answers are held (see `group.held_calls`).
        left: gradients of the sender's update that come after this one.
    """

    what: Literal["part", "alive", "result", "state", "store"]
    key: ViewKey
    number: Natural
    weight: Annotated[float, Meta(ge=0, le=MAX_WEIGHT)] = 0.0
    policy_version: Natural = 0
    learning_rate: LearningRate = 0.0
    call: Natural = 0
    left: Natural = 0


class ReduceAnswer(msgspec.Struct, frozen=True, array_like=True):
    """The answer.

    Attributes:
        number: round that the vector is of, or that the sender has completed.
        weights: of the members, in their order.
        versions: their policy versions.
        square: ‖average‖² of this piece.
        spread: Σ w_k ‖x_k − average‖² / Σ w_k of this piece; 0 where it isn't measured.
        mark: digest of the sender's rounds (see `history`).
        before: the same, one round earlier.
        state: of the sender's parameters, where others take its whole state.
        learning_rates: at which the members would step, in their order.
        ends_update: whether the leader's update ends with this round (see `group.round_collector`).
    """

    number: Natural
    weights: Annotated[tuple[Finite, ...], Meta(max_length=MAX_MEMBERS)] = ()
    versions: Annotated[tuple[Natural, ...], Meta(max_length=MAX_MEMBERS)] = ()
    square: Finite = 0.0
    spread: Finite = 0.0
    mark: Digest = b""
    before: Digest = b""
    state: Digest = b""
    learning_rates: Annotated[tuple[LearningRate, ...], Meta(max_length=MAX_MEMBERS)] = ()
    ends_update: bool = False
