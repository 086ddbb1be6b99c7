"""Reads the sound of a file in windows, at the rate that a model hears.

Files are decoded by libsndfile (WAV, FLAC, OGG, MP3 and its other formats) and resampled by soxr, a second at a time,
so that no size which a file names is allocated. Several channels become their mean. Everything here blocks.

`gateway.audio` calls this in threads."""

from __future__ import annotations

import io
from typing import Final

import numpy as np
import soundfile
import soxr
from numpy.typing import NDArray

from fusionai.primitives.errors import UsageError

MOST_S: Final = 4 * 3600
"""Longest sound, in seconds (chosen)."""
MOST_RATE_HZ: Final = 384_000
MOST_CHANNELS: Final = 16
"""Largest rate and number of channels of a file: those of audio hardware."""
_FORMATS: Final = "WAV, FLAC, OGG or MP3"


class SoundReader:
    """`seconds`: length of what was read up to now."""

    def __init__(self, data: bytes, rate_hz: int, window_samples: int) -> None:
        """Open the file `data`. Raises `UsageError` if it is no sound, or more than the limits."""
        self._rate_hz = rate_hz
        self._window_samples = window_samples
        try:
            self._file = soundfile.SoundFile(io.BytesIO(data))
        except (soundfile.SoundFileError, TypeError) as problem:
            raise UsageError(
                f"these bytes are no sound that can be read: {problem}", hint=f"Send {_FORMATS}."
            ) from None
        rate_hz_given, channels = int(self._file.samplerate), int(self._file.channels)
        if not 0 < rate_hz_given <= MOST_RATE_HZ or not 0 < channels <= MOST_CHANNELS:
            raise UsageError(
                f"the sound has {channels} channels at {rate_hz_given} Hz; at most {MOST_CHANNELS} at {MOST_RATE_HZ} "
                "Hz are accepted."
            )
        self._given_hz = rate_hz_given
        self._resampler = soxr.ResampleStream(rate_hz_given, rate_hz, 1, dtype="float32")
        self._waiting: list[NDArray[np.float32]] = []
        self._has_ended = False
        self.seconds = 0.0

    def next_window(self) -> NDArray[np.float32] | None:
        """Return the next window, float32 [samples], of which the last one may be shorter; None at the end. Raises
        `UsageError` for a damaged file, and for sound that is too long."""
        while not self._has_ended and sum(map(len, self._waiting)) < self._window_samples:
            self._waiting.append(self._next_second())
        samples = np.concatenate(self._waiting) if self._waiting else np.zeros(0, np.float32)
        self._waiting = [samples[self._window_samples :]]
        window = samples[: self._window_samples]
        self.seconds += len(window) / self._rate_hz
        if self.seconds > MOST_S:
            raise UsageError(f"the sound is longer than {MOST_S} seconds.", hint="Send it in parts.")
        return window if len(window) else None

    def _next_second(self) -> NDArray[np.float32]:
        try:
            read = self._file.read(self._given_hz, dtype="float32", always_2d=True)
        except soundfile.SoundFileError as problem:
            raise UsageError(f"the sound can't be read to its end: {problem}", hint="Save it again.") from None
        self._has_ended = len(read) < self._given_hz
        mono = np.ascontiguousarray(np.nan_to_num(read).mean(axis=1, dtype=np.float32))
        return self._resampler.resample_chunk(mono, last=self._has_ended)
