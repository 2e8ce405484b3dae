"""The swarm key's file."""

from __future__ import annotations

import base64

import pytest

from p2pdrl.api.keyfile import (
    KEY_BYTES,
    read_operator_key,
    read_swarm_keys,
    rotate_swarm_key,
    write_operator_key,
    write_swarm_key,
)
from p2pdrl.errors import UsageError
from p2pdrl.ids import swarm_id_from_key

NOW_S, HOUR_S = 1_790_000_000.0, 3600.0


def read_swarm_key(path):
    (key,) = read_swarm_keys(path).good(NOW_S)
    return key


def test_a_key_is_written_for_its_owner_only_and_read_back(tmp_path):
    path = tmp_path / "swarm.key"
    write_swarm_key(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(read_swarm_key(path)) == KEY_BYTES
    other = tmp_path / "other.key"
    write_swarm_key(other)
    assert read_swarm_key(other) != read_swarm_key(path)


def test_a_key_is_never_overwritten(tmp_path):
    path = tmp_path / "swarm.key"
    write_swarm_key(path)
    before = path.read_bytes()
    with pytest.raises(UsageError, match="never overwritten"):
        write_swarm_key(path)
    assert path.read_bytes() == before
    with pytest.raises(UsageError, match="can't write"):
        write_swarm_key(tmp_path / "missing" / "swarm.key")


def test_a_key_that_others_can_read_is_refused(tmp_path):
    path = tmp_path / "swarm.key"
    write_swarm_key(path)
    path.chmod(0o640)
    with pytest.raises(UsageError, match="chmod 600"):
        read_swarm_key(path)


@pytest.mark.parametrize("content", [b"", b"not base64!", b"c2hvcnQ=", b"\xff" * 50, b"A" * 5000])
def test_what_is_no_key_is_refused_without_being_shown(tmp_path, content):
    path = tmp_path / "swarm.key"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(UsageError, match="isn't a swarm key"):
        read_swarm_key(path)


def test_a_missing_or_unreadable_file_says_what_to_do(tmp_path):
    with pytest.raises(UsageError, match="p2pdrl keygen"):
        read_swarm_key(tmp_path / "none.key")
    with pytest.raises(UsageError, match="can't read"):
        read_swarm_key(tmp_path)


@pytest.fixture
def rotated(tmp_path):
    """A key file, its key before, and what it holds now."""
    path = tmp_path / "swarm.key"
    write_swarm_key(path)
    old = read_swarm_key(path)
    return path, old, rotate_swarm_key(path, HOUR_S, NOW_S)


def test_a_rotation_leaves_time_to_copy_the_file_and_then_time_for_stragglers(rotated):
    path, old, keys = rotated
    assert read_swarm_keys(path) == keys
    new = keys.keys[0].key
    assert new != old
    assert keys.good(NOW_S) == (old, new), "the old one is shown, the new one taken"
    assert keys.good(NOW_S + HOUR_S - 1) == (old, new)
    assert keys.good(NOW_S + HOUR_S) == (new, old)
    assert keys.good(NOW_S + 2 * HOUR_S - 1) == (new, old)
    assert keys.good(NOW_S + 2 * HOUR_S) == (new,)
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_swarm_keeps_its_id_through_rotations(rotated):
    path, old, keys = rotated
    assert keys.swarm_id == swarm_id_from_key(old)
    later_s = NOW_S + 3 * HOUR_S
    again = rotate_swarm_key(path, HOUR_S, later_s)
    assert again.swarm_id == keys.swarm_id
    assert again.good(later_s) == (keys.keys[0].key, again.keys[0].key)


def test_one_rotation_at_a_time(rotated):
    path, _, _ = rotated
    before = path.read_bytes()
    with pytest.raises(UsageError, match="being rotated already: wait until 2026-09-21"):
        rotate_swarm_key(path, HOUR_S, NOW_S + HOUR_S)
    assert path.read_bytes() == before


def test_keys_are_never_shown_in_words(rotated):
    path, _, keys = rotated
    assert not any(line.split()[0] in repr(keys) for line in path.read_text().splitlines())


@pytest.mark.parametrize(
    "extra",
    [
        " operator=zz:a",
        " operator=00:a",
        f" operator={'0' * 64}:a/b",
        " form=3",
        " from=soon",
        " from",
        "\nnot base64!",
        "\n" + base64.b64encode(b"x").decode(),
    ],
)
def test_what_a_line_may_not_say(tmp_path, extra):
    path = tmp_path / "swarm.key"
    path.write_text(base64.b64encode(bytes(32)).decode() + extra + "\n")
    path.chmod(0o600)
    with pytest.raises(UsageError, match="isn't a swarm key"):
        read_swarm_keys(path)


@pytest.fixture
def operated(tmp_path):
    """A key file with one operator, and hers."""
    operator = write_operator_key(tmp_path / "swarm.key.operator", "alice")
    write_swarm_key(tmp_path / "swarm.key", [operator.public])
    return tmp_path / "swarm.key", operator


def test_a_key_names_its_operators_and_an_operators_key_is_a_file_of_its_own(operated):
    path, operator = operated
    assert read_swarm_keys(path).operators == (operator.public,)
    assert path.read_text().endswith(f" operator={operator.public.public_key.hex()}:alice\n")
    private = path.with_name("swarm.key.operator")
    assert private.stat().st_mode & 0o777 == 0o600
    assert read_operator_key(private).public == operator.public
    private.chmod(0o644)
    with pytest.raises(UsageError, match="chmod 600"):
        read_operator_key(private)
    assert private.read_text().split()[0] not in repr(operator)


@pytest.mark.parametrize("content", ["", "x", "AAAA name=alice", f"{'A' * 43}= name=a/b", f"{'A' * 43}="])
def test_what_is_no_operators_key(tmp_path, content):
    path = tmp_path / "o"
    path.write_text(content)
    path.chmod(0o600)
    with pytest.raises(UsageError, match="isn't an operator key"):
        read_operator_key(path)


def test_a_rotation_keeps_the_operators_but_for_those_that_are_named(operated, tmp_path):
    path, alice = operated
    bob = write_operator_key(tmp_path / "bob", "bob").public
    keys = rotate_swarm_key(path, HOUR_S, NOW_S)
    assert read_swarm_keys(path) == keys
    assert keys.operators == (alice.public,)
    assert rotate_swarm_key(path, HOUR_S, NOW_S + 3 * HOUR_S, add=[bob, bob]).operators == (alice.public, bob)
    with pytest.raises(UsageError, match="names 0 of the key's root operators, which are: alice"):
        rotate_swarm_key(path, HOUR_S, NOW_S + 6 * HOUR_S, remove=["carol"])
    keys = rotate_swarm_key(path, HOUR_S, NOW_S + 6 * HOUR_S, remove=[alice.public.id[:8]])
    assert keys.operators == (bob,)
    with pytest.raises(UsageError, match="the last root operator stays"):
        rotate_swarm_key(path, HOUR_S, NOW_S + 9 * HOUR_S, remove=["bob"])
    assert read_swarm_keys(path) == keys


@pytest.mark.parametrize("digits", [0, 1, 3])
def test_a_rotation_leaves_nobody_out_by_a_slip(operated, tmp_path, digits):
    path, alice = operated
    rotate_swarm_key(path, HOUR_S, NOW_S, add=[write_operator_key(tmp_path / "bob", "bob").public])
    before = path.read_bytes()
    with pytest.raises(UsageError, match="names 0 of the key's root operators"):
        rotate_swarm_key(path, HOUR_S, NOW_S + 3 * HOUR_S, remove=[alice.public.id[:digits]])
    assert path.read_bytes() == before


@pytest.mark.parametrize("name", ["", "a b", "a:b", "é", "x" * 33])
def test_what_an_operator_cant_be_called(tmp_path, name):
    with pytest.raises(UsageError, match="can't be an operator's name"):
        write_operator_key(tmp_path / "o", name)
