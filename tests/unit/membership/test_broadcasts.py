from __future__ import annotations

from p2pdrl.membership.broadcasts import BroadcastQueue
from p2pdrl.membership.records import Incarnation, MemberRecord, Suspicion


def member(number: int, counter: int = 0, tags: dict[str, str] | None = None) -> MemberRecord:
    node_id = f"{number:032x}"
    return MemberRecord(node_id, bytes(32), "n", "h:1", Incarnation(1, counter), "alive", tags or {}, 1)


def suspicion(number: int, accuser: int) -> Suspicion:
    return Suspicion(f"{number:032x}", Incarnation(1, 0), f"{accuser:032x}", "suspect", "why")


def test_each_record_is_sent_a_limited_number_of_times() -> None:
    queue = BroadcastQueue()
    queue.put(member(1))
    assert [len(queue.take(16, 10_000, 3)) for _ in range(4)] == [1, 1, 1, 0]
    assert len(queue) == 0


def test_least_sent_first_then_newest() -> None:
    queue = BroadcastQueue()
    queue.put(member(1))
    queue.take(16, 10_000, 4)
    queue.put(member(2))
    queue.put(member(3))
    assert [record.id[-1] for record in queue.take(3, 10_000, 4)] == ["3", "2", "1"]


def test_batches_are_bounded_in_count_and_bytes() -> None:
    queue = BroadcastQueue()
    for number in range(40):
        queue.put(member(number))
    assert len(queue.take(16, 32_768, 4)) == 16
    assert len(queue.take(16, 1_000, 4)) == 4
    assert queue.take(0, 32_768, 4) == ()


def test_a_record_too_big_for_the_room_doesnt_block_the_others() -> None:
    queue = BroadcastQueue()
    queue.put(member(1))
    queue.put(member(2, tags={f"k{i}": "v" * 100 for i in range(60)}))
    assert [record.id[-1] for record in queue.take(16, 1_000, 4)] == ["1"]


def test_news_of_a_member_end_old_news_and_accusations() -> None:
    queue = BroadcastQueue()
    queue.put(suspicion(1, 7))
    queue.put(suspicion(2, 7))
    queue.put(member(1))
    queue.put(member(1, counter=1))
    taken = queue.take(16, 10_000, 4)
    assert member(1, counter=1) in taken
    assert suspicion(2, 7) in taken
    assert len(taken) == 2
