"""What a node tells about itself: log lines, metrics for Prometheus, short histories, TensorBoard files."""
