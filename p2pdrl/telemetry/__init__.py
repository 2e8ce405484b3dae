"""What a node tells about itself: log lines, metrics for Prometheus, rates, TensorBoard files."""
