"""Devices and dtypes that the tests run on. Without a GPU, `cuda` tests are not collected."""

import pytest
import torch

HAS_CUDA = torch.cuda.is_available()
DEVICES = [
    "cpu",
    *([pytest.param("cuda", marks=pytest.mark.cuda)] if HAS_CUDA else []),
]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if HAS_CUDA:
        return
    without_gpu = [item for item in items if item.get_closest_marker("cuda") is None]
    config.hook.pytest_deselected(items=[i for i in items if i not in set(without_gpu)])
    items[:] = without_gpu


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(params=DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    chosen: torch.dtype = request.param
    return chosen


@pytest.fixture
def generator() -> torch.Generator:
    """Fresh random inputs at every run; the seed is printed when a test fails."""
    random = torch.Generator()
    print("generator seed:", random.seed())
    return random
