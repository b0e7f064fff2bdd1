"""The rerank client against a real HTTP server on this machine."""

import asyncio
import json
import threading
import time
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
from plumbob.retrieval import Document, RerankClient, Reranked, RerankError, build

DOCUMENTS = [Document(str(i), f"title {i}", "word " * i) for i in range(1, 6)]


def by_length(body: dict) -> dict:
    """The longer the text, the better; returned best first, as services do."""
    results = [{"index": i, "relevance_score": float(len(text))} for i, text in enumerate(body["documents"])]
    return {"results": sorted(results, key=lambda result: -result["relevance_score"])}


@pytest.fixture
def service():
    """A server whose `script` is a list of replies, (status, body, headers) or a callable, the last of them for good."""
    state = SimpleNamespace(script=[by_length], requests=[], headers=[], delay=0.0, running=0, most_running=0)
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                state.requests.append((self.path, body))
                state.headers.append(dict(self.headers))
                reply = state.script.pop(0) if len(state.script) > 1 else state.script[0]
                state.running += 1
                state.most_running = max(state.most_running, state.running)
            time.sleep(state.delay)
            with lock:
                state.running -= 1
            status, content, headers = (200, reply(body), {}) if callable(reply) else reply
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_port}"
    with closing(SimpleNamespace(close=server.server_close)):
        yield state
        server.shutdown()
        thread.join()


def ask(client: RerankClient, query: str = "q", texts=("a", "bbb", "cc")) -> list[float]:
    async def once() -> list[float]:
        try:
            return await client.scores(query, texts)
        finally:
            await client.aclose()

    return asyncio.run(once())


def test_scores_come_back_in_the_order_of_the_documents(service, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "secret")
    assert ask(RerankClient(service.url + "/", model="tei", token_variable="MY_TOKEN")) == [1, 3, 2]
    body = {"query": "q", "documents": ["a", "bbb", "cc"], "top_n": 3, "model": "tei"}
    assert service.requests == [("/rerank", body)]
    assert service.headers[0]["Authorization"] == "Bearer secret"
    monkeypatch.delenv("MY_TOKEN")
    ask(RerankClient(service.url, token_variable="MY_TOKEN"))
    assert "Authorization" not in service.headers[1] and "model" not in service.requests[1][1]


def test_what_was_scored_is_not_asked_again(service):
    client = RerankClient(service.url)
    assert ask(client) == ask(client) and len(service.requests) == 1
    assert ask(client, texts=("cc", "dddd", "dddd")) == [2, 4, 4]
    assert service.requests[1][1]["documents"] == ["dddd"]
    ask(client, query="another")
    assert len(service.requests) == 3


@pytest.mark.parametrize("status", [429, 500, 503])
def test_passing_failures_are_retried(service, status):
    service.script = [(status, {}, {}), (status, b"", {}), by_length]
    assert ask(RerankClient(service.url, first_wait=0.01)) == [1, 3, 2]
    assert len(service.requests) == 3


def test_retry_after_is_heeded(service):
    service.script = [(429, {}, {"Retry-After": "0.4"}), by_length]
    start = time.perf_counter()
    assert ask(RerankClient(service.url, first_wait=0.01)) == [1, 3, 2]
    assert time.perf_counter() - start >= 0.4


def test_lasting_failures_end_in_one_sentence(service):
    service.script = [(500, {}, {})]
    with pytest.raises(RerankError, match="/rerank failed 3 times; the last error: status 500$"):
        ask(RerankClient(service.url, first_wait=0.01, attempts=3))
    assert len(service.requests) == 3


def test_a_slow_server_times_out(service):
    service.delay = 0.6
    with pytest.raises(RerankError, match="failed 2 times; the last error: ReadTimeout"):
        ask(RerankClient(service.url, timeout=0.1, first_wait=0.01, attempts=2))


def test_no_server_is_one_sentence(service):
    with pytest.raises(RerankError, match="failed 2 times; the last error: ConnectError"):
        ask(RerankClient("http://127.0.0.1:9", first_wait=0.01, attempts=2))
    with pytest.raises(RerankError, match="the last error: UnsupportedProtocol|cannot be called"):
        ask(RerankClient("localhost:9", first_wait=0.01, attempts=2))


def test_a_refusal_is_not_retried(service):
    service.script = [(401, {"detail": "no such key"}, {})]
    with pytest.raises(RerankError, match="refused the request with status 401: .*no such key"):
        ask(RerankClient(service.url))
    assert len(service.requests) == 1


@pytest.mark.parametrize(
    "reply",
    [
        b"<html>",
        b"",
        b"[]",
        {"detail": "x"},
        {"results": [{"index": 0}]},
        {"results": [{"index": 0, "relevance_score": 1.0}]},
        {"results": [{"index": i, "relevance_score": 1.0} for i in (0, 1, 3)]},
        {"results": [{"index": i, "relevance_score": float("nan")} for i in (0, 1, 2)]},
        {"results": [{"index": i, "relevance_score": "high"} for i in (0, 1, 2)]},
        {"results": None},
    ],
)
def test_malformed_replies_are_named_and_not_remembered(service, reply):
    service.script = [(200, reply, {}), by_length]
    client = RerankClient(service.url)
    with pytest.raises(RerankError, match="malformed reply|did not score each of 3 documents") as caught:
        ask(client)
    assert "\n" not in str(caught.value)
    assert ask(client) == [1, 3, 2]


def test_requests_under_way_are_bounded_and_one_question_is_asked_once(service):
    service.delay = 0.03

    async def many() -> list:
        client = RerankClient(service.url, concurrency=3)
        try:
            return await asyncio.gather(*(client.scores(f"q{i}", ["a", "bb"]) for i in range(12)))
        finally:
            await client.aclose()

    assert asyncio.run(many()) == [[1, 2]] * 12
    assert 1 < service.most_running <= 3


def test_reranked_orders_the_candidates_and_leaves_the_others_behind(service):
    retriever = Reranked(build("bm25", DOCUMENTS), RerankClient(service.url), candidates=3)
    first = [hit.doc_id for hit in build("bm25", DOCUMENTS).search("nothing", 5)]
    assert first == ["1", "2", "3", "4", "5"]
    hits = retriever.search("nothing", 9)
    assert [hit.doc_id for hit in hits] == ["3", "2", "1", "4", "5"]
    assert [hit.rank for hit in hits] == [1, 2, 3, 4, 5]
    assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)
    for top_k in range(1, 6):
        assert retriever.search("nothing", top_k) == hits[:top_k]
    assert len(service.requests) == 1
    assert Reranked(build("bm25", []), RerankClient(service.url)).search("x", 2) == []


def test_search_on_a_running_loop_says_what_to_do(service):
    retriever = Reranked(build("bm25", DOCUMENTS), RerankClient(service.url))

    async def wrong() -> None:
        retriever.search("x", 1)

    with pytest.raises(RuntimeError, match="use `await retriever.asearch"):
        asyncio.run(wrong())
    with pytest.raises(ValueError, match="top_k"):
        retriever.search("x", 0)
