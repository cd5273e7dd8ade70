"""The loss of each source of a mixture, without the host waiting for the device between two rows of the log.

The model's forward gives the loss of every row of a micro-batch, which stays on the device beside the row's source, known to the host.
Reading is one copy of an interval's row losses, and one sum over ranks; so the figures do not depend on how samples are spread over ranks
and micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from harness.batches import IGNORE, MicroBatch
from harness.coordination import Coordinator


class SourceLosses:
    """Adds up losses and label tokens by source.

    Args:
        names: of the sources, by number.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        self._new: list[tuple[Tensor, Tensor, Tensor]] = []
        self._kept: list[tuple[Tensor, Tensor, Tensor]] = []

    def begin(self) -> Callable[[MicroBatch, Tensor], None]:
        """Where a step's, or an evaluation's, micro-batches report; what an attempt at it that failed has reported is forgotten."""
        self._new.clear()
        return self.add

    def add(self, micro: MicroBatch, row_losses: Tensor) -> None:
        """Takes the losses of a micro-batch, (b,) on any device, summed over each row's label tokens. The host does not read them."""
        assert micro.source_ids is not None
        num_label_tokens = (micro.labels[:, 1:] != IGNORE).sum(1)  # (b,) of the CPU's copy
        self._new.append((micro.source_ids, num_label_tokens, row_losses.detach()))

    def commit(self) -> None:
        """What was reported since `begin` counts: the step, or the evaluation, is done."""
        if self._new:
            ids, counts, losses = zip(*self._new, strict=True)
            self._kept.append((torch.cat(ids), torch.cat(counts), torch.cat(losses)))
        self._new.clear()

    def read(self, coordinator: Coordinator) -> dict[str, float]:
        """Mean loss per label token by source over all ranks since the last call, sources without a label token left out.

        Waits for the device, and for the other ranks once.
        """
        size = len(self.names)
        sums = torch.zeros(2, size, dtype=torch.float64)
        if self._kept:
            ids, counts, losses = (torch.cat(parts) for parts in zip(*self._kept, strict=True))
            sums[0].index_add_(0, ids, losses.double().cpu())
            sums[1].index_add_(0, ids, counts.double())
        self._kept.clear()
        sums[1] /= coordinator.sequence_parallel_size  # ranks that share samples have the losses of a part, and the counts of all
        total = coordinator.sum(sums.flatten().tolist(), "loss of each source")
        return {name: total[i] / total[size + i] for i, name in enumerate(self.names) if total[size + i]}
