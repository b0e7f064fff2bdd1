"""How the encoder orders and gathers its work, with a small sentence-transformers model that the tests make."""

import asyncio
import importlib.util
import threading
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plumbob.retrieval import Document, build, models
from plumbob.retrieval.encoder import encoder_for
from plumbob.testing.small_berts import write_bert

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("sentence_transformers") is None, reason="needs plumbob-retrieval[semantic]"
)

WORDS = ["river", "mountain", "senate", "treaty", "album", "singer", "county", "railway", "species", "novel", "empire"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A random BERT of 32 dimensions with mean pooling, stored in 16 bits."""
    from sentence_transformers import SentenceTransformer

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64, "initializer_range": 0.3}
    folder = write_bert(tmp_path_factory.mktemp("models") / "bert", WORDS, half=True, **sizes)
    whole = folder.parent / "whole"
    SentenceTransformer(str(folder), device="cpu").save(str(whole))
    return whole


def documents(number: int, count: int = 6) -> list[Document]:
    return [Document(str(i), WORDS[i], " ".join(WORDS[(number + i * k) % 11] for k in range(9))) for i in range(count)]


def hold(encoder) -> threading.Event:
    """Have the encoder's thread wait for the event, so that jobs gather."""
    held, go = threading.Event(), threading.Event()
    encoder.submit(None, lambda _: (held.set(), go.wait(60)))
    assert held.wait(60)
    return go


@given(st.lists(st.lists(st.sampled_from(WORDS), min_size=1, max_size=40).map(" ".join), min_size=1, max_size=12))
@settings(max_examples=25, deadline=None)
def test_ranks_do_not_depend_on_the_batch_even_of_a_model_in_16_bits(model, tmp_path_factory, queries):
    together, alone = (tmp_path_factory.mktemp("cache") for _ in range(2))
    batched = build(f"semantic/{model}", documents(3), cache=together)
    go = hold(encoder_for(str(model), together))

    async def gather() -> list:
        searches = [asyncio.ensure_future(batched.asearch(query, 6)) for query in queries]
        await asyncio.sleep(0)
        go.set()
        return await asyncio.gather(*searches)

    found = asyncio.run(gather())
    assert encoder_for(str(model), together).batches == [len(set(queries))]
    for query, hits in zip(queries, found, strict=True):
        one = build(f"semantic/{model}", documents(3), cache=alone).search(query, 6)
        assert [hit.score for hit in one] == pytest.approx([hit.score for hit in hits], abs=2e-6)
        if min(a.score - b.score for a, b in pairwise(one)) > 4e-6:
            assert [hit.doc_id for hit in one] == [hit.doc_id for hit in hits]


def test_searches_come_before_preparations_and_need_not_wait_for_documents_that_were_prepared(model, tmp_path):
    encoder, ended = encoder_for(str(model), tmp_path), []
    prepared = [build(f"hybrid/{model}", documents(number), cache=tmp_path) for number in range(5)]
    go = hold(encoder)
    for retriever in prepared:
        retriever.prepare()
    last = encoder.submit(None, lambda _: ended.append("preparations"), later=True)
    search = encoder.submit("river", lambda _: ended.append("search"))
    go.set()
    search.result(60)
    last.result(60)
    assert ended == ["search", "preparations"]
    vectors, shards = len(encoder.load()._place), len(list(encoder.load().directory.iterdir()))
    for retriever in prepared:
        assert len(retriever.search("treaty of the empire", 3)) == 3
    assert (len(encoder.load()._place), len(list(encoder.load().directory.iterdir()))) == (vectors, shards)
    build("bm25", documents(0)).prepare()


def test_documents_of_searches_that_come_together_are_embedded_together_and_shared_ones_once(model, tmp_path):
    encoder = encoder_for(str(model), tmp_path)
    go = hold(encoder)
    jobs = []
    for number in (0, 1, 2, 0, 1):
        retriever = build(f"semantic/{model}", [*documents(number), Document("shared", "", "senate")], cache=tmp_path)
        jobs.append(encoder.submit("novel", lambda vector, own=retriever: own._rank("", vector, 2), retriever._texts))
    go.set()
    assert all(len(job.result(60)) == 2 for job in jobs)
    texts = {text for number in range(3) for d in documents(number) for text in [f"{d.title}\n{d.text}"]}
    assert len(encoder.load()._place) == len(texts) + 1
    assert len(list(encoder.load().directory.iterdir())) == 1


def test_a_query_that_no_tokenizer_reads_harms_no_other(model, tmp_path):
    retriever = build(f"hybrid/{model}", documents(1), cache=tmp_path)

    async def scenario() -> list:
        return await asyncio.gather(*(retriever.asearch(query, 2) for query in ("half \ud800 a pair", "river")))

    assert [len(hits) for hits in asyncio.run(scenario())] == [2, 2]
    assert len(build(f"hybrid/{model}", [Document("1", "\udfff", "\ud83d")], cache=tmp_path).search("river", 2)) == 1


@pytest.mark.filterwarnings("ignore")
def test_the_device_of_a_model(model, monkeypatch):
    """Torch's device "meta", which computes nothing, stands for a GPU."""
    import torch

    def device() -> str:
        return models.load(str(model))[0].device.type

    monkeypatch.setenv(models.GPU_VARIABLE, "meta")
    monkeypatch.delenv(models.DEVICE_VARIABLE, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert device() == "meta"
    monkeypatch.setattr(models, "LARGEST_ON_GPU", 1000)
    assert device() == "cpu", "too large to join uninvited"
    monkeypatch.setenv(models.DEVICE_VARIABLE, "meta")
    assert device() == "meta"
    monkeypatch.setenv(models.DEVICE_VARIABLE, "cpu")
    monkeypatch.undo()
    monkeypatch.setenv(models.GPU_VARIABLE, "meta")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device() == "cpu"


def test_searches_go_on_when_the_gpu_is_full(model, tmp_path, caplog):
    import torch

    retriever, full = build(f"semantic/{model}", documents(4), cache=tmp_path), [True]

    def allocate(*_) -> None:
        if full.pop() if full else False:
            raise torch.OutOfMemoryError("CUDA out of memory")

    encoder = encoder_for(str(model), tmp_path)
    encoder.load()
    encoder._loaded.register_forward_pre_hook(allocate)
    encoder._loaded[0].register_forward_pre_hook(allocate)
    assert len(retriever.search("river", 3)) == 3 and not full
    assert "goes on with the CPU" in caplog.text
