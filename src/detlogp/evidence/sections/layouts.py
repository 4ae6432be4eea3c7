"""The same rows presented otherwise: value, lse and gradient have the same bits."""

from collections.abc import Iterator
from functools import partial

import torch

from detlogp.evidence.accuracy import random_rows
from detlogp.evidence.layouts import LAYOUTS
from detlogp.evidence.sections._check import (
    DTYPES,
    Check,
    Options,
    Result,
    all_of,
    dtype_text,
    same_bits,
    solve,
)

ROWS = 32


def checks(options: Options) -> Iterator[Check]:
    vocabs = (31, 4097) if options.quick else (31, 128, 257, 4096, 4097, 50257, 151936)
    for vocab in vocabs:
        for dtype in DTYPES:
            for layout in LAYOUTS:
                name = f"{layout}, V = {vocab}"
                run = partial(_check, layout, vocab, dtype, options.device)
                yield Check(name, dtype_text(dtype), run)


def _check(layout: str, vocab: int, dtype: torch.dtype, device: str) -> Result:
    logits, ids = random_rows(ROWS, vocab, dtype, device, vocab)
    wide = torch.promote_types(dtype, torch.float32)
    random = torch.Generator().manual_seed(vocab)
    grads = torch.randn(2, ROWS, generator=random).to(device, wide)
    expected = solve(logits, ids, (grads[0], grads[1]))
    results = []
    for call in LAYOUTS[layout]((logits, ids, grads[0], grads[1]), random):
        x, t, *cotangents = call.parts
        found = solve(x, t, (cotangents[0], cotangents[1]))
        for name, one, other in zip(found._fields, found, expected, strict=True):
            results.append(same_bits(one[call.take], other[call.rows], name))
    whole = all_of(results)
    if whole.outcome == "pass":
        return Result("pass", f"logp, lse and gradient of {ROWS} rows, the same bits")
    return whole
