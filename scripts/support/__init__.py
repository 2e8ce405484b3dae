"""What scripts are made of and nobody runs by hand: swarms, workers, proxies and plots."""
