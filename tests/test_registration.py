"""The operators as PyTorch sees them, and the library as the loader sees it."""

import os
import subprocess
from importlib.metadata import distribution
from pathlib import Path

import torch

import detlogp
from detlogp._native import DTYPE_NUMBERS, LIBRARY


def test_opcheck(dtype: torch.dtype, device: str) -> None:
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    number = DTYPE_NUMBERS[dtype]
    options = (number, compute == torch.float64, False)
    logits = torch.randn(2, 3, 50, device=device).to(dtype)
    ids = torch.randint(50, (2, 3), device=device)
    mask = torch.tensor([[True, False, True]] * 2, device=device)
    out = torch.empty(2, 3, dtype=torch.bfloat16, device=device)
    row_max, log_sum, grad = torch.randn(3, 2, 3, dtype=compute, device=device)
    turned = logits.transpose(0, 1)
    ops = torch.ops.detlogp
    torch.library.opcheck(ops.row_sum.default, (logits.to(compute),))
    for chosen in (None, mask):
        rows = (logits, ids, chosen)
        torch.library.opcheck(ops.logp.default, (*rows, *options))
        torch.library.opcheck(ops.logp_with_stats.default, (*rows, number, *options))
        torch.library.opcheck(ops.logp_with_entropy.default, (*rows, number, *options, 0.7))
        torch.library.opcheck(ops.logp_out.default, (*rows, *options, out))
        stats = (row_max, log_sum)
        torch.library.opcheck(ops.probability.default, (*rows, *stats))
        torch.library.opcheck(ops.logp_tangent.default, (*rows, *stats, logits))
        for grads in ((grad, None), (None, grad), (grad, grad)):
            torch.library.opcheck(ops.logp_backward.default, (*rows, *stats, *grads))
            more = (0, None, row_max, grad, 0.7)
            torch.library.opcheck(ops.logp_backward.default, (*rows, *stats, *grads, *more))
            inplace = (logits.clone(), ids, chosen, *stats, *grads)
            torch.library.opcheck(ops.logp_backward_inplace.default, inplace)
            arguments = (*rows, *stats, *grads, logits)
            torch.library.opcheck(ops.logp_second_order.default, arguments)
    vectors = (ids.t().contiguous(), None, row_max.t().contiguous(), log_sum.t().contiguous())
    torch.library.opcheck(
        ops.logp_backward.default, (turned, *vectors, grad.t().contiguous(), None)
    )


def test_opcheck_of_several_ids(dtype: torch.dtype, device: str) -> None:
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    logits = torch.randn(2, 3, 50, device=device).to(dtype)
    ids = torch.randint(-5, 55, (2, 3, 4), device=device)
    mask = torch.tensor([[True, False, True]] * 2, device=device)
    row_max, log_sum, grad = torch.randn(3, 2, 3, dtype=compute, device=device)
    of_ids = torch.randn(2, 3, 4, dtype=compute, device=device)
    ops = torch.ops.detlogp
    for chosen in (None, mask):
        rows = (logits, ids, chosen, row_max, log_sum)
        for number in DTYPE_NUMBERS.values():
            torch.library.opcheck(ops.targets.default, (*rows, number, False, 0.7))
        for grads in (
            (of_ids, None, None, None),
            (of_ids, grad, row_max, grad),
            (None, grad, None, None),
        ):
            arguments = (*rows, *grads, 1.0 if grads[2] is None else 0.7)
            torch.library.opcheck(ops.targets_backward.default, arguments)


def test_opcheck_of_the_steps(device: str) -> None:
    logits = torch.randn(2, 3, 50, device=device)
    ids = torch.randint(80, (2, 3), device=device)
    keys = torch.zeros(2, 2, 3, dtype=torch.int32, device=device)
    sums = torch.zeros(2, 3, dtype=torch.int64, device=device)
    row_max, log_sum = torch.randn(2, 2, 3, device=device)
    part = (logits, ids, None, 20, 80)
    rows = (logits, ids, None, row_max, log_sum.double())
    ops = torch.ops.detlogp
    torch.library.opcheck(ops.exact_max.default, (*part, keys))
    torch.library.opcheck(ops.exact_sum.default, (*part, keys, sums))
    torch.library.opcheck(ops.exact_finish.default, (keys, sums, ids, None, 80, 2, 2, False))
    torch.library.opcheck(ops.exact_total.default, (keys, sums, 80))
    for terms in ((logits, *(None,) * 5), (logits, *rows)):
        torch.library.opcheck(ops.exact_extremes.default, (*terms, 80, keys))
        torch.library.opcheck(ops.exact_row_sum.default, (*terms, 80, keys, sums))
        torch.library.opcheck(ops.exact_row_total.default, (*terms, 80))
    arguments = (*rows, row_max, None, logits, row_max, 20, 80)
    torch.library.opcheck(ops.logp_second_order.default, arguments)


def test_fake_of_the_public_function() -> None:
    logits = torch.empty(4, 7, 50, dtype=torch.bfloat16, device="meta", requires_grad=True)
    ids = torch.empty(4, 7, dtype=torch.int64, device="meta")
    result = detlogp.logp(logits, ids, return_lse=True)
    assert result.logp.shape == result.lse.shape == (4, 7)
    assert result.logp.dtype == torch.float32
    (gradient,) = torch.autograd.grad(result.logp.sum(), logits)
    assert gradient.shape == logits.shape
    assert gradient.dtype == torch.bfloat16


def test_one_wheel_for_every_python() -> None:
    wheel = distribution("detlogp").read_text("WHEEL")
    assert wheel is not None
    assert "Tag: py3-none-linux_x86_64" in wheel


def test_no_python_symbol() -> None:
    """Nor any of libtorch beyond libtorch_cpu's, so that a CPU torch can load it."""
    symbols = subprocess.run(
        ["nm", "--dynamic", "--undefined-only", str(LIBRARY)],
        check=True, capture_output=True, text=True,
    ).stdout.split()  # fmt: skip
    assert not [s for s in symbols if s.startswith(("Py", "_Py"))]
    assert not [s for s in symbols if "cuda" in s.lower()]
    assert not [s for s in symbols if s.startswith(("_ZN2at", "_ZN3c10", "_ZN5torch"))]


def test_sources_compile_without_cuda() -> None:
    """The build where no nvcc is found (the kernels do not depend on it, so they are left out)."""
    sources = Path(__file__).parents[1] / "csrc"
    flags = ["-std=c++17", "-fsyntax-only", "-DTORCH_TARGET_VERSION=0x020a000000000000ULL"]
    names = [f'-DDETLOGP_{name}=""' for name in ("COMPILER", "TORCH_VERSION", "COMMIT")]
    include = Path(torch.__file__).parent / "include"
    files = sorted(sources.glob("*.cpp"))
    assert files
    subprocess.run(
        [os.environ.get("CXX", "g++"), *flags, *names, f"-I{sources}", f"-I{include}", *files],
        check=True,
    )
