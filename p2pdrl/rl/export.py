"""A policy as a file that runs without p2pdrl, and the card beside it.

| format | file | runs in |
|---|---|---|
| ``onnx`` | ``.onnx`` | ONNX Runtime and what else reads ONNX; wants the extra ``p2pdrl[onnx]`` to write |
| ``torch`` | ``.pt2`` | PyTorch: ``torch.export.load(FILE).module()`` |
| ``torchscript`` | ``.pt`` | PyTorch and libtorch: ``torch.jit.load(FILE)``; deprecated by PyTorch |

All hold a `policy_module.PolicyModule`: raw observations in, with any number of rows. What is written is read
again and compared before it takes its place.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import logging
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec
import torch
from torch import Tensor

import p2pdrl
from p2pdrl.atomic import storage_error, write_atomic
from p2pdrl.config.environments import install_hint
from p2pdrl.errors import P2PDRLError, UsageError
from p2pdrl.rl.policy_module import PolicyModule, TensorInfo

__all__ = ["FORMATS", "Format", "export", "format_of", "require_packages"]

Format = Literal["onnx", "torch", "torchscript"]
FORMATS: tuple[Format, ...] = get_args(Format)
ENDINGS: dict[str, Format] = {".onnx": "onnx", ".pt2": "torch", ".pt": "torchscript"}
ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
TOLERANCE = 1e-4
"""Of outputs that are compared, against the greater of 1 and the number itself."""
ROWS = 3
"""Of the example that a module is traced with: neither 0 nor 1, which tracing takes for constants."""
MOST_ROWS = 1 << 20
MODE = 0o644
"""Of the files: what is exported is meant for others."""


def format_of(path: Path) -> Format:
    """Return the format that a file's ending stands for.

    Raises:
        UsageError: it stands for none.
    """
    found = ENDINGS.get(path.suffix)
    if found is None:
        raise UsageError(f"{path.name} ends in none of {', '.join(ENDINGS)}: say which format is meant")
    return found


def require_packages(form: Format) -> None:
    """Check that the packages are there which write a format.

    Raises:
        UsageError: one is missing; the message says how to install it.
    """
    missing = [name for name in ONNX_PACKAGES if form == "onnx" and importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"writing ONNX needs {' and '.join(missing)}; run: {install_hint('onnx')}")


def export(module: PolicyModule, path: Path, form: Format, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Write a policy, and its card beside it, as JSON and as Markdown; return the card.

    Args:
        facts: what the card says of the policy beside its inputs and outputs.

    Raises:
        UsageError: packages are missing.
        P2PDRLError: the format can't hold this policy, or what was written computes something else.
        StorageError: the disk doesn't take it.
    """
    require_packages(form)
    examples = tuple(_example(info, ROWS) for info in module.inputs)
    try:
        with _quiet():
            data = _WRITERS[form](module, examples)
            differs = _compared(module, form, data)
    except P2PDRLError:
        raise
    except Exception as error:  # a compiler's, of any kind: it names what it can't translate
        raise P2PDRLError(
            f"{form} can't hold this policy ({type(error).__name__}: {str(error)[:500]}); try another format"
        ) from error
    card = {
        **facts,
        "format": form,
        "file": path.name,
        "bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
        "inputs": [_described(info) for info in module.inputs],
        "outputs": [_described(info) for info in module.outputs],
        "greatest_difference": differs,
        "versions": _versions(form),
    }
    try:
        write_atomic(path, data, MODE)
        text = msgspec.json.format(msgspec.json.encode(card), indent=2) + b"\n"
        write_atomic(path.with_name(path.name + ".json"), text, MODE)
        write_atomic(path.with_name(path.name + ".md"), _card_text(card).encode(), MODE)
    except OSError as error:
        raise storage_error("write the policy", path, error) from error
    return card


def _example(info: TensorInfo, rows: int) -> Tensor:
    """Return rows that aren't all alike, the same each time."""
    tensor = info.zeros(rows)
    if not tensor.is_floating_point():
        return tensor
    return torch.randn(tensor.shape, generator=torch.Generator().manual_seed(rows))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep from people what PyTorch tells of its own insides: deprecations, packages that aren't needed."""
    told = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = told.level
    told.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        told.setLevel(level)


# --- formats -------------------------------------------------------------------------------------


def _exported(module: PolicyModule, examples: tuple[Tensor, ...]) -> torch.export.ExportedProgram:
    rows = torch.export.Dim("batch", min=1, max=MOST_ROWS)
    shapes = {"given": tuple({0: rows} for _ in examples)}
    with torch.no_grad():
        return torch.export.export(module, examples, dynamic_shapes=shapes, strict=False)


def _write_torch(module: PolicyModule, examples: tuple[Tensor, ...]) -> bytes:
    file = io.BytesIO()
    torch.export.save(_exported(module, examples), file)
    return file.getvalue()


def _write_onnx(module: PolicyModule, examples: tuple[Tensor, ...]) -> bytes:
    program = torch.onnx.export(
        _exported(module, examples),
        dynamo=True,
        input_names=[info.name for info in module.inputs],
        output_names=[info.name for info in module.outputs],
        verbose=False,
    )
    if program is None:
        raise AssertionError("the exporter made nothing")
    data: bytes = program.model_proto.SerializeToString()
    return data


def _write_torchscript(module: PolicyModule, examples: tuple[Tensor, ...]) -> bytes:
    file = io.BytesIO()
    with torch.no_grad():
        traced = torch.jit.trace(module, examples, strict=False, check_trace=False)  # type: ignore[no-untyped-call]
    torch.jit.save(traced, file)
    return file.getvalue()


_WRITERS = {"onnx": _write_onnx, "torch": _write_torch, "torchscript": _write_torchscript}


def _compared(module: PolicyModule, form: Format, data: bytes) -> float:
    """Return the greatest difference between what the file and the policy say of some observations.

    Raises:
        P2PDRLError: it is too great.
    """
    worst = 0.0
    for rows in (1, 7):
        examples = [_example(info, rows) for info in module.inputs]
        found = _run(form, data, module, examples)
        for name, wanted in module(*examples).items():
            scale = wanted.abs().clamp(min=1.0) if wanted.is_floating_point() else 1.0
            difference = ((wanted.double() - found[name].double()) / scale).abs().max().item()
            worst = max(worst, difference)
    if not worst <= TOLERANCE:
        raise P2PDRLError(
            f"{form} computes something else than the policy, by {worst:.2g} at most; try another format"
        )
    return worst


def _run(form: Format, data: bytes, module: PolicyModule, given: list[Tensor]) -> dict[str, Tensor]:
    if form == "onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
        feeds = {info.name: one.numpy() for info, one in zip(module.inputs, given, strict=True)}
        names = [info.name for info in module.outputs]
        return {
            name: torch.from_numpy(one) for name, one in zip(names, session.run(names, feeds), strict=True)
        }
    file = io.BytesIO(data)
    if form == "torch":
        found: dict[str, Tensor] = torch.export.load(file).module()(*given)
    else:
        found = torch.jit.load(file)(*given)  # type: ignore[no-untyped-call]
    return found


# --- the card ------------------------------------------------------------------------------------


def _described(info: TensorInfo) -> dict[str, object]:
    return {"name": info.name, "dtype": info.dtype, "shape": ["batch", *info.shape], "role": info.role}


def _versions(form: Format) -> dict[str, str]:
    found = {"p2pdrl": p2pdrl.__version__, "torch": str(torch.__version__)}
    if form == "onnx":
        from importlib.metadata import version

        found |= {name: version(name) for name in ONNX_PACKAGES}
    return found


def _card_text(card: Mapping[str, Any]) -> str:
    """Return the card for people."""
    lines = [f"# {card['file']}", ""]
    lines += [f"A policy for `{card['environment']}`, trained by {card['algorithm']} with p2pdrl.", ""]
    facts = {
        "environment steps": f"{card['env_steps']:,}",
        "mean return": "not known" if card["mean_return"] is None else f"{card['mean_return']:.4g}",
        "policy version": card["policy_version"],
        "observation": card["observation"],
        "action": card["action"],
        "format": card["format"],
        "versions": ", ".join(f"{name} {number}" for name, number in card["versions"].items()),
    }
    lines += [f"- {name}: {value}" for name, value in facts.items()]
    for title in ("inputs", "outputs"):
        lines += ["", f"| {title} | type | shape | what |", "|---|---|---|---|"]
        for info in card[title]:
            shape = " × ".join(map(str, info["shape"]))
            lines.append(f"| `{info['name']}` | {info['dtype']} | {shape} | {info['role']} |")
    lines += ["", "Observations go in as the environment gives them: normalisation and scaling are inside."]
    return "\n".join(lines) + "\n"
