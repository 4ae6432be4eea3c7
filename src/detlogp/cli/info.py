"""`detlogp info`: versions, how the library was built, and which code a call would take."""

import argparse
import json
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from detlogp import __version__
from detlogp._native import build_info
from detlogp.cli import _gpu
from detlogp.cli._command import Command
from detlogp.cli._pairs import print_pairs

OPTIONAL_PACKAGES = ("transformers", "safetensors", "pyarrow")


def _version_or_none(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def collect() -> dict[str, Any]:
    """Everything that the command prints, as plain values for JSON."""
    build = build_info()
    setup = _gpu.read_setup(build)
    devices = [
        {
            "index": index,
            "name": device.name,
            "capability": "{}.{}".format(*device.capability),
            "code": _gpu.code_for(device.capability, setup.build_architectures),
        }
        for index, device in enumerate(setup.devices)
    ]
    driver = None if setup.driver_cuda is None else "{}.{}".format(*setup.driver_cuda)
    return {
        "versions": {
            "detlogp": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "platform": platform.platform(),
        },
        "optional": {package: _version_or_none(package) for package in OPTIONAL_PACKAGES},
        "build": {
            "commit": build["commit"],
            "compiler": build["compiler"],
            "torch": build["torch"],
            "cuda": setup.build_cuda,
            "cuda_architectures": setup.build_architectures.split(),
        },
        "cpu": {"path": build["cpu_path"], "threads": torch.get_num_threads()},
        "cuda": {"torch_cuda": setup.torch_cuda, "driver_cuda": driver, "devices": devices},
        "missing_for_gpu": _gpu.missing_for_gpu(setup),
    }


def _sections(facts: dict[str, Any]) -> dict[str, list[tuple[str, str]]]:
    """The facts as titled lists of (name, text)."""
    optional = [
        f"{package} {found or 'not installed'}" for package, found in facts["optional"].items()
    ]
    build = facts["build"]
    built_for = [("CUDA", "without CUDA")]
    if build["cuda"] is not None:
        built_for = [("CUDA toolkit", build["cuda"])]
        built_for.append(("architectures", " ".join(build["cuda_architectures"])))
    threads = facts["cpu"]["threads"]
    plural = "" if threads == 1 else "s"
    routes = [("cpu", f"{facts['cpu']['path']} code, {threads} thread{plural}")]
    for device in facts["cuda"]["devices"]:
        code = device["code"] or "no code in this build"
        routes.append(
            (
                f"cuda:{device['index']}",
                f"{device['name']}, capability {device['capability']}, {code}",
            )
        )
    missing = [("-", sentence) for sentence in facts["missing_for_gpu"]]
    return {
        "Versions": [*facts["versions"].items(), ("optional", ", ".join(optional))],
        "Build": [*((name, build[name]) for name in ("commit", "compiler", "torch")), *built_for],
        "A call would run on": routes,
        "Missing for the GPU": missing or [("-", "nothing")],
    }


def _print_text(facts: dict[str, Any]) -> None:
    console = Console(highlight=False)
    for number, (title, lines) in enumerate(_sections(facts).items()):
        if number > 0:
            console.print()
        console.print(Text(title, style="bold"))
        print_pairs(console, lines, indent=2)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the same as JSON")


def run(args: argparse.Namespace) -> int:
    facts = collect()
    if args.json:
        print(json.dumps(facts, indent=2))
    else:
        _print_text(facts)
    return 0


COMMAND = Command(
    "info",
    "versions, how the library was built, which code a call would take",
    "Prints versions, how the library was built, which device and code a call would\n"
    "take, and what is missing for the GPU.",
    add_arguments,
    run,
)
