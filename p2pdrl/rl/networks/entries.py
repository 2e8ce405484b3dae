"""The first layer of networks that see several entries, and masks: from rows of bytes to tensors, by views.

`observations.ObservationLayout` says what lies where in a row. Without images all entries together are one
vector, numbers as they are and choices one-hot, which any network of vectors takes: the columns of its first
dense layer are a branch for each entry. With an image among them each image goes through its own convolutions
(``EntryBranches``). A single image is what it would be without a mask beside it.

Shape suffixes: … leading dimensions, N rows, X bytes of a row, F features, A actions (or logits of all
choices).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from p2pdrl.rl.distributions import NEVER
from p2pdrl.rl.networks.layers import Trunk, in_pairs, mlp
from p2pdrl.rl.observations import ObservationEntry, ObservationLayout, Path

__all__ = [
    "EntryBranches",
    "ImageEntry",
    "UnpackedRows",
    "VectorEntries",
    "allowed_actions",
    "entry_of",
    "masked",
]


class UnpackedRows:
    """Entries of N observations in tensors of their own, in place of the rows_NX that a policy expects.

    For graphs in which bytes can't be looked at as numbers (`rl.policy_module`). It has what a policy asks
    of rows before it takes them apart.

    Args:
        entries: tensors of N x the entry's shape, by its path.
        nbytes: X of the rows that they stand for.
    """

    def __init__(self, entries: Mapping[Path, Tensor], nbytes: int) -> None:
        self.entries = entries
        first = next(iter(entries.values()))
        self.shape = (first.shape[0], nbytes)
        self.device = first.device

    def dim(self) -> int:
        """N and X."""
        return 2

    def reshape(self, *_shape: int) -> UnpackedRows:
        """Return the same: there is one leading dimension."""
        return self

    def to(self, _dtype: torch.dtype) -> UnpackedRows:
        """Return the same: each entry has its own type."""
        return self


def entry_of(rows: Tensor | UnpackedRows, entry: ObservationEntry) -> Tensor:
    """Return an entry of rows …X in its own type and shape: a view."""
    if isinstance(rows, UnpackedRows):
        return rows.entries[entry.path]
    part = rows[..., entry.offset : entry.offset + entry.nbytes]
    if entry.dtype != "uint8":
        part = part.view(getattr(torch, entry.dtype))
    return part.view(*part.shape[:-1], *entry.shape)


def allowed_actions(rows: Tensor, entry: ObservationEntry, sizes: tuple[int, ...] = ()) -> Tensor:
    """Return the mask in rows …X, bool …A.

    Where nothing at all is allowed, as an environment may say once an episode has ended, everything is: there
    must be an action.

    Args:
        sizes: of actions of several choices: how many logits each has; for each there must be one.
    """
    allowed = entry_of(rows, entry)
    if not sizes:
        return allowed | ~allowed.any(-1, keepdim=True)
    parts = [part | ~part.any(-1, keepdim=True) for part in torch.split(allowed, list(sizes), -1)]
    return torch.cat(parts, -1)


def masked(logits: Tensor, allowed: Tensor) -> Tensor:
    """Return logits …A, or action values, in which what isn't allowed is `NEVER`, and gets no gradient.

    Those in fp16, which ends at 65,504, come back as float32.
    """
    if logits.dtype == torch.float16:
        logits = logits.float()
    return logits.masked_fill(~allowed, NEVER)


class VectorEntries(nn.Module):
    """All entries but the mask as one vector."""

    def __init__(self, entries: Sequence[ObservationEntry]) -> None:
        super().__init__()
        self._entries = tuple(entries)

    def forward(self, rows_NX: Tensor) -> Tensor:
        """Return numbers, bytes scaled to 0…1, and one-hot choices: float32, one entry after the other."""
        parts = []
        for entry in self._entries:
            values = entry_of(rows_NX, entry)
            if entry.kind == "choices":
                for choice, size in zip(values.unbind(-1), entry.sizes, strict=True):
                    numbers = torch.arange(size, device=rows_NX.device)
                    parts.append((choice.unsqueeze(-1) == numbers).to(torch.float32))
                continue
            values = values.flatten(1).to(torch.float32)
            parts.append(values if entry.most == 1.0 else values / entry.most)
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


class ImageEntry(nn.Module):
    """One image, as its pixels lie in the row."""

    def __init__(self, entry: ObservationEntry) -> None:
        super().__init__()
        self._entry = entry

    def forward(self, rows_NX: Tensor) -> Tensor:
        """Return the picture, of the entry's type and shape."""
        return entry_of(rows_NX, self._entry)


class SideBySide(nn.Module):
    """What branches give, side by side.

    Args:
        branches: each takes rows and gives features.
    """

    def __init__(self, branches: nn.ModuleList) -> None:
        super().__init__()
        self.branches = branches

    def forward(self, rows_NX: Tensor) -> Tensor:
        """Return features_NF of all branches."""
        return torch.cat([branch(rows_NX) for branch in self.branches], -1)


class EntryBranches(Trunk):
    """Convolutions for each image, everything else as a vector, and dense layers behind both.

    Args:
        images: the trunk of each image entry.
        hidden: widths of the dense layers; none puts the branches together and nothing more.
        activation: ``tanh`` or ``relu``, behind these.
    """

    def __init__(
        self, layout: ObservationLayout, images: Sequence[Trunk], hidden: Sequence[int], activation: str
    ) -> None:
        super().__init__()
        pairs = zip(layout.images, images, strict=True)
        branches: list[nn.Module] = [nn.Sequential(ImageEntry(entry), trunk) for entry, trunk in pairs]
        others = [entry for entry in layout.inputs if entry.kind != "image"]
        if others:
            branches.append(VectorEntries(others))
        width = sum(trunk.features for trunk in images) + sum(entry.width for entry in others)
        self.branches = nn.ModuleList(branches)
        self.dense = mlp((width, *hidden), activation)
        self.features = hidden[-1] if hidden else width

    def layers(self) -> list[nn.Module]:
        """Return all branches as one module, and one per dense layer."""
        return [SideBySide(self.branches), *in_pairs(self.dense)]

    def forward(self, obs_BX: Tensor) -> Tensor:
        """Return features_BF."""
        features: Tensor = self.dense(torch.cat([branch(obs_BX) for branch in self.branches], -1))
        return features
