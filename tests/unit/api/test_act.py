"""``/v1/act`` over real HTTP and its decoders: good questions, bad ones, and bytes at random."""

from __future__ import annotations

import io
import json

import gymnasium as gym
import numpy as np
import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pdrl.api.act import BINARY, MAX_JSON_BYTES, decode_binary, decode_json
from p2pdrl.api.answers import ApiRefusal
from p2pdrl.api.routes import mount
from p2pdrl.rl.observations import ObservationPacker, layout_of
from p2pdrl.tensors.inference_slots import InferenceEntry, InferenceSpec
from p2pdrl.testing.fake_node import FakeNode

CARTPOLE = FakeNode().policy_spec
PICTURE = InferenceSpec(
    obs_shape=(4, 3, 3), obs_dtype="uint8", action_shape=(2,), action_dtype="float32", has_values=False
)
ONE = [0.1, -0.2, 0.3, 0.5]


def packed_spec(space, **options):
    """The spec that a policy of this space has, and the layout that it comes from."""
    layout = layout_of(space, **options)

    def entry(one):
        return InferenceEntry(one.path, one.shape, one.dtype, one.offset, one.sizes, one.start)

    spec = InferenceSpec(
        obs_shape=(layout.nbytes,),
        obs_dtype="uint8",
        entries=tuple(entry(one) for one in layout.inputs),
        mask=None if layout.mask is None else entry(layout.mask),
        info_mask=layout.info_mask,
        several=""
        if not isinstance(space, gym.spaces.Dict | gym.spaces.Tuple)
        else "dict"
        if isinstance(space, gym.spaces.Dict)
        else "tuple",
        action_shape=(),
        action_dtype="int64",
        has_values=True,
    )
    return spec, layout


@pytest.fixture
def start(serve):
    async def _start(node):
        app = web.Application()
        mount(app, node)
        return await serve(app)

    return _start


async def refused(answer, status, *words):
    text = (await answer.json())["error"]
    assert answer.status == status, text
    assert all(word in text for word in words), text


async def test_json_is_answered_in_order_with_values_and_version(start):
    node = FakeNode()
    client = await start(node)
    answer = await client.post("/v1/act", json={"observations": [ONE, ONE], "greedy": True})
    assert answer.status == 200
    assert await answer.json() == {
        "actions": [0, 1],
        "values": [0.0, 0.5],
        "log_probs": [0.0, 0.0],
        "policy_version": 120,
    }
    obs, greedy = node.acted[0]
    assert greedy
    assert obs.dtype == np.float32
    np.testing.assert_array_equal(obs, np.array([ONE, ONE], np.float32))


async def test_one_observation_is_a_batch_of_one(start):
    node = FakeNode()
    client = await start(node)
    assert (await (await client.post("/v1/act", json={"observations": ONE})).json())["actions"] == [0]
    assert node.acted[0][0].shape == (1, 4)
    assert not node.acted[0][1]


async def test_bytes_are_answered_in_bytes(start):
    node = FakeNode()
    client = await start(node)
    obs = np.arange(12, dtype="<f4").reshape(3, 4)
    answer = await client.post(
        "/v1/act?rows=3&greedy=1&values=1", data=obs.tobytes(), headers={"Content-Type": BINARY}
    )
    assert answer.status == 200
    body = await answer.read()
    headers = answer.headers
    assert (headers["P2PDRL-Action-Dtype"], headers["P2PDRL-Action-Shape"]) == ("int64", "3")
    assert (headers["P2PDRL-Policy-Version"], headers["P2PDRL-Values"]) == ("120", "float32")
    np.testing.assert_array_equal(np.frombuffer(body, "<i8", 3), [0, 1, 2])
    np.testing.assert_array_equal(np.frombuffer(body, "<f4", 3, 24), [0.0, 0.5, 1.0])
    np.testing.assert_array_equal(node.acted[0][0], obs)


async def test_without_a_value_function_there_are_no_values(start):
    node = FakeNode()
    node.policy_spec = PICTURE
    client = await start(node)
    answer = await client.post("/v1/act?rows=1&values=1", data=bytes(36), headers={"Content-Type": BINARY})
    assert "P2PDRL-Values" not in answer.headers
    assert (answer.headers["P2PDRL-Action-Shape"], len(await answer.read())) == ("1,2", 8)
    pictures = np.zeros((4, 3, 3), int).tolist()
    assert "values" not in await (await client.post("/v1/act", json={"observations": pictures})).json()


async def test_get_tells_what_is_taken(start):
    client = await start(FakeNode())
    assert await (await client.get("/v1/act")).json() == {
        "observations": {
            "kind": "array",
            "dtype": "float32",
            "shape": [4],
            "binary": True,
            "row_bytes": 16,
        },
        "mask": None,
        "actions": {"dtype": "int64", "shape": []},
        "values": True,
        "max_rows": 8,
    }


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"observations": [ONE[:3]]}, ["float32 of shape [4]", "[1, 3]"]),
        ({"observations": [ONE, ONE[:3]]}, ["of one length"]),
        ({"observations": []}, ["numbers"]),
        ({"observations": [ONE] * 9}, ["1 to 8"]),
        ({"observations": ["1", "2", "3", "4"]}, ["numbers"]),
        ({"observations": [None] * 4}, ["numbers"]),
        ({"observations": [1e300, 0, 0, 0]}, ["finite"]),
        ({"observations": [10**400, 0, 0, 0]}, []),
        ({"observations": {"a": ONE}}, ["numbers"]),
        ({"observations": ONE, "mask": [1, 1]}, ["no action masks"]),
        ({"observations": ONE, "state": []}, ["state"]),
        ({"observations": ONE, "greedy": 1}, ["greedy"]),
        ({}, ["observations"]),
        ([], ["observations"]),
    ],
)
async def test_bad_json_is_refused_with_what_is_expected(start, body, words):
    node = FakeNode()
    client = await start(node)
    await refused(await client.post("/v1/act", json=body), 400, *words)
    assert node.acted == []


@pytest.mark.parametrize("text", [b"", b"nonsense", b'{"observations": [NaN]}', b"[" * 100_000])
async def test_what_is_no_json_is_refused(start, text):
    client = await start(FakeNode())
    await refused(await client.post("/v1/act", data=text, headers={"Content-Type": "application/json"}), 400)


@pytest.mark.parametrize(
    ("query", "body", "words"),
    [
        ("rows=2", bytes(16), ["2 observations", "32 bytes", "16"]),
        ("rows=9", bytes(144), ["1 to 8"]),
        ("rows=0", b"", ["1 to 8"]),
        ("rows=-1", bytes(16), ["1 to 8"]),
        ("rows=1e0", bytes(16), ["1 to 8"]),
        ("rows=" + "9" * 5000, bytes(16), ["1 to 8"]),
        ("rows=%D9%A1", bytes(16), ["1 to 8"]),
        ("", bytes(16), ["rows="]),
        ("rows=1&greedy=perhaps", bytes(16), ["greedy is 0 or 1"]),
        ("rows=1&dtype=object", bytes(16), ["dtype"]),
        ("rows=1", np.array([0, np.nan, 0, 0], np.float32).tobytes(), ["NaN"]),
        ("rows=1", np.array([0, np.inf, 0, 0], np.float32).tobytes(), ["infinity"]),
    ],
)
async def test_bad_bytes_are_refused_with_what_is_expected(start, query, body, words):
    node = FakeNode()
    client = await start(node)
    answer = await client.post(f"/v1/act?{query}", data=body, headers={"Content-Type": BINARY})
    await refused(answer, 400, *words)
    assert node.acted == []


async def test_other_types_and_long_bodies_are_refused(start):
    client = await start(FakeNode())
    await refused(await client.post("/v1/act", data=b"x", headers={"Content-Type": "text/plain"}), 415)
    long = {"Content-Type": "application/json"}
    await refused(
        await client.post("/v1/act", data=io.BytesIO(b" " * (MAX_JSON_BYTES + 1)), headers=long), 413
    )

    async def pieces():
        for _ in range(40):
            yield b" " * (MAX_JSON_BYTES // 20)

    await refused(await client.post("/v1/act", data=pieces(), headers=long), 413)
    await refused(await client.post("/v1/act?rows=1", data=pieces(), headers={"Content-Type": BINARY}), 411)


async def test_a_refusal_of_the_node_is_passed_on(start):
    node = FakeNode()

    def busy():
        raise ApiRefusal(503, "too many wait", {"Retry-After": "1"})

    node.on_act = busy
    client = await start(node)
    answer = await client.post("/v1/act", json={"observations": ONE})
    assert answer.headers["Retry-After"] == "1"
    await refused(answer, 503, "too many wait")


async def test_with_a_swarm_key_acting_wants_credentials(start):
    node = FakeNode(swarm_key=bytes(32))
    client = await start(node)
    assert (await client.post("/v1/act", json={"observations": ONE})).status == 401
    token = {"Authorization": f"Bearer {node.token}"}
    assert (await client.post("/v1/act", json={"observations": ONE}, headers=token)).status == 200


async def test_other_routes_still_take_no_body(start):
    node = FakeNode()
    client = await start(node)
    token = {"Authorization": f"Bearer {node.token}"}
    assert (await client.post("/v1/pause", data=b"x", headers=token)).status == 400


DICT = gym.spaces.Dict(
    {
        "camera": gym.spaces.Box(0, 255, (4, 4, 3), np.uint8),
        "joints": gym.spaces.Box(-1, 1, (3,), np.float32),
        "tool": gym.spaces.Discrete(5, start=2),
        "switches": gym.spaces.MultiBinary(4),
        "gears": gym.spaces.MultiDiscrete([3, 4]),
    }
)
TUPLE = gym.spaces.Tuple((gym.spaces.Discrete(3), gym.spaces.Box(-9, 9, (2, 2), np.float32)))


def plain(observation):
    """An observation as JSON has it."""
    if isinstance(observation, dict):
        return {key: plain(value) for key, value in observation.items()}
    if isinstance(observation, tuple):
        return [plain(value) for value in observation]
    return np.asarray(observation).tolist()


def stacked(space, samples):
    if isinstance(space, gym.spaces.Dict):
        return {key: np.stack([np.asarray(one[key]) for one in samples]) for key in space.spaces}
    return tuple(np.stack([np.asarray(one[i]) for one in samples]) for i in range(len(space.spaces)))


@pytest.mark.parametrize("space", [DICT, TUPLE], ids=["dict", "tuple"])
def test_entries_are_packed_as_environments_pack_them(space):
    spec, layout = packed_spec(space)
    space.seed(1)
    samples = [space.sample() for _ in range(5)]
    body = json.dumps({"observations": [plain(one) for one in samples]}).encode()
    rows = ObservationPacker(layout, 5, "").pack(stacked(space, samples), {})
    np.testing.assert_array_equal(decode_json(body, spec, 8).obs_NX, rows)


def test_one_dict_is_a_batch_of_one():
    spec, _ = packed_spec(DICT)
    DICT.seed(2)
    body = json.dumps({"observations": plain(DICT.sample())}).encode()
    assert decode_json(body, spec, 8).obs_NX.shape == (1, *spec.obs_shape)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"tool": 7}, "from 2 to 6"),
        ({"tool": 1}, "from 2 to 6"),
        ({"tool": 2.5}, "whole"),
        ({"gears": [0, 4]}, "2 whole numbers"),
        ({"switches": [0, 1, 2, 0]}, "0 to 1"),
        ({"joints": [0, 0]}, "shape [3]"),
        ({"camera": [[[256] * 3] * 4] * 4}, "255"),
        ({"joints": None}, "numbers"),
    ],
)
def test_bad_entries_are_refused_by_name(change, word):
    spec, _ = packed_spec(DICT)
    DICT.seed(3)
    observation = {**plain(DICT.sample()), **change}
    with pytest.raises(ApiRefusal) as caught:
        decode_json(json.dumps({"observations": [observation]}).encode(), spec, 8)
    assert caught.value.status == 400
    assert next(iter(change)) in caught.value.reason
    assert word in caught.value.reason


def test_a_missing_entry_is_named():
    spec, _ = packed_spec(DICT)
    with pytest.raises(ApiRefusal, match="has no"):
        decode_json(b'{"observations": {"camera": 1}}', spec, 8)


BOX = gym.spaces.Box(-1, 1, (2,), np.float32)


def test_masks_beside_observations_are_taken_and_default_to_all():
    spec, layout = packed_spec(BOX, info_mask=True, mask_size=3)
    obs = np.array([[0.5, -1], [0, 1]], np.float32)
    masks = np.array([[1, 0, 1], [0, 0, 1]])
    given = {"observations": obs.tolist(), "mask": masks.tolist()}
    packer = ObservationPacker(layout, 2, "action_mask")
    rows = packer.pack(obs, {"action_mask": list(masks), "_action_mask": np.ones(2, bool)}).copy()
    np.testing.assert_array_equal(decode_json(json.dumps(given).encode(), spec, 8).obs_NX, rows)
    del given["mask"]
    np.testing.assert_array_equal(
        decode_json(json.dumps(given).encode(), spec, 8).obs_NX, packer.pack(obs, {})
    )


@pytest.mark.parametrize("mask", [[[1, 1]], [[1, 1, 1]] * 2, [[0, 0, 0]], [[1, 2, 1]], "yes", [[None] * 3]])
def test_bad_masks_are_refused(mask):
    spec, _ = packed_spec(BOX, info_mask=True, mask_size=3)
    body = json.dumps({"observations": [[0.5, 0.5]], "mask": mask}).encode()
    with pytest.raises(ApiRefusal, match="mask"):
        decode_json(body, spec, 8)


@settings(max_examples=150, deadline=None)
@given(
    st.binary(max_size=200), st.dictionaries(st.sampled_from(["rows", "greedy", "values", "x"]), st.text())
)
@pytest.mark.parametrize("spec", [CARTPOLE, PICTURE], ids=["floats", "bytes"])
def test_any_bytes_are_finite_rows_or_refused(spec, body, query):
    statuses = {400}
    for asked in (query, {"rows": str(len(body) // spec.row_nbytes)}):
        try:
            question = decode_binary(body, asked, spec, 8)
        except ApiRefusal as refusal:
            statuses.add(refusal.status)
        else:
            assert question.obs_NX.shape[1:] == spec.obs_shape
            assert 1 <= len(question.obs_NX) <= 8
            assert question.obs_NX.nbytes == len(body)
            assert np.isfinite(question.obs_NX).all()
    assert statuses == {400}


def test_truth_values_are_0_or_1():
    spec = InferenceSpec(
        obs_shape=(2,), obs_dtype="bool", action_shape=(), action_dtype="int64", has_values=False
    )
    assert decode_binary(b"\x00\x01", {"rows": "1"}, spec, 8).obs_NX.tolist() == [[False, True]]
    with pytest.raises(ApiRefusal, match="0 or 1"):
        decode_binary(b"\x00\x02", {"rows": "1"}, spec, 8)


JSON = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.sampled_from(["tool", "joints"]), inner),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(JSON, JSON)
def test_any_json_is_rows_or_refused(observations, mask):
    body = json.dumps({"observations": observations, "mask": mask}).encode()
    masked, _ = packed_spec(BOX, info_mask=True, mask_size=3)
    statuses = {400}
    for spec in (CARTPOLE, PICTURE, packed_spec(DICT)[0], packed_spec(TUPLE)[0], masked):
        try:
            question = decode_json(body, spec, 8)
        except ApiRefusal as refusal:
            statuses.add(refusal.status)
        else:
            assert question.obs_NX.shape[1:] == spec.obs_shape
    assert statuses == {400}
