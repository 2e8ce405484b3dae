"""The process in which torch.distributed runs for a daemon."""
