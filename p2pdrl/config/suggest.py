"""What was meant by a key or value that there isn't: for messages. Pure.

Whoever comes from another library writes its names: ``lr`` for ``learning_rate``, ``n_envs``, ``gamma``,
``total_timesteps``. A section may be missing (``lr``), have another name (``model``), or be the wrong
one (``task.algorithm.num_envs``). What fits best is named, and where nothing does, what there is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from p2pdrl.config.schema import KeyPath, dotted
from p2pdrl.errors import did_you_mean

__all__ = ["SYNONYMS", "hint", "meant", "value"]

SYNONYMS: dict[str, tuple[str, ...]] = {
    name: tuple(keys.split())
    for names, keys in {
        "lr step_size alpha_lr learn_rate actor_lr critic_lr policy_lr": "learning_rate",
        "actor_lr policy_lr pi_lr": "actor_learning_rate learning_rate",
        "alpha_lr ent_coef_lr": "temperature_learning_rate",
        "lr_schedule learning_rate_schedule anneal_lr lr_decay decay_lr": "anneal",
        "gamma discount_factor": "discount",
        "n_envs nenvs num_env n_env num_environments nenv num_envs_per_worker envs": "num_envs",
        "n_steps nsteps num_steps rollout_length rollout_steps horizon rollout_fragment_length t_max "
        "unroll_length steps_per_epoch": "unroll_steps",
        "n_epochs num_epochs update_epochs noptepochs ppo_epochs num_sgd_iter k_epochs": "epochs",
        "n_minibatches num_minibatches nminibatches num_mini_batch": "minibatches",
        "minibatch_size mini_batch_size sgd_minibatch_size train_batch_size batch batchsize": "batch_size "
        "minibatches",
        "batch_size": "batch_size minibatches",
        "gae lam lambda lmbda gae_lam tau_gae": "gae_lambda lambda_",
        "clip_range clip_coef clip_param eps_clip clip_ratio clip_epsilon cliprange epsilon_clip": "clip",
        "clip_range_vf vf_clip vf_clip_param clip_vloss": "value_clip",
        "vf_coef value_loss_coef vf_loss_coeff value_coeff critic_coef vf_loss_coef": "value_coef",
        "ent_coef entropy_coeff entropy_cost entropy_beta ent_weight": "entropy_coef temperature",
        "max_norm grad_clip clip_grad_norm gradient_clip grad_norm clip_grad max_grad": "max_grad_norm",
        "norm_adv normalize_advantage normalise_advantages standardize_advantages": "normalize_advantages",
        "kl_target max_kl kl_coeff": "target_kl",
        "buffer replay_size memory_size buffer_capacity replay_buffer_size capacity": "buffer_size",
        "warmup_steps start_steps learning_start random_steps": "learning_starts",
        "train_freq utd updates_per_step gradient_updates": "gradient_steps",
        "tau polyak soft_update": "target_tau",
        "target_update_interval target_network_frequency target_update target_update_freq "
        "target_network_update_freq": "target_every",
        "n_step multi_step nstep": "n_step",
        "per prioritized_replay": "prioritized",
        "double_q double_dqn": "double",
        "exploration_fraction epsilon_decay eps_decay epsilon_steps": "exploration_steps",
        "epsilon epsilon_start eps_start exploration_initial_eps start_e": "exploration_start",
        "epsilon_end eps_end exploration_final_eps end_e epsilon_min": "exploration_end",
        "policy_freq policy_frequency": "policy_delay",
        "rho_bar": "rho_clip",
        "optim opt": "optimizer",
        "total_timesteps total_steps timesteps max_steps num_timesteps max_timesteps total_env_steps frames "
        "total_frames": "env_steps",
        "max_time time_limit wall_time": "time_s",
        "target_return reward_threshold solved_at goal target_reward": "mean_return",
        "env_id env_name environment_id gym_id env_kwargs_id game": "env.id",
        "env environment": "env.id",
        "env_kwargs": "env.kwargs",
        "norm_obs normalize_obs obs_norm normalise_observations": "normalize_observations",
        "norm_reward normalize_reward normalize_rewards reward_norm": "normalize_returns",
        "clip_reward reward_clip": "clip_rewards",
        "time_limit_steps max_episode_length episode_length": "max_episode_steps",
        "net_arch hidden_sizes hidden_size hidden_layers hidden_dims fc_layers fcnet_hiddens units": "hidden",
        "activation_fn nonlinearity act_fn": "activation",
        "recurrent rnn use_lstm lstm": "core",
        "lstm_size rnn_size hidden_state_size": "core_size",
        "use_sde sde": "exploration_noise",
        "num_workers n_workers num_actors n_actors workers num_env_runners": "actors.count",
        "cuda gpu use_cuda": "learner.device",
        "device": "learner.device",
        "n_threads num_threads": "learner.threads",
        "eval_freq eval_interval evaluate_every": "evaluation.every",
        "n_eval_episodes eval_episodes num_eval_episodes": "evaluation.episodes",
        "save_freq checkpoint_interval save_every": "checkpoint.every_s",
        "log_dir logdir tensorboard_log tensorboard": "log.tensorboard_dir",
        "log_level verbosity verbose": "log.level",
        "algo algorithm agent": "algorithm.name",
        "strategy protocol": "strategy.name",
        "policy model network": "network.kind",
        "host address bind": "listen",
        "key key_file swarm_key": "swarm_key_file",
    }.items()
    for name in names.split()
}
"""Names that other libraries have for a key, and its name here: the last word, or words, of the key."""

SECTIONS: dict[str, str] = {
    name: section
    for names, section in {
        "environment envs environments gym": "env",
        "algo agent rl train training ppo dqn sac a2c impala td3 ddpg": "algorithm",
        "model net policy architecture": "network",
        "sync protocol mode": "strategy",
        "eval evaluations": "evaluation",
        "termination until": "stop",
        "logging logs": "log",
        "checkpoints": "checkpoint",
        "actor workers": "actors",
    }.items()
    for name in names.split()
}
"""Names that others have for a section."""


def hint(path: KeyPath, here: Sequence[KeyPath], known: Sequence[KeyPath]) -> str:
    """Say what was meant by a key that there isn't.

    Args:
        path: the key.
        here: the keys that could be set beside those that are.
        known: every key, those of other variants included.
    """
    found = meant(path, here) or meant(path, known)
    section = _plain(path)[:-1]
    inside_it = any(key[: len(section)] == section for key in found)
    if found and path[-1] == found[0][-1] and _is_section(section, known) and not inside_it:
        return f"{path[-1]} is a key of another section: {_listed(found)}"
    if found:
        return f"did you mean {_listed(found)}?"
    spelt = _spelt(path, here) or _spelt(path, known)
    if spelt:
        return f"did you mean {_listed(spelt)}?"
    inside = dict.fromkeys(key[len(section)] for key in here if key[: len(section)] == section)
    if section and inside:
        return f"{dotted(section)} has {', '.join(inside)}"
    return "`p2pdrl config show` prints all keys, `p2pdrl config init` what they mean"


def _is_section(path: KeyPath, known: Sequence[KeyPath]) -> bool:
    return len(path) > 1 and any(key[: len(path)] == path for key in known)


def meant(path: KeyPath, known: Sequence[KeyPath]) -> list[KeyPath]:
    """The keys that go by that name, or by another that people have for it; the nearest section first."""
    given, path = path, _plain(path)
    word = path[-1]
    for ends in (SYNONYMS.get(word, ()), (word,)):
        for end in ends:
            last = tuple(end.split("."))
            found = [key for key in known if key[-len(last) :] == last and key != given]
            if found:
                return _nearest_section(path, found)
    return []


def _nearest_section(path: KeyPath, found: Sequence[KeyPath]) -> list[KeyPath]:
    """Those that share the most of the path, where that names a section at all."""
    sections = set(path[:-1])
    most = max(len(sections & set(key[:-1])) for key in found)
    return [key for key in found if len(sections & set(key[:-1])) == most]


def _spelt(path: KeyPath, known: Sequence[KeyPath]) -> list[KeyPath]:
    """The key that is spelled most alike: in the same section, else with its section, else in any."""
    import difflib

    path = _plain(path)
    beside = {key[-1]: key for key in known if key[:-1] == path[:-1]}
    whole = {dotted(key): key for key in known}
    anywhere = {key[-1]: key for key in reversed(known)}
    for word, names, cutoff in (
        (path[-1], beside, 0.7),
        (dotted(path), whole, 0.9),
        (path[-1], anywhere, 0.8),
        (path[-1], SYNONYMS, 0.85),
    ):
        near = difflib.get_close_matches(word, list(names), n=1, cutoff=cutoff)
        if near and names is SYNONYMS:
            return meant((*path[:-1], near[0]), known)
        if near:
            return [names[near[0]]]
    return []


def _plain(path: KeyPath) -> KeyPath:
    """The path as we would write it: lower case, underscores, our names of sections."""
    words = [word.strip().lower().replace("-", "_") for word in path]
    return (*(SECTIONS.get(word, word) for word in words[:-1]), words[-1])


def _listed(found: Sequence[KeyPath]) -> str:
    return " or ".join(dotted(key) for key in found[:3])


MODES = {"gossip": "adpsgd", "allreduce": "grad_average", "ring": "grad_average", "ddp": "grad_average",
         "downpour": "server_async", "fedavg": "federated", "parameter_server": "server_sync",
         "none": "local"}  # fmt: skip
"""What people call a strategy, or its mode, and one of that name here."""


def value(key: str, given: object, words: Iterable[str]) -> str:
    """Say which of the words that a key takes was meant; empty where none comes near."""
    words = list(words)
    texts = given if isinstance(given, list | tuple) else [given]
    for text in map(str, texts):
        spelt = text.strip().lower().replace("-", "_")
        if text in words:
            continue
        if key == "task.strategy.name" and spelt in MODES:
            return f"did you mean {MODES[spelt]}? `p2pdrl mode set --help` lists the strategies of each mode"
        return did_you_mean(spelt, words)
    return ""
