"""Unrolls from node to node: what actors make on one, a learner on another learns from.

| to … | module |
|---|---|
| send what this node's actors make to the learner that they work for | `sender` |
| take it in on the learner's node, and answer with newer parameters | `receiver` |
| say what both tell each other, and which learner an actor works for | `messages` |
"""
