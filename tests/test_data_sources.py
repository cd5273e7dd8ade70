"""Reading rows: kinds of files, and wrong ones named by file and line."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma

import numpy as np
import pytest

from harness.data_sources import FileReader, Row, expand, segments
from harness.encoders import TextEncoder, TextTokenizer, encode_all, special_tokens
from harness.findings import UserError
from tests.data_tokenizers import byte_tokenizer, word_tokenizer


def read(tmp_path, files, entries=None, **options):
    """Writes files (name -> bytes or text), and reads them back by name."""
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    reader = FileReader(**options)
    rows = list(reader.rows(expand([str(tmp_path / entry) for entry in (entries or files)], reader.key)))
    return rows, reader


def texts(rows):
    return [row.values["text"] for row in rows]


def test_lines_and_documents(tmp_path):
    content = {"a.txt": b"first\n\n   \nsecond\r\nlast"}
    rows, _ = read(tmp_path, content, line_mode=True)
    assert texts(rows) == ["first", "second", "last"]
    assert [row.where for row in rows] == [f"{tmp_path}/a.txt, line {number}" for number in (1, 4, 5)]
    rows, _ = read(tmp_path, content)
    assert texts(rows) == ["first\n\n   \nsecond\nlast"]


@pytest.mark.parametrize("content", [b"", b" \n\t\n", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("name", ["b.txt", "b.jsonl", "b.csv"])
def test_an_empty_file_that_was_named_is_an_error_also_beside_good_ones(tmp_path, name, content):
    with pytest.raises(UserError, match=f"{tmp_path}/{name} is empty or blank"):
        read(tmp_path, {"a.txt": "good", name: content})


def test_an_empty_file_in_a_folder_is_left_out_and_counted(tmp_path):
    rows, reader = read(
        tmp_path, {"d/a.py": "x = 1\n", "d/__init__.py": "", "d/.hidden.py": "y", "d/sub/b.md": "# b", "d/c.bin": "?"}, ["d"]
    )
    assert texts(rows) == ["x = 1\n", "# b"]
    assert reader.skipped == {"empty or blank files": [f"{tmp_path}/d/__init__.py"]}


def test_a_file_that_is_not_utf8_is_named_with_line_and_offset(tmp_path):
    content = bytes.fromhex("63 61 66 E9 20 6E 6F 69 72 0A 70 6C 61 69 6E 0A")
    with pytest.raises(UserError) as caught:
        read(tmp_path, {"a.txt": content})
    finding = caught.value.findings[0]
    assert finding.message == f"{tmp_path}/a.txt, line 1: byte 0xe9 at offset 3 is not UTF-8"
    assert "--data_encoding" in finding.fix
    rows, _ = read(tmp_path, {"a.txt": content}, encoding="latin-1", line_mode=True)
    assert texts(rows) == ["café noir", "plain"]
    assert len(texts(rows)[0]) == 9


@pytest.mark.parametrize("kind", ["utf-16-le", "utf-16-be"])
def test_utf_16_is_recognised_by_its_mark(tmp_path, kind):
    content = "\ufeffab".encode(kind)
    with pytest.raises(UserError, match=r"--data_encoding \(this one begins like utf-16\), or convert it"):
        read(tmp_path, {"a.txt": content})
    assert texts(read(tmp_path, {"a.txt": content}, encoding="utf-16")[0]) == ["ab"]


def test_a_wrong_byte_far_into_a_file_is_found(tmp_path):
    content = "é\n".encode() * 100_000 + b"ab\xff"
    with pytest.raises(UserError, match=r"a.txt, line 100001: byte 0xff at offset 300002"):
        read(tmp_path, {"a.txt": content})
    cut = b"abc\n" + "é".encode()[:1]
    with pytest.raises(UserError, match=r"b.txt, line 2: byte 0xc3 at offset 4"):
        read(tmp_path, {"b.txt": cut})


def test_a_byte_order_mark_is_no_part_of_text_or_key(tmp_path):
    rows, _ = read(tmp_path, {"a.txt": b"\xef\xbb\xbfabc", "b.jsonl": b'\xef\xbb\xbf{"text": "x"}\n', "c.csv": b"\xef\xbb\xbftext\ny\n"})
    assert texts(rows) == ["abc", "x", "y"]


def test_source_code_may_name_its_encoding(tmp_path):
    latin = "# -*- coding: latin-1 -*-\nname = 'é'\n".encode("latin-1")
    rows, _ = read(tmp_path, {"d/a.py": latin, "d/b.py": b"ok\n", "d/c.py": b"\xff\xfe\n"}, ["d"])
    assert texts(rows) == ["# -*- coding: latin-1 -*-\nname = 'é'\n", "ok\n"]
    _, reader = read(tmp_path, {}, ["d"])
    assert reader.skipped == {"source files whose encoding cannot be read": [f"{tmp_path}/d/c.py"]}
    with pytest.raises(UserError, match=r"c\.py, line 1"):
        read(tmp_path, {}, ["d/c.py"])


@pytest.mark.parametrize(("suffix", "compress"), [(".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress)])
def test_compressed_files(tmp_path, suffix, compress):
    rows, _ = read(tmp_path, {"a.jsonl" + suffix: compress(b'{"text": "x"}\n')})
    assert texts(rows) == ["x"]
    with pytest.raises(UserError, match=r"cannot read .*b.txt"):
        read(tmp_path, {"b.txt" + suffix: compress(b"x" * 1000)[:-9] if suffix != ".bz2" else b"not compressed"})


def test_json_in_its_shapes(tmp_path):
    rows = [{"text": "a"}, {"text": "b\nc"}]
    files = {
        "lines.jsonl": "\n".join(map(json.dumps, rows)),
        "array.json": json.dumps(rows, indent=1),
        "data.json": json.dumps({"version": 1, "data": rows}, indent=1),
        "lines.json": "\n".join(map(json.dumps, rows)) + "\n",
    }
    for name, content in files.items():
        assert texts(read(tmp_path, {name: content})[0]) == ["a", "b\nc"], name
    assert read(tmp_path, {"one.json": '{"text": "x"}'})[0] == [Row({"text": "x"}, f"{tmp_path}/one.json, row 1")]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", '[{"text": "a"},\n {"text" "b"}]', "a.json, line 2: not valid JSON"),
        ("a.csv", 'text,n\n"a"x,1\n', "a.csv, line 2: not valid CSV"),
        ("a.parquet", "no table", "a.parquet is not a parquet file"),
    ],
)
def test_broken_files_are_named(tmp_path, name, content, message):
    with pytest.raises(UserError, match=message):
        read(tmp_path, {name: content})


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"text": "a"}\n\n{"text": \n{"text": "b"}', "line 3: not valid JSON: Expecting value at column 10"),
        ("a.jsonl", '{"text": "a"}\n{"text": "\n{"text": "b"}', "line 2: not valid JSON: Unterminated string starting at column 10"),
        ("a.jsonl", '{"text": "a"}\n["b"]\n{"text": "b"}', "line 2: a JSON object is needed, not list"),
        ("a.json", '[{"text": "a"}, 1, {"text": "b"}]', "row 2: a JSON object is needed, not int"),
        ("a.csv", 'text,n\n"a",1\nc\nb,2\n', "line 3: not as many fields as the header has"),
    ],
)
def test_broken_rows_are_named_by_file_and_line_and_can_be_left_out(tmp_path, name, content, message):
    rows = read(tmp_path, {name: content})[0]
    assert [row.values.get("text") for row in rows] == ["a", None, "b"]
    problem = rows[1].problem
    assert problem is not None and problem.message == f"{tmp_path}/{name}, {message}" and problem.fix.endswith("--bad_rows skip")
    assert rows[0].problem is None and rows[2].problem is None


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "rows.json"])
def test_half_a_character_is_named_by_file_and_row(tmp_path, name):
    rows = [
        r'{"text": "whole \ud83d\ude00"}',
        r'{"messages": [{"content": "half \uD83d"}]}',
        r'{"text": "low \udc00"}',
        r'{"text": "\\ud800"}',
    ]
    joined = "[" + ",".join(rows) + "]" if name == "rows.json" else "\n".join(rows)
    read_rows, _ = read(tmp_path, {name: joined})
    assert [row.problem is not None for row in read_rows] == [False, True, True, False]
    place = "row" if name == "rows.json" else "line"
    half = "is half of a character (a lone surrogate), which no tokenizer takes"
    assert read_rows[1].problem.message == rf"{tmp_path}/{name}, {place} 2: \ud83d {half}"
    assert read_rows[2].problem.message == rf"{tmp_path}/{name}, {place} 3: \udc00 {half}"
    assert [row.values.get("text") for row in read_rows] == ["whole \U0001f600", None, None, r"\ud800"]


def test_tables(tmp_path):
    import datasets

    table = datasets.Dataset.from_dict({"text": ["a", "b"], "n": [1, 2]})
    table.to_parquet(tmp_path / "t.parquet")
    table.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": table, "validation": table.select([1])}).save_to_disk(tmp_path / "dict")
    expected = [{"text": "a", "n": 1}, {"text": "b", "n": 2}]
    for name in ("t.parquet", "saved", "saved/data-00000-of-00001.arrow", "dict"):
        assert [row.values for row in read(tmp_path, {}, [name])[0]] == expected, name
    assert texts(read(tmp_path, {}, ["dict"], key="--validation_file")[0]) == ["b"]
    datasets.DatasetDict({"part": table, "test": table.select([1])}).save_to_disk(tmp_path / "odd")
    assert texts(read(tmp_path, {}, ["odd"], key="--validation_file")[0]) == ["b"]
    with pytest.raises(UserError, match=r"odd has no split train, but part, test -> give one: .*/odd/part"):
        read(tmp_path, {}, ["odd"])
    datasets.DatasetDict({"part": table}).save_to_disk(tmp_path / "one")
    assert texts(read(tmp_path, {}, ["one"])[0]) == ["a", "b"]
    assert [row.values for row in read(tmp_path, {"a.tsv": "text\tn\nq\t1\n"})[0]] == [{"text": "q", "n": "1"}]


def test_arrow_files_that_point_outside_of_themselves_are_refused(tmp_path):
    """Arrow trusts the places that a file gives: reading them would end the process."""
    import datasets
    import pyarrow as pa

    table = pa.table({"text": ["a", "b"]})
    with pa.OSFile(str(tmp_path / "wild.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    content = (tmp_path / "wild.arrow").read_bytes()
    right, wild = (np.array([0, 1, end], dtype=np.int32).tobytes() for end in (2, 2**30))
    (tmp_path / "wild.arrow").write_bytes(wild.join(content.rsplit(right, 1)))
    with pytest.raises(UserError, match=r"wild\.arrow is not an arrow file: .*ength"):
        read(tmp_path, {}, ["wild.arrow"])
    assert datasets.Dataset.from_file(str(tmp_path / "wild.arrow")).num_rows == 2  # which looks right


def test_names_globs_and_folders(tmp_path):
    for name in ("b.txt", "a.txt", "sub/c.txt"):
        read(tmp_path, {name: name})
    assert texts(read(tmp_path, {}, ["*.txt"])[0]) == ["a.txt", "b.txt"]
    assert texts(read(tmp_path, {}, ["**/*.txt"])[0]) == ["a.txt", "b.txt", "sub/c.txt"]
    assert texts(read(tmp_path, {}, ["sub/c.txt", ".", "a.txt"])[0]) == ["sub/c.txt", "a.txt", "b.txt"]  # each file once


def test_every_wrong_name_is_reported_at_once(tmp_path):
    (tmp_path / "empty").mkdir()
    for name in ("data.jsonl", "empty/x.bin", "y.docx"):
        (tmp_path / name).write_text("?")
    entries = [str(tmp_path / name) for name in ("dat.jsonl", "none*.txt", "empty", "y.docx")]
    with pytest.raises(UserError) as caught:
        expand(entries, "--train_file")
    lines = [finding.line() for finding in caught.value.findings]
    assert len(lines) == 4
    assert f"dat.jsonl does not exist -> did you mean {tmp_path}/data.jsonl?" in lines[0]
    assert "no file matches" in lines[1]
    assert "has no file of a known kind" in lines[2]
    assert "y.docx is of an unknown kind" in lines[3]


def twelve_rows(folder, kind):
    """A file of twelve rows, some of them after a blank line or a lone carriage return."""
    import datasets

    rows = [{"text": f"row {number} é"} for number in range(12)]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    path = folder / kind
    if kind in ("a.jsonl", "a.json", "a.jsonl.gz"):
        text = "\n\n".join(["\r\n".join(lines[:4]), "\r".join(lines[4:7]), "\n".join(lines[7:])]) + "\n"
        content = b"\xef\xbb\xbf" + text.encode()
        path.write_bytes(gzip.compress(content) if kind.endswith(".gz") else content)
    elif kind == "a.txt":
        path.write_text("\n\n".join(row["text"] for row in rows))
    elif kind == "array.json":
        path.write_text(json.dumps(rows))
    elif kind == "a.csv":
        path.write_text("text\n" + "\n".join(f'"{row["text"]}"' for row in rows))
    elif kind == "a.parquet":
        datasets.Dataset.from_list(rows).to_parquet(path, batch_size=5)
    else:
        datasets.Dataset.from_list(rows).save_to_disk(path)
    return expand([str(path)], "--train_file")


@pytest.mark.parametrize("kind", ["a.jsonl", "a.json", "a.jsonl.gz", "a.txt", "array.json", "a.csv", "a.parquet", "saved"])
def test_reading_goes_on_at_any_row(tmp_path, kind):
    files = twelve_rows(tmp_path, kind)
    reader = FileReader(line_mode=True)
    rows, places = [], [None]
    for row in reader.rows(files):
        rows.append(row)
        places.append(reader.place)
    assert texts(rows) == [f"row {number} é" for number in range(12)]
    assert (places[-1] is not None) == (kind in ("a.jsonl", "a.json", "a.txt"))
    for skip in range(13):
        assert list(FileReader(line_mode=True).rows(files, skip, places[skip])) == rows[skip:]
        assert list(FileReader(line_mode=True).rows(files, skip)) == rows[skip:]


def test_what_comes_before_a_place_is_not_read(tmp_path):
    (file,) = twelve_rows(tmp_path, "a.jsonl")
    reader = FileReader()
    iterator = reader.rows([file])
    for _ in range(10):
        next(iterator)
    data = bytearray(file.path.read_bytes())
    data[: reader.place.offset] = b"\xff" * reader.place.offset
    file.path.write_bytes(data)
    assert texts(FileReader().rows([file], 10, reader.place)) == ["row 10 é", "row 11 é"]


def test_an_unknown_encoding_is_refused():
    with pytest.raises(UserError, match="utf-9 is not an encoding Python knows"):
        FileReader(encoding="utf-9")


TEXT = "".join(f"line {number}\n" + ("\n" if number % 7 == 0 else "    indented\n" if number % 5 == 0 else "") for number in range(400))


@pytest.mark.parametrize("size", [1, 7, 64, 1000, 10**6])
def test_long_texts_come_in_parts_that_begin_at_lines(size):
    parts = list(segments(io.StringIO(TEXT), size))
    assert "".join(parts) == TEXT
    assert all(part.endswith("\n") and not part[0].isspace() for part in parts)
    assert len(parts) > 1 or size > len(TEXT) // 2
    assert list(segments(io.StringIO(" \n\n \n"), size)) == []


def test_parts_of_a_document_give_the_tokens_of_the_whole(tmp_path):
    tokenizer = byte_tokenizer()
    special = special_tokens(tokenizer, True, None)
    encoder = TextEncoder(TextTokenizer(tokenizer), special, "text")
    files = {"a.txt": TEXT, "b.txt": "short"}
    results = []
    for segment_chars in (None, 100):
        rows, _ = read(tmp_path, files, segment_chars=segment_chars)
        batches = [encoder.encode(rows[begin : begin + 3]) for begin in range(0, len(rows), 3)]
        tokens = [token for batch in batches for token in batch.tokens.tolist()]
        ends, total = [], 0
        for batch in batches:
            lengths = batch.lengths.tolist()
            for number, length in enumerate(lengths):
                total += length
                if not (batch.open and number == len(lengths) - 1):
                    ends.append(total)
        results.append((tokens, ends))
    assert results[0] == results[1]
    assert results[0][1] == [len(TEXT) + 2, len(TEXT) + 2 + 5 + 2]


def test_a_tokenizer_that_puts_blanks_before_texts_gets_them_whole():
    assert TextTokenizer(byte_tokenizer()).is_splittable()
    assert not TextTokenizer(word_tokenizer("▁a ▁word ▁and ▁more ▁", metaspace=True)).is_splittable()


def test_a_tokenizers_left_over_truncation_does_not_cut_documents():
    tokenizer = byte_tokenizer()
    tokenizer("abc", truncation=True, max_length=2)
    tokenizer.backend_tokenizer.enable_truncation(2)
    assert len(TextTokenizer(tokenizer).ids(["abcdef"])[0]) == 6


def test_rows_that_have_no_text_are_named_together():
    encoder = TextEncoder(TextTokenizer(byte_tokenizer()), special_tokens(byte_tokenizer(), None, None), "text")
    rows = [
        Row({"text": "ok"}, "a, line 1"),
        Row({"body": "x"}, "a, line 2"),
        Row({"text": 3}, "a, line 3"),
        Row({"text": None}, "a, line 4"),
    ]
    encoded = encoder.encode([*rows, Row({"text": " "}, "a, line 5")])
    assert [finding.message for finding in encoded.problems] == [
        "a, line 2: no column 'text'; it has body",
        "a, line 3: 'text' holds int, not text",
    ]
    assert dict(encoded.dropped) == {"empty rows": 2}
    assert encoded.lengths.tolist() == [3]


@pytest.mark.parametrize("num_workers", [1, 2])
def test_processes_keep_the_order(num_workers):
    encoder = TextEncoder(TextTokenizer(byte_tokenizer()), special_tokens(byte_tokenizer(), None, None), "text")
    rows = [Row({"text": "x" * (number % 50 + 1)}, str(number)) for number in range(3000)]
    lengths = [length for encoded in encode_all(encoder, rows, num_workers) for length in encoded.lengths.tolist()]
    assert lengths == [number % 50 + 2 for number in range(3000)]


class Dying:
    """An encoder whose process ends without a word."""

    masked = False

    def encode(self, rows):
        import os

        os._exit(9)


def test_a_dead_tokenising_process_gives_one_message():
    with pytest.raises(RuntimeError, match="a tokenising process died"):
        list(encode_all(Dying(), [Row({"text": "x"}, "a")], 2))


def test_special_tokens_are_chosen_and_said():
    full = byte_tokenizer()
    ids = {name: full.convert_tokens_to_ids(name) for name in ("<s>", "</s>", "<pad>")}
    chosen = special_tokens(full, None, None)
    assert (chosen.bos, chosen.eos, chosen.pad, chosen.findings) == (None, ids["</s>"], ids["<pad>"], ())
    assert special_tokens(full, True, False).bos == ids["<s>"]
    assert special_tokens(full, True, False).eos is None
    size = len(full)
    no_pad = byte_tokenizer(pad_token=None)
    chosen = special_tokens(no_pad, None, None)
    assert chosen.pad == chosen.eos
    assert "has no pad token" in chosen.findings[0].message
    assert len(no_pad) == size - 1  # the vocabulary is not grown
    bare = byte_tokenizer(pad_token=None, eos_token=None, bos_token=None)
    assert [finding.severity for finding in special_tokens(bare, None, None).findings] == ["warning", "info"]
    with pytest.raises(UserError) as caught:
        special_tokens(bare, True, True)
    assert [finding.key for finding in caught.value.findings] == ["--add_bos", "--add_eos"]
