from __future__ import annotations

import random

from p2pdrl.membership.joining import SeedBook
from p2pdrl.transport.protocol import Address

A, B, NAME = Address("10.0.0.1", 1), Address("10.0.0.2", 1), Address("swarm.local", 1)
ME = "0" * 32
OTHER = "1" * 32


def book(*seeds: Address, hints: tuple[Address, ...] = ()) -> SeedBook:
    return SeedBook(seeds, hints, random.Random(0))


def test_back_off_doubles_to_thirty_seconds_and_ends_with_success() -> None:
    seeds = book(A)
    (seed,) = seeds.all
    waits = []
    for _ in range(8):
        seeds.failed(seed, 0.0, joined=True)
        waits.append(seed.next_at)
    for wait, full in zip(waits, [1, 2, 4, 8, 16, 30, 30, 30], strict=True):
        assert 0.8 * full <= wait <= full
    seeds.succeeded(seed, 0.0)
    assert seed.failures == 0
    assert seeds.due(1.0) == [seed]


def test_a_node_in_no_swarm_tries_each_second_or_two() -> None:
    seeds = book(A)
    (seed,) = seeds.all
    for _ in range(100):
        seeds.failed(seed, 0.0, joined=False)
        assert 0.8 <= seed.next_at <= 1.5


def test_many_remembered_addresses_are_tried_no_faster_than_twenty_a_second() -> None:
    seeds = book(hints=tuple(Address("10.0.0.1", port) for port in range(1, 201)))
    for seed in seeds.all:
        for _ in range(6):
            seeds.failed(seed, 0.0, joined=False)
    assert all(8.0 <= seed.next_at <= 10.0 for seed in seeds.all)


def test_only_addresses_not_at_rest_are_tried() -> None:
    seeds = book(NAME)
    (seed,) = seeds.all
    assert seeds.todo(seed, [A, B, A], ME, lambda address, who: False) == [A, B]
    assert seeds.todo(seed, [A, B], ME, lambda address, who: address == A) == [B]
    seed.answered[B] = OTHER
    assert seeds.todo(seed, [A, B], ME, lambda address, who: who == OTHER) == [A]
    seed.answered[A] = ME
    assert seeds.todo(seed, [A, B], ME, lambda address, who: who == OTHER) == []
    assert seeds.todo(seed, [A, B], ME, lambda address, who: False) == [B]  # that member died


def test_what_a_name_no_longer_resolves_to_is_forgotten() -> None:
    seeds = book(NAME)
    (seed,) = seeds.all
    seed.answered[A] = OTHER
    seeds.todo(seed, [B], ME, lambda address, who: False)
    assert seed.answered == {}


def test_a_refusal_is_news_once_and_tried_again_slowly() -> None:
    seeds = book(A)
    (seed,) = seeds.all
    assert seeds.refused(seed, "another task", 0.0)
    assert not seeds.refused(seed, "another task", 0.0)
    assert seeds.refused(seed, "another key", 0.0)
    assert 24.0 <= seed.next_at <= 30.0


def test_hints_go_once_the_swarm_was_met_and_doubles_count_once() -> None:
    seeds = book(A, A, hints=(A, B))
    assert [(seed.address, seed.hint) for seed in seeds.all] == [(A, False), (B, True)]
    seeds.drop_hints()
    assert [seed.address for seed in seeds.all] == [A]
