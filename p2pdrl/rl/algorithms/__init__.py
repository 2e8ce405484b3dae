"""Learning algorithms, one file each, each readable from top to bottom: objective, then update.

``registry`` picks one by its configuration: ``ppo`` (proximal policy optimization), ``a2c`` (advantage
actor-critic) or what other code registered. ``regression`` learns from a data set. ``algorithm`` is what all
of them are, ``batches`` what those that learn from unrolls share.
"""
