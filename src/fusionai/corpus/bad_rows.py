"""Invalid rows of the data: counted, listed with their place and problem. Decides when there are too many of them.

No text here quotes a row's content, because messages may leave this machine. Neighbours: `text` and `conversations`
find invalid rows, `chat_file` leaves them out.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Final, TextIO

import msgspec

from fusionai.primitives.errors import DataError
from fusionai.storage.atomic import storage_errors

SHOWN: Final = 3
"""Number of invalid rows that messages name; the list has all of them."""


class RowError(Exception):
    """An invalid row: `expected ..., got ...`, without the row's content."""


class BadRow(msgspec.Struct, frozen=True):
    """`place`: file and line, file and row of a Parquet file, or data set and record."""

    place: str
    problem: str


class BadRows:
    """Invalid rows of one pass over the data. `limit`: number that may be left out; below 1, the fraction of all rows.
    `listing` gets one line of JSON for each invalid row; the file does not exist if there are none."""

    def __init__(self, limit: float, listing: Path) -> None:
        """Raises `StorageError` if an old list can't be removed."""
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
        """Count a valid row."""
        self.rows += 1

    def bad(self, place: str, problem: str) -> None:
        """Record an invalid row. Raises `DataError` if there are too many, `StorageError` for the list."""
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
        """End the pass. Raises `DataError` if too large a fraction of the rows is invalid."""
        check_bad_rows(self.first, self.count, self.rows, self._limit, self._listing)


def check_bad_rows(first: list[BadRow], count: int, rows: int, limit: float, listing: Path) -> None:
    """Raise `DataError` if `count` invalid rows of `rows` are too many."""
    if count > (limit if limit >= 1 else limit * rows):
        raise too_many(first, count, rows, limit, listing)


def too_many(first: list[BadRow], count: int, rows: int, limit: float, listing: Path) -> DataError:
    """The error that names the first invalid row and the limit."""
    named = f"{first[0].place}: {first[0].problem}"
    if limit == 0:
        return DataError(
            named, hint="Fix the row, or set bad_rows in [data]: the number or fraction of rows that may be left out."
        )
    allowed = f"{limit:g}" if limit >= 1 else f"{limit:.3g} of all rows"
    return DataError(
        f"{count} of the first {rows} rows are invalid; [data] bad_rows allows {allowed}. The first: {named}",
        hint=f"All found so far are listed in {listing}.",
    )
