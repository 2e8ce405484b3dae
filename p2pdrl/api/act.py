"""``POST /v1/act``: actions of the node's newest policy for observations that the caller has.

JSON::

    {"observations": [0.1, 0.0, -0.2, 0.3], "greedy": true}
    → {"actions": [1], "values": [21.5], "log_probs": [-0.6], "policy_version": 812}

``observations`` is one observation or a list of them, as the task's environment gives them after the
wrappers that its configuration asks for; ``GET /v1/act`` tells their types and shapes. One with several
entries is an object (Dict) or a list (Tuple; of those always send a list of observations). ``greedy`` takes
the likeliest actions, otherwise they are sampled; who explores by ε in training doesn't here. ``mask`` says
for each action whether it is allowed, where environments tell that beside their observations; without it all
are. Lists of the answer have one element for each observation. ``values`` is v(s), only where the policy has
a value function; ``log_probs`` are of these actions, and zero where the policy has no probabilities.

Binary: ``Content-Type: application/octet-stream``; count, ``greedy`` and ``values`` (1 or 0) in the query::

    POST /v1/act?rows=64&greedy=1&values=1

The body is ``rows`` observations, one behind the other, in C order, little-endian, of the dtype and shape
that ``GET /v1/act`` tells. So is the answer of actions, whose dtype and shape are in ``P2PDRL-Action-Dtype``
and ``P2PDRL-Action-Shape``; ``rows`` float32 values follow where they were asked for and there are any
(``P2PDRL-Values: float32``). ``P2PDRL-Policy-Version`` is the policy's. Observations of several entries, or
with masks, are taken as JSON only.

Nothing that a caller sends reaches the policy unchecked: wrong lengths and types, NaN and infinity are
refused with 400. With a swarm key signatures cover path and query of a request, as everywhere, not its body.
"""

# ruff: noqa: N806, N815 (names carry shape suffixes)
from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from aiohttp import web

from p2pdrl.api.answers import ApiRefusal, json_answer
from p2pdrl.api.protocol import NodeView
from p2pdrl.errors import UsageError
from p2pdrl.tensors.inference_slots import InferenceSpec, PolicyAnswer
from p2pdrl.tensors.observation_rows import rows_of_lists, wanted

__all__ = ["ActHandlers", "ActQuestion", "decode_binary", "decode_json"]

Array = npt.NDArray[Any]

BINARY = "application/octet-stream"
MAX_JSON_BYTES = 1 << 20
"""Longer ones would hold the event loop up; the binary form takes more."""
BODY_S = 30.0
"""The longest that a body may take to come."""
_QUERY = frozenset({"rows", "greedy", "values"})


class ActQuestion(NamedTuple):
    """What a caller asks.

    Args:
        obs_NX: rows, as `InferenceSpec` says.
    """

    obs_NX: Array
    greedy: bool
    values: bool


class _Body(msgspec.Struct, forbid_unknown_fields=True):
    observations: Any
    greedy: bool = False
    mask: Any = None


_decoder = msgspec.json.Decoder(_Body)


class ActHandlers:
    """Handlers of the two routes of one node."""

    def __init__(self, node: NodeView) -> None:
        self._node = node

    async def describe(self, _request: web.Request) -> web.Response:
        """What observations and actions are."""
        spec = await self._node.act_spec()
        return json_answer({**describe(spec), "max_rows": self._node.max_act_rows})

    async def act(self, request: web.Request) -> web.Response:
        """Read, check, ask, answer in the form of the question."""
        kind = request.content_type
        if kind not in (BINARY, "application/json"):
            raise ApiRefusal(415, f"this route takes application/json or {BINARY}, as Content-Type")
        length = request.content_length
        if kind == BINARY and length is None:
            raise ApiRefusal(411, "a binary body wants its Content-Length")
        if kind != BINARY and (length or 0) > MAX_JSON_BYTES:
            raise _too_long(length)
        spec, most = await self._node.act_spec(), self._node.max_act_rows
        if kind != BINARY:
            question = decode_json(await _read(request, MAX_JSON_BYTES), spec, most)
            answer = await self._node.act(question.obs_NX, greedy=question.greedy)
            return json_answer(_document(answer))
        rows = _rows(dict(request.query), spec, most, length or 0)
        body = await _read(request, rows * spec.row_nbytes)
        question = decode_binary(body, dict(request.query), spec, most)
        answer = await self._node.act(question.obs_NX, greedy=question.greedy)
        return _binary_answer(answer, values=question.values)


async def _read(request: web.Request, most: int) -> bytes:
    """Return the body.

    Raises:
        ApiRefusal: 413 where it is longer than ``most``, 408 where it doesn't come.
    """
    found = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            while piece := await request.content.readany():
                found += piece
                if len(found) > most:
                    raise _too_long(len(found))
    except TimeoutError:
        raise ApiRefusal(408, f"the body didn't come within {BODY_S:g} s") from None
    return bytes(found)


def _too_long(length: int | None) -> ApiRefusal:
    return ApiRefusal(
        413, f"the body has {length} bytes or more: at most {MAX_JSON_BYTES} as JSON; send {BINARY} for more"
    )


# --- what a policy takes -------------------------------------------------------------------------


def describe(spec: InferenceSpec) -> dict[str, object]:
    """Return the document of ``GET /v1/act``, without the bound on rows."""
    observations: dict[str, object]
    if spec.several:
        entries = [
            {"path": list(one.path), "is": str(one), "dtype": one.dtype, "shape": list(one.shape)}
            for one in spec.entries
        ]
        observations = {"kind": spec.several, "entries": entries, "binary": False}
    elif spec.entries:
        one = spec.entries[0]
        observations = {"kind": "array", "dtype": one.dtype, "shape": list(one.shape), "binary": False}
    else:
        observations = {"kind": "array", "dtype": spec.obs_dtype, "shape": list(spec.obs_shape)}
        observations |= {"binary": True, "row_bytes": spec.row_nbytes}
    mask = None
    if spec.mask is not None:
        mask = {"shape": list(spec.mask.shape), "where": "mask" if spec.info_mask else list(spec.mask.path)}
    return {
        "observations": observations,
        "mask": mask,
        "actions": {"dtype": spec.action_dtype, "shape": list(spec.action_shape)},
        "values": spec.has_values,
    }


# --- binary --------------------------------------------------------------------------------------


def _rows(query: dict[str, str], spec: InferenceSpec, most: int, nbytes: int) -> int:
    """Return how many observations a binary body of so many bytes has.

    Raises:
        ApiRefusal: 400 where it can't be what the query says.
    """
    if spec.entries:
        raise ApiRefusal(400, f"observations of several entries are taken as JSON only: {wanted(spec)}")
    if unknown := set(query) - _QUERY:
        raise ApiRefusal(400, f"this route takes rows, greedy and values, not {min(unknown)[:40]!r}")
    text = query.get("rows", "")
    rows = int(text) if text.isascii() and text.isdecimal() and len(text) <= 9 else 0
    if not 1 <= rows <= most:
        raise ApiRefusal(400, f"write ?rows= and how many observations there are, 1 to {most}")
    if nbytes != rows * spec.row_nbytes:
        raise ApiRefusal(
            400,
            f"{rows} observations of {wanted(spec)} are {rows * spec.row_nbytes} bytes, not {nbytes}",
        )
    return rows


def decode_binary(body: bytes, query: dict[str, str], spec: InferenceSpec, most: int) -> ActQuestion:
    """Read a binary question; nothing in it is believed.

    Args:
        most: observations.

    Raises:
        ApiRefusal: 400 with what is expected.
    """
    rows = _rows(query, spec, most, len(body))
    dtype = np.dtype(spec.obs_dtype)
    if dtype == np.bool_:
        raw = np.frombuffer(body, np.uint8)
        if raw.max(initial=0) > 1:
            raise ApiRefusal(400, "truth values are bytes of 0 or 1")
    obs: Array = np.frombuffer(body, dtype.newbyteorder("<")).reshape(rows, *spec.obs_shape)
    if dtype.kind == "f" and not np.isfinite(obs).all():
        raise ApiRefusal(400, "observations hold NaN or infinity; all their numbers must be finite")
    return ActQuestion(obs, _flag(query, "greedy"), _flag(query, "values"))


def _flag(query: dict[str, str], name: str) -> bool:
    text = query.get(name, "0").lower()
    if text not in ("0", "1", "false", "true"):
        raise ApiRefusal(400, f"{name} is 0 or 1")
    return text in ("1", "true")


def _binary_answer(answer: PolicyAnswer, *, values: bool) -> web.Response:
    actions_NA = answer.actions_NA
    parts = [actions_NA.astype(actions_NA.dtype.newbyteorder("<"), copy=False).tobytes()]
    headers = {
        "Cache-Control": "no-store",
        "P2PDRL-Policy-Version": str(answer.policy_version),
        "P2PDRL-Action-Dtype": actions_NA.dtype.name,
        "P2PDRL-Action-Shape": ",".join(str(length) for length in actions_NA.shape),
    }
    if values and answer.values_N is not None:
        parts.append(answer.values_N.astype("<f4", copy=False).tobytes())
        headers["P2PDRL-Values"] = "float32"
    return web.Response(body=b"".join(parts), content_type=BINARY, headers=headers)


# --- JSON ----------------------------------------------------------------------------------------


def decode_json(body: bytes, spec: InferenceSpec, most: int) -> ActQuestion:
    """Read a question in JSON.

    Args:
        most: observations.

    Raises:
        ApiRefusal: 400 with what is expected.
    """
    try:
        asked = _decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ApiRefusal(
            400, f'the body isn\'t {{"observations": …, "greedy": false, "mask": …}}: {str(error)[:200]}'
        ) from None
    try:
        obs_NX = rows_of_lists(spec, asked.observations, asked.mask, most)
    except UsageError as error:
        raise ApiRefusal(400, str(error)) from None
    return ActQuestion(obs_NX, asked.greedy, values=True)


def _document(answer: PolicyAnswer) -> dict[str, object]:
    document: dict[str, object] = {"actions": answer.actions_NA.tolist()}
    if answer.values_N is not None:
        document["values"] = answer.values_N.tolist()
    document["log_probs"] = answer.log_probs_N.tolist()
    return {**document, "policy_version": answer.policy_version}
