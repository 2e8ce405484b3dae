"""Trains CartPole to its goal, acts, and keeps the learning curve: fifteen lines as for a notebook."""

import importlib.util

import numpy as np

import p2pdrl

with p2pdrl.train("cartpole") as run:
    for status in run:
        print(f"{status.swarm_env_steps:>9,} steps, mean return {status.mean_return or 0:.1f}")
policy, curve = run.policy(), run.curve()
print(policy, "does", policy.act([0.0, 0.0, 0.05, 0.0], deterministic=True))
np.savetxt("curve.csv", np.stack([curve.env_steps, curve.mean_return], 1), "%g", ",")
if importlib.util.find_spec("matplotlib"):
    from matplotlib.figure import Figure

    axes = (figure := Figure()).add_subplot(xlabel="environment steps", ylabel="mean return")
    axes.plot(curve.env_steps, curve.mean_return)
    figure.savefig("curve.png")
