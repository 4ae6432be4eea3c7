"""Log-probabilities of tokens whose bits depend on nothing but the row itself.

>>> import torch, detlogp
>>> logits = torch.randn(4, 1000)
>>> token_ids = torch.tensor([1, 20, 300, 999])
>>> batch = detlogp.logp(logits, token_ids)
>>> alone = detlogp.logp(logits[2], token_ids[2])
>>> torch.equal(batch[2], alone)
True
"""

from detlogp import parallel
from detlogp._version import __version__
from detlogp.functional import LogpEntropyResult, LogpLseEntropyResult, LogpResult, logp
from detlogp.object import DeterministicLogp

__all__ = [
    "DeterministicLogp",
    "LogpEntropyResult",
    "LogpLseEntropyResult",
    "LogpResult",
    "__version__",
    "logp",
    "parallel",
]
