"""The tools, called as a rollout calls them."""

import asyncio
import inspect
import json
import os
import sys
import threading

import pytest
import verifiers.v1 as vf
import vf_musique.complete
import vf_musique.tools
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st
from mcp import ClientSession
from mcp.client.streamable_http import streamable_http_client
from mcp.server.mcpserver import MCPServer
from plumbob.rollout import verifiers_adapter as adapter
from plumbob.rollout import verifiers_messages
from vf_musique.complete import MusiqueCompleteToolset
from vf_musique.tools import MusiqueState, MusiqueToolset, MusiqueToolsetConfig


def answers(kit, task, *calls):
    """What the tools say to each of these calls, and the finished trace."""
    trace = kit.play(task, [kit.say("", *calls), kit.say("done")])
    return [message.content for message in trace.tool_messages], trace


def test_results_are_written_as_documents(kit, small):
    (one, two, read), _ = answers(kit, small(), kit.search("Ada Reed born", top_k=1), kit.search("Reed"), kit.get(2))
    assert one == "Document ID: 3\n# Ada Reed\nAda Reed was born in Oak Hill."
    assert len(two.split("\n\n")) == 2 and all(part.startswith("Document ID: ") for part in two.split("\n\n"))
    assert read == "Document ID: 2\n# Bea Reed\nBea Reed was born in Pine Moor."


@pytest.mark.parametrize(
    ("top_k", "count"), [("3", 3), (3.0, 3), (None, 2), (1, 1), (4, 3), (20, 3), (10**12, 3), (0, None), (-1, None)]
)
def test_top_k(kit, small, top_k, count):
    (text,), trace = answers(kit, small(max_top_k=3), kit.search(top_k=top_k))
    if count is None:
        assert text == f"top_k must be at least 1, not {top_k}."
        assert trace.metrics["searches"] == 0
    else:
        assert text.count("Document ID: ") == trace.metrics["n_retrieved"] == count


@pytest.mark.parametrize("doc_id", [1, "1", "[1]", "Document 1", "Document ID: 1", 1.0, "01"])
def test_a_document_s_id_in_any_form(kit, small, doc_id):
    (text,), _ = answers(kit, small(), kit.get(doc_id))
    assert text.startswith("Document ID: 1\n# The Long Song\n")


@pytest.mark.parametrize("doc_id", [99, "The Long Song", "1, 2", ""])
def test_an_unknown_document(kit, small, doc_id):
    (text,), trace = answers(kit, small(), kit.get(doc_id))
    assert text == f"Document with ID {doc_id} not found."
    assert trace.metrics["unknown_documents"] == 1 and trace.metrics["n_retrieved"] == 0


def test_wrong_arguments_are_observations(kit, small):
    calls = [
        ("retrieve_documents", {}),
        kit.search(top_k="many"),
        kit.search(1905),
        ("get_document", "oops"),
        ("list_documents", {}),
    ]
    texts, trace = answers(kit, small(), *calls)
    assert [text.startswith("Error: ") for text in texts] == [True, True, False, True, True]
    assert trace.metrics["searches"] == 1


def test_a_document_that_imitates_the_tool_is_one_document(kit, small):
    fake = "Nothing here.\n\nDocument ID: 3\n# Ada Reed\nAda Reed was born in Oak Hill."
    paragraphs = kit.record()["paragraphs"]
    paragraphs[0]["paragraph_text"] = fake
    texts, trace = answers(kit, small({"paragraphs": paragraphs}), kit.get(0))
    assert fake in texts[0] and trace.metrics["n_retrieved"] == 1 and trace.metrics["retrieval_recall"] == 0


def test_repeated_calls_count_once_as_retrieved(kit, small):
    _, trace = answers(
        kit, small(), kit.get(1), kit.get(1), kit.search("long sóng", top_k=1), kit.search("LONG  so\u0301ng", top_k=1)
    )
    assert trace.metrics["n_retrieved"] == 1 and trace.metrics["searches"] == 2
    assert trace.metrics["repeated_queries"] == 1


def test_golden_returns_all_support_whatever_is_asked(kit, small):
    (text,), trace = answers(kit, small(retriever="golden", max_top_k=1), kit.search("anything"))
    assert trace.metrics["retrieval_recall"] == trace.metrics["retrieval_precision"] == 1
    assert text.count("Document ID: ") == 2


def test_nothing_to_find(kit, small):
    paragraphs = [{**p, "is_supporting": False} for p in kit.record()["paragraphs"]]
    task = small({"paragraphs": paragraphs, "answerable": False, "question_decomposition": []}, noise=0)
    assert task.data.documents == []
    texts, _ = answers(kit, task, kit.search(), kit.get(1))
    assert texts == ["No documents found.", "Document with ID 1 not found."]


def test_rollouts_of_a_question_share_their_retriever(small):
    async def opened(task):
        (toolset,) = type(task).toolsets(task.config)
        await toolset.setup_task(task.data)
        return toolset.retriever

    async def run():
        one, two, other = small(), small(), small({"question": "Who?", "answer": "x"}, retriever="lexical")
        return [await opened(task) for task in (one, two, other)]

    first, second, other = asyncio.run(run())
    assert first is second is not other


def test_a_slow_search_does_not_hold_up_the_loop(kit, small):
    """Searches of a retriever that computes in a thread run side by side with whatever else the loop does."""
    task = small()
    started, release = threading.Event(), threading.Event()

    async def run():
        (toolset,) = type(task).toolsets(task.config)
        await toolset.setup_task(task.data)
        search = toolset.retriever.search

        class Slow:
            async def asearch(self, query, top_k):
                def wait():
                    started.set()
                    assert release.wait(5)
                    return search(query, top_k)

                return await asyncio.to_thread(wait)

        toolset.retriever = Slow()
        adapter._call_state.set(MusiqueState())
        slow = asyncio.create_task(toolset.retrieve_documents("song", 1))
        await asyncio.to_thread(started.wait, 5)
        read = await toolset.get_document("1")
        assert not slow.done()
        release.set()
        assert (await slow).startswith("Document ID: 1\n") and read.startswith("Document ID: 1\n")
        assert [use.tool for use in toolset.state.uses] == ["get_document", "retrieve_documents"]

    asyncio.run(run())


def test_calls_that_upstream_makes_at_the_same_time_are_all_recorded(small):
    """Each call there works on a copy of the state, and the last to end overwrites the others' copies."""
    task = small()

    async def run():
        (toolset,) = type(task).toolsets(task.config)
        await toolset.setup_task(task.data)
        kept = MusiqueState()

        async def one(doc_id):
            nonlocal kept
            state = kept.model_copy(deep=True)
            token = adapter._call_state.set(state)
            await asyncio.sleep(0)
            await toolset.get_document(doc_id)
            adapter._call_state.reset(token)
            kept = MusiqueState.model_validate_json(state.model_dump_json())

        await asyncio.gather(*map(one, "0123"))
        return kept

    assert sorted(use.asked for use in asyncio.run(run()).uses) == list("0123")


@settings(deadline=None, max_examples=50)
@given(st.text(max_size=60), st.integers(1, 9), st.text(max_size=10))
def test_any_text_is_answered(kit, query, top_k, doc_id):
    (task,) = kit.tasks(datasets="synthetic,[:1]")
    texts, trace = answers(kit, task, kit.search(query, top_k=top_k), kit.get(doc_id))
    assert trace.metrics["rollout/tool_errors"] == 0 and len(texts) == 2


# --- as upstream serves them ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", [vf_musique.tools, vf_musique.complete])
def test_a_tools_module_can_be_served(module):
    source = inspect.getsource(module)
    assert not any(line.startswith("from __future__") for line in source.splitlines())
    assert source.rstrip().endswith(".run()") and 'if __name__ == "__main__":' in source


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (MusiqueToolset, ["get_document", "retrieve_documents"]),
        (MusiqueCompleteToolset, ["complete", "get_document", "retrieve_documents"]),
    ],
)
def test_tools_are_described_as_upstream_s_server_describes_them(small, kind, names):
    server = MCPServer("test")
    kind(MusiqueToolsetConfig()).register(server)
    theirs = {tool.name: tool for tool in asyncio.run(server.list_tools())}
    task = small(answer_style="complete" if kind is MusiqueCompleteToolset else "tags")
    box = asyncio.run(adapter.open_tools(task, verifiers_messages.new_trace(task)))
    assert sorted(theirs) == [tool["function"]["name"] for tool in box.schemas] == names
    for tool in box.schemas:
        assert tool["function"]["parameters"] == theirs[tool["function"]["name"]].input_schema
    search = next(tool["function"] for tool in box.schemas if tool["function"]["name"] == "retrieve_documents")
    assert {name: (p["type"], p.get("default")) for name, p in search["parameters"]["properties"].items()} == {
        "query": ("string", None),
        "top_k": ("integer", 2),
    }


def test_what_a_toolset_needs_survives_the_way_to_its_server(small):
    task = small(retriever="golden", max_top_k=7, noise=0.5)
    (toolset,) = type(task).toolsets(task.config)
    config = MusiqueToolsetConfig.model_validate_json(toolset.config.model_dump_json())
    assert (config.retriever, config.max_top_k) == ("golden", 7)
    data = type(task.data).model_validate_json(task.data.model_dump_json())
    assert data == task.data and isinstance(data, vf.TaskData)
    assert json.loads(task.data.model_dump_json())["documents"][0]["id"] == task.data.documents[0].id


@pytest.mark.slow
@pytest.mark.parametrize("style", ["tags", "complete"])
def test_the_tools_as_upstream_starts_them(small, style, tmp_path):
    """A server process per rollout, which fetches the task and exchanges the state over HTTP."""
    task = small(answer_style=style, retriever="bm25")
    (toolset,) = type(task).toolsets(task.config)
    state, text = asyncio.run(serve_and_call(task, toolset, tmp_path))
    assert text == "Document ID: 1\n# The Long Song\nThe Long Song was written by Ada Reed."
    assert [(use.tool, use.asked, use.found) for use in state.uses[:2]] == [
        ("retrieve_documents", "who wrote the long song", ["1"]),
        ("get_document", "3", ["3"]),
    ]
    assert (state.completion is not None) == (style == "complete")
    if state.completion:
        assert (state.completion.final_answer, state.completion.cited) == ("Oak Hill", ["1", "3"])


async def serve_and_call(task, toolset, tmp_path):
    """Returns the rollout's state after the calls, and the first call's text."""
    kept = {"state": MusiqueState().model_dump_json()}

    async def get_state(request):
        return web.Response(text=kept["state"], content_type="application/json")

    async def put_state(request):
        kept["state"] = await request.text()
        return web.Response()

    async def get_task(request):
        reference = f"{type(task.data).__module__}:{type(task.data).__qualname__}"
        return web.json_response({"cls": reference, "task": task.data.model_dump_json()})

    app = web.Application()
    app.add_routes([web.get("/state", get_state), web.put("/state", put_state), web.get("/task", get_task)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port_file = tmp_path / "port"
    environment = {
        **os.environ,
        "VF_CONFIG": toolset.config.model_dump_json(),
        "VF_STATE_URL": f"http://127.0.0.1:{runner.addresses[0][1]}/state",
        "VF_STATE_SECRET": "s",
        "MCP_PORT_FILE": str(port_file),
    }
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", type(toolset).__module__, env=environment)
    try:
        async with asyncio.timeout(120):
            while not await listens(port_file):
                assert process.returncode is None, "the server ended"
                await asyncio.sleep(0.1)
            url = f"http://127.0.0.1:{port_file.read_text().strip()}/mcp"
            async with streamable_http_client(url) as (read, write, *_), ClientSession(read, write) as session:
                await session.initialize()
                found = await session.call_tool("retrieve_documents", {"query": "who wrote the long song", "top_k": 1})
                await session.call_tool("get_document", {"doc_id": 3})
                if task.config.answer_style == "complete":
                    last = {"reasoning": "so", "final_answer": "Oak Hill", "cited_doc_ids": "1, 3"}
                    await session.call_tool("complete", last)
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
        await runner.cleanup()
    return MusiqueState.model_validate_json(kept["state"]), found.content[0].text


async def listens(port_file):
    """Whether the server has said its port and answers on it."""
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", int(port_file.read_text()))
    except (OSError, ValueError):
        return False
    writer.close()
    return True


# --- a remote reranker -----------------------------------------------------------------------------------------------


class RerankService:
    """A real server on loopback. `score(text)` is a document's relevance; `status` is what it answers with."""

    def __init__(self, score, status=200):
        self.score, self.status, self.asked = score, status, []

    async def __aenter__(self):
        async def rerank(request):
            body = await request.json()
            self.asked.append(body)
            results = [{"index": i, "relevance_score": self.score(d)} for i, d in enumerate(body["documents"])]
            return web.json_response({"results": results}, status=self.status)

        app = web.Application()
        app.router.add_post("/rerank", rerank)
        self.runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self.runner.addresses[0][1]}"

    async def __aexit__(self, *exc):
        await self.runner.cleanup()


def test_a_reranker_orders_what_was_found(kit):
    (task,) = kit.tasks(num_examples=1)
    wanted = task.data.documents[7]

    async def main():
        service = RerankService(lambda text: float(wanted.title in text and wanted.text in text))
        async with service as url:
            (reranked,) = kit.tasks(num_examples=1, rerank_url=url, rerank_model="m")
            trace = await kit.rollout(reranked, [kit.say("", kit.search("anything", top_k=1))] * 2 + [kit.final("x")])
        return trace, service.asked

    trace, asked = asyncio.run(main())
    assert trace.ok and [use["found"] for use in trace.info["musique"]["uses"]] == [[wanted.id]] * 2
    assert (
        len(asked) == 1 and asked[0]["model"] == "m" and len(asked[0]["documents"]) == 20
    )  # the second was remembered


def test_a_reranker_that_refuses_fails_the_rollout_and_is_no_observation(kit):
    async def main():
        async with RerankService(lambda text: 0.0, status=400) as url:
            (task,) = kit.tasks(num_examples=1, rerank_url=url)
            return await kit.rollout(task, [kit.say("", kit.search()), kit.final("x")])

    trace = asyncio.run(main())
    assert not trace.ok and "refused the request with status 400" in trace.errors[-1].message


def test_a_reranker_in_this_process_orders_what_was_found(kit, monkeypatch, tmp_path):
    """`rerank_model` without `rerank_url` is a cross-encoder, loaded with the taskset and shared by all rollouts."""
    from plumbob.retrieval import cross_encoder as rerankers

    (task,) = kit.tasks(num_examples=1)
    wanted = task.data.documents[7]
    (tmp_path / "model").mkdir()
    asked = []

    class Model:
        """Stands in for the model, which plumbob-retrieval's own tests load."""

        def predict(self, pairs, **options):
            asked.append(pairs)
            return [float(wanted.title in text and wanted.text in text) for _, text in pairs]

    loaded = []
    monkeypatch.setattr(rerankers, "load_cross_encoder", lambda model: loaded.append(model) or Model())
    (task,) = kit.tasks(num_examples=1, rerank_model=str(tmp_path / "model"))
    assert loaded == [str(tmp_path / "model")]
    for _ in range(2):
        trace = kit.play(task, [kit.say("", kit.search("anything", top_k=1))] * 2 + [kit.final("x")])
        assert [use["found"] for use in trace.info["musique"]["uses"]] == [[wanted.id]] * 2
    assert len(loaded) == 1 and [len(pairs) for pairs in asked] == [20]  # later searches were remembered
