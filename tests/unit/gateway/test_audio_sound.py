"""Sound in files becomes windows at one rate, within limits."""

from __future__ import annotations

import io

import numpy as np
import pytest
import soundfile
from numpy.typing import NDArray

from fusionai.gateway import audio
from fusionai.gateway.audio import SoundReader
from fusionai.primitives.errors import UsageError

RATE_HZ = 16_000


def written(samples: NDArray[np.float32], rate_hz: int, form: str, kind: str | None = None) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate_hz, format=form, subtype=kind)
    return file.getvalue()


def tone(rate_hz: int, seconds: float) -> NDArray[np.float32]:
    return (0.5 * np.sin(2 * np.pi * 440 * np.arange(int(rate_hz * seconds)) / rate_hz)).astype(np.float32)


def windows(data: bytes, seconds: int = 2) -> list[NDArray[np.float32]]:
    reader = SoundReader(data, RATE_HZ, seconds * RATE_HZ)
    found: list[NDArray[np.float32]] = []
    while (window := reader.next_window()) is not None:
        found.append(window)
    return found


@pytest.mark.parametrize(
    ("form", "kind", "rate_hz", "exact"),
    [
        ("WAV", "FLOAT", 16_000, 1e-6),
        ("FLAC", None, 44_100, 1e-3),
        ("OGG", None, 48_000, 0.05),
        ("MP3", None, 44_100, 0.1),
    ],
)
def test_formats_and_rates(form: str, kind: str | None, rate_hz: int, exact: float) -> None:
    """The sound is the tone that was written, in windows of two seconds; both channels count."""
    left = tone(rate_hz, 5.0)
    found = windows(written(np.stack([left, left], axis=1), rate_hz, form, kind))
    assert [len(window) for window in found[:-1]] == [2 * RATE_HZ] * 2
    whole = np.concatenate(found)
    assert len(whole) == pytest.approx(5 * RATE_HZ, abs=0.1 * RATE_HZ)
    middle = slice(RATE_HZ, 4 * RATE_HZ)
    strength = np.abs(np.fft.rfft(whole[middle]))
    assert strength.argmax() * RATE_HZ / len(whole[middle]) == pytest.approx(440, abs=1)
    assert np.abs(whole[middle]).max() == pytest.approx(0.5, abs=max(exact, 0.01))


def test_no_sound_and_broken_sound_are_refused() -> None:
    for data in (b"", b"no sound at all", written(tone(RATE_HZ, 1.0), RATE_HZ, "FLAC")[:200]):
        with pytest.raises(UsageError):
            windows(data)
    assert windows(written(np.zeros(0, np.float32), RATE_HZ, "WAV")) == []


def test_too_long_a_sound_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audio, "MOST_S", 3)
    with pytest.raises(UsageError, match="longer than 3 seconds"):
        windows(written(tone(RATE_HZ, 5.0), RATE_HZ, "WAV"))


def test_a_header_that_names_a_huge_size_allocates_nothing() -> None:
    data = bytearray(written(tone(RATE_HZ, 0.5), RATE_HZ, "WAV", "PCM_16"))
    data[40:44] = (2**31 - 2).to_bytes(4, "little")
    assert sum(map(len, windows(bytes(data)))) == RATE_HZ // 2
