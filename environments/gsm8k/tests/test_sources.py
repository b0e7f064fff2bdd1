"""Rows come out checked, or the first bad one is named."""

import json
import re
import sys
import types

import pytest
from vf_gsm8k.sources import Row, load_rows

GOOD = {"question": "How many?", "answer": "1,000 + 1 = 1,001\n#### 1,001"}


def write(path, *lines):
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return str(path)


def fake_hub(monkeypatch, load_dataset):
    module = types.ModuleType("datasets")
    module.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", module)


def test_a_file_is_used_whole_whatever_the_split(tmp_path):
    path = write(tmp_path / "mine.jsonl", GOOD, "", GOOD | {"question": "And now?"})
    expected = [Row("gsm8k-mine-0", "How many?", "1001"), Row("gsm8k-mine-1", "And now?", "1001")]
    assert load_rows(path, "train") == load_rows(path, "test") == expected


def test_a_directory_gives_the_file_of_the_split(tmp_path):
    write(tmp_path / "test.jsonl", GOOD)
    assert [row.id for row in load_rows(str(tmp_path), "test")] == ["gsm8k-test-0"]
    with pytest.raises(ValueError, match=r"^no such dataset file: .*train\.jsonl$"):
        load_rows(str(tmp_path), "train")


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        ('{"question": ', "not valid JSON (Expecting value at column 14)"),
        ("[1]", "not a JSON object"),
        ({"answer": "#### 1"}, "missing field 'question'"),
        ({"question": "How many?"}, "missing field 'answer'"),
        ({"question": 3, "answer": "#### 1"}, "'question' is not a string"),
        ({"question": " ", "answer": "#### 1"}, "'question' is empty"),
        ({"question": "\u200b\u2060", "answer": "#### 1"}, "'question' is empty"),
        ({"question": "6 pens \ud83d", "answer": "#### 1"}, "'question' holds half of a surrogate pair ('\\ud83d')"),
        ({"question": "How many?", "answer": "\ud83d #### 1"}, "'answer' holds half of a surrogate pair ('\\ud83d')"),
        ({"question": "How many?", "answer": "1"}, "'answer' has no \"#### <number>\" line"),
        ({"question": "How many?", "answer": "#### one"}, "'answer' has no \"#### <number>\" line"),
        ("9" * 5000, "not readable JSON (Exceeds"),
        ("[" * 100_000, "not readable JSON (maximum recursion"),
    ],
)
def test_a_broken_row_is_named_by_file_and_line(tmp_path, bad, problem):
    path = write(tmp_path / "rows.jsonl", GOOD, "", bad, GOOD)
    with pytest.raises(ValueError, match=f"^{re.escape(f'{path} line 3: {problem}')}[^\\n]*$"):
        load_rows(path, "train", num_examples=1)


def test_bytes_that_are_not_text_are_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b"\n\xff\xfe\n")
    with pytest.raises(ValueError, match=r"rows\.jsonl line 2: not UTF-8 text"):
        load_rows(str(path), "train")


def test_a_byte_order_mark_and_a_unicode_line_break_inside_a_string_are_harmless(tmp_path):
    path = tmp_path / "rows.jsonl"
    row = GOOD | {"question": "How\u2028many?"}
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(row, ensure_ascii=False).encode())
    assert load_rows(str(path), "train")[0].question == "How\u2028many?"


def test_an_empty_file_is_an_error(tmp_path):
    path = write(tmp_path / "rows.jsonl")
    with pytest.raises(ValueError, match=r"rows\.jsonl: no rows"):
        load_rows(path, "train")


MISSING = ["mine.jsonl", "owner/mine.jsonl", "./mine", "/nowhere/mine", "~/no-such-dir-here", "a/b/c", "data/"]


@pytest.mark.parametrize("source", MISSING)
def test_a_missing_path_is_never_looked_up_on_the_hub(source, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    fake_hub(monkeypatch, lambda *args, **kwargs: pytest.fail("asked the hub"))
    with pytest.raises(ValueError, match=r"^no such dataset file: "):
        load_rows(source, "train")


def test_a_hub_name_is_loaded_from_the_hub(monkeypatch):
    calls = []
    fake_hub(monkeypatch, lambda *args, **kwargs: calls.append((args, kwargs)) or [GOOD, GOOD, GOOD])
    rows = load_rows("openai/gsm8k", "test", num_examples=2)
    assert [row.id for row in rows] == ["gsm8k-test-0", "gsm8k-test-1"]
    assert calls == [(("openai/gsm8k", "main"), {"split": "test"})]


def test_a_bad_hub_row_is_named(monkeypatch):
    fake_hub(monkeypatch, lambda *args, **kwargs: [GOOD, {"question": "How many?"}])
    with pytest.raises(ValueError, match=r"^openai/gsm8k \(test\) row 1: missing field 'answer'$"):
        load_rows("openai/gsm8k", "test", num_examples=1)


def test_a_hub_failure_is_one_sentence_that_says_what_else_to_give(monkeypatch):
    def unreachable(*args, **kwargs):
        raise ConnectionError("Couldn't reach\nthe Hub")

    fake_hub(monkeypatch, unreachable)
    with pytest.raises(
        ValueError, match=r"'openai/gsm8k'.*Couldn't reach the Hub.*local \.jsonl.*\"synthetic\""
    ) as error:
        load_rows("openai/gsm8k", "train")
    assert "\n" not in str(error.value)
