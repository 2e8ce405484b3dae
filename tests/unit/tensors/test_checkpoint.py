from __future__ import annotations

import json
import struct

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pdrl.errors import CheckpointError
from p2pdrl.tensors.checkpoint import Checkpoint, from_bytes, to_bytes
from p2pdrl.tensors.layout import Layout, TensorEntry
from p2pdrl.tensors.sidecar import SidecarItem, SidecarLayout

LAYOUT = Layout((TensorEntry("w", (2, 2)), TensorEntry("b", ())))
SIDECAR = SidecarLayout(
    (
        SidecarItem("m", (5,)),
        SidecarItem("step", (), "int64"),
        SidecarItem("mean", (3,), "float64", "moments"),
    )
)


def make(**changes) -> Checkpoint:
    parts = {
        "params": np.arange(5, dtype=np.float32),
        "sidecar": {
            "m": np.full(5, 0.5, np.float32),
            "step": np.array(7),
            "mean": np.array([1e300, -1.0, 0.0]),
        },
        "meta": {
            "layout": LAYOUT.to_wire(),
            "sidecar_layout": SIDECAR.to_wire(),
            "policy_version": 3,
            "task": {"env": {"id": "CartPole-v1"}},
            "mean_return": None,
        },
    }
    return Checkpoint(**{**parts, **changes})


def meta(**changes) -> dict:
    return {**make().meta, **changes}


def test_round_trip():
    original = make()
    back = from_bytes(to_bytes(original))
    assert np.array_equal(back.params, original.params)
    assert back.meta == original.meta
    assert back.sidecar.keys() == original.sidecar.keys()
    for name, array in original.sidecar.items():
        assert back.sidecar[name].dtype == array.dtype
        assert np.array_equal(back.sidecar[name], array)
    assert back.params.flags.writeable
    assert (back.layout, back.sidecar_layout) == (LAYOUT, SIDECAR)
    assert to_bytes(back) == to_bytes(original)


def test_any_reader_of_safetensors_can_read_it(tmp_path):
    data = to_bytes(make())
    tensors = safetensors.numpy.load(data)
    assert sorted(tensors) == ["params", "sidecar/m", "sidecar/mean", "sidecar/step"]
    assert np.array_equal(tensors["params"], np.arange(5, dtype=np.float32))
    (tmp_path / "c.safetensors").write_bytes(data)
    with safetensors.safe_open(tmp_path / "c.safetensors", "np") as file:
        assert json.loads(file.metadata()["p2pdrl"])["policy_version"] == 3


def test_without_a_sidecar():
    checkpoint = make(sidecar={}, meta={"layout": LAYOUT.to_wire()})
    assert from_bytes(to_bytes(checkpoint)).sidecar == {}


def test_strided_arrays_are_written_right():
    params = np.arange(10, dtype=np.float32)[::2]
    assert np.array_equal(from_bytes(to_bytes(make(params=params))).params, params)


@pytest.mark.parametrize(
    ("checkpoint", "words"),
    [
        (make(params=np.zeros(4, np.float32)), "5 float32 parameters"),
        (make(params=np.zeros(5, np.float64)), "5 float32 parameters"),
        (make(params=np.array([0, 1, np.nan, 0, 0], np.float32)), "'params' holds NaN"),
        (make(sidecar={**make().sidecar, "mean": np.array([0, np.inf, 0])}), "'mean' holds NaN"),
        (make(sidecar={}), "sidecar is off"),
        (make(sidecar={**make().sidecar, "m": np.zeros(4, np.float32)}), "sidecar is off"),
        (make(meta={}), "document is off"),
        (make(meta=meta(layout="x")), "document is off"),
        (make(meta=meta(layout=[])), "document is off"),
        (make(meta=meta(policy_version=-1)), "document is off"),
        (make(meta=meta(lineage="x" * 65)), "document is off"),
        (make(meta=meta(extra=object())), "isn't JSON"),
    ],
)
def test_a_bad_checkpoint_is_never_written(checkpoint, words):
    with pytest.raises(CheckpointError, match=words):
        to_bytes(checkpoint)


def test_every_truncation_is_noticed():
    data = to_bytes(make())
    for length in range(len(data)):
        with pytest.raises(CheckpointError):
            from_bytes(data[:length])
    with pytest.raises(CheckpointError):
        from_bytes(data + b"\0")


@settings(max_examples=200)
@given(st.integers(0, len(to_bytes(make())) - 1), st.integers(1, 255))
def test_a_changed_byte_is_noticed_or_harmless(at, flip):
    data = bytearray(to_bytes(make()))
    data[at] ^= flip
    try:
        back = from_bytes(bytes(data))
    except CheckpointError:
        return
    assert back.meta == make().meta
    assert np.array_equal(back.params, make().params)


@given(st.binary(max_size=200))
def test_any_other_bytes_are_refused(data):
    with pytest.raises(CheckpointError):
        from_bytes(data)


def foreign(header: object, data: bytes = b"") -> bytes:
    head = json.dumps(header).encode() if not isinstance(header, bytes) else header
    return struct.pack("<Q", len(head)) + head + data


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x04\x95" + b"\0" * 100,
        b"PK\x03\x04" + b"\0" * 100,
        struct.pack("<Q", 2**63) + b"{}",
        foreign({}),
        foreign(b"[" * 100_000),
        foreign({"__metadata__": {"format": "pt"}}),
        foreign({"__metadata__": {"format": "p2pdrl-checkpoint-1"}}),
        foreign({"__metadata__": {"format": "p2pdrl-checkpoint-1", "p2pdrl": "{}", "sha256": ""}}),
        foreign({"params": {"dtype": "F32"}}),
        foreign({"params": {"dtype": "F32", "shape": [1], "data_offsets": "x"}}, b"\0" * 4),
        foreign({"params": {"dtype": "F32", "shape": [1], "data_offsets": [{}, 4]}}, b"\0" * 4),
        foreign({"params": 5}),
        safetensors.numpy.save({"params": np.zeros(5, np.float32)}),
    ],
)
def test_foreign_files_are_refused(data):
    with pytest.raises(CheckpointError):
        from_bytes(data)
