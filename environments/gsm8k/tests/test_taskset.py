"""The taskset as verifiers and the trainer meet it."""

import asyncio
import importlib
import json
import sys
import threading
from importlib.metadata import entry_points

import pytest
import verifiers.v1 as vf
import vf_gsm8k
from verifiers.v1.graph import MessageNode
from verifiers.v1.trace import AgentInfo, TraceTask
from vf_gsm8k.taskset import SYSTEM_PROMPTS, GSM8KConfig, GSM8KTaskset


def first_task(**config):
    return next(iter(GSM8KTaskset(GSM8KConfig(id="gsm8k", datasets="synthetic", num_examples=3, **config))))


def trace_of(task, *replies):
    nodes = [MessageNode(message=vf.UserMessage(content=task.data.prompt))]
    nodes += [
        MessageNode(parent=turn, message=vf.AssistantMessage(content=reply), sampled=True)
        for turn, reply in enumerate(replies)
    ]
    seeded_by = TraceTask(type=type(task).__name__, data=task.data, key=task.key)
    return vf.Trace(task=seeded_by, agent=AgentInfo(config=vf.AgentConfig()), nodes=nodes)


def scored(task, *replies):
    trace = trace_of(task, *replies)
    asyncio.run(task.score(trace))
    return trace.reward, trace.metrics


def test_the_package_exports_its_functions_and_the_one_taskset_that_its_entry_point_names():
    (entry,) = entry_points(group="plumbob.environments", name="gsm8k")
    assert {"Answer", "GSM8KTaskset", "extract_answer", "is_correct"} <= set(vf_gsm8k.__all__)
    exported = [getattr(vf_gsm8k, name) for name in vf_gsm8k.__all__]
    tasksets = [item for item in exported if isinstance(item, type) and issubclass(item, vf.Taskset)]
    assert tasksets == [GSM8KTaskset]
    with pytest.raises(AttributeError, match="has no attribute 'Missing'"):
        vf_gsm8k.Missing  # noqa: B018
    assert entry.load() is vf_gsm8k.GSM8KTaskset is GSM8KTaskset
    # verifiers finds a taskset by module name: the entry point's distribution, with "_".
    assert importlib.import_module(entry.dist.name.replace("-", "_")) is vf_gsm8k


def test_verifiers_finds_the_taskset_and_its_types():
    assert isinstance(vf.load_taskset(GSM8KConfig(id="vf-gsm8k")), GSM8KTaskset)
    assert vf.taskset_config_type("vf-gsm8k") is GSM8KConfig
    assert GSM8KTaskset.task_type().__name__ == "GSM8KTask"


def test_only_the_hub_source_imports_datasets(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "datasets", None)  # importing it now fails
    for name in [name for name in sys.modules if name.startswith("vf_gsm8k")]:
        monkeypatch.delitem(sys.modules, name)
    fresh = importlib.import_module("vf_gsm8k.taskset")
    (tmp_path / "mine.jsonl").write_text(json.dumps({"question": "How many?", "answer": "#### 1"}))
    for source in ("synthetic", str(tmp_path / "mine.jsonl")):
        assert list(fresh.GSM8KTaskset(fresh.GSM8KConfig(datasets=source)))
    with pytest.raises(ImportError):
        fresh.GSM8KTaskset(fresh.GSM8KConfig()).load()


def test_a_task_carries_its_row():
    task = first_task(split="test", seed=4)
    assert task.key == task.data.id == "gsm8k-synthetic-test-4-0"
    assert (task.data.idx, task.data.system_prompt) == (0, SYSTEM_PROMPTS["hash", False])
    assert task.data.prompt and int(task.data.answer) > 0


def test_all_rows_are_checked_before_the_first_task(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "How many?", "answer": "#### 1"}\n{"question": "How many?"}\n')
    with pytest.raises(ValueError, match=r"rows\.jsonl line 2: missing field 'answer'"):
        GSM8KTaskset(GSM8KConfig(datasets=str(path))).load()


@pytest.mark.parametrize("count", [0, -2])
def test_a_count_that_means_nothing_is_refused(count):
    with pytest.raises(ValueError, match=f"num_examples must be at least 1, or -1 for all, not {count}"):
        GSM8KConfig(num_examples=count)


def test_one_turn_ends_the_rollout():
    task = first_task()
    (single_turn,) = task.hooks("stop")
    assert not asyncio.run(single_turn(trace_of(task)))
    assert asyncio.run(single_turn(trace_of(task, "Let me think.")))


def metrics(kind=None, **values):
    """All metrics of a reply that is read as `kind`; those not given are 0."""
    names = ("answer_found", "format_ok", "lenient_correct")
    kinds = {f"extracted_by/{name}": float(name == kind) for name in ("hash", "boxed", "answer_tag", "phrase")}
    return {**{name: float(values.get(name, 0)) for name in names}, **kinds}


def test_the_reward_is_for_the_answer_and_the_metrics_say_how_it_was_read():
    task = first_task()
    gold = task.data.answer
    good = {"answer_found": 1, "lenient_correct": 1}
    assert scored(task, f"So:\n#### {gold}") == (1.0, metrics("hash", **good, format_ok=1))
    assert scored(task, f"It is \\boxed{{{gold}}}.") == (1.0, metrics("boxed", **good))
    assert scored(task, f"<answer>{gold}</answer>") == (1.0, metrics("answer_tag", **good))
    assert scored(task, f"The answer is {gold}.") == (1.0, metrics("phrase", **good))
    assert scored(task, f"#### {gold}1") == (0.0, metrics("hash", answer_found=1, format_ok=1))
    assert scored(task, f"It is {gold}.") == (0.0, metrics(lenient_correct=1))
    assert scored(task, "#### <number>") == (0.0, metrics())
    assert scored(task) == (0.0, metrics())


def test_the_trace_says_which_text_was_read():
    task = first_task()
    trace = trace_of(task, "It is $\\boxed{1{,}000}$.")
    asyncio.run(task.score(trace))
    assert trace.to_record()["info"]["answer"] == {"text": "1{,}000", "extracted_by": "boxed"}
    trace = trace_of(task, "It is 1000.")
    asyncio.run(task.score(trace))
    assert trace.info["answer"] is None


@pytest.mark.parametrize(
    ("given", "style"), [("hash", "hash"), ("####", "hash"), ("boxed", "boxed"), (r"\boxed", "boxed")]
)
def test_the_answer_style_is_what_the_prompt_asks_for_and_format_ok_wants(given, style):
    task = first_task(answer_style=given)
    assert task.data.answer_style == style
    assert {"hash": "#### <number>", "boxed": r"\boxed{<number>}"}[style] in task.data.system_prompt
    replies = {"hash": f"#### {task.data.answer}", "boxed": rf"\boxed{{{task.data.answer}}}"}
    for name, reply in replies.items():
        reward, read = scored(task, reply)
        # The answer counts in either style; the format only in the one that was asked for.
        assert (reward, read["format_ok"]) == (1.0, float(name == style))


@pytest.mark.parametrize(("style", "reply"), [("hash", "#### 40 + {}"), ("boxed", r"\boxed{{40 + {}}}")])
def test_arithmetic_is_an_answer_where_no_bare_number_was_asked_for(style, reply):
    for strict, asks in ((True, True), (False, False), (None, False)):
        task = first_task(answer_style=style, strict=strict)
        assert ("a bare number" in task.data.system_prompt) is asks is task.data.strict
        reward, read = scored(task, reply.format(int(task.data.answer) - 40))
        assert (reward, read["answer_found"], read["format_ok"]) == (float(not asks), float(not asks), 0)
        units = reply.replace("40 + {}", "${}.00 a day").format(task.data.answer)
        assert scored(task, units)[0] == 1  # a number with its unit is a number


def test_real_problems_ask_for_a_bare_number_by_default(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "How many?", "answer": "#### 42"}\n')
    for strict, reward in ((None, 0), (True, 0), (False, 1)):
        (task,) = GSM8KTaskset(GSM8KConfig(datasets=str(path), strict=strict)).load()
        assert task.data.strict is (strict is not False)
        assert scored(task, "#### 40 + 2")[0] == reward and scored(task, "40 + 2 = 42\n#### 40 + 2 = 42")[0] == 1
        assert task.prediction(trace_of(task, "#### 40 + 2"))["answer"] == ("42" if reward else None)


def test_an_unknown_answer_style_is_refused():
    with pytest.raises(ValueError, match="'hash' or 'boxed'"):
        GSM8KConfig(answer_style="latex")


@pytest.mark.parametrize("style", ["hash", "boxed"])
def test_the_oracle_scores_one_on_every_task(style):
    for task in GSM8KTaskset(GSM8KConfig(datasets="synthetic", num_examples=20, answer_style=style)):
        transcript = task.oracle()
        assert all(isinstance(message, vf.AssistantMessage) for message in transcript)
        reward, read = scored(task, *(message.content for message in transcript))
        assert (reward, read["format_ok"]) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("reply", "answer"), [("#### $1,200.50", "1200.5"), (r"\boxed{\frac{1}{3}}", "1/3"), ("It is 7.", None), ("", None)]
)
def test_a_prediction_is_one_row_of_json(reply, answer):
    task = first_task(split="test")
    row = task.prediction(trace_of(task, reply))
    assert json.loads(json.dumps(row)) == {"id": "gsm8k-synthetic-test-0-0", "answer": answer}


def test_scoring_many_rollouts_at_once_does_not_hold_up_the_event_loop():
    """Arithmetic in 200 replies, while something else wants to run every few milliseconds."""
    task = first_task()

    async def run():
        longest = 0.0

        async def beat():
            nonlocal longest
            while True:
                start = asyncio.get_running_loop().time()
                await asyncio.sleep(0.005)
                longest = max(longest, asyncio.get_running_loop().time() - start)

        beats = asyncio.create_task(beat())
        traces = [trace_of(task, rf"\boxed{{{n} \times 7 + 1}}") for n in range(200)]
        await asyncio.gather(*(task.score(trace) for trace in traces))
        beats.cancel()
        return longest, traces

    longest, traces = asyncio.run(run())
    assert all(trace.metrics["extracted_by/boxed"] == 1.0 for trace in traces)
    assert longest < 2.0


@pytest.mark.parametrize(("filler", "elsewhere"), [("", False), ("so " * 10_000, True)])
def test_only_long_replies_are_read_in_another_thread(monkeypatch, filler, elsewhere):
    readers = []

    def is_correct(*args, **kwargs):
        readers.append(threading.current_thread())
        return True

    monkeypatch.setattr("vf_gsm8k.taskset.is_correct", is_correct)
    task = first_task()
    asyncio.run(task.score(trace_of(task, f"{filler}#### 1")))
    assert [reader is not threading.current_thread() for reader in readers] == [elsewhere]
