"""Settled groups are judged and batched as they come, also while the trainer works.

A rejected group is told of at once, so that another takes its place; a usable one when it has its
place in a batch. Full batches wait here in the order to train them. A run that teaches nothing any
more stops collecting, and that is told to whoever waits for a batch: those that were full before
are trained first.
"""

from collections import deque
from collections.abc import Callable

import anyio
from anyio.abc import ObjectReceiveStream

from loops_cookbook.attempts import Group
from loops_cookbook.errors import NoLearningSignal, NothingWorks
from loops_cookbook.learning.advantages import AdvantageKind
from loops_cookbook.learning.batches import Batch, Batcher, JudgedGroup, Placed, judged


class Collector:
    """Turns the groups of a run into batches.

    Args:
        batcher: whose rules hold.
        advantage: how a group is judged.
        rejected: told of each group that will not be trained.
        placed: told of each that will, with the number of its batch, from 0.
    """

    def __init__(
        self,
        batcher: Batcher,
        *,
        advantage: AdvantageKind,
        rejected: Callable[[JudgedGroup], None],
        placed: Callable[[JudgedGroup, int], None],
    ) -> None:
        self._batcher = batcher
        self._advantage: AdvantageKind = advantage
        self._tell_rejected = rejected
        self._tell_placed = placed
        self._full: deque[Batch] = deque()
        self._is_over = False
        self._stopped_by: NoLearningSignal | None = None
        self._news = anyio.Event()

    async def collect(self, groups: ObjectReceiveStream[Group]) -> None:
        """Take groups until there are no more; what is left then is the last, short batch.

        Raises:
            NothingWorks: at once, for no batch is waited for in vain, nor an evaluation.
        """
        try:
            async for group in groups:
                self._take(judged(group, advantage=self._advantage))
            self._place(self._batcher.flush())
        except NothingWorks:
            raise
        except NoLearningSignal as error:
            self._stopped_by = error
        self._is_over = True
        self._news.set()

    async def next(self) -> Batch | None:
        """Wait for the next batch; None when there is nothing more to train on.

        Raises:
            NoLearningSignal: too many groups in a row taught nothing.
        """
        while not self._full and not self._is_over:
            self._news = anyio.Event()
            await self._news.wait()
        if self._full:
            return self._full.popleft()
        if self._stopped_by is not None:
            raise self._stopped_by
        return None

    def close(self) -> list[Group]:
        """Tell of the usable groups without a place too, once nothing more is collected.

        Returns:
            Every usable group that `next` did not hand out, in starting order.
        """
        for each in self._batcher.waiting:
            self._tell_placed(each, self._batcher.full)
        waiting = [each for batch in self._full for each in batch.groups]
        return [each.group for each in (*waiting, *self._batcher.leftovers)]

    def _take(self, group: JudgedGroup) -> None:
        if group.rejection is not None:
            self._tell_rejected(group)
        self._place(self._batcher.add(group))

    def _place(self, placed: Placed) -> None:
        for group, batch in placed.groups:
            self._tell_placed(group, batch)
        self._full.extend(placed.batches)
        if placed.batches:
            self._news.set()
