"""Names of other libraries, sections that are missing or wrong: each leads to the key that is meant."""

from __future__ import annotations

import pytest

from p2pdrl.config import schema, suggest
from p2pdrl.config.loader import resolve
from p2pdrl.config.root import Config
from p2pdrl.errors import ConfigError


def complaint(key, *more):
    with pytest.raises(ConfigError) as caught:
        resolve(sets=[*more, f"{key}=1"])
    return str(caught.value)


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("task.algorithm.lr", "task.algorithm.learning_rate"),
        ("lr", "task.algorithm.learning_rate"),
        ("algo.lr", "task.algorithm.learning_rate"),
        ("gamma", "task.algorithm.discount"),
        ("task.env.n_envs", "task.env.num_envs"),
        ("task.algorithm.n_steps", "task.algorithm.unroll_steps"),
        ("n_epochs", "task.algorithm.epochs"),
        ("minibatch_size", "task.algorithm.minibatches"),
        ("task.algorithm.ent_coef", "task.algorithm.entropy_coef"),
        ("task.algorithm.vf_coef", "task.algorithm.value_coef"),
        ("clip_range", "task.algorithm.clip"),
        ("clip_range_vf", "task.algorithm.value_clip"),
        ("max_norm", "task.algorithm.max_grad_norm"),
        ("total_timesteps", "task.stop.env_steps"),
        ("task.stop.total_timesteps", "task.stop.env_steps"),
        ("env_id", "task.env.id"),
        ("model.hidden_sizes", "task.network.hidden"),
        ("net_arch", "task.network.hidden"),
        ("task.algorithm.lambda", "task.algorithm.gae_lambda"),
        ("task.algorithm.learning_rat", "task.algorithm.learning_rate"),
        ("task.algoritm.learning_rate", "task.algorithm.learning_rate"),
        ("task.algorithm.Learning-Rate", "task.algorithm.learning_rate"),
        ("task.env.idd", "task.env.id"),
        ("device", "node.learner.device"),
        ("node.device", "node.learner.device"),
        ("num_workers", "node.actors.count"),
        ("seed", "task.seed or node.seed"),
    ],
)
def test_what_is_meant(key, meant):
    assert complaint(key).endswith(f"unknown key {key} in --set; did you mean {meant}?")


def test_synonyms_follow_the_algorithm_that_is_picked():
    dqn = "task.algorithm.name=dqn"
    assert complaint("task.algorithm.tau", dqn).endswith("did you mean task.algorithm.target_tau?")
    assert complaint("replay_size", dqn).endswith("did you mean task.algorithm.buffer_size?")
    assert complaint("exploration_final_eps", dqn).endswith("did you mean task.algorithm.exploration_end?")
    sac = "task.algorithm.name=sac"
    assert complaint("ent_coef", sac).endswith("did you mean task.algorithm.temperature?")
    # of another algorithm than the one that is picked
    assert "task.algorithm.name is ppo here, which has task.algorithm.minibatches" in complaint(
        "task.algorithm.batch_size"
    )


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("task.algorithm.num_envs", "num_envs is a key of another section: task.env.num_envs"),
        ("task.env.learning_rate", "learning_rate is a key of another section: task.algorithm.learning_rate"),
        ("task.strategy.peers", "peers is a key of another section: node.peers"),
        ("task.env.env_steps", "env_steps is a key of another section: task.stop.env_steps"),
    ],
)
def test_a_right_key_in_the_wrong_section_is_told_where_it_belongs(key, says):
    assert complaint(key).endswith(says)


def test_where_nothing_is_near_it_is_said_what_there_is():
    assert complaint("task.colour").endswith(
        "task has seed, env, network, algorithm, gradients, scaling, strategy, stop, evaluation"
    )
    assert "`p2pdrl config init`" in complaint("colour")


def test_every_synonym_leads_to_a_key_that_there_is():
    known = {path for path, _ in schema.leaves(Config())}
    for union, field in schema.unions(Config):
        for struct in schema.variants(field.annotation).values():
            known |= {path for path, _ in schema.leaves(struct(), union)}
    ends = {end for key in known for end in (".".join(key[n:]) for n in range(len(key)))}
    for word, targets in suggest.SYNONYMS.items():
        assert set(targets) & ends, word
        assert set(targets) <= ends, (word, targets)


@pytest.mark.parametrize(
    ("sets", "says"),
    [
        ("task.algorithm.name=pppo", "did you mean ppo?"),
        ("task.strategy.name=downpour", "did you mean server_async?"),
        ("task.strategy.name=gossip", "did you mean adpsgd? `p2pdrl mode set --help` lists"),
        ("node.roles=actor,learnr", "did you mean learner?"),
        ("task.network.activation=reul", "did you mean relu?"),
    ],
)
def test_words_that_are_spelt_alike(sets, says):
    with pytest.raises(ConfigError) as caught:
        resolve(sets=[sets])
    assert says in str(caught.value)
