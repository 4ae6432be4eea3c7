"""Results in a supplied buffer: what is written, what is refused, and nothing written then."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.func import grad, vmap

import detlogp
from detlogp.evidence.accuracy import random_rows
from detlogp.evidence.sections._check import (
    DTYPES,
    Check,
    Options,
    Result,
    all_of,
    dtype_text,
    same_bits,
)

ROWS, VOCAB = 6, 300


def checks(options: Options) -> Iterator[Check]:
    for dtype in DTYPES:
        for out_dtype in DTYPES:
            run = partial(_rounding, dtype, out_dtype, options.device)
            yield Check(f"into {dtype_text(out_dtype)}", dtype_text(dtype), run)
        for name, check in (("unselected rows", _unselected), ("training", _training)):
            yield Check(name, dtype_text(dtype), partial(check, dtype, options.device))
    for name, attempt in REFUSED.items():
        yield Check(f"refused: {name}", "float32", partial(_refused, attempt, options.device))
    for name, allowed in (
        ("made inside a transform", _made_inside),
        ("mapped by vmap", _mapped),
        ("used again after its graph", _used_again),
    ):
        yield Check(name, "float32", partial(allowed, options.device))


def _inputs(device: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return random_rows(ROWS, VOCAB, dtype, device, 0)


def _rounding(dtype: torch.dtype, out_dtype: torch.dtype, device: str) -> Result:
    logits, ids = _inputs(device, dtype)
    out = torch.full((ROWS,), torch.nan, dtype=out_dtype, device=device)
    pointer = out.data_ptr()
    detlogp.logp(logits, ids, out=out)
    if out.data_ptr() != pointer:
        return Result("fail", "the buffer's storage was replaced")
    return same_bits(out, detlogp.logp(logits, ids).to(out_dtype), "one rounding")


def _unselected(dtype: torch.dtype, device: str) -> Result:
    logits, ids = _inputs(device, dtype)
    mask = torch.arange(ROWS, device=device) % 2 == 0
    out = torch.full((ROWS,), 7.0, device=device)
    detlogp.logp(logits, ids, rows=mask, out=out)
    expected = torch.where(mask, detlogp.logp(logits, ids).float(), 7.0)
    return same_bits(out, expected, "unselected rows keep 7")


def _training(dtype: torch.dtype, device: str) -> Result:
    logits, ids = _inputs(device, dtype)
    out = torch.zeros(ROWS, dtype=torch.promote_types(dtype, torch.float32), device=device)
    gradients = []
    for buffer in (None, out):
        leaf = logits.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(detlogp.logp(leaf, ids, out=buffer).sum(), leaf)
        gradients.append(gradient)
    return same_bits(gradients[1], gradients[0], "the gradient of a new tensor")


# ---- refused -------------------------------------------------------------------------------------


def _captured(logits: Tensor, ids: Tensor) -> None:
    buffer = torch.zeros(ROWS, device=logits.device)
    grad(lambda x: detlogp.logp(x, ids, out=buffer).sum())(logits)


def _shared(logits: Tensor, ids: Tensor) -> None:
    buffer = torch.zeros(ROWS, device=logits.device)
    vmap(lambda x: detlogp.logp(x, ids, out=buffer))(torch.stack([logits, logits]))


def _into(make: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], None]:
    def attempt(logits: Tensor, ids: Tensor) -> None:
        detlogp.logp(logits, ids, out=make(logits, ids))

    return attempt


REFUSED: dict[str, Callable[[Tensor, Tensor], None]] = {
    "requires grad": _into(lambda x, t: torch.zeros(ROWS, device=x.device, requires_grad=True)),
    "shares storage with the logits": _into(lambda x, t: x.view(-1)[:ROWS]),
    "another shape": _into(lambda x, t: torch.zeros(ROWS + 1, device=x.device)),
    "integers": _into(lambda x, t: torch.zeros_like(t)),
    "overlaps itself": _into(lambda x, t: torch.zeros(1, device=x.device).expand(ROWS)),
    "captured by a transform": _captured,
    "shared by the samples of vmap": _shared,
}


def _refused(attempt: Callable[[Tensor, Tensor], None], device: str) -> Result:
    logits, ids = _inputs(device)
    before = logits.clone()
    try:
        attempt(logits, ids)
    except (ValueError, TypeError) as error:
        written = same_bits(logits, before, "nothing is written")
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return written._replace(reason=f"{reason}; {written.reason}")
    return Result("fail", "it was accepted")


# ---- allowed -------------------------------------------------------------------------------------


def _made_inside(device: str) -> Result:
    logits, ids = _inputs(device)

    def loss(x: Tensor) -> Tensor:
        return detlogp.logp(x, ids, out=torch.zeros(ROWS, device=device)).sum()

    expected = grad(lambda x: detlogp.logp(x, ids).sum())(logits)
    return same_bits(grad(loss)(logits), expected, "gradient")


def _mapped(device: str) -> Result:
    logits, ids = _inputs(device)
    both = torch.stack([logits, logits.flip(0)])
    buffers = torch.zeros(2, ROWS, device=device)
    vmap(lambda x, out: detlogp.logp(x, ids, out=out))(both, buffers)
    pairs = zip(buffers, both, strict=True)
    return all_of([same_bits(out, detlogp.logp(x, ids), "a sample") for out, x in pairs])


def _used_again(device: str) -> Result:
    """Autograd's version check catches a buffer overwritten before the backward that needs it."""
    logits, ids = _inputs(device)
    out = torch.ones(ROWS, device=device)
    weight = torch.ones(ROWS, device=device, requires_grad=True)
    product = weight * out
    detlogp.logp(logits, ids, out=out)
    try:
        product.sum().backward()
    except RuntimeError as error:
        return Result("pass", str(error).splitlines()[0][:120])
    return Result("fail", "the overwritten buffer went unnoticed")
