"""What the arguments must be. Every error names the argument, what was expected and what came."""

import torch
from torch import Tensor

# In the order of csrc/core/dtype.h.
FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGER_DTYPES = frozenset(
    (
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
    )
)
ON_INVALID = ("zero", "nan", "raise")
CONTRACTS = ("locked", "exact")


def check_options(contract: str, on_invalid: str) -> None:
    check_choice("contract", contract, CONTRACTS)
    check_choice("on_invalid", on_invalid, ON_INVALID)


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        expected = " or ".join(repr(choice) for choice in choices)
        raise ValueError(f"{name} must be {expected}, got {value!r}")


def checked_temperature(temperature: float, *, in_double: bool) -> float:
    """As a float that the arithmetic's type holds."""
    if isinstance(temperature, bool) or not isinstance(temperature, (int, float)):
        raise TypeError(f"temperature must be a float, got {type(temperature).__name__}")
    limits = torch.finfo(torch.float64 if in_double else torch.float32)
    if not limits.tiny <= temperature <= limits.max:
        raise ValueError(
            f"temperature must be between {limits.tiny} and {limits.max}, got {temperature}"
        )
    return float(temperature)


def check_logits_type(logits: Tensor) -> None:
    if not isinstance(logits, Tensor):
        raise TypeError(f"logits must be a Tensor, got {type(logits).__name__}")
    if logits.dtype not in FLOAT_DTYPES:
        raise TypeError(
            f"logits must be float16, bfloat16, float32 or float64, got {dtype_name(logits.dtype)}"
        )


def dtype_error(logits: Tensor, dtype: object) -> TypeError:
    """For a pair of logits and `dtype` of which one is wrong."""
    check_logits_type(logits)
    return TypeError(f"dtype must be float16, bfloat16, float32, float64 or None, got {dtype!r}")


def to_ids(token_ids: Tensor) -> Tensor:
    """The ids as contiguous int64."""
    if not isinstance(token_ids, Tensor):
        raise TypeError(f"token_ids must be a Tensor, got {type(token_ids).__name__}")
    if token_ids.dtype is torch.int64:
        return token_ids.contiguous()
    if token_ids.dtype not in INTEGER_DTYPES:
        raise TypeError(f"token_ids must have an integer dtype, got {dtype_name(token_ids.dtype)}")
    return token_ids.to(torch.int64).contiguous()


def check_tensors(logits: Tensor, token_ids: Tensor) -> None:
    """Types, shapes and devices, in the words of the caller; an id a row, or several."""
    check_logits_type(logits)
    check_placement(logits, token_ids, several=True)
    if logits.shape[-1] == 0:
        raise ValueError(f"logits must have at least one column (V >= 1), got {shape_text(logits)}")


def check_placement(
    logits: Tensor, token_ids: Tensor, name: str = "logits", *, several: bool = False
) -> None:
    """Devices, and that the leading shapes agree; there may be no columns, or `several` ids."""
    of = f"{name}'" if name.endswith("s") else f"{name}'s"
    if logits.dim() == 0:
        raise ValueError(f"{name} must have shape [..., V], got a 0-d tensor")
    if logits.device.type not in ("cpu", "cuda", "meta"):
        raise ValueError(f"{name} must be on a CPU or CUDA device, got {logits.device}")
    if token_ids.device != logits.device:
        raise ValueError(
            f"token_ids must be on {of} device, {logits.device}, got {token_ids.device}"
        )
    leading = logits.shape[:-1]
    is_several = several and token_ids.dim() == logits.dim()
    if (token_ids.shape[:-1] if is_several else token_ids.shape) != leading:
        or_more = "or one more dimension, " if several else ""
        raise ValueError(
            f"token_ids must have {of} leading shape, {tuple(leading)}, {or_more}"
            f"got {shape_text(token_ids)}"
        )


def to_mask(rows: Tensor, logits: Tensor) -> Tensor:
    """The selection as a contiguous boolean mask of logits' leading shape."""
    leading = logits.shape[:-1]
    if not isinstance(rows, Tensor):
        raise TypeError(f"rows must be a Tensor, got {type(rows).__name__}")
    if rows.device != logits.device:
        raise ValueError(f"rows must be on logits' device, {logits.device}, got {rows.device}")
    if rows.dtype == torch.bool:
        if rows.shape != leading:
            raise ValueError(
                f"rows, a boolean mask, must have logits' leading shape, {tuple(leading)}, "
                f"got {shape_text(rows)}"
            )
        return rows.contiguous()
    if rows.dtype not in INTEGER_DTYPES:
        raise TypeError(f"rows must have an integer or bool dtype, got {dtype_name(rows.dtype)}")
    count = leading.numel()
    numbers = rows.to(torch.int64).reshape(-1)
    # One slot more than there are rows takes every number that is out of range.
    numbers = numbers.where((numbers >= 0) & (numbers < count), count)
    mask = torch.zeros(count + 1, dtype=torch.bool, device=logits.device)
    return mask.index_fill(0, numbers, True)[:count].view(leading)


def check_row_indices(row_indices: Tensor) -> None:
    if not isinstance(row_indices, Tensor) or row_indices.dtype not in INTEGER_DTYPES:
        got = (
            dtype_name(row_indices.dtype) if isinstance(row_indices, Tensor) else type(row_indices)
        )
        raise TypeError(f"row_indices must be a Tensor of an integer dtype, got {got}")


def check_ids_in_range(
    token_ids: Tensor, mask: Tensor | None, vocab: int, *, several: bool = False
) -> None:
    """Raises for a bad id in a selected row, of `several` or of one. Synchronises the device."""
    bad = (token_ids < 0) | (token_ids >= vocab)
    if mask is not None:
        bad &= mask.unsqueeze(-1) if several else mask
    if bool(bad.any()):
        number = int(bad.reshape(-1).nonzero()[0])
        value = int(token_ids.reshape(-1)[number])
        row, place = divmod(number, token_ids.shape[-1]) if several else (number, 0)
        where = f"row {row}, place {place}" if several else f"row {row}"
        raise ValueError(f"token_ids must be in [0, {vocab}), got {value} in {where}")


def unwrap(tensor: Tensor) -> Tensor:
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def share_storage(one: Tensor, other: Tensor) -> bool:
    pointer = unwrap(one).untyped_storage().data_ptr()
    return pointer != 0 and pointer == unwrap(other).untyped_storage().data_ptr()


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether two elements may share memory: some stride lies inside the dimensions below it."""
    dims = zip(tensor.stride(), tensor.shape, strict=True)
    reach = 0
    for stride, size in sorted(dim for dim in dims if dim[1] > 1):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def shape_text(tensor: Tensor) -> str:
    return f"shape {tuple(tensor.shape)}"
