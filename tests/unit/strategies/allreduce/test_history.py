"""Histories of rounds, and what follows from the members' notes."""

from __future__ import annotations

import msgspec

from p2pdrl.group.view import MAX_NOTE_BYTES, ViewKey
from p2pdrl.strategies.allreduce.history import AveragingNote, RoundHistory, make_plan

KEY = ViewKey(1, 7, "a" * 32)
LATER = ViewKey(1, 8, "a" * 32)


def after(rounds, key=KEY, history=None) -> RoundHistory:
    history = RoundHistory() if history is None else history
    for number in rounds:
        history.completed(key, number)
    return history


def noted(history, lineage="aa", steps=100, version=5) -> AveragingNote:
    return AveragingNote(history.number, history.digest, history.before, lineage, steps, version)


def plan(notes, *, led=True):
    return make_plan(LATER, sorted(notes), notes, led=led)


def test_equal_histories_have_equal_marks_and_others_dont():
    assert after((1, 2)) == after((1, 2))
    assert after((1, 2)).before == after((1,)).digest
    assert after((1, 2)).digest != after((1, 2), LATER).digest
    assert after((1, 2)).digest != after((2, 1)).digest


def test_a_round_that_was_done_again_in_another_view_is_another_one():
    """Who gave a part to the first, and not to the second, has none in the result."""
    history = after((1, 2))
    assert history.ended_in(KEY, 2)
    assert not history.ended_in(KEY, 1)
    again = after((2,), LATER, after((1,)))
    assert again.ended_in(LATER, 2)
    assert not again.ended_in(KEY, 2)


def test_a_note_is_short_and_survives_rubbish():
    note = AveragingNote(2**52, b"x" * 12, b"y" * 12, "l" * 64, 2**52, 2**52)
    assert len(note.encode()) <= MAX_NOTE_BYTES
    assert AveragingNote.read(note.encode()) == note
    for bad in (b"", b"\xc1", b"x" * 300, msgspec.msgpack.encode([-1]), None):
        assert AveragingNote.read(bad) == AveragingNote()


def test_without_histories_the_one_with_most_steps_leads():
    fresh = RoundHistory()
    notes = {"a": noted(fresh, steps=5), "b": noted(fresh, steps=9), "c": noted(fresh, steps=9, version=9)}
    led = plan(notes)
    assert led.fresh
    assert led.number == 1
    assert led.leaders == ("c",)
    assert led.standing == {"a": "other", "b": "other", "c": "same"}
    together = plan(notes, led=False)
    assert set(together.standing.values()) == {"same"}
    assert set(together.leaders) == {"a", "b", "c"}


def test_the_lineage_with_most_steps_stays_then_the_lower_id():
    long, fresh = after(range(1, 9)), RoundHistory()
    notes = {"a": noted(long, "zz", 10), "b": noted(fresh, "yy", 11), "c": noted(fresh, "xx", 11)}
    decided = plan(notes, led=False)
    assert decided.lineage == "xx"
    assert decided.standing == {"a": "other", "b": "other", "c": "same"}
    assert decided.number == 1


def test_one_round_short_is_behind_and_more_is_other():
    notes = {name: noted(after(range(1, last + 1))) for name, last in zip("abc", (5, 4, 3), strict=True)}
    notes["d"] = noted(RoundHistory())
    decided = plan(notes)
    assert decided.number == 6
    assert decided.leaders == ("a",)
    assert decided.standing == {"a": "same", "b": "behind", "c": "other", "d": "other"}


def test_another_branch_of_the_same_length_is_other_and_the_greater_part_stays():
    common = range(1, 4)
    notes = {name: noted(after((4,), LATER, after(common))) for name in "ab"}
    notes["c"] = noted(after((4,), ViewKey(1, 8, "b"), after(common)))
    decided = plan(notes)
    assert decided.standing == {"a": "same", "b": "same", "c": "other"}
    notes["c"] = noted(after((4, 5), ViewKey(1, 8, "b"), after(common)))
    assert plan(notes).standing == {"a": "other", "b": "other", "c": "same"}


def test_members_without_a_state_neither_lead_nor_decide():
    notes = {"a": AveragingNote(), "b": noted(RoundHistory(), steps=1)}
    assert plan(notes).leaders == ("b",)
    assert plan(notes).standing == {"a": "other", "b": "same"}
    assert plan({"a": AveragingNote(), "b": AveragingNote()}).number == 1
