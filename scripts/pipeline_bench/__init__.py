"""The parts of `bench_pipeline.py`: its contenders, their processes, and what it makes of their trials."""
