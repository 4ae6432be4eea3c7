"""Which columns of the rows a matrix holds, and how a sum over whole rows is taken."""

from dataclasses import dataclass

from torch import Tensor
from torch import distributed as dist


@dataclass(frozen=True)
class Columns:
    """Of whole rows, or of one process's part of them.

    In the exact contract sums are whole numbers, to which every process of the group adds its own.
    """

    count: int  # here
    vocab_size: int  # of whole rows
    first: int = 0
    is_exact: bool = False
    group: dist.ProcessGroup | None = None  # the processes that share the rows

    def largest(self, keys: Tensor) -> None:
        """Takes the largest number of all processes, in place."""
        if self.group is not None:
            dist.all_reduce(keys, dist.ReduceOp.MAX, self.group)

    def total(self, numbers: Tensor) -> None:
        """Adds up what all processes have, in place."""
        if self.group is not None:
            dist.all_reduce(numbers, dist.ReduceOp.SUM, self.group)
