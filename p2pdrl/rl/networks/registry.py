"""From a network's configuration to its trunk."""

from __future__ import annotations

from p2pdrl.config.task import NetworkConfig
from p2pdrl.errors import ConfigError
from p2pdrl.rl.envs import EnvSpec
from p2pdrl.rl.imports import load_named
from p2pdrl.rl.networks.impala_resnet import ImpalaResNet
from p2pdrl.rl.networks.layers import DenseTrunk, Trunk
from p2pdrl.rl.networks.nature_cnn import NatureCNN
from p2pdrl.rl.networks.transformer import Transformer

__all__ = ["make_trunk", "resolve_kind"]


def resolve_kind(config: NetworkConfig, spec: EnvSpec) -> str:
    """Return the kind of network; ``auto`` is ``nature_cnn`` for images and ``mlp`` for all others.

    Raises:
        ConfigError: a convolutional network was asked for observations that aren't images.
    """
    if config.kind in {"nature_cnn", "impala_resnet"} and not spec.is_image:
        raise ConfigError(
            f"network.kind = {config.kind!r} wants images (3 dimensions of uint8), "
            f"observations are {spec.obs_shape} of {spec.obs_dtype}; use 'mlp', 'transformer' or 'auto'"
        )
    if config.kind == "auto":
        return "nature_cnn" if spec.is_image else "mlp"
    return config.kind


def make_trunk(config: NetworkConfig, spec: EnvSpec) -> Trunk:
    """Return what policy and value function share, on the meta device.

    Raises:
        ConfigError: it doesn't fit the observations.
    """
    # the default widths are meant for vectors; the papers' dense layers stand in for them
    given = config.hidden if config.hidden != NetworkConfig().hidden else None
    match resolve_kind(config, spec):
        case "own":
            return _own(config, spec)
        case "nature_cnn":
            return NatureCNN(spec.obs_shape, (512,) if given is None else given)
        case "impala_resnet":
            return ImpalaResNet(spec.obs_shape, config.channels, (256,) if given is None else given)
        case "transformer":
            return Transformer(
                spec.obs_shape,
                is_image=spec.is_image,
                layers=config.layers,
                heads=config.heads,
                width=config.width,
                patch=config.patch,
            )
    return DenseTrunk(spec.obs_shape, config.hidden, config.activation)


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
