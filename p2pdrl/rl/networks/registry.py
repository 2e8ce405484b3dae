"""From a network's configuration to its trunk."""

from __future__ import annotations

from msgspec.structs import replace
from torch import nn

from p2pdrl.config.task import NetworkConfig
from p2pdrl.errors import ConfigError
from p2pdrl.rl.envs import EnvSpec
from p2pdrl.rl.imports import load_named
from p2pdrl.rl.networks.entries import EntryBranches, ImageEntry, VectorEntries
from p2pdrl.rl.networks.impala_resnet import ImpalaResNet
from p2pdrl.rl.networks.layers import DenseTrunk, Pixels, Trunk
from p2pdrl.rl.networks.minatar_cnn import MinAtarCNN
from p2pdrl.rl.networks.nature_cnn import SMALLEST, NatureCNN
from p2pdrl.rl.networks.transformer import Transformer
from p2pdrl.rl.observations import ObservationEntry

__all__ = ["is_branched", "make_front", "make_trunk", "resolve_kind", "seen_spec"]


def is_branched(config: NetworkConfig, spec: EnvSpec) -> bool:
    """Whether observations have an image beside other entries, which the network is to see as an image."""
    layout = spec.layout
    return layout is not None and config.kind != "mlp" and len(layout.inputs) > 1 and bool(layout.images)


def seen_spec(config: NetworkConfig, spec: EnvSpec) -> EnvSpec:
    """Return observations as the network sees them once rows of bytes have been taken apart (`entries`)."""
    layout = spec.layout
    if layout is None:
        return spec
    if layout.images and config.kind != "mlp":
        return _image_spec(layout.images[0], spec)
    return EnvSpec((layout.width,), "float32", spec.action)


def _image_spec(entry: ObservationEntry, spec: EnvSpec) -> EnvSpec:
    return EnvSpec(entry.shape, entry.dtype, spec.action, obs_most=entry.most)


def resolve_kind(config: NetworkConfig, spec: EnvSpec) -> str:
    """Return the kind of network; of observations of several entries, that of the first image.

    ``auto`` is ``nature_cnn`` for images, ``minatar_cnn`` for those whose sides are too short for it, and
    ``mlp`` for all others.

    Raises:
        ConfigError: a convolutional network was asked for observations that aren't images.
    """
    spec = seen_spec(config, spec)
    if config.kind in {"nature_cnn", "impala_resnet", "minatar_cnn"} and not spec.is_image:
        raise ConfigError(
            f"network.kind = {config.kind!r} wants images (3 dimensions, sides of 3 or more), "
            f"observations are {spec.obs_shape} of {spec.obs_dtype}; use 'mlp', 'transformer' or 'auto'"
        )
    if config.kind == "auto":
        if not spec.is_image:
            return "mlp"
        _, height, width = Pixels(spec.obs_shape).shape
        return "nature_cnn" if min(height, width) >= SMALLEST else "minatar_cnn"
    return config.kind


def make_front(config: NetworkConfig, spec: EnvSpec) -> nn.Module | None:
    """Return what brings raw rows to the form that the network was made for; None where they have it.

    It has no parameters. Images become vectors of 0…1 for an MLP; rows of entries are taken apart.
    """
    layout = spec.layout
    if layout is not None:
        if is_branched(config, spec):
            return None
        one = layout.images and config.kind != "mlp"
        return ImageEntry(layout.images[0]) if one else VectorEntries(layout.inputs)
    if spec.is_image and resolve_kind(config, spec) == "mlp":
        return nn.Sequential(Pixels(spec.obs_shape, spec.obs_most), nn.Flatten())
    return None


def make_trunk(config: NetworkConfig, spec: EnvSpec) -> Trunk:
    """Return what policy and value function share, on the meta device; `make_front` comes before it.

    Raises:
        ConfigError: it doesn't fit the observations.
    """
    if is_branched(config, spec):
        return _branches(config, spec)
    spec = seen_spec(config, spec)
    # the default widths are meant for vectors; the papers' dense layers stand in for them
    given = config.hidden if config.hidden != NetworkConfig().hidden else None
    match resolve_kind(config, spec):
        case "own":
            return _own(config, spec)
        case "nature_cnn":
            return NatureCNN(spec.obs_shape, (512,) if given is None else given, spec.obs_most)
        case "impala_resnet":
            hidden = (256,) if given is None else given
            return ImpalaResNet(spec.obs_shape, config.channels, hidden, spec.obs_most)
        case "minatar_cnn":
            return MinAtarCNN(spec.obs_shape, (128,) if given is None else given, spec.obs_most)
        case "transformer":
            return Transformer(
                spec.obs_shape,
                is_image=spec.is_image,
                layers=config.layers,
                heads=config.heads,
                width=config.width,
                patch=config.patch,
                most=spec.obs_most,
            )
    return DenseTrunk(spec.obs_shape, config.hidden, config.activation)


def _branches(config: NetworkConfig, spec: EnvSpec) -> EntryBranches:
    """Return convolutions for each image, the papers' dense layers behind them, and ``hidden`` for all."""
    layout = spec.layout
    assert layout is not None  # noqa: S101 - or it weren't branched
    if config.kind == "transformer":
        raise ConfigError(
            "network.kind = 'transformer' takes a vector or one image; observations here have images beside "
            "other entries; take auto, or mlp"
        )
    alone = replace(config, hidden=NetworkConfig().hidden)
    images = [make_trunk(alone, _image_spec(entry, spec)) for entry in layout.images]
    return EntryBranches(layout, images, config.hidden, config.activation)


def _own(config: NetworkConfig, spec: EnvSpec) -> Trunk:
    """Import and make a user's trunk; ``build_trainer`` has checked that this is allowed."""
    trunk = load_named(config.own)(spec.obs_shape, config)
    if not isinstance(trunk, Trunk) or not isinstance(getattr(trunk, "features", None), int):
        raise ConfigError(f"network.own = {config.own!r} isn't a Trunk with features; see docs/own_code.md")
    for name, layer in trunk.named_modules():
        if next(layer.parameters(recurse=False), None) is not None and not hasattr(layer, "draw"):
            raise ConfigError(
                f"network.own = {config.own!r}: its layer {name!r} ({type(layer).__name__}) can't draw its "
                "own weights, so nodes would begin with different ones; see docs/own_code.md"
            )
    return trunk
