"""The reranker in this process, with small cross-encoders that the tests make."""

import asyncio
import importlib.util
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plumbob.retrieval import (
    CrossEncoderReranker,
    Document,
    ModelError,
    Reranked,
    RerankError,
    build,
    check_reranker,
    cross_encoder_for,
)
from plumbob.testing.small_berts import write_bert

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("sentence_transformers") is None, reason="needs plumbob-retrieval[semantic]"
)

WORDS = ["river", "mountain", "senate", "treaty", "album", "singer", "county", "railway", "species", "novel"]


def make_model(folder, *, labels=1, head=True):
    """A random BERT of 16 dimensions as a cross-encoder; without `head`, a plain encoder."""
    kind = "BertForSequenceClassification" if head else "BertModel"
    return write_bert(folder, ["title", *WORDS], kind, num_labels=labels)


def make_counting_model(folder, word="river"):
    """A cross-encoder that was made by hand: its logit grows with the share of `word` among the tokens."""
    import torch
    from transformers import BertForSequenceClassification

    make_model(folder)
    model = BertForSequenceClassification.from_pretrained(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        # Coordinate 0 of a token's embedding says whether it is the word. Coordinate 2 is the same for all tokens: it is
        # what the layer norms measure the others by.
        model.bert.embeddings.word_embeddings.weight[:, 2] = 1.0
        index = 6 + WORDS.index(word)
        model.bert.embeddings.word_embeddings.weight[index, 0] = 1.0
        for norm in (m for m in model.modules() if isinstance(m, torch.nn.LayerNorm)):
            norm.weight.fill_(1.0)
        # Attention with equal weights writes the mean of coordinate 0 over all tokens to coordinate 1 of every token.
        attention = model.bert.encoder.layer[0].attention
        attention.self.value.weight[0, 0] = 1.0
        attention.output.dense.weight[1, 0] = 1.0
        model.bert.pooler.dense.weight[1, 1] = 1.0
        model.classifier.weight[0, 1] = 4.0
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "random")


@pytest.fixture(scope="module")
def counting(tmp_path_factory):
    return make_counting_model(tmp_path_factory.mktemp("model") / "counting")


def texts_of(count, seed=0):
    import numpy as np

    random = np.random.default_rng(seed)
    return [" ".join(random.choice(WORDS, random.integers(1, 20))) for _ in range(count)]


def ask(reranker, query, texts):
    return asyncio.run(reranker.scores(query, texts))


@pytest.mark.slow
def test_the_order_is_that_of_the_model_s_own_predict(model):
    from sentence_transformers import CrossEncoder

    theirs, ours = CrossEncoder(str(model), device="cpu"), CrossEncoderReranker(str(model))
    for seed in range(5):
        query, *texts = texts_of(41, seed)
        expected = theirs.predict([(query, text) for text in texts], show_progress_bar=False)
        scores = ask(ours, query, texts)
        # predict's scores are a sigmoid of ours
        assert [1 / (1 + 2.718281828459045**-score) for score in scores] == pytest.approx(expected.tolist(), abs=1e-6)
        documents = [Document(str(i), "title", text) for i, text in enumerate(texts)]
        hits = Reranked(build("bm25", documents), ours, candidates=99).search(query, 99)
        pairs = [(query, f"title\n{text}") for text in texts]
        best_first = sorted(theirs.predict(pairs, show_progress_bar=False).tolist(), reverse=True)
        theirs_by_id = dict(zip((d.id for d in documents), theirs.predict(pairs, show_progress_bar=False), strict=True))
        assert [theirs_by_id[hit.doc_id] for hit in hits] == pytest.approx(best_first, abs=1e-6)
        assert [hit.rank for hit in hits] == list(range(1, 41))


def test_a_model_with_a_known_order(counting):
    texts = ["album", "river album", "river river album", "river river river album", "novel album singer"]
    documents = [Document(name, "title", text) for name, text in zip("edcba", texts, strict=True)]
    retriever = Reranked(build("bm25", documents), CrossEncoderReranker(str(counting)))
    hits = retriever.search("county", 5)
    assert [hit.doc_id for hit in hits][:3] == ["b", "c", "d"]
    assert {hit.doc_id for hit in hits[3:]} == {"e", "a"}
    assert hits[0].score > hits[1].score > hits[2].score > hits[3].score
    for top_k in range(1, 6):
        assert retriever.search("county", top_k) == hits[:top_k]


def test_equal_scores_keep_the_retriever_s_order(counting):
    """Without the word, every text has the same score, whatever else it says and however long the batch's texts are."""
    texts = ["album " * n for n in (1, 9, 3, 30, 2)]
    documents = [Document(str(i), "title", text) for i, text in enumerate([*texts, "river"])]
    first = build("bm25", documents).search("singer", 6)
    hits = Reranked(build("bm25", documents), CrossEncoderReranker(str(counting))).search("singer", 6)
    assert [hit.doc_id for hit in hits] == ["5", *(hit.doc_id for hit in first if hit.doc_id != "5")]
    assert len({hit.score for hit in hits}) == 2


@settings(max_examples=15, deadline=None)
@given(order=st.permutations(range(12)), cuts=st.sets(st.integers(1, 11)))
def test_scores_do_not_depend_on_the_batch(model, order, cuts):
    texts = texts_of(12)
    whole = dict(zip(texts, ask(cross_encoder_for(str(model)), "river album", texts), strict=True))
    fresh, start = CrossEncoderReranker(str(model)), 0
    fresh._loaded = cross_encoder_for(str(model))._loaded  # loading takes longer than scoring
    for end in [*sorted(cuts), 12]:
        part = [texts[i] for i in order[start:end]]
        assert ask(fresh, "river album", part) == pytest.approx([whole[text] for text in part], rel=2e-5, abs=3e-6)
        start = end
    assert sum(fresh.batches) == len(set(texts))


def test_what_was_scored_is_not_scored_again(model):
    reranker = CrossEncoderReranker(str(model))
    first = ask(reranker, "river", ["album", "novel", "album"])
    assert first[0] == first[2] and reranker.batches == [2]
    assert ask(reranker, "river", ["novel", "county"])[0] == first[1] and reranker.batches == [2, 1]
    assert (
        ask(reranker, "river", []) == [] and ask(reranker, "album", ["album"]) != [] and reranker.batches == [2, 1, 1]
    )


def test_many_threads_and_rollouts_get_what_one_gets(model):
    """Requests of several event loops, each with many rollouts, of which one is cancelled."""
    reranker, alone = CrossEncoderReranker(str(model)), CrossEncoderReranker(str(model))
    queries, texts = texts_of(24, seed=7), texts_of(10, seed=8)
    results = {}

    async def rollouts(part):
        tasks = [asyncio.create_task(reranker.scores(query, texts)) for query in part]
        cancelled = asyncio.create_task(reranker.scores(part[0], texts))
        await asyncio.sleep(0)
        cancelled.cancel()
        results.update(zip(part, await asyncio.gather(*tasks), strict=True))
        assert isinstance((await asyncio.gather(cancelled, return_exceptions=True))[0], asyncio.CancelledError)

    threads = [threading.Thread(target=asyncio.run, args=(rollouts(queries[i::4]),)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(results) == set(queries)
    for query in queries:
        assert results[query] == pytest.approx(ask(alone, query, texts), rel=2e-5, abs=3e-6)
    assert sum(reranker.batches) == len(set(queries)) * len(set(texts))  # each pair once
    assert len(reranker.batches) < len(queries) / 2  # requests that arrived while the model loaded are one batch


def test_the_process_has_one_reranker_of_a_model(model):
    assert cross_encoder_for(str(model)) is cross_encoder_for(f"{model.parent}/./{model.name}")
    check_reranker(str(model), load_model=True)
    assert cross_encoder_for(str(model))._loaded is not None


@pytest.mark.parametrize(
    ("kind", "complaint"),
    [
        ({"head": False}, "has no trained scoring head .its architecture is BertModel.: name a cross-encoder"),
        ({"labels": 3}, "gives 3 numbers for a text, and a reranker gives one: name another model"),
        (None, "does not load as a cross-encoder .*give another folder or hub name"),
    ],
)
def test_what_is_no_reranker_is_one_sentence(tmp_path, kind, complaint):
    folder = tmp_path / "model"
    if kind is None:
        folder.mkdir()
    else:
        make_model(folder, **kind)
    check_reranker(str(folder))
    for _ in range(2):  # the second attempt too
        with pytest.raises(ModelError, match=complaint) as caught:
            check_reranker(str(folder), load_model=True)
        assert "\n" not in str(caught.value) and str(folder) in str(caught.value)


def test_a_folder_that_does_not_exist_is_one_sentence(tmp_path):
    with pytest.raises(ValueError, match="there is no directory /.*/missing$"):
        check_reranker(f"{tmp_path}/missing")
    with pytest.raises(ValueError, match="'a b c' is neither a directory nor a model id"):
        check_reranker("a b c")


def test_an_unreachable_hub_is_one_sentence(monkeypatch):
    from huggingface_hub import HfApi

    monkeypatch.setattr(HfApi.__init__, "__defaults__", ("http://127.0.0.1:9", *HfApi.__init__.__defaults__[1:]))
    with pytest.raises(ModelError, match="is not on this machine and cannot be loaded .*hub name") as caught:
        check_reranker("nobody/nothing-of-this-name", load_model=True)
    assert "\n" not in str(caught.value)


def test_a_model_that_fails_names_itself_and_harms_no_later_request(model, monkeypatch):
    reranker = CrossEncoderReranker(str(model))
    reranker.load()
    with monkeypatch.context() as patch:
        patch.setattr(type(reranker._loaded), "predict", lambda *args, **options: 1 / 0)
        with pytest.raises(RerankError, match="random failed .ZeroDivisionError: division by zero."):
            ask(reranker, "river", ["album"])
        patch.setattr(type(reranker._loaded), "predict", lambda *args, **options: [float("nan")])
        with pytest.raises(RerankError, match="scores that are not finite"):
            ask(reranker, "river", ["album"])
    assert len(ask(reranker, "river", ["album", "novel"])) == 2
