"""The facts that every record carries: machine, versions, and which build of the library it was."""

import hashlib
import platform
import subprocess
from datetime import date

import torch

import detlogp
from detlogp._native import LIBRARY, build_info


def facts(device: str) -> dict[str, str]:
    """As text by name, with the GPU and its driver for a CUDA device."""
    build = build_info()
    known = {
        "date": date.today().isoformat(),
        "detlogp": detlogp.__version__,
        "commit": build["commit"],
        "build_id": build_id(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu_path": build["cpu_path"],
        "threads": str(torch.get_num_threads()),
        "device": device,
    }
    if device.startswith("cuda"):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout
        known["gpu"] = torch.cuda.get_device_name(device)
        known["driver"] = driver.split()[0]
        known["cuda"] = build.get("cuda", "none")
    return known


def build_id() -> str:
    """The first 16 hexadecimal digits of the native library's SHA-256."""
    return hashlib.sha256(LIBRARY.read_bytes()).hexdigest()[:16]
