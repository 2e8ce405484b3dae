"""Exact averaging of a whole group: gradients, parameters, federated; over our transport or torch.distributed."""
