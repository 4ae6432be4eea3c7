"""Hugging Face transformers: the loss of a causal language model, by detlogp.

    model.loss_function = causal_lm_loss                     # the model's own loss, or
    Trainer(..., compute_loss_func=compute_loss)             # the Trainer's

Source: transformers 5.24.0, transformers/loss/loss_utils.py, and torch's cross_entropy.
"""

from typing import Any

import torch
from torch import Tensor

import detlogp

_REDUCTIONS = ("mean", "sum", "none")


def cross_entropy(
    logits: Tensor, labels: Tensor, *, ignore_index: int = -100, reduction: str = "mean"
) -> Tensor:
    """What torch's cross_entropy of logits [N, V] and labels [N] is, by `detlogp.logp`.

    The bits of a token's loss do not depend on the batch; those of a mean or a sum are torch's.
    It is differentiable to every order and under every torch.func transform.

    Args:
        logits: [..., V], float16, bfloat16, float32 or float64.
        labels: [...], any integer dtype. A label outside [0, V) that is not `ignore_index` gives
            NaN.
        ignore_index: labels that count for nothing: loss 0, gradient 0.
        reduction: "mean" over the labels that count (NaN when there is none), "sum" or "none".

    Returns:
        A scalar, or [...] for "none", in nats; float64 for float64 logits, otherwise float32.

    Raises:
        ValueError: another reduction; a shape or device that does not fit.
        TypeError: a dtype that is not supported.
    """
    if reduction not in _REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(_REDUCTIONS)}, got {reduction!r}")
    counted = labels != ignore_index
    # Subtracted from 0, because an ignored label's loss is 0 and not -0.
    losses = 0 - detlogp.logp(logits, labels, rows=counted, on_invalid="nan")
    if reduction == "none":
        return losses
    return losses.sum() / counted.sum() if reduction == "mean" else losses.sum()


def causal_lm_loss(
    logits: Tensor,
    labels: Tensor | None = None,
    vocab_size: int | None = None,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **unused: Any,
) -> Tensor:
    """transformers' ForCausalLMLoss, for `model.loss_function`: the same arguments and result.

    Args:
        logits: [..., T, V]; row t predicts the token t + 1.
        labels: [..., T]; they are shifted here. Not read when `shift_labels` is given.
        vocab_size: V, which the model passes.
        num_items_in_batch: the sum of the losses is divided by it; None: their mean is taken.
        ignore_index: see `cross_entropy`.
        shift_labels: [..., T], labels that are shifted already.
        unused: what a model passes besides, which transformers' own loss does not use either.

    Returns: a scalar, see `cross_entropy`.

    Raises: ValueError, for another V, or neither labels nor shift_labels; see `cross_entropy`.
    """
    if vocab_size is not None and vocab_size != logits.shape[-1]:
        raise ValueError(f"vocab_size must be logits' V, {logits.shape[-1]}, got {vocab_size}")
    if shift_labels is None:
        if labels is None:
            raise ValueError("labels must be given when shift_labels are not")
        shift_labels = torch.nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    targets = shift_labels.reshape(logits.shape[:-1]).to(logits.device)
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = cross_entropy(logits, targets, ignore_index=ignore_index, reduction=reduction)
    if num_items_in_batch is None:
        return loss
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(loss.device)
    return loss / num_items_in_batch


def compute_loss(
    outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None
) -> Tensor:
    """For `Trainer(compute_loss_func=...)`: `causal_lm_loss` of a model's outputs.

    Args:
        outputs: a model's output, whose `logits` are [..., T, V].
        labels: [..., T], which are shifted here.
        num_items_in_batch: what the Trainer counts: labels other than -100 over a whole step.

    Returns: a scalar, see `cross_entropy`.
    """
    return causal_lm_loss(outputs.logits, labels, num_items_in_batch=num_items_in_batch)
