"""The learner's newest gradient, open until an exchange takes it or a newer one comes.

The learner never waits: it may run two posts ahead, and at most two are open here: one in an exchange,
and one on offer. A third drives out the one on offer, which is answered ``none`` at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sized

from p2pdrl.strategies.protocol import Learner, Post

__all__ = ["Offers"]


class Offers:
    """What of the learner's posts can be exchanged.

    Args:
        learner: who posts.
    """

    def __init__(self, learner: Learner) -> None:
        self._learner = learner
        self._post: Post | None = None

    @property
    def open(self) -> bool:
        """Whether there is a gradient to exchange."""
        return self._post is not None

    async def follow(self, alive: Callable[[], Sized], told: Callable[[], None]) -> None:
        """Offer each gradient as it comes, for ever; while nobody is alive its answer comes at once.

        Args:
            alive: the peers that there are.
            told: called after each.
        """
        while True:
            self.put(await self._learner.next_post())
            if not alive():
                self.withdraw()
            told()

    def put(self, post: Post) -> None:
        """Offer a newer gradient."""
        self.withdraw()
        if post.vector is None:
            self._learner.answer(post, "none")
        else:
            self._post = post

    def withdraw(self) -> None:
        """Let the learner go on with its own."""
        post, self._post = self._post, None
        if post is not None:
            self._learner.answer(post, "none")

    def take(self) -> Post | None:
        """Take the gradient for an exchange; the taker answers it, or puts it `back`."""
        post, self._post = self._post, None
        return post

    def back(self, post: Post) -> None:
        """Offer again what an exchange couldn't use; when there is a newer one, answer it ``none``."""
        if self._post is None:
            self._post = post
        else:
            self._learner.answer(post, "none")
