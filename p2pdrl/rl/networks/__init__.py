"""Networks: from observations to features, one file per kind.

``registry.make_trunk`` picks one by its configuration: an MLP, the Nature CNN, the IMPALA ResNet,
MinAtar's CNN or a transformer. ``lstm`` and ``gru`` are the memories that may follow any of them.
"""
