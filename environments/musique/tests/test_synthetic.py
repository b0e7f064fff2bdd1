"""The generator: official schema, answerable step by step, and nothing shared between the splits."""

import itertools
import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import vf_musique
from hypothesis import given, settings
from hypothesis import strategies as st
from plumbob.retrieval import Document, build
from vf_musique.metrics import normalize
from vf_musique.records import check_record
from vf_musique.synthetic import GRAPHS, generate
from vf_musique.synthetic_world import JOINS, RELATIONS, aliases_of, draw_name, halves_of

VALUES = ("number", "colour")


def rows(count, split="train", seed=0, **kwargs):
    return list(itertools.islice(generate(split, seed=seed, **kwargs), count))


def sub_questions(row):
    answers = [step["answer"] for step in row["question_decomposition"]]
    return [
        re.sub(r"#(\d)", lambda m: answers[int(m[1]) - 1], step["question"]) for step in row["question_decomposition"]
    ]


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(["train", "validation"]), st.integers(0, 10**6), st.integers(4, 30))
def test_records_are_official_ones_and_answerable_by_their_decomposition(split, seed, size):
    for row in rows(6, split, seed, paragraphs=size):
        record = check_record(row, "here")
        assert len(record.paragraphs) == size and [p.idx for p in record.paragraphs] == list(range(size))
        assert record.answerable and record.kind in GRAPHS and record.hops == len(GRAPHS[record.kind])
        steps = row["question_decomposition"]
        assert row["answer"] == steps[-1]["answer"]
        supporting = {p.idx for p in record.paragraphs if p.supporting}
        assert supporting == {step["paragraph_support_idx"] for step in steps} and len(supporting) == record.hops
        references = [set(map(int, re.findall(r"#(\d)", step["question"]))) for step in steps]
        assert references == [{i + 1 for i in inputs if i >= 0} for inputs in GRAPHS[record.kind]]
        for number, (question, step) in enumerate(zip(sub_questions(row), steps, strict=True)):
            paragraph = record.paragraphs[step["paragraph_support_idx"]]
            # What is asked about stands in the paragraph, and so does the answer.
            relations = [r for r in (*RELATIONS, *JOINS) if _matches(r.question, question)]
            (relation,) = relations
            subjects = _matches(relation.question, question)
            fact = relation.fact.format(**subjects, o=step["answer"])
            assert normalize(fact) in normalize(paragraph.text), (fact, paragraph)
            # No other paragraph answers the same sub-question.
            others = [p for p in record.paragraphs if p is not paragraph]
            pattern = re.escape(normalize(relation.fact.format(**subjects, o="OBJECT"))).replace("object", ".+")
            assert not any(re.search(pattern, normalize(p.text)) for p in others), (pattern, others)
            # The question does not name what has to be found, nor under another name.
            for answer in (step["answer"], *aliases_of(step["answer"])):
                assert normalize(answer) not in normalize(row["question"]), (number, row["question"])


@settings(deadline=None)
@given(st.sampled_from(["train", "validation"]), st.integers(0, 10**9))
def test_no_question_holds_its_own_answer_or_one_on_the_way(split, seed):
    for row in rows(25, split, seed, paragraphs=4):
        question = normalize(row["question"])
        for answer in (step["answer"] for step in row["question_decomposition"]):
            assert not any(normalize(name) in question for name in (answer, *aliases_of(answer))), row["question"]


def test_a_question_that_named_its_answer_names_it_no_more():
    """The training town of the Yellow Owls Club had a yellow flag."""
    row = rows(5, "train", 246, paragraphs=4)[-1]
    assert (row["answer"], "Owls Club" in row["question"]) == ("yellow", True)
    assert "yellow" not in normalize(row["question"])


def test_no_value_is_a_word_of_a_name_or_of_a_question():
    """Then no question about a colour or a number can hold its answer, whatever it names."""
    values = {kind: {draw_name(kind, "train", random.Random(seed)) for seed in range(500)} for kind in VALUES}
    assert [len(values[kind]) for kind in VALUES] == [9, 11]
    kinds = {kind for relation in (*RELATIONS, *JOINS) for kind in (*relation.subjects, relation.object)}
    names = {word for kind in kinds - {*VALUES, "year"} for half in halves_of(kind) for word in half}
    assert len(names) > 150
    asked = {word for relation in (*RELATIONS, *JOINS) for word in f"{relation.question} {relation.phrase}".split()}
    assert not (values["number"] | values["colour"]) & {normalize(word) for word in names | asked}
    assert not any(sign.isdigit() for word in names | asked for sign in word)


def _matches(template, text):
    pattern = re.escape(normalize(template.format(a="AAA", b="BBB")))
    pattern = pattern.replace("aaa", "(?P<a>.+)", 1).replace("bbb", "(?P<b>.+)", 1)
    match = re.fullmatch(pattern, normalize(text))
    return match.groupdict() if match else None


def test_all_graph_types_and_hop_counts_occur():
    kinds = [row["id"].split("__")[0] for row in rows(600)]
    assert set(kinds) == set(GRAPHS)
    for hops in "234":
        assert 150 < sum(kind[0] == hops for kind in kinds) < 250


def test_the_splits_share_no_name():
    def names(split):
        found = set()
        for seed in (0, 1):
            for row in rows(150, split, seed):
                found |= {p["title"] for p in row["paragraphs"]}
        return found

    train, validation = names("train"), names("validation")
    assert len(validation) > 300 and not train & validation
    questions = {split: {row["question"] for row in rows(500, split)} for split in ("train", "validation")}
    assert not questions["train"] & questions["validation"]
    assert len(questions["train"]) > 490


def test_twins_lack_one_step_and_nothing_else():
    pairs = rows(60, unanswerable=True)
    for row, twin in zip(pairs[::2], pairs[1::2], strict=True):
        assert (row["id"], row["question"], row["answer"]) == (twin["id"], twin["question"], twin["answer"])
        assert row["answerable"] and not twin["answerable"]
        assert check_record(twin, "here").key == f"{row['id']}/unanswerable"
        different = [i for i, (a, b) in enumerate(zip(row["paragraphs"], twin["paragraphs"], strict=True)) if a != b]
        (gone,) = different
        assert row["paragraphs"][gone]["is_supporting"] and not twin["paragraphs"][gone]["is_supporting"]
        supports = [step["paragraph_support_idx"] for step in twin["question_decomposition"]]
        assert supports.count(None) == 1
    assert [row for row in pairs if row["answerable"]] == rows(30)


def test_rows_do_not_depend_on_the_process():
    # The generator's modules alone: the whole package takes seconds to import.
    code = (
        "import itertools, json, sys, types; package = types.ModuleType('vf_musique');"
        "package.__path__ = [sys.argv[1]]; sys.modules['vf_musique'] = package;"
        "from vf_musique.synthetic import generate;"
        "print(json.dumps(list(itertools.islice(generate('train', seed=3, unanswerable=True), 40))))"
    )
    command = [sys.executable, "-c", code, str(Path(vf_musique.__file__).parent)]
    here = rows(40, seed=3, unanswerable=True)
    for hash_seed in ("1", "2"):
        out = subprocess.run(command, capture_output=True, check=True, env={"PYTHONHASHSEED": hash_seed}).stdout
        assert json.loads(out) == here


def test_sub_questions_find_their_paragraph_and_the_whole_question_does_not():
    hits = hops = whole = 0
    questions = rows(200)
    for row in questions:
        documents = [Document(id=str(p["idx"]), title=p["title"], text=p["paragraph_text"]) for p in row["paragraphs"]]
        retriever = build("bm25", documents)
        for query, step in zip(sub_questions(row), row["question_decomposition"], strict=True):
            found = [hit.doc_id for hit in retriever.search(query, 2)]
            hits += str(step["paragraph_support_idx"]) in found
            hops += 1
        supporting = {str(p["idx"]) for p in row["paragraphs"] if p["is_supporting"]}
        whole += supporting <= {hit.doc_id for hit in retriever.search(row["question"], 5)}
    print(f"oracle hit@2 {hits / hops:.3f}, all supporting in the top 5 of the whole question {whole / 200:.3f}")
    assert hits / hops > 0.93
    assert whole / len(questions) < 0.15


def test_the_last_fact_is_not_told_by_its_subject_being_named_elsewhere():
    """Neither by its being named at all, nor by how often: decoys lead to other last facts of the same relation."""
    named = most = 0.0
    questions = rows(500)
    for row in questions:
        (relation,) = (r for r in (*RELATIONS, *JOINS) if _matches(r.question, sub_questions(row)[-1]))
        pattern = re.escape(normalize(relation.fact.format(a="AAA", b="BBB", o="OOO")))
        for name in "abo":
            pattern = pattern.replace(name * 3, f"(?P<{name}>.+)", 1)
        texts = [normalize(p["paragraph_text"]) for p in row["paragraphs"]]
        facts = [
            match.groupdict()
            for p in row["paragraphs"]
            for sentence in re.findall(r"[^.]+\.", p["paragraph_text"])
            if (match := re.fullmatch(pattern, normalize(sentence)))
        ]
        candidates = []  # (how often its least named subject is named, object), of subjects that have to be found
        for fact in facts:
            subjects = {fact[name] for name in "ab" if name in fact}
            hidden = [subject for subject in subjects if subject not in normalize(row["question"])]
            if hidden and (count := min(sum(subject in text for text in texts) for subject in hidden)) > 1:
                candidates.append((count, fact["o"]))
        right = normalize(row["answer"])
        named += _chance(right, [obj for _, obj in candidates])
        most += _chance(right, [obj for count, obj in candidates if count == max(candidates)[0]])
    print(f"right by a subject named elsewhere {named / 500:.3f}, by the one named most {most / 500:.3f}")
    assert named / len(questions) < 0.3
    assert most / len(questions) < 0.35


def _chance(right, candidates):
    """Of choosing the right one of them at random."""
    return candidates.count(right) / len(candidates) if candidates else 0.0


@pytest.mark.parametrize("seed", range(3))
def test_paragraphs_are_short(seed):
    lengths = [len(p["paragraph_text"].split()) for row in rows(100, seed=seed) for p in row["paragraphs"]]
    assert max(lengths) < 30 and sum(lengths) / len(lengths) < 12
