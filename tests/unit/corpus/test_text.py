from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fusionai.corpus.files import SourceFile, find_files, fingerprint, select_library
from fusionai.corpus.tables import FileData, HubData
from fusionai.corpus.text import PIECE_BYTES, TextPiece, pieces_of
from fusionai.primitives.errors import DataError


def read(path: Path, kind: str = "text", field: str = "text") -> list[TextPiece]:
    return list(pieces_of(FileData(files=(str(path),), format=kind), field))  # pyright: ignore[reportArgumentType]


def found(*patterns: str, form: str = "auto") -> list[tuple[str, str]]:
    files = find_files(FileData(files=patterns, format=form))  # pyright: ignore[reportArgumentType]
    return [(file.path.name, file.kind) for file in files]


def test_a_text_file_is_one_document_whatever_its_size(tmp_path: Path) -> None:
    text = "".join(f"line {number} – žluťoučký\r\n" for number in range(20_000)) + "x" * (3 * PIECE_BYTES) + "ü"
    path = tmp_path / "big.txt"
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    pieces = read(path)
    assert "".join(piece.text for piece in pieces) == text
    assert [piece.ends_document for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert max(len(piece.text.encode()) for piece in pieces) <= 2 * PIECE_BYTES
    assert pieces[0].text.endswith("\r\n")


def test_an_empty_file_is_no_document(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    assert read(tmp_path / "empty.txt") == []


@pytest.mark.parametrize(
    ("content", "line", "column"),
    [
        (b"abc\n\xff", 2, 1),
        (b"ab\xffc\n", 1, 3),
        (b"one\ntwo\nx\xe2\x82", 3, 2),
        (b"x" * PIECE_BYTES + b"yy\xfe", 1, PIECE_BYTES + 3),
        (b"x" * (PIECE_BYTES - 1) + b"\xe2\x82\xac\xff", 1, PIECE_BYTES + 3),
    ],
)
def test_undecodable_text_names_file_line_and_column(tmp_path: Path, content: bytes, line: int, column: int) -> None:
    path = tmp_path / "bad.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"bad\.txt, line {line}, column {column}: not UTF-8 text\."):
        read(path)


def test_jsonl(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one", "n": 1}\n\n{"text": "zwei ü"}')
    assert read(path, "jsonl") == [TextPiece("one", True), TextPiece("zwei ü", True)]


@pytest.mark.parametrize(
    ("second_line", "message"),
    [
        ("{", "line 2: not valid JSON"),
        ("[1]", "line 2: expected a JSON object."),
        ('{"txt": "a"}', "line 2: no field 'text'; did you mean 'txt'?"),
        ('{"text": 3}', "line 2: field 'text': expected a text, got a number."),
        ('{"text": null}', "line 2: field 'text': expected a text, got nothing."),
    ],
)
def test_a_broken_jsonl_line_is_named(tmp_path: Path, second_line: str, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n' + second_line + "\n")
    with pytest.raises(DataError) as caught:
        read(path, "jsonl")
    assert str(path) in str(caught.value)
    assert message in str(caught.value)


def test_parquet(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"body": [f"doc {number}" for number in range(2500)], "n": range(2500)}), path)
    pieces = read(path, "parquet", "body")
    assert [piece.text for piece in pieces] == [f"doc {number}" for number in range(2500)]
    with pytest.raises(DataError, match=r"a\.parquet: no column 'boddy'; did you mean 'body'\?"):
        read(path, "parquet", "boddy")
    with pytest.raises(DataError, match="row 0: field 'n': expected a text, got a number"):
        read(path, "parquet", "n")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match="not a readable Parquet file"):
        read(path, "parquet", "body")


def test_missing_files_and_kinds(tmp_path: Path) -> None:
    for name in ("b.txt", "a.py", "c.JSONL", "d.parquet", "sub/e.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    assert found(f"{tmp_path}/*") == [
        ("a.py", "text"),
        ("b.txt", "text"),
        ("c.JSONL", "jsonl"),
        ("d.parquet", "parquet"),
    ]
    assert found(f"{tmp_path}/**/*.txt", f"{tmp_path}/b.txt") == [("b.txt", "text"), ("e.txt", "text")]
    assert found(f"{tmp_path}/d.parquet", form="text") == [("d.parquet", "text")]
    with pytest.raises(DataError, match="no file matches"):
        found(f"{tmp_path}/*.csv")
    with pytest.raises(DataError, match="no file at"):
        found(f"{tmp_path}/none.txt")
    with pytest.raises(DataError, match="is a directory"):
        found(str(tmp_path))
    with pytest.raises(DataError, match=r"expected a \.jsonl or \.parquet"):
        found(f"{tmp_path}/b.txt", form="tensors")
    (tmp_path / "x.json").touch()
    with pytest.raises(DataError, match="can't tell whether it is one JSON document"):
        found(f"{tmp_path}/x.json")
    (tmp_path / "x.gz").touch()
    with pytest.raises(DataError, match=r"\.gz files can't be read"):
        found(f"{tmp_path}/x.gz")


def test_the_fingerprint_is_of_content_and_order_not_of_place(tmp_path: Path) -> None:
    one, two, copy = tmp_path / "1.txt", tmp_path / "2.txt", tmp_path / "3.txt"
    one.write_text("a")
    two.write_text("b")
    copy.write_text("a")

    def of(*paths: Path) -> str:
        return fingerprint([SourceFile(path, "text") for path in paths])

    assert of(one) == of(copy)
    assert len({of(one), of(two), of(one, two), of(two, one)}) == 4


def test_data_sets_without_the_package_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    data = HubData(dataset="org/set", subset=None, split="train", format="text")
    with pytest.raises(DataError, match=r"needs the package 'datasets'.*pip install 'fusionai\[hub\]'"):
        list(pieces_of(data, "text"))


def test_data_sets_through_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []

    def load_dataset(name: str, subset: str | None, split: str) -> list[dict[str, str]]:
        asked.append((name, subset, split))
        if name == "missing":
            raise FileNotFoundError("Dataset 'missing' doesn't exist on the Hub\nmore lines")
        return [{"text": "a"}, {"text": "b"}]

    package = types.ModuleType("datasets")
    package.load_dataset = load_dataset  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "datasets", package)
    data = HubData(dataset="org/set", subset="en", split="test", format="text")
    assert [piece.text for piece in pieces_of(data, "text")] == ["a", "b"]
    assert asked == [("org/set", "en", "test")]
    with pytest.raises(DataError, match="data set org/set, record 0: no field 'txt'; did you mean 'text'"):
        list(pieces_of(data, "txt"))
    missing = HubData(dataset="missing", subset=None, split="train", format="text")
    with pytest.raises(
        DataError, match=r"data set missing, split 'train': Dataset 'missing' doesn't exist on the Hub$"
    ):
        list(pieces_of(missing, "text"))


@pytest.mark.slow
def test_the_python_library_is_selected_the_same_each_time() -> None:
    selection = select_library(300_000)
    assert selection == select_library(300_000)
    assert 150_000 < sum(path.stat().st_size for path in selection) <= 300_000
    assert not any({"test", "tests", "site-packages"} & set(path.parts) for path in selection)
    assert {path.name[0] for path in selection} >= set("acdst"), "spread over the whole library"


def test_library_files_that_are_no_text_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text("x = 1\n")
    (tmp_path / "bad.py").write_bytes(b"# \xff\n")
    (tmp_path / "empty.py").touch()
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "t.py").write_text("x = 2\n")
    assert select_library(1000, root=tmp_path) == (tmp_path / "good.py",)
    with pytest.raises(DataError, match="no Python source of at most 2 bytes"):
        select_library(2, root=tmp_path)


def test_json_lines_written_by_json_round_trip(tmp_path: Path) -> None:
    texts = ["", "\u2028 \ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16"), 'tab\t"quote" \\n']
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    assert [piece.text for piece in read(path, "jsonl")] == texts
