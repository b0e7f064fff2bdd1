import asyncio
import re

import numpy as np
import pytest
from plumbob.retrieval import Document, Spec, build, check_name, parse_name
from plumbob.retrieval.names import DEFAULT_MODEL


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("bm25", Spec("bm25")),
        ("lexical", Spec("bm25")),
        ("golden", Spec("golden")),
        ("semantic", Spec("semantic", None, DEFAULT_MODEL)),
        ("semantic/all-MiniLM-L6-v2", Spec("semantic", None, DEFAULT_MODEL)),
        ("semantic/intfloat/e5-small-v2", Spec("semantic", None, "intfloat/e5-small-v2")),
        ("hybrid", Spec("hybrid", "minmax", DEFAULT_MODEL)),
        ("hybrid/rrf", Spec("hybrid", "rrf", DEFAULT_MODEL)),
        ("hybrid/intfloat/e5-small-v2", Spec("hybrid", "minmax", "intfloat/e5-small-v2")),
        ("hybrid/rrf/intfloat/e5-small-v2", Spec("hybrid", "rrf", "intfloat/e5-small-v2")),
    ],
)
def test_names_are_read(name, spec):
    assert parse_name(name) == spec


def test_a_directory_is_a_model(tmp_path):
    assert parse_name(f"semantic/{tmp_path}").model == str(tmp_path)
    assert parse_name(f"hybrid/rrf/{tmp_path}") == Spec("hybrid", "rrf", str(tmp_path))
    assert parse_name(f"hybrid/{tmp_path}") == Spec("hybrid", "minmax", str(tmp_path))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bm52", "there is no retriever 'bm52'; did you mean 'bm25'?.*golden"),
        ("Semantic", "did you mean 'semantic'?"),
        ("", "there is no retriever ''; The names are bm25"),
        ("xyzzy", "The names are bm25"),
        ("bm25/some-model", "'bm25' takes no options after its name"),
        ("golden/", "'golden' takes no options after its name"),
        ("semantic/", "ends in a slash"),
        ("hybrid/rrf/", "ends in a slash"),
        ("hybrid/rff", "did you mean 'hybrid/rrf'?"),
        ("hybrid/min-max", "did you mean 'hybrid/minmax'?"),
        ("semantic//no/such/place", "there is no directory /no/such/place"),
        ("semantic/a/b/c", "'a/b/c' is neither a directory nor a model id"),
        ("semantic/a b", "neither a directory nor a model id"),
    ],
)
def test_a_wrong_name_is_one_sentence(name, message):
    with pytest.raises(ValueError, match=message) as caught:
        check_name(name)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=message):
        build(name, [Document("1", "t", "x")])


def test_golden_returns_the_golden_documents_in_document_order_and_nothing_else(fruit):
    golden = build("golden", fruit, golden=["c", "a"])
    for top_k in (1, 2, 10):
        assert [(hit.doc_id, hit.rank) for hit in golden.search("pear", top_k)] == [("a", 1), ("c", 2)]
    assert build("golden", fruit, golden=[]).search("pear", 3) == []
    with pytest.raises(ValueError, match="needs golden ids"):
        build("golden", fruit)
    with pytest.raises(ValueError, match=r"\['z'\] are not among the documents"):
        build("golden", fruit, golden=["a", "z"])


def test_ids_that_repeat_and_top_k_below_one_are_refused(fruit):
    for name in ("bm25", "semantic", "golden"):
        with pytest.raises(ValueError, match="two documents have the id 'a'"):
            build(name, [*fruit, fruit[0]], golden=["a"])
        for top_k in (0, -1):
            with pytest.raises(ValueError, match="top_k must be at least 1"):
                build(name, fruit, golden=["a"]).search("pear", top_k)


@pytest.mark.parametrize("top_k", [1.5, 2.0, "2", None, True, [1]])
def test_a_top_k_that_is_no_integer_is_refused_in_one_sentence(fruit, top_k):
    message = re.escape(f"top_k must be an integer of at least 1, got {top_k!r}")
    for name in ("bm25", "semantic", "hybrid", "golden"):
        retriever = build(name, fruit, golden=["a"])
        with pytest.raises(ValueError, match=message):
            retriever.search("pear", top_k)
        with pytest.raises(ValueError, match=message):
            asyncio.run(retriever.asearch("pear", top_k))


def test_numpy_s_integers_are_integers(fruit):
    assert build("bm25", fruit).search("pear", np.int64(2)) == build("bm25", fruit).search("pear", 2)


def test_the_same_documents_share_a_retriever(fruit):
    assert build("bm25", fruit) is build("bm25", list(fruit))
    assert build("bm25", fruit) is not build("bm25", fruit[:2])
