"""What goes over streams and pipes: hidden or proven, in one order only."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given
from hypothesis import strategies as st

from p2pdrl.errors import WireError
from p2pdrl.transport.cipher import KEY_BYTES, OPEN, TAG_BYTES, Cipher, new_keys

KEY = bytes(range(KEY_BYTES))
HIDES = pytest.mark.parametrize("hides", [True, False], ids=["hidden", "proven"])
data = st.binary(max_size=200)


def sealed_piece(cipher: Cipher, piece: bytes) -> bytes:
    return b"".join(map(bytes, cipher.seal_piece(piece)))


def opened_piece(cipher: Cipher, raw: bytes) -> bytes | None:
    """A piece that came; None when it isn't authentic."""
    if not cipher.hides:
        piece, tag = memoryview(raw)[: len(raw) - cipher.nbytes], memoryview(raw)[len(raw) - cipher.nbytes :]
        return bytes(piece) if cipher.unseal_piece(piece, tag) else None
    out = bytearray(len(raw) - TAG_BYTES)
    return bytes(out) if cipher.decrypt_piece(memoryview(raw), memoryview(out)) else None


@HIDES
@given(st.lists(st.tuples(st.booleans(), data, data), max_size=8))
def test_what_is_sealed_comes_out(hides: bool, things: list[tuple[bool, bytes, bytes]]) -> None:
    ours, theirs = Cipher(KEY, hides=hides), Cipher(KEY, hides=hides)
    for is_message, content, head in things:
        if is_message:
            raw = ours.seal(content, head)
            assert theirs.unseal(raw, head, "it") == content
        else:
            raw = sealed_piece(ours, content)
            assert opened_piece(theirs, raw) == content
        assert len(raw) == len(content) + TAG_BYTES


def test_it_is_aes_256_gcm_with_the_count_as_nonce() -> None:
    """Against AESGCM itself: nodes of different releases have to agree."""

    def gcm(count: int, hidden: bytes, shown: bytes = b"", *, piece: bool = False) -> bytes:
        nonce = (count | (1 << 95 if piece else 0)).to_bytes(12, "big")
        return AESGCM(KEY).encrypt(nonce, hidden, shown)

    cipher = Cipher(KEY)
    assert cipher.seal(b"meta", b"head") == gcm(1, b"meta", b"head")
    assert sealed_piece(cipher, b"piece") == gcm(2, b"piece", piece=True)
    assert sealed_piece(cipher, b"another") == gcm(3, b"another", piece=True)
    cipher.skip(4)
    assert cipher.seal(b"") == gcm(8, b"")
    cipher = Cipher(KEY, hides=False)
    assert cipher.seal(b"meta", b"head") == b"meta" + gcm(1, b"", b"headmeta")
    assert sealed_piece(cipher, b"piece") == b"piece" + gcm(2, b"", b"piece", piece=True)


def test_a_known_answer() -> None:
    sealed = "44a4504338415ba46ba6ccdd5f9105374f486fc8"
    assert Cipher(bytes(KEY_BYTES)).seal(b"meta", b"head").hex() == sealed


SECRET = b"the policy's weights, word for word"


def test_what_is_hidden_cannot_be_read() -> None:
    cipher = Cipher(KEY)
    raw = cipher.seal(SECRET, b"head") + sealed_piece(cipher, SECRET) + sealed_piece(cipher, SECRET)
    assert not any(SECRET[at : at + 4] in raw for at in range(len(SECRET) - 3))
    assert cipher.seal(SECRET) != cipher.seal(SECRET), "the same is never sent twice"


def test_what_is_proven_alone_can_be_read() -> None:
    cipher = Cipher(KEY, hides=False)
    assert cipher.seal(SECRET, b"head").startswith(SECRET)
    assert sealed_piece(cipher, SECRET).startswith(SECRET)


@HIDES
@given(data, data, st.data())
def test_a_message_of_which_a_bit_changed_is_refused(
    hides: bool, message: bytes, head: bytes, more: st.DataObject
) -> None:
    raw = Cipher(KEY, hides=hides).seal(message, head)
    bad = bytearray(head + raw)
    bit = more.draw(st.integers(0, 8 * len(bad) - 1))
    bad[bit // 8] ^= 1 << bit % 8
    with pytest.raises(WireError, match="the call isn't authentic"):
        Cipher(KEY, hides=hides).unseal(bytes(bad[len(head) :]), bytes(bad[: len(head)]), "the call")


@HIDES
@given(data, st.data())
def test_a_piece_of_which_a_bit_changed_is_refused(hides: bool, piece: bytes, more: st.DataObject) -> None:
    bad = bytearray(sealed_piece(Cipher(KEY, hides=hides), piece))
    bit = more.draw(st.integers(0, 8 * len(bad) - 1))
    bad[bit // 8] ^= 1 << bit % 8
    assert opened_piece(Cipher(KEY, hides=hides), bytes(bad)) is None


@HIDES
@pytest.mark.parametrize("nbytes", range(TAG_BYTES + 4))
def test_what_was_cut_is_refused(hides: bool, nbytes: int) -> None:
    raw = Cipher(KEY, hides=hides).seal(b"meta", b"head")
    assert len(raw) == TAG_BYTES + 4
    with pytest.raises(WireError):
        Cipher(KEY, hides=hides).unseal(raw[:nbytes], b"head", "it")


@HIDES
@pytest.mark.parametrize("order", [[0, 0], [1], [0, 2], [1, 0]], ids=["repeated", "late", "a gap", "swapped"])
@pytest.mark.parametrize("kind", ["messages", "pieces"])
def test_nothing_can_be_repeated_left_out_or_swapped(hides: bool, order: list[int], kind: str) -> None:
    ours, theirs = Cipher(KEY, hides=hides), Cipher(KEY, hides=hides)
    make: Callable[[bytes], bytes] = ours.seal if kind == "messages" else lambda it: sealed_piece(ours, it)
    raw = [make(b"same") for _ in range(3)]
    found: list[bytes | None] = []
    for at in order:
        if kind == "pieces":
            found.append(opened_piece(theirs, raw[at]))
        else:
            try:
                found.append(theirs.unseal(raw[at], b"", "it"))
            except WireError:
                found.append(None)
    assert found == [b"same" if at == place else None for place, at in enumerate(order)]


@HIDES
def test_what_is_skipped_counts(hides: bool) -> None:
    ours, theirs = Cipher(KEY, hides=hides), Cipher(KEY, hides=hides)
    raw = [ours.seal(b"meta"), sealed_piece(ours, b"a"), sealed_piece(ours, b"b"), ours.seal(b"last")]
    assert theirs.unseal(raw[0], b"", "it") == b"meta"
    theirs.skip(2)
    assert theirs.unseal(raw[3], b"", "it") == b"last"


@HIDES
def test_another_key_or_way_is_refused(hides: bool) -> None:
    calls, answers = new_keys()
    raw = Cipher(calls, hides=hides).seal(b"meta", b"head")
    for key in (answers, *new_keys()):
        with pytest.raises(WireError):
            Cipher(key, hides=hides).unseal(raw, b"head", "it")
    with pytest.raises(WireError):
        Cipher(calls, hides=not hides).unseal(raw, b"head", "it")


def test_a_head_belongs_to_its_message() -> None:
    for hides in (True, False):
        raw = Cipher(KEY, hides=hides).seal(b"meta", b"head")
        with pytest.raises(WireError):
            Cipher(KEY, hides=hides).unseal(raw, b"tail", "it")


def test_keys_are_fresh() -> None:
    keys = {key for _ in range(10) for key in new_keys()}
    assert len(keys) == 20
    assert {len(key) for key in keys} == {KEY_BYTES}


@pytest.mark.parametrize("hides", [True, False])
def test_without_a_key_nothing_is_sealed(hides: bool) -> None:
    for cipher in (Cipher(None, hides=hides), OPEN):
        assert (cipher.nbytes, cipher.hides) == (0, False)
        assert cipher.seal(b"meta", b"head") == b"meta"
        assert cipher.unseal(b"other", b"head", "it") == b"other"
        piece = memoryview(bytearray(5))
        assert [buffer is piece for buffer in cipher.seal_piece(piece)] == [True]
        assert cipher.unseal_piece(piece, memoryview(b""))
        with pytest.raises(ValueError, match="without a key"):
            cipher.decrypt_piece(piece, piece)


def test_proven_pieces_are_not_copied() -> None:
    piece = memoryview(bytearray(5))
    assert Cipher(KEY, hides=False).seal_piece(piece)[0] is piece
