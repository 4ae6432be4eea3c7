"""`detlogp info`: the text, the JSON, and what it says about GPUs that are not here."""

import json

import pytest
import torch

import detlogp
from detlogp._native import build_info
from detlogp.cli import _gpu, info, main

DEFAULT_BUILD = "80-real 90-real 100-real 120-real 120-virtual"
READY = _gpu.GpuSetup(
    build_cuda="13.0.88",
    build_architectures=DEFAULT_BUILD,
    torch_version="2.13.0+cu130",
    torch_cuda="13.0",
    driver_cuda=(13, 0),
    devices=[_gpu.Device("NVIDIA H200", (9, 0))],
)


@pytest.fixture(autouse=True)
def plain_output(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


def test_text_names_versions_build_and_path(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    build = build_info()
    for expected in (
        detlogp.__version__,
        torch.__version__,
        build["compiler"],
        f"{build['cpu_path']} code, {torch.get_num_threads()} thread",
        build.get("cuda", "without CUDA"),
        "Missing for the GPU",
    ):
        assert expected in text


def test_json_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts == info.collect()
    assert facts["versions"]["detlogp"] == detlogp.__version__
    assert facts["cpu"] == {
        "path": build_info()["cpu_path"],
        "threads": torch.get_num_threads(),
    }
    assert facts["build"]["cuda"] == build_info().get("cuda")


def test_devices_are_listed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    devices = [*READY.devices, _gpu.Device("Tesla T4", (7, 5))]
    monkeypatch.setattr(_gpu, "read_setup", lambda build: READY._replace(devices=devices))
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    assert "cuda:0  NVIDIA H200, capability 9.0, machine code for 9.0" in text
    assert "cuda:1  Tesla T4, capability 7.5, no code in this build" in text
    assert "this build has no code for cuda:1 (capability 7.5)" in text


def test_build_without_cuda(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    build = {"commit": "1", "compiler": "GNU 12", "torch": "2.13.0", "cpu_path": "portable"}
    monkeypatch.setattr(info, "build_info", lambda: build)
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    assert "without CUDA" in text
    assert "nvcc was not found" in text


@pytest.mark.parametrize(
    ("capability", "architectures", "expected"),
    [
        ((9, 0), DEFAULT_BUILD, "machine code for 9.0"),
        ((8, 9), DEFAULT_BUILD, "machine code for 8.0"),
        ((12, 1), DEFAULT_BUILD, "machine code for 12.0"),
        ((13, 0), DEFAULT_BUILD, "PTX for 12.0"),
        ((11, 0), DEFAULT_BUILD, None),
        ((7, 5), DEFAULT_BUILD, None),
        ((8, 0), "86-real", None),
        ((9, 0), "80", "PTX for 8.0"),
        ((9, 0), "90a-real", "machine code for 9.0"),
        ((10, 3), "100a", None),
        ((10, 3), "100f-real", "machine code for 10.0"),
        ((12, 0), "100f", None),
        ((9, 0), "native", "unknown"),
        ((9, 0), "", None),
    ],
)
def test_code_for_device(
    capability: tuple[int, int], architectures: str, expected: str | None
) -> None:
    found = _gpu.code_for(capability, architectures)
    if expected is None:
        assert found is None
    else:
        assert found is not None
        assert found.startswith(expected)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, []),
        ({"build_cuda": None}, ["this build has no CUDA kernels"]),
        ({"torch_cuda": None, "devices": []}, ["torch 2.13.0+cu130 is not a CUDA build"]),
        ({"driver_cuda": None, "devices": []}, ["no GPU visible: the NVIDIA driver"]),
        ({"devices": []}, ["no GPU visible to torch"]),
        ({"driver_cuda": (12, 4)}, ["the driver knows CUDA up to 12.4, this build needs 13.0"]),
    ],
)
def test_missing_for_gpu(change: dict[str, object], expected: list[str]) -> None:
    missing = _gpu.missing_for_gpu(READY._replace(**change))  # type: ignore[arg-type]
    assert len(missing) == len(expected)
    for sentence, start in zip(missing, expected, strict=True):
        assert sentence.startswith(start)
