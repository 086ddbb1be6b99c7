"""How fast boundary tensors are packed and unpacked, and what is lost, beside top-k with as many bits.

    python benchmarks/packing.py [--rounds 9] [--megabytes 16] [--json FILE]

One thread. Speeds are bytes of float32 per second, taken in turn within each round, and as ratios to a copy of the same
tensor in the same round; medians. `lost` is the part of the squares' sum that does not come back, for three kinds of
rows: normally distributed numbers; the same with one column in a hundred thirty times as large, as residual streams
have them; and a random network's activations (two layers of tanh and products). Top-k keeps the largest of a row as
float16 with 16-bit places, as many as fit the codec's bits.

`following`: as activations of two sequences are packed below `int8`, each row as its difference from those before; lost
is then quoted for rows that have three quarters of their energy in common, alone and following.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, get_args

import numpy as np

from fusionai.execution.training.codecs import Packed, pack, unpack
from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.scheduling.kernels.compiled import available
from fusionai.wire.codecs import Packing, follows, packed_bytes

WIDTH: Final = 1024
TOP_K_BYTES: Final = 4


def main() -> None:
    arguments = _arguments()
    rows = int(arguments.megabytes * 1e6 / 4 / WIDTH) // 2 * 2
    inputs = {"normal": _normal(rows), "outliers": _outliers(rows), "network": _network(rows)}
    codecs: tuple[Packing, ...] = get_args(Packing)[1:]
    ways = ("pack", "unpack", "follow", "follow_back")
    speeds: dict[str, dict[str, list[float]]] = {codec: {way: [] for way in ways} for codec in codecs}
    copies: list[float] = []
    tensor = _tensor(inputs["outliers"])
    sequences = _tensor(inputs["outliers"].reshape(2, rows // 2, WIDTH))
    for number in range(arguments.rounds + 1):
        copied_s = _seconds(lambda: np.frombuffer(tensor.data, np.float32).copy())
        for codec in codecs:
            packed = _packed(tensor, codec)
            taken = {
                "pack": _seconds(lambda codec=codec: _packed(tensor, codec)),
                "unpack": _seconds(lambda packed=packed: unpack(packed)),
            }
            if follows(codec, sequences.shape):
                packed = _packed(sequences, codec, following=True)
                taken["follow"] = _seconds(lambda codec=codec: _packed(sequences, codec, following=True))
                taken["follow_back"] = _seconds(lambda packed=packed: unpack(packed))
            if number:  # the first round compiles
                for way, seconds in taken.items():
                    speeds[codec][way].append(tensor.nbytes / seconds)
        if number:
            copies.append(tensor.nbytes / copied_s)
    found: dict[str, Any] = {
        "schema": "fusionai.packing/1",
        "compiled": available(),
        "copy_gb_per_s": statistics.median(copies) / 1e9,
        "codecs": {codec: _result(codec, speeds[codec], copies, inputs) for codec in codecs},
    }
    for codec, result in found["codecs"].items():
        lost = ", ".join(
            f"{name} {one['codec']:.2%} (top-k {one['top_k']:.1%})" for name, one in result["lost"].items()
        )
        print(
            f"{codec}: {result['smaller']:.1f} x smaller; packs {result['pack_gb_per_s']:.2f} GB/s "
            f"({result['pack_per_copy']:.2f} of a copy), unpacks {result['unpack_gb_per_s']:.2f} GB/s; lost: {lost}"
        )
        if follow := result["following"]:
            print(
                f"  following: packs {follow['pack_gb_per_s']:.2f} GB/s, unpacks {follow['unpack_gb_per_s']:.2f} GB/s; "
                f"lost of what rows differ in: {follow['lost_alone']:.1%} alone, {follow['lost']:.1%} following"
            )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


def _result(
    codec: Packing, speeds: dict[str, list[float]], copies: list[float], inputs: dict[str, np.ndarray]
) -> dict[str, Any]:
    ratios = [speed / copy for speed, copy in zip(speeds["pack"], copies, strict=True)]
    return {
        "smaller": 4 * WIDTH * 1024 / packed_bytes(codec, (1024, WIDTH)),
        "pack_gb_per_s": statistics.median(speeds["pack"]) / 1e9,
        "unpack_gb_per_s": statistics.median(speeds["unpack"]) / 1e9,
        "pack_per_copy": statistics.median(ratios),
        "lost": {
            name: {"codec": _lost(values, codec), "top_k": _lost_by_top_k(values, codec)}
            for name, values in inputs.items()
        },
        "following": _following(codec, speeds) if speeds["follow"] else None,
    }


def _following(codec: Packing, speeds: dict[str, list[float]]) -> dict[str, float]:
    own = _normal(512).reshape(2, 256, WIDTH)
    values = own + np.float32(3**0.5) * np.random.default_rng(3).standard_normal((1, 1, WIDTH), np.float32)
    lost = [
        _energy(
            np.frombuffer(unpack(_packed(_tensor(values), codec, following=following)).data, np.float32).reshape(
                values.shape
            )
            - values
        )
        / _energy(own)
        for following in (False, True)
    ]
    return {
        "pack_gb_per_s": statistics.median(speeds["follow"]) / 1e9,
        "unpack_gb_per_s": statistics.median(speeds["follow_back"]) / 1e9,
        "lost_alone": lost[0],
        "lost": lost[1],
    }


def _lost(values: np.ndarray, codec: Packing) -> float:
    back = np.frombuffer(unpack(_packed(_tensor(values), codec)).data, np.float32).reshape(values.shape)
    return _energy(back - values) / _energy(values)


def _lost_by_top_k(values: np.ndarray, codec: Packing) -> float:
    """As many numbers of each row as the codec's bytes hold."""
    kept = packed_bytes(codec, (WIDTH,)) // TOP_K_BYTES
    places = np.argpartition(np.abs(values), -kept, axis=1)[:, -kept:]
    back = np.zeros_like(values)
    found = np.take_along_axis(values, places, axis=1).astype(np.float16).astype(np.float32)
    np.put_along_axis(back, places, found, axis=1)
    return _energy(back - values) / _energy(values)


def _energy(values: np.ndarray) -> float:
    return float(np.square(values, dtype=np.float64).sum())


def _normal(rows: int) -> np.ndarray:
    return np.random.default_rng(1).standard_normal((rows, WIDTH), np.float32)


def _outliers(rows: int) -> np.ndarray:
    values = _normal(rows)
    values[:, 7::100] *= 30
    return values


def _network(rows: int) -> np.ndarray:
    generator = np.random.default_rng(2)
    x = generator.standard_normal((rows, 64), np.float32)
    for into, out in ((64, 256), (256, WIDTH)):
        x = np.tanh(x @ generator.standard_normal((into, out), np.float32) * np.float32(into**-0.5))
    return x


def _tensor(values: np.ndarray) -> HostTensor:
    return host_tensor("float32", values.shape, np.ascontiguousarray(values).tobytes())


def _packed(tensor: HostTensor, codec: Packing, *, following: bool = False) -> Packed:
    made = pack("value", tensor, codec, following=following)
    assert isinstance(made, Packed)
    return made


def _seconds(work: Callable[[], object]) -> float:
    begun_s = time.perf_counter()
    work()
    return time.perf_counter() - begun_s


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--megabytes", type=float, default=16.0)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
