from __future__ import annotations

import numpy as np

from p2pdrl.strategies.gossip.gala import OwnVector


def test_a_delta_counts_only_for_the_vector_that_was_read(make_board):
    board = make_board(np.zeros(4))
    own = OwnVector(board, 4)
    own.read()
    assert own.policy_version == 1
    assert own.add(np.ones(4, np.float32), 5)
    own.read()
    assert np.array_equal(own.vector, np.ones(4))
    assert own.policy_version == 5
    assert not own.replaced()
    board.post_set(np.full(4, 7.0, np.float32), None, 3)
    assert not own.add(np.ones(4, np.float32), 9)
    assert own.replaced()
    assert not own.replaced()
    own.read()
    assert np.array_equal(own.vector, np.full(4, 7.0))
    assert own.add(np.ones(4, np.float32), 9)
