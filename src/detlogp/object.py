"""The object for those who come from RL-Kernel: its names, its argument order, its dtypes."""

import torch
from torch import Tensor

from detlogp import _checks
from detlogp.functional import score


class DeterministicLogp:
    """`detlogp.logp` under the names of RL-Kernel's DeterministicLogpCUDAOp, on CPU and CUDA.

    Results and arithmetic are float32 whatever the logits' type, unless the name says fp64; float64
    logits are then rounded to float32 first. `row_indices` are flat row numbers (integers); the
    result keeps the full row shape. An `output` buffer sets the rounding of the result alone.

    Shapes: logits [..., V], token_ids [...], row_indices [M], output [...]; results [...], in nats.

    Args:
        contract: "locked" or "exact", as for `detlogp.logp`. The names that say fp64 need "locked".

    Raises: what `detlogp.logp` raises, under the names given there.

    Source: rl_engine's public DeterministicLogpCUDAOp.
    """

    def __init__(self, contract: str = "locked") -> None:
        _checks.check_choice("contract", contract, _checks.CONTRACTS)
        self.contract = contract

    def __call__(self, logits: Tensor, token_ids: Tensor) -> Tensor:
        """Same as `apply`."""
        return self.apply(logits, token_ids)

    def apply(self, logits: Tensor, token_ids: Tensor) -> Tensor:
        """float32 log-probabilities in a new tensor."""
        return self._score(logits, token_ids)

    def apply_fp32(self, logits: Tensor, token_ids: Tensor) -> Tensor:
        """Same as `apply`."""
        return self.apply(logits, token_ids)

    def apply_fp64(self, logits: Tensor, token_ids: Tensor) -> Tensor:
        """float64 arithmetic and log-probabilities in a new tensor."""
        return self._score(logits, token_ids, compute_dtype=torch.float64)

    def out(self, logits: Tensor, token_ids: Tensor, output: Tensor) -> Tensor:
        """Writes into `output`, and returns it."""
        return self._score(logits, token_ids, out=output)

    def indexed_out(
        self, logits: Tensor, token_ids: Tensor, row_indices: Tensor, output: Tensor
    ) -> Tensor:
        """Writes the rows of `row_indices` into `output`, whose other rows keep their values."""
        _checks.check_row_indices(row_indices)
        return self._score(logits, token_ids, rows=row_indices, out=output)

    def indexed_fp32(self, logits: Tensor, token_ids: Tensor, row_indices: Tensor) -> Tensor:
        """float32 log-probabilities of the rows of `row_indices`, 0 elsewhere."""
        _checks.check_row_indices(row_indices)
        return self._score(logits, token_ids, rows=row_indices)

    def indexed_fp64(self, logits: Tensor, token_ids: Tensor, row_indices: Tensor) -> Tensor:
        """float64 arithmetic and log-probabilities of the rows of `row_indices`, 0 elsewhere."""
        _checks.check_row_indices(row_indices)
        return self._score(logits, token_ids, rows=row_indices, compute_dtype=torch.float64)

    online_out = out
    online_fp32 = apply_fp32
    online_fp64 = apply_fp64
    online_indexed_out = indexed_out
    online_indexed_fp32 = indexed_fp32
    online_indexed_fp64 = indexed_fp64

    def _score(
        self,
        logits: Tensor,
        token_ids: Tensor,
        *,
        rows: Tensor | None = None,
        out: Tensor | None = None,
        compute_dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        result = score(
            logits,
            token_ids,
            compute_dtype=compute_dtype,
            rows=rows,
            out=out,
            contract=self.contract,
        )
        assert isinstance(result, Tensor)
        return result
