"""What is minimised, as values: one file for each algorithm, without model, batch or optimizer.

``objective`` says what all of them are; ``ppo``, ``a2c`` and ``regression`` hold one family each.
"""
