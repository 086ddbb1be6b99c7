"""What PyTorch on this machine sees, and how fast it is; run as a process of its own: `python -m ...survey`.

A broken driver or a build for another processor kills the process that imports torch; here that is a finding, not the
end of the program that asked. Decides nothing. Neighbours: `cli.doctor` starts it and reads its one line of JSON,
`backends.torch.backend` measures.
"""

from __future__ import annotations

import argparse
import sys

import msgspec

from fusionai.backends.interface import DeviceReport


class Survey(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`cuda_build` and `hip_build`: the version torch was built for, None for a build without. `devices`: what it can
    use now, e.g. `cpu`, `cuda:0 NVIDIA L4`. `report`: measured on the device asked for; None where that failed."""

    torch_version: str
    cuda_build: str | None
    hip_build: str | None
    devices: tuple[str, ...]
    report: DeviceReport | None
    problem: str = ""


def survey(device: str, threads: int | None) -> Survey:
    """Look at every device, measure one. Never raises for a device that fails: `problem` says why."""
    import torch

    devices = ["cpu"]
    if torch.cuda.is_available():
        devices += [f"cuda:{place} {torch.cuda.get_device_name(place)}" for place in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        devices.append("mps")
    report: DeviceReport | None = None
    problem = ""
    try:
        from fusionai.backends.torch.backend import TorchBackend

        report = TorchBackend(device=device, threads=threads).probe()
    except Exception as failure:  # noqa: BLE001 - whatever a driver throws is the finding
        problem = f"{type(failure).__name__}: {failure}"
    return Survey(
        torch_version=str(torch.__version__),
        cuda_build=torch.version.cuda,
        hip_build=torch.version.hip,
        devices=tuple(devices),
        report=report,
        problem=problem,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int)
    given = parser.parse_args()
    sys.stdout.buffer.write(msgspec.json.encode(survey(given.device, given.threads)) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
