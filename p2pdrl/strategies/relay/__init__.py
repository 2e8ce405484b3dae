"""Strom's thresholded updates, to everybody, each exactly once.

`state`: the algorithm's arithmetic, and one node's part; `log`: who has which updates; `strom`: the strategy.
"""
