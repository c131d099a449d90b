"""Every result carries what it was measured with, so that a number can be traced to a machine and a commit."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def provenance() -> dict[str, Any]:
    """Machine, versions, date, commit and arguments of this run."""
    return {
        "machine": platform.machine(),
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2),
        "torch_threads": torch.get_num_threads(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "argv": [Path(sys.argv[0]).name, *sys.argv[1:]],
    }


def write_result(path: str | os.PathLike[str], result: dict[str, Any]) -> None:
    """Write ``result`` as JSON with its provenance; relative paths lie in ``benchmarks/results``."""
    target = RESULTS / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps({**result, "provenance": provenance()}, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {target}")


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor()


def _commit() -> str:
    """Short commit, with ``+changes`` if tracked files differ from it."""
    try:
        commit = subprocess.run(
            ["git", "describe", "--always", "--dirty=+changes"], cwd=ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit.stdout.strip()
