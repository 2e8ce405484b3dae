"""A checkpoint as bytes: one safetensors file with the parameters, the sidecar and a JSON document.

| in the file | holds |
|---|---|
| tensor ``params`` | the flat float32 vector, D elements |
| tensor ``sidecar/<name>`` | one item of the sidecar |
| metadata ``p2pdrl`` | JSON: ``layout``, ``sidecar_layout``, ``policy_version``, ``env_steps``, task, … |
| metadata ``sha256`` | over that JSON and all tensor bytes in their order in the file |

No pickle anywhere: safetensors holds numbers only. Everything is checked after parsing, for the format
itself lets NaN and any number of tensors pass. The node's checkpoint store and its API write it; the
evaluator, the node and plain ``safetensors`` read it. Pure: no files here.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import safetensors
from msgspec import Meta

from p2pdrl.errors import CheckpointError, LayoutMismatchError, WireError
from p2pdrl.tensors.layout import Float32Array, Layout
from p2pdrl.tensors.mix import all_finite
from p2pdrl.tensors.sidecar import AnyArray, SidecarLayout

__all__ = ["Checkpoint", "chunks", "from_bytes", "read_file", "to_bytes"]

FORMAT = "p2pdrl-checkpoint-1"
PARAMS = "params"
SIDECAR = "sidecar/"
MAX_META_BYTES = 32 * 1024**2
"""Largest JSON document: counters and records of thousands of nodes fit many times over."""

_CODES = {"float32": "F32", "float64": "F64", "int64": "I64"}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}


class _Known(msgspec.Struct):
    """What every checkpoint's document holds, whatever else it holds."""

    layout: list[Any]
    sidecar_layout: list[Any] = []
    policy_version: Annotated[int, Meta(ge=0, lt=2**53)] = 0
    env_steps: Annotated[int, Meta(ge=0, lt=2**53)] = 0
    lineage: Annotated[str, Meta(max_length=64)] = ""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Everything a node needs to go on where it was.

    Attributes:
        params: flat float32 vector, D elements; not to be changed while it is written.
        sidecar: the sidecar's arrays by name.
        meta: plain JSON types; ``layout`` (as `Layout.to_wire`) is required, ``sidecar_layout`` too when
            there is a sidecar.
    """

    params: Float32Array
    sidecar: Mapping[str, AnyArray] = field(default_factory=dict)
    meta: Mapping[str, Any] = field(default_factory=dict)

    @property
    def layout(self) -> Layout:
        """Layout of ``params``."""
        return _layouts(self.meta)[0]

    @property
    def sidecar_layout(self) -> SidecarLayout:
        """Layout of ``sidecar``."""
        return _layouts(self.meta)[1]

    def check(self) -> None:
        """Check that sizes, names and dtypes agree with the layouts and that every number is finite.

        Raises:
            CheckpointError: if anything is off.
        """
        layout, sidecar_layout = _layouts(self.meta)
        if self.params.dtype != np.float32 or self.params.shape != (layout.size,):
            raise CheckpointError(
                f"a checkpoint of this layout has {layout.size} float32 parameters, "
                f"not {self.params.shape} of {self.params.dtype}"
            )
        try:
            sidecar_layout.check(self.sidecar)
        except LayoutMismatchError as error:
            raise CheckpointError(f"the checkpoint's sidecar is off: {error}") from error
        for name, array in {PARAMS: self.params, **self.sidecar}.items():
            if not all_finite(array):
                raise CheckpointError(f"the checkpoint's {name!r} holds NaN or infinity")


def chunks(checkpoint: Checkpoint) -> list[memoryview]:
    """Return the file's content in order: the head, then each array's own memory, nothing copied.

    Raises:
        CheckpointError: if the checkpoint is off (see `Checkpoint.check`): a bad one is never written.
    """
    checkpoint.check()
    arrays: dict[str, AnyArray] = {SIDECAR + name: array for name, array in checkpoint.sidecar.items()}
    arrays[PARAMS] = checkpoint.params
    # Wide dtypes first, as safetensors orders them: every array stays aligned.
    ordered = sorted(arrays.items(), key=lambda item: (-item[1].itemsize, item[0]))
    try:
        document = msgspec.json.encode(checkpoint.meta)
    except (TypeError, ValueError, msgspec.EncodeError) as error:
        raise CheckpointError(f"the checkpoint's document isn't JSON: {error}") from error
    if len(document) > MAX_META_BYTES:
        raise CheckpointError(f"the checkpoint's document has {len(document)} of {MAX_META_BYTES} bytes")
    digest = hashlib.sha256(document)
    header: dict[str, object] = {}
    data: list[memoryview] = []
    at = 0
    for name, array in ordered:
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        digest.update(raw)
        header[name] = {
            "dtype": _CODES[str(array.dtype)],
            "shape": list(array.shape),
            "data_offsets": [at, at + raw.nbytes],
        }
        data.append(raw)
        at += raw.nbytes
    header["__metadata__"] = {"format": FORMAT, "p2pdrl": document.decode(), "sha256": digest.hexdigest()}
    head = msgspec.json.encode(header)
    head += b" " * (-len(head) % 8)
    return [memoryview(struct.pack("<Q", len(head)) + head), *data]


def to_bytes(checkpoint: Checkpoint) -> bytes:
    """Return a checkpoint as the content of a safetensors file."""
    return b"".join(chunks(checkpoint))


def from_bytes(data: bytes) -> Checkpoint:
    """Read what `to_bytes` made, from anyone: every length, name and number is checked.

    Raises:
        CheckpointError: if the bytes are damaged, truncated or something else.
    """
    metadata, names = _header(data)
    document = metadata["p2pdrl"].encode()
    try:
        meta = msgspec.json.decode(document, type=dict[str, Any])
        tensors: dict[str, Any] = dict(safetensors.deserialize(data))  # type: ignore[no-untyped-call]
    except (msgspec.DecodeError, safetensors.SafetensorError, RecursionError) as error:
        raise CheckpointError("the checkpoint is damaged: its content can't be read") from error
    digest = hashlib.sha256(document)
    for name in names:
        digest.update(tensors[name]["data"])
    if digest.hexdigest() != metadata["sha256"]:
        raise CheckpointError("the checkpoint is damaged: its checksum doesn't match its content")
    params = _array(tensors.pop(PARAMS, None), PARAMS)
    sidecar = {name.removeprefix(SIDECAR): _array(tensor, name) for name, tensor in tensors.items()}
    checkpoint = Checkpoint(params, sidecar, meta)
    checkpoint.check()
    return checkpoint


def read_file(file: Path) -> Checkpoint:
    """Read one of this machine's files.

    Raises:
        CheckpointError: it can't be read, or isn't one; the message names it.
    """
    try:
        return from_bytes(file.read_bytes())
    except OSError as error:
        raise CheckpointError(f"can't read the checkpoint {file}: {error.strerror}") from error
    except CheckpointError as error:
        raise CheckpointError(f"{file}: {error}; nodes keep theirs in DATA_DIR/checkpoints") from error


def _header(data: bytes) -> tuple[dict[str, str], list[str]]:
    """The file's metadata, and the tensors' names in the order of their bytes."""
    length = struct.unpack_from("<Q", data)[0] if len(data) >= 8 else 0
    if not 2 <= length <= min(len(data) - 8, 2 * MAX_META_BYTES):
        raise CheckpointError("the checkpoint is damaged or truncated, or isn't a safetensors file")
    try:
        header = msgspec.json.decode(data[8 : 8 + length], type=dict[str, dict[str, Any]])
        metadata = msgspec.convert(header.pop("__metadata__", {}), dict[str, str])
        names = sorted(header, key=lambda name: tuple(header[name]["data_offsets"]))
    except (msgspec.DecodeError, KeyError, TypeError, RecursionError, UnicodeError) as error:
        raise CheckpointError("the checkpoint is damaged: its head can't be read") from error
    if metadata.get("format") != FORMAT or not {"p2pdrl", "sha256"} <= metadata.keys():
        raise CheckpointError("this safetensors file isn't a p2pdrl checkpoint, or one of another version")
    return metadata, names


def _array(tensor: dict[str, Any] | None, name: str) -> AnyArray:
    """One tensor as a writable array."""
    if tensor is None or tensor["dtype"] not in _DTYPES:
        raise CheckpointError(f"the checkpoint's tensor {name!r} is missing or of a foreign number format")
    array: AnyArray = np.frombuffer(bytearray(tensor["data"]), _DTYPES[tensor["dtype"]])
    return array.reshape(tensor["shape"])


def _layouts(meta: Mapping[str, Any]) -> tuple[Layout, SidecarLayout]:
    try:
        known = msgspec.convert(dict(meta), _Known)
        return Layout.from_wire(known.layout), SidecarLayout.from_wire(known.sidecar_layout)
    except (msgspec.ValidationError, WireError, LayoutMismatchError) as error:
        raise CheckpointError("the checkpoint's document is off: of another release, or damaged") from error
