"""Learning algorithms, one file each, each readable from top to bottom.

``registry.build`` picks one by its configuration: ``ppo`` (proximal policy optimization) or ``a2c``
(advantage actor-critic).
"""
