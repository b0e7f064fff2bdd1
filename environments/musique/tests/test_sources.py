"""Specs, files and rows; every error says where and which field."""

import json
import random
import re
import sys
import types

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from vf_musique.records import check_record
from vf_musique.slices import parse_split
from vf_musique.sources import Source, Synthetic, load_records, parse_spec

SMALL = Synthetic(rows=12)


def load(spec, split="train", synthetic=SMALL):
    return load_records(spec, split, synthetic)


def ids(spec, **kwargs):
    return [record.key for record in load(spec, **kwargs)]


@pytest.mark.parametrize(
    ("spec", "sources"),
    [
        ("bdsaglam/musique,answerable,train", [Source("bdsaglam/musique", "answerable", "train")]),
        (" a/b , full , train[:100] ", [Source("a/b", "full", "train[:100]")]),
        ("a/b", [Source("a/b")]),
        ("a/b,full", [Source("a/b", "full")]),
        ("a/b,validation", [Source("a/b", None, "validation")]),
        ("a.jsonl,[:100]", [Source("a.jsonl", None, "[:100]")]),
        ("a.jsonl,,train[10%:20%]", [Source("a.jsonl", None, "train[10%:20%]")]),
        ("a,x,train; b,y,train+validation;", [Source("a", "x", "train"), Source("b", "y", "train+validation")]),
    ],
)
def test_specs(spec, sources):
    assert parse_spec(spec) == sources


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", "datasets is empty; a part is written path,name,split"),
        (" ; ", "datasets is empty"),
        (",answerable,train", "datasets part 1 (',answerable,train'): the path is empty"),
        ("a;b,c,d,e", "datasets part 2 ('b,c,d,e'): has 4 fields; a part is written path,name,split"),
        ("a,b,train[", "datasets part 1 ('a,b,train['): the split 'train[' is not one of train, train[:100]"),
        ("a,b,train[1:2:3]", "the split 'train[1:2:3]' is not"),
        ("a,b,train+", "the split 'train+' is not"),
        ("a,b,train[:101%]", "the split 'train[:101%]' has a percentage beyond 100"),
    ],
)
def test_a_wrong_spec_is_one_sentence(spec, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        parse_spec(spec)
    assert "\n" not in str(error.value)


bounds = st.none() | st.integers(-150, 150)


@settings(deadline=None)
@given(bounds, bounds, st.booleans(), st.integers(0, 240))
@example(1, 2, True, 50)  # half a row: rounded to the even one
@example(None, 101, False, 100)
def test_slices_are_those_of_datasets(start, stop, percent, size):
    from datasets import ReadInstruction

    if percent:
        start, stop = (None if bound is None else max(-100, min(100, bound)) for bound in (start, stop))
    unit = "%" if percent else ""
    text = f"train[{'' if start is None else f'{start}{unit}'}:{'' if stop is None else f'{stop}{unit}'}]"
    (theirs,) = ReadInstruction.from_spec(text).to_absolute({"train": size})
    (ours,) = parse_split(text, "here")
    assert list(ours.of(range(size))) == list(range(size))[theirs.from_ : theirs.to]


# --- rows -----------------------------------------------------------------------------------------------------------


def test_a_record(kit):
    record = check_record(kit.record("3hop1__7"), "here")
    assert (record.key, record.id, record.kind) == ("3hop1__7", "3hop1__7", "3hop1")
    assert record.hops == 2  # the decomposition's steps, whatever the id says
    assert record.answers == ("Oak Hill", "Oakhill")
    assert [(p.idx, p.supporting) for p in record.paragraphs] == [(0, False), (1, True), (2, False), (3, True)]
    assert [(step.question, step.support) for step in record.steps] == [
        ("Who wrote The Long Song?", 1),
        ("Where was #1 born?", 3),
    ]
    assert record.answerable and not record.full


def test_tex_quotes_become_quotes(kit):
    row = kit.record()
    row["paragraphs"][0]["paragraph_text"] = "a ``person - centered '' view, don't"
    assert check_record(row, "here").paragraphs[0].text == 'a "person - centered " view, don\'t'


def test_hops_without_a_decomposition(kit):
    bare = {name: value for name, value in kit.record("4hop2__9").items() if name != "question_decomposition"}
    assert check_record(bare, "here").hops == 4
    assert check_record({**bare, "id": "5a7a0693"}, "here").hops == 2  # the supporting paragraphs


def test_what_may_be_left_out(kit):
    needed = {"id", "question", "answer", "paragraphs"}
    record = check_record({name: value for name, value in kit.record().items() if name in needed}, "here")
    assert record.answerable and record.answers == ("Oak Hill",) and record.steps == ()


HALF = "holds half of a surrogate pair ('\\ud83d'), which is no character; write the whole character or leave it out"


def changed(path, value):
    def change(row):
        *parents, last = path
        for key in parents:
            row = row[key]
        if value is ...:
            del row[last]
        else:
            row[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed(["id"], ...), "missing field 'id'"),
        (changed(["id"], " "), "'id' is empty"),
        (changed(["id"], "\u200b\u3164"), "'id' is empty"),
        (changed(["question"], 3), "'question' is not a string"),
        (changed(["question"], "Who? \ud83d"), f"'question' {HALF}"),
        (changed(["answer_aliases"], ["\ud83d"]), f"'answer_aliases' {HALF}"),
        (changed(["paragraphs", 2, "paragraph_text"], "\ud83d"), f"'paragraphs[2].paragraph_text' {HALF}"),
        (changed(["question_decomposition", 1, "answer"], "\ud83d"), f"'question_decomposition[1].answer' {HALF}"),
        (changed(["answer"], None), "'answer' is not a string"),
        (changed(["answer"], ...), "missing field 'answer'"),
        (changed(["answer_aliases"], "x"), "'answer_aliases' is not a list"),
        (changed(["answer_aliases"], [1]), "'answer_aliases' holds something that is not a string"),
        (changed(["answerable"], "yes"), "'answerable' is not true or false"),
        (changed(["paragraphs"], []), "'paragraphs' is empty"),
        (changed(["paragraphs"], ...), "missing field 'paragraphs'"),
        (changed(["paragraphs", 2], "x"), "'paragraphs[2]' is not an object"),
        (changed(["paragraphs", 2, "idx"], "2"), "'paragraphs[2].idx' is not an integer"),
        (changed(["paragraphs", 2, "idx"], True), "'paragraphs[2].idx' is not an integer"),
        (changed(["paragraphs", 2, "idx"], 1), "'paragraphs[2].idx' is 1, which is negative or not unique"),
        (changed(["paragraphs", 2, "title"], ...), "missing field 'paragraphs[2].title'"),
        (changed(["paragraphs", 0, "paragraph_text"], None), "'paragraphs[0].paragraph_text' is not a string"),
        (changed(["paragraphs", 0, "is_supporting"], 1), "'paragraphs[0].is_supporting' is not true or false"),
        (changed(["question_decomposition"], "x"), "'question_decomposition' is not a list"),
        (changed(["question_decomposition", 1], 3), "'question_decomposition[1]' is not an object"),
        (changed(["question_decomposition", 1, "question"], ""), "'question_decomposition[1].question' is empty"),
        (
            changed(["question_decomposition", 0, "paragraph_support_idx"], 9),
            "'question_decomposition[0].paragraph_support_idx' is 9, which no paragraph has",
        ),
    ],
)
def test_a_wrong_field_is_named_with_file_and_line(kit, write, change, message):
    row = json.loads(json.dumps(kit.record("2hop__bad")))
    change(row)
    path = write(kit.record(), "", row)
    with pytest.raises(ValueError, match=f"^{re.escape(f'{path} line 3: {message}')}$"):
        load(path)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"id": ', "not valid JSON (Expecting value at column 8)"),
        ("[1]", "not an object"),
        ("9" * 5000, "not readable JSON (Exceeds"),
        ("[" * 100_000, "not readable JSON (maximum recursion"),
    ],
)
def test_a_broken_line_is_named(kit, write, line, problem):
    path = write(kit.record(), line)
    with pytest.raises(ValueError, match=f"^{re.escape(f'{path} line 2: {problem}')}"):
        load(path)


def test_a_question_that_nothing_supports_is_refused(kit, write):
    row = kit.record()
    for paragraph in row["paragraphs"]:
        paragraph["is_supporting"] = False
    with pytest.raises(ValueError, match=r"line 1: no paragraph has 'is_supporting': true, but the question is answer"):
        load(write(row))


# --- files ----------------------------------------------------------------------------------------------------------


def test_a_file_is_used_whole_or_in_slices_whatever_the_split(kit, write):
    path = write(*(kit.record(f"2hop__{i}") for i in range(10)))
    assert ids(path) == ids(path, split="validation") == [f"2hop__{i}" for i in range(10)]
    assert ids(f"{path},answerable,train[:2]") == ids(f"{path},[:20%]") == ["2hop__0", "2hop__1"]
    assert ids(f"{path},[8:]+[:1]") == ["2hop__8", "2hop__9", "2hop__0"]
    with pytest.raises(ValueError, match="a file holds one split; the split may give slices of it"):
        load(f"{path},answerable,train+validation")
    with pytest.raises(ValueError, match=r"rows\.jsonl,\[20:\] has no rows"):
        load(f"{path},[20:]")
    with pytest.raises(ValueError, match="the name 'ful' is not one of answerable, full"):
        load(f"{path},ful")


def test_a_slice_without_a_name_is_of_the_split_that_the_setting_names(kit, write, tmp_path):
    for name in ("train", "dev"):
        write(*(kit.record(f"2hop__{name}_{i}") for i in range(3)), name=f"musique_ans_v1.0_{name}.jsonl")
    assert ids(f"{tmp_path},[:1]") == ["2hop__train_0"]
    assert ids(f"{tmp_path},[:1]", split="validation") == ["2hop__dev_0"]
    assert ids(f"{tmp_path},[:1] + train[1:2]", split="validation") == ["2hop__dev_0", "2hop__train_1"]
    unnamed = ids("synthetic,answerable,[:2]", split="validation")
    assert unnamed == ids("synthetic,answerable,validation[:2]") and len(unnamed) == 2
    assert ids("synthetic,[:2]") == ids("synthetic,answerable,train[:2]")


@pytest.mark.parametrize("rows", [12, 1000, 1500])
def test_a_synthetic_slice_holds_the_same_rows_whatever_number_is_wanted(rows):
    def numbers(spec):
        return [int(record.id.rsplit("-", 1)[1]) for record in load(spec, synthetic=Synthetic(rows=rows, paragraphs=4))]

    assert numbers("synthetic,answerable,train[100:200]") == list(range(100, 200))
    assert numbers("synthetic,answerable,train[:50%]") == list(range(500))
    assert numbers("synthetic,answerable,train[-5:]") == list(range(995, 1000))
    assert numbers("synthetic,answerable,train[:1200]") == list(range(1200))
    assert numbers("synthetic") == list(range(max(rows, 1000)))


def test_parquet(kit, tmp_path):
    path = tmp_path / "rows.parquet"
    rows = [kit.record(f"2hop__{i}") for i in range(3)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    assert load(str(path)) == [check_record(row, "here") for row in rows]
    path.write_bytes(b"no")
    with pytest.raises(ValueError, match=r"rows\.parquet: not a Parquet file"):
        load(str(path))
    bad = {**rows[0], "question": None}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([rows[0], bad]), path)
    with pytest.raises(ValueError, match=r"rows\.parquet row 1: 'question' is not a string"):
        load(str(path))


def test_a_directory_with_the_official_files(kit, write, tmp_path):
    write(kit.record("2hop__t"), name="musique_ans_v1.0_train.jsonl")
    write(kit.record("2hop__d"), name="musique_ans_v1.0_dev.jsonl")
    write(kit.record("2hop__d"), kit.record("2hop__d", answerable=False), name="musique_full_v1.0_dev.jsonl")
    assert ids(str(tmp_path)) == ["2hop__t"]
    assert ids(str(tmp_path), split="validation") == ["2hop__d"]
    assert ids(f"{tmp_path},answerable,train+validation") == ["2hop__t", "2hop__d"]
    assert ids(f"{tmp_path},full,validation") == ["2hop__d", "2hop__d/unanswerable"]
    with pytest.raises(ValueError, match=r"no such dataset file: .*musique_full_v1\.0_train\.jsonl"):
        load(f"{tmp_path},full,train")
    with pytest.raises(ValueError, match="the split 'test' is not one of train, validation"):
        load(f"{tmp_path},full,test")


def test_full_is_what_is_named_so_or_holds_an_unanswerable_question(kit, write):
    mixed = write(kit.record(), kit.record(answerable=False))
    assert [(r.key, r.full) for r in load(mixed)] == [("2hop__1_2", True), ("2hop__1_2/unanswerable", True)]
    assert [(r.key, r.full) for r in load(f"{mixed},answerable")] == [("2hop__1_2", False)]
    plain = write(kit.record(), name="plain.jsonl")
    assert not load(plain)[0].full and load(f"{plain},full")[0].full


def test_the_same_question_twice_is_used_once(kit, write):
    path = write(*(kit.record(f"2hop__{i}") for i in range(4)))
    assert ids(f"{path},[:3];{path},[1:]") == [f"2hop__{i}" for i in range(4)]
    # Other distractors, other blanks, and another spelling of the answer are still the same question.
    row = kit.record("2hop__1", question="Where was the  author of The Long Song born?", answer="Oak hill.")
    row["paragraphs"][0]["paragraph_text"] = "Pine Moor is a village."
    assert load(f"{path};{write(row, name='other.jsonl')}")[1].answers == ("Oak Hill", "Oakhill")


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"question": "Another one?"}, "question"),
        ({"answer": "Pine Moor"}, "answer"),
        ({"answer_aliases": []}, "answer"),
        ({"answer_aliases": ["Oakhill", "Oak Hill Town"]}, "answer"),
        ({"paragraphs": 2}, "supporting paragraph"),
    ],
)
def test_a_second_row_of_an_id_that_says_something_else_is_refused(kit, write, changes, difference):
    """Between two files and within one: dropping either in silence would score rollouts by half of the data."""
    row = kit.record("2hop__1", **{name: value for name, value in changes.items() if name != "paragraphs"})
    if "paragraphs" in changes:
        row["paragraphs"][changes["paragraphs"]]["is_supporting"] = True
    path, other = write(kit.record("2hop__0"), kit.record("2hop__1")), write(row, name="other.jsonl")
    both = write(kit.record("2hop__1"), row, name="both.jsonl")
    for spec, first, second in ((f"{path};{other}", f"{path} line 2", f"{other} line 1"), (both, "line 1", "line 2")):
        message = f"the id '2hop__1' is in .*{first} and in .*{second}, with another {difference}; correct or remove"
        with pytest.raises(ValueError, match=message):
            load(spec)


@pytest.mark.parametrize("path", ["mine.jsonl", "owner/mine.parquet", "./mine", "/nowhere/mine", "a/b/c", "data/"])
def test_a_missing_path_is_never_looked_up_on_the_hub(path, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match="^no such dataset file: "):
        load(path)


# --- the hub, which is never asked in a test ------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch):
    calls = []
    module = types.ModuleType("datasets")
    module.load_dataset = lambda *args, **kwargs: calls.append((*args, kwargs["split"])) or module.rows
    monkeypatch.setitem(sys.modules, "datasets", module)
    module.calls = calls
    return module


def test_what_the_hub_is_asked_for(hub, kit):
    hub.rows = [kit.record()]
    spec = "bdsaglam/musique;bdsaglam/musique,full,train[:10%]+validation;bdsaglam/hotpotqa-distractor,default,train"
    load(spec, split="validation")
    assert hub.calls == [
        ("bdsaglam/musique", "answerable", "validation"),
        ("bdsaglam/musique", "default", "train[:10%]+validation"),
        ("bdsaglam/hotpotqa-distractor", "default", "train"),
    ]
    hub.calls.clear()
    load("a/b,[:2] + train[5:]", split="validation")
    assert hub.calls == [("a/b", "answerable", "validation[:2]+train[5:]")]


def test_a_bad_hub_row_is_named(hub, kit):
    hub.rows = [kit.record(), {**kit.record(), "answer": 4}]
    with pytest.raises(ValueError, match=r"^a/b answerable train row 1: 'answer' is not a string$"):
        load("a/b")


def test_a_hub_failure_is_one_sentence_that_says_what_else_to_give(hub):
    def unreachable(*args, **kwargs):
        raise ConnectionError("Couldn't reach\nthe Hub")

    hub.load_dataset = unreachable
    with pytest.raises(
        ValueError, match=r"'bdsaglam/musique'.*Couldn't reach the Hub.*\.jsonl.*\"synthetic\""
    ) as error:
        load("bdsaglam/musique")
    assert "\n" not in str(error.value)


# --- noise ----------------------------------------------------------------------------------------------------------


def test_noise_drops_only_distractors_by_question_and_seed_alone():
    records = load("synthetic")
    by_key = {record.key: record.with_noise(0.5, 0) for record in records}
    random.Random(1).shuffle(records)
    for record in records[3:]:
        noisy = record.with_noise(0.5, 0)
        assert noisy == by_key[record.key]
        assert set(noisy.paragraphs) < set(record.paragraphs)  # ids and all, in the same order
        assert [p for p in noisy.paragraphs if p.supporting] == [p for p in record.paragraphs if p.supporting]
    assert any(record.with_noise(0.5, 1) != by_key[record.key] for record in records)
    kept = sum(len(record.paragraphs) for record in by_key.values()) / sum(len(r.paragraphs) for r in records)
    assert 0.4 < kept < 0.75
    assert all(record.with_noise(1.0, 0) is record for record in records)
    assert all(p.supporting for record in records for p in record.with_noise(0.0, 0).paragraphs)


@settings(deadline=None)
@given(st.floats(0, 1), st.floats(0, 1))
def test_more_noise_keeps_what_less_noise_keeps(a, b):
    (record, *_) = load("synthetic,answerable,train[:1]")
    low, high = sorted([a, b])
    assert set(record.with_noise(low, 0).paragraphs) <= set(record.with_noise(high, 0).paragraphs)
