"""Exact averaging of a whole group, of gradients or parameters, over our transport or torch.distributed."""
