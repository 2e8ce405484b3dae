"""Which network for which observations."""

from __future__ import annotations

import pytest

from p2pdrl.config.task import NetworkConfig
from p2pdrl.errors import ConfigError
from p2pdrl.rl.envs import Discrete, EnvSpec
from p2pdrl.rl.networks.impala_resnet import ImpalaResNet
from p2pdrl.rl.networks.layers import DenseTrunk
from p2pdrl.rl.networks.nature_cnn import NatureCNN
from p2pdrl.rl.networks.registry import make_trunk, resolve_kind
from p2pdrl.rl.networks.transformer import Transformer

VECTOR = EnvSpec((4,), "float32", Discrete(3))
FRAMES = EnvSpec((4, 84, 84), "uint8", Discrete(6))


@pytest.mark.parametrize(
    ("kind", "spec", "network", "features"),
    [
        ("auto", FRAMES, NatureCNN, 512),
        ("nature_cnn", FRAMES, NatureCNN, 512),
        ("impala_resnet", FRAMES, ImpalaResNet, 256),
        ("transformer", FRAMES, Transformer, 64),
        ("transformer", VECTOR, Transformer, 64),
        ("auto", VECTOR, DenseTrunk, 64),
        ("mlp", FRAMES, DenseTrunk, 64),
    ],
)
def test_kinds_and_what_the_default_widths_stand_for(kind, spec, network, features):
    trunk = make_trunk(NetworkConfig(kind=kind), spec)
    assert type(trunk) is network
    assert trunk.features == features


@pytest.mark.parametrize("kind", ["nature_cnn", "impala_resnet"])
def test_convolutions_of_vectors_are_refused(kind):
    with pytest.raises(ConfigError, match=f"{kind}.*use 'mlp'"):
        resolve_kind(NetworkConfig(kind=kind), VECTOR)


def test_widths_that_were_given_count():
    assert make_trunk(NetworkConfig(hidden=(100, 32)), FRAMES).features == 32
    assert make_trunk(NetworkConfig(kind="impala_resnet", hidden=(100,)), FRAMES).features == 100
