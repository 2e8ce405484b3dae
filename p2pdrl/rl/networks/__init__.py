"""Networks: from observations to features, one file per kind.

``registry.make_trunk`` picks one by its configuration: an MLP, the Nature CNN, the IMPALA ResNet or a
transformer. ``lstm`` is the memory that may follow any of them.
"""
