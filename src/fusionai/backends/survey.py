"""Reports what a backend finds on this machine and how fast it is. Runs as a separate process: `python -m ...survey`.

A broken driver, or a build for another processor, kills the process that imports the framework. In a separate process
that is a finding and does not end the program that asked. Neighbours: `cli.doctor` starts it and reads its one line of
JSON, `backends.registry` opens the backend that measures.
"""

from __future__ import annotations

import argparse
import sys
from typing import Final

import msgspec

from fusionai.backends.interface import DeviceReport
from fusionai.backends.registry import BACKENDS, open_backend


class Seen(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`devices`: devices that the framework can use now, e.g. `cpu`, `cuda:0 NVIDIA L4`. `cuda_build` and `hip_build`:
    the version that PyTorch was built for; None for a build without it and for other frameworks."""

    version: str
    devices: tuple[str, ...]
    cuda_build: str | None = None
    hip_build: str | None = None


class Survey(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`report`: measured on the requested device; None if that failed, and then `problem` says why."""

    seen: Seen
    report: DeviceReport | None
    problem: str = ""


def survey(backend: str, device: str, threads: int | None) -> Survey:
    """List every device and measure the requested one. Never raises for a device that fails."""
    seen = _BY[backend]()
    try:
        return Survey(seen=seen, report=open_backend(backend, device=device, threads=threads).probe())
    except Exception as failure:  # noqa: BLE001 - any error that a driver raises is the finding
        return Survey(seen=seen, report=None, problem=f"{type(failure).__name__}: {failure}")


def _by_torch() -> Seen:
    import torch

    devices = ["cpu"]
    if torch.cuda.is_available():
        devices += [f"cuda:{place} {torch.cuda.get_device_name(place)}" for place in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        devices.append("mps")
    return Seen(
        version=str(torch.__version__),
        devices=tuple(devices),
        cuda_build=torch.version.cuda,
        hip_build=torch.version.hip,
    )


def _by_jax() -> Seen:
    import jax

    names = [
        f"{device.platform}:{device.id} {device.device_kind}" for device in jax.devices() if device.platform != "cpu"
    ]
    return Seen(version=jax.__version__, devices=("cpu", *names))


def _by_onnxruntime() -> Seen:
    import onnxruntime

    names = [provider.removesuffix("ExecutionProvider") for provider in onnxruntime.get_available_providers()]
    return Seen(version=onnxruntime.__version__, devices=tuple("cpu" if name == "CPU" else name for name in names))


_BY: Final = {"torch": _by_torch, "jax": _by_jax, "onnxruntime": _by_onnxruntime}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=BACKENDS, default="torch")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int)
    given = parser.parse_args()
    sys.stdout.buffer.write(msgspec.json.encode(survey(given.backend, given.device, given.threads)) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
