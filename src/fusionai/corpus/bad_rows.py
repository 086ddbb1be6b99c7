"""Rows of the data that are not what they should be: named, counted, listed. Decides when there are too many of them.

Nothing here says a word of a row: messages may leave this machine. Neighbours: `text` and `conversations` find them,
`chat_file` leaves them out.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Final, TextIO

import msgspec

from fusionai.primitives.errors import DataError
from fusionai.storage.atomic import storage_errors

SHOWN: Final = 3
"""So many are named in messages; all are in the list."""


class RowError(Exception):
    """A row that is not what it should be: `expected ..., got ...`, without a word of the row."""


class BadRow(msgspec.Struct, frozen=True):
    """`place`: file and line, file and row of a Parquet file, or data set and record."""

    place: str
    problem: str


class BadRows:
    """Of one reading of the data. `limit`: so many may be left out; below 1, so large a part of all rows. `listing`
    gets one JSON object a line for each bad row, and is not there when there are none."""

    def __init__(self, limit: float, listing: Path) -> None:
        """Raises `StorageError` where an old list can't be removed."""
        self._limit = limit
        self._listing = listing
        self._file: TextIO | None = None
        self.count = 0
        self.rows = 0
        self.first: list[BadRow] = []
        with storage_errors(listing, "removed"):
            listing.unlink(missing_ok=True)

    def __enter__(self) -> BadRows:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def good(self) -> None:
        """One more row that is as it should be."""
        self.rows += 1

    def bad(self, place: str, problem: str) -> None:
        """One more that is not. Raises `DataError` when the job can't go on, `StorageError` for the list."""
        self.rows += 1
        self.count += 1
        row = BadRow(place, problem)
        if len(self.first) < SHOWN:
            self.first.append(row)
        with storage_errors(self._listing):
            if self._file is None:
                self._listing.parent.mkdir(parents=True, exist_ok=True)
                self._file = self._listing.open("w", encoding="utf-8")
            self._file.write(msgspec.json.encode(row).decode() + "\n")
            self._file.flush()
        if self._limit == 0 or (self._limit >= 1 and self.count > self._limit):
            raise too_many(self.first, self.count, self.rows, self._limit, self._listing)

    def settle(self) -> None:
        """All rows are read. Raises `DataError` if too large a part of them is bad."""
        check_bad_rows(self.first, self.count, self.rows, self._limit, self._listing)


def check_bad_rows(first: list[BadRow], count: int, rows: int, limit: float, listing: Path) -> None:
    """Raises `DataError` if of `rows` rows `count` are too many."""
    if count > (limit if limit >= 1 else limit * rows):
        raise too_many(first, count, rows, limit, listing)


def too_many(first: list[BadRow], count: int, rows: int, limit: float, listing: Path) -> DataError:
    """Why the job does not go on, naming the first of them."""
    named = f"{first[0].place}: {first[0].problem}"
    if limit == 0:
        return DataError(
            named, hint="Mend the row, or say with bad_rows in [data] how many may be left out (a number, or a part)."
        )
    allowed = f"{limit:g}" if limit >= 1 else f"{limit:.3g} of all rows"
    return DataError(
        f"{count} of the first {rows} rows are bad, [data] bad_rows allows {allowed}. The first: {named}",
        hint=f"All so far are in {listing}.",
    )
