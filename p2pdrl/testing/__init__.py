"""Test doubles that ship: in-memory transport, fault proxy, fake learners, simulators, virtual swarms."""
