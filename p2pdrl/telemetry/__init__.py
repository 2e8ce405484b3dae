"""What a node reports: log lines, metrics for Prometheus, rates, writers of figures."""
