"""The taskset as verifiers and the trainer meet it."""

import asyncio
import importlib
import json
import sys
from importlib.metadata import entry_points

import pytest
import verifiers.v1 as vf
import vf_gsm8k
from verifiers.v1.graph import MessageNode
from verifiers.v1.trace import AgentInfo, TraceTask
from vf_gsm8k.taskset import SYSTEM_PROMPT, GSM8KConfig, GSM8KTaskset


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


def test_the_package_exports_the_one_class_that_its_entry_point_names():
    (entry,) = entry_points(group="plumbob.environments", name="gsm8k")
    assert vf_gsm8k.__all__ == ["GSM8KTaskset"]
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
    assert (task.data.idx, task.data.system_prompt) == (0, SYSTEM_PROMPT)
    assert "#### <number>" in SYSTEM_PROMPT
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


def test_the_reward_is_for_the_answer_and_the_metrics_say_why_not():
    task = first_task()
    gold = task.data.answer
    assert scored(task, f"So:\n#### {gold}") == (1.0, {"answer_found": 1.0, "format_ok": 1.0})
    assert scored(task, f"It is \\boxed{{{gold}}}.") == (1.0, {"answer_found": 1.0, "format_ok": 0.0})
    assert scored(task, f"#### {gold}1") == (0.0, {"answer_found": 1.0, "format_ok": 1.0})
    assert scored(task, f"It is {gold}.") == (0.0, {"answer_found": 0.0, "format_ok": 0.0})
    assert scored(task) == (0.0, {"answer_found": 0.0, "format_ok": 0.0})
