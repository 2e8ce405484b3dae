from __future__ import annotations

import os
import socket
import threading
import time

import pytest

from p2pdrl.config.learner_mode import FREE
from p2pdrl.errors import WireError, WorkerError
from p2pdrl.workers.protocol import (
    Alive,
    Attach,
    ChildFailed,
    JoinHogwild,
    LearnerPace,
    Others,
    Progress,
    Report,
    Stop,
    WorkMode,
    frame,
)


def report(updates: int, size: int = 0) -> Report:
    return Report(updates, updates, updates, 0, [0.5] * size, {})


def test_what_the_daemon_says_arrives_in_order(ends):
    mailbox, daemon = ends
    daemon.say(LearnerPace(True, 0.0), Progress(0.25), Stop())
    assert mailbox.receive(1.0) == [LearnerPace(True, 0.0), Progress(0.25), Stop()]
    assert mailbox.receive(0.0) == []


def test_half_a_frame_waits_for_the_other_half(ends):
    mailbox, daemon = ends
    whole = frame(Progress(0.75))
    daemon.sock.sendall(whole[:5])
    assert mailbox.receive(0.0) == []
    daemon.sock.sendall(whole[5:])
    assert mailbox.receive(1.0) == [Progress(0.75)]


def test_what_is_ahead_is_seen_and_still_arrives(ends):
    mailbox, daemon = ends
    assert mailbox.ahead() == []
    whole = frame(Progress(0.75))
    daemon.sock.sendall(whole[:5])
    assert mailbox.ahead() == []
    assert mailbox.receive(1.0) == []
    daemon.sock.sendall(whole[5:] + frame(Stop())[:3])
    assert mailbox.ahead() == mailbox.ahead() == [Progress(0.75)]
    assert mailbox.receive(1.0) == [Progress(0.75)]
    daemon.sock.sendall(frame(Stop())[3:])
    assert mailbox.ahead() == [Stop()]
    assert mailbox.receive(1.0) == [Stop()]
    daemon.sock.close()
    with pytest.raises(WorkerError, match="the daemon is gone"):
        mailbox.ahead()


def test_descriptors_of_what_is_ahead_are_still_there(ends):
    mailbox, daemon = ends
    read_fd, write_fd = os.pipe()
    order = Attach(8, restore=False)
    socket.send_fds(daemon.sock, [frame(order)], [write_fd])
    os.close(write_fd)
    assert mailbox.ahead() == mailbox.ahead() == [order]
    assert mailbox.receive(1.0) == [order]
    taken = mailbox.take_fd()
    os.write(taken, b"x")
    os.close(taken)
    assert os.read(read_fd, 2) == b"x"
    assert os.read(read_fd, 1) == b""
    os.close(read_fd)


def test_waiting_ends_in_time(ends):
    mailbox, _ = ends
    began_s = time.monotonic()
    assert mailbox.receive(0.02) == []
    assert time.monotonic() - began_s >= 0.019


def test_a_daemon_that_is_gone_is_told(ends):
    mailbox, daemon = ends
    daemon.sock.close()
    with pytest.raises(WorkerError, match="the daemon is gone"):
        mailbox.receive(1.0)
    with pytest.raises(WorkerError, match="the daemon is gone"):
        mailbox.send(report(1))


def test_a_daemon_that_died_with_our_report_unread_is_told(ends):
    mailbox, daemon = ends
    mailbox.send(report(1))
    daemon.sock.close()
    with pytest.raises(WorkerError):
        mailbox.receive(1.0)
    with pytest.raises(WorkerError):
        mailbox.send(report(2))


def test_rubbish_from_the_daemon_is_a_wire_error(ends):
    mailbox, daemon = ends
    daemon.sock.sendall(b"\xff\xff\xff\xff")
    with pytest.raises(WireError):
        mailbox.receive(1.0)


def test_the_board_comes_with_its_descriptor(ends):
    mailbox, daemon = ends
    read_end, write_end = os.pipe()
    socket.send_fds(daemon.sock, [frame(Attach(64, restore=True))], [read_end])
    os.close(read_end)
    attach, fd = mailbox.attach()
    assert attach == Attach(64, restore=True)
    os.write(write_end, b"x")
    os.close(write_end)
    assert os.read(fd, 1) == b"x"
    os.close(fd)


def test_what_comes_right_behind_the_board_isnt_lost(ends):
    mailbox, daemon = ends
    read_end, write_end = os.pipe()
    os.close(write_end)
    frames = [
        frame(message) for message in (Attach(64, restore=False), LearnerPace(True, 0.0), Others({"a": b"b"}))
    ]
    socket.send_fds(daemon.sock, [b"".join(frames)], [read_end])
    os.close(read_end)
    _, fd = mailbox.attach()
    os.close(fd)
    assert mailbox.receive(0.0) == [LearnerPace(True, 0.0), Others({"a": b"b"})]
    assert mailbox.receive(0.0) == []


def test_descriptors_are_claimed_in_the_order_of_their_messages(ends):
    mailbox, daemon = ends
    pipes = [os.pipe() for _ in range(3)]
    socket.send_fds(daemon.sock, [frame(JoinHogwild(64))], [pipes[0][0]])
    mailbox_join, first = mailbox.attach()
    for (read_end, _), word in zip(pipes[1:], (WorkMode(FREE, 1, 64), WorkMode(FREE, 2, 64)), strict=True):
        socket.send_fds(daemon.sock, [frame(word)], [read_end])
    messages = []
    while len(messages) < 2:
        messages += mailbox.receive(1.0)
    fds = [first, mailbox.take_fd(), mailbox.take_fd()]
    with pytest.raises(WorkerError, match="didn't send the memory"):
        mailbox.take_fd()
    assert (mailbox_join, [word.epoch for word in messages]) == (JoinHogwild(64), [1, 2])
    for number, ((read_end, write_end), fd) in enumerate(zip(pipes, fds, strict=True)):
        os.write(write_end, bytes([number]))
        assert os.read(fd, 1) == bytes([number])
        for each in (read_end, write_end, fd):
            os.close(each)


@pytest.mark.parametrize("message", [LearnerPace(False, 0.0), Attach(64, restore=False)])
def test_anything_but_a_board_is_refused(ends, message):
    mailbox, daemon = ends
    daemon.say(message)  # without a descriptor
    with pytest.raises(WorkerError, match="didn't send the board"):
        mailbox.attach()


def test_descriptors_that_nobody_took_are_closed(ends):
    mailbox, daemon = ends
    read_end, write_end = os.pipe()
    socket.send_fds(daemon.sock, [frame(LearnerPace(False, 0.0))], [read_end])
    os.close(read_end)
    mailbox.receive(1.0)
    mailbox.close()
    with pytest.raises(BrokenPipeError):
        os.write(write_end, b"x")
    os.close(write_end)


def test_a_daemon_that_doesnt_read_blocks_nobody(ends):
    mailbox, daemon = ends
    began_s, sent = time.monotonic(), 0
    while not mailbox.backlog and sent < 1000:
        mailbox.send(report(sent, size=2000))
        sent += 1
    assert mailbox.backlog
    assert time.monotonic() - began_s < 5
    mailbox.drain(0.0)  # no room, and no wait
    assert mailbox.backlog
    heard = daemon.hear()
    while mailbox.backlog:
        mailbox.flush()
        heard += daemon.hear()
    assert [one.updates for one in heard] == list(range(sent))


def test_the_last_words_wait_for_room(ends):
    mailbox, daemon = ends
    while not mailbox.backlog:
        mailbox.send(report(1, size=2000))
    mailbox.send(ChildFailed("the last word", usage=True))
    heard = []

    def read() -> None:
        while not heard or not isinstance(heard[-1], ChildFailed):
            heard.extend(daemon.hear())

    reader = threading.Thread(target=read)
    reader.start()
    mailbox.drain(5.0)
    reader.join(5.0)
    assert not mailbox.backlog
    assert heard[-1] == ChildFailed("the last word", usage=True)


def test_signs_of_life_wait_for_room_and_never_pile_up(ends):
    mailbox, daemon = ends
    mailbox.beat()
    assert daemon.hear() == [Alive()]
    while not mailbox.backlog:
        mailbox.send(report(1, size=1000))
    unsent = len(mailbox._unsent)
    for _ in range(100):
        mailbox.beat()
    assert len(mailbox._unsent) <= unsent


def test_signs_of_life_from_another_thread_break_no_message(ends):
    mailbox, daemon = ends
    over = threading.Event()

    def beat() -> None:
        while not over.is_set():
            mailbox.beat()

    beating = threading.Thread(target=beat)
    beating.start()
    heard: list[int] = []
    try:
        for number in range(300):
            mailbox.send(report(number, size=200))
            heard += [said.updates for said in daemon.hear() if isinstance(said, Report)]
    finally:
        over.set()
        beating.join()
    while len(heard) < 300:
        mailbox.drain(0.1)
        heard += [said.updates for said in daemon.hear() if isinstance(said, Report)]
    assert heard == list(range(300))
