"""Reinforcement learning of one learner: no processes, no network, no clock.

In the order in which an observation passes through: ``envs`` (a batch of gymnasium copies), ``normalize``,
``networks`` → ``policy`` (with ``distributions``), ``rollout`` (unrolls), ``sources`` (batches),
``algorithms`` (advantages, objectives, updates), ``gradients`` (computed by one of ``engines``),
``optimizers`` over ``flat`` (the policy as one vector). ``trainer`` puts them together for the learner
process; ``registry`` builds what the task asks for. ``sequential`` cuts a policy into blocks, which
``pipeline`` trains over several devices. ``rollout_worker`` is the part that actor processes have;
``evaluate`` plays episodes with a fixed policy.
"""
