"""The rows that `sft` trains on: exact, of real tool results, and never of held-out tasks."""

import asyncio
import gzip
import json
from pathlib import Path

import pytest
import torch
import verifiers.v1 as vf
from plumbob.console import UserError
from plumbob.rollout import Completion, Limits, Sampling, run_rollout, to_sample
from plumbob.trainer.config.evaluate import EvaluateConfig
from plumbob.trainer.config.sft import SftConfig
from plumbob.trainer.distributed.world import World
from plumbob.trainer.evaluation import run as evaluation
from plumbob.trainer.policy.loading import load_chat, load_tokenizer
from plumbob.trainer.rollouts.identity import marks, marks_of
from plumbob.trainer.rollouts.tasks import load_tasks
from plumbob.trainer.run_files.trace_files import trace_paths
from plumbob.trainer.training.sft.demonstrations import FILE, make_demonstrations, read_stored, shown, store

HERE = World(0, 1, torch.device("cpu"))


def config_of(**values) -> SftConfig:
    return SftConfig(**{"max_demonstrations": 12, "eval_examples": 16, "env_args": ("num_examples=200",), **values})


def make(chat, config, tasks=None):
    return make_demonstrations(config, tasks or load_tasks(config), chat, HERE)


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory) -> Path:
    """The file of `evaluate lookup -r 4` with the bundled policy, on 24 training tasks."""
    folder = tmp_path_factory.mktemp("evaluations")
    config = EvaluateConfig(
        envs=("lookup",), model="tiny", num_examples=24, rollouts_per_example=4, env_args=("split=train",),
        max_tokens=48, output_dir=str(folder), run_name="e",
    )  # fmt: skip
    assert evaluation.run(config) == 0
    return folder / "e" / "lookup.jsonl"


def test_a_demonstration_is_the_row_of_a_rollout_with_the_same_sampled_ids(chat):
    """An engine that samples the same ids, turn by turn, leaves the same ids and loss mask in a GRPO rollout."""
    config = config_of()
    tasks = load_tasks(config)
    found = make(chat, config, tasks)
    assert len(found.rows) == 12 and not found.left_out
    for task, row in zip(tasks.take(0, 12), found.rows, strict=True):
        spans, start = [], None
        for i, sampled in enumerate([*row.loss_mask, False]):
            if sampled and start is None:
                start = i
            elif not sampled and start is not None:
                spans.append((start, i))
                start = None

        class Sampler:
            def __init__(self, turns):
                self.turns, self.prompts = iter(turns), []

            async def generate(self, prompt_ids, sampling):
                self.prompts.append(list(prompt_ids))
                ids = next(self.turns)
                return Completion(tuple(ids), tuple(-0.5 for _ in ids), "stop")

        sampler = Sampler([row.token_ids[a:b] for a, b in spans])
        trace = asyncio.run(run_rollout(task, sampler, chat, Sampling(), Limits()))
        rollout = to_sample(trace, "g")
        assert trace.reward == row.reward == 1.0
        assert (rollout.token_ids, rollout.loss_mask) == (row.token_ids, row.loss_mask)
        assert sampler.prompts == [row.token_ids[:a] for a, _ in spans]
        assert len(spans) == len(task.oracle())


def test_tool_calls_are_written_as_the_chat_template_writes_them(chat, tokenizer):
    """What the model is taught is its template's own text of the conversation."""
    config = config_of()
    tasks = load_tasks(config)
    for task, row in zip(tasks.take(0, 12), make(chat, config, tasks).rows, strict=True):
        text = tokenizer.decode(row.token_ids)
        for message in task.oracle():
            wire = {"role": "assistant", "content": message.content}
            wire["tool_calls"] = [
                {"function": {"name": c.name, "arguments": json.loads(c.arguments)}} for c in message.tool_calls or ()
            ]
            question = [{"role": "user", "content": "?"}]
            before = tokenizer.apply_chat_template(question, tokenize=False)
            turn = tokenizer.apply_chat_template([*question, wire], tokenize=False).removeprefix(before)
            assert turn.rstrip("\n") in text
        assert text.count("⟦") == 0 and shown(tokenizer, row).count("⟦") == len(task.oracle())


def test_held_out_tasks_give_no_oracle_demonstrations(chat):
    config = config_of(env_args=("num_examples=40",), max_demonstrations=100)
    tasks = load_tasks(config)
    found = make(chat, config, tasks)
    assert {row.group for row in found.rows} == {task.key for task in tasks.train}
    assert not {row.group for row in found.rows} & {task.key for task in tasks.held_out}


@pytest.mark.slow
def test_the_best_of_stored_rollouts_are_used_token_by_token(chat, evaluated):
    records = [json.loads(line) for line in evaluated.read_text().splitlines()]
    good = [r for r in records if r["ok"] and sum(x["score"] for x in r["rewards"].values()) == 1]
    ids = {tuple(t for node in r["nodes"] for t in node["token_ids"]) for r in good}
    assert 0 < len(ids) < len(good)  # some rollouts of a task are equal, and count once
    found = make(chat, config_of(demonstrations=str(evaluated), max_demonstrations=None))
    assert {tuple(row.token_ids) for row in found.rows} == ids and len(found.rows) == len(ids)
    assert found.verbatim == len(ids) and all(row.reward == 1.0 for row in found.rows)
    assert found.left_out["below --min-reward 1"] == len(records) - len(good)
    assert found.left_out["equal to another one"] == len(good) - len(ids)
    assert any(logprob < 0 for row in found.rows for logprob in row.sampled_logprobs)

    once = make(chat, config_of(demonstrations=str(evaluated.parent), max_demonstrations=None, per_task=1))
    assert len({row.group for row in once.rows}) == len(once.rows) == len({r["task"]["key"] for r in good})
    everything = make(chat, config_of(demonstrations=str(evaluated), max_demonstrations=None, min_reward=0.0))
    assert len(everything.rows) > len(found.rows)


def test_stored_rollouts_of_held_out_tasks_are_dropped_and_counted(chat, evaluated, tmp_path):
    config = config_of(demonstrations=str(tmp_path / "x.jsonl.gz"), max_demonstrations=None, min_reward=0.0)
    tasks = load_tasks(config)
    records = [json.loads(line) for line in evaluated.read_text().splitlines()]
    held_out = tasks.held_out[0]
    moved = [{**r, "task": {**r["task"], "data": held_out.data.model_dump(mode="json")}} for r in records[:8]]
    lines = "".join(json.dumps(r) + "\n" for r in [*moved, *records[8:]])
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    found = make(chat, config, tasks)
    assert found.left_out["of held-out tasks, which are never trained on"] == 8
    held = marks_of(tasks.held_out)
    assert all(held.isdisjoint(marks(task)) for task in tasks.train if task.key in {row.group for row in found.rows})

    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress("".join(json.dumps(r) + "\n" for r in moved).encode()))
    with pytest.raises(UserError, match=r"8 x of held-out tasks.*; sample rollouts of training tasks instead: .*-r 8"):
        make(chat, config, tasks)


def test_rollouts_of_another_environment_are_named_as_such(chat, evaluated):
    """Their data may fit: GSM8K's has a prompt and an answer too."""
    config = config_of(env="gsm8k", env_args=("datasets=synthetic",), demonstrations=str(evaluated))
    with pytest.raises(
        UserError, match="lookup.jsonl holds tasks of another environment than gsm8k: they are LookupTask, not GSM"
    ):
        make(chat, config)


def test_rollouts_of_another_model_are_played_again_in_this_model_s_form(evaluated):
    """tiny-musique has another tokenizer and the same form of calls: ids are its own, rewards are scored anew."""
    other = load_chat(load_tokenizer("tiny-musique"), None)
    config = config_of(model="tiny-musique", demonstrations=str(evaluated), max_demonstrations=None)
    found = make(other, config)
    assert found.rows and found.verbatim == 0
    stored = {
        json.dumps([node["message"]["content"] for node in json.loads(line)["nodes"]])
        for line in evaluated.read_text().splitlines()
    }
    for row, record in zip(found.rows, map(json.loads, found.records), strict=True):
        assert row.reward == 1.0
        assert json.dumps([node["message"]["content"] for node in record["nodes"]]) in stored
        assert other.tokenizer.decode(row.token_ids).startswith("<|im_start|>system\nLook up the start key.")


def test_what_is_stored_is_read_again(chat, tmp_path):
    found = make(chat, config_of())
    store(tmp_path, found)
    again = read_stored(tmp_path)
    assert again is not None and again.rows == found.rows and again.checksum == found.checksum
    assert (tmp_path / FILE).is_file() and read_stored(tmp_path / "elsewhere") is None
    with pytest.raises(UserError, match="is neither 'oracle' nor a file, folder or pattern"):
        trace_paths(str(tmp_path / "no*.jsonl"), "lookup")
    assert trace_paths(str(tmp_path), "lookup") == trace_paths(str(tmp_path / "*.gz"), "lookup") == [tmp_path / FILE]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"max_context": 160}, "longer than a limit .--max-context 160, "),
        ({"max_tokens": 8}, "longer than a limit .* --max-tokens 8,"),
        ({"max_turns": 2, "env_args": ("min_hops=3",)}, "longer than a limit .* --max-turns 2"),
        ({"min_reward": 1.5}, r"below --min-reward 1.5 \(the highest reward below it is 1\); lower --min-reward"),
    ],
)
def test_what_does_not_fit_is_left_out_and_named(chat, values, reason):
    with pytest.raises(UserError, match=f"no demonstration of --demonstrations oracle can be used: .*{reason}"):
        make(chat, config_of(**values))


def test_an_environment_without_an_oracle_says_what_to_give(chat, monkeypatch):
    import vf_lookup.taskset

    monkeypatch.delattr(vf_lookup.taskset.LookupTask, "oracle")
    with pytest.raises(UserError, match="environment 'lookup' has no oracle.*give --demonstrations a file of good"):
        make(chat, config_of())


def test_an_oracle_that_fails_is_counted(chat, monkeypatch):
    import vf_lookup.taskset

    original = vf_lookup.taskset.LookupTask.oracle

    def fail_sometimes(self) -> list[vf.AssistantMessage]:
        if len(self.data.chain) == 1:
            raise KeyError("no chain")
        return original(self)

    monkeypatch.setattr(vf_lookup.taskset.LookupTask, "oracle", fail_sometimes)
    found = make(chat, config_of(max_demonstrations=40))
    (reason,) = found.left_out
    assert reason == "its `oracle` method failed: KeyError: 'no chain'" and len(found.rows) == 40


@pytest.mark.slow
def test_musique_keeps_what_its_own_retriever_supports():
    """The oracle's answer is trained only where the user's retriever returned the documents that it cites."""
    chat = load_chat(load_tokenizer("tiny-musique"), None)
    values = {"env": "musique", "model": "tiny-musique", "max_demonstrations": 8, "max_context": 8192}
    found = make(chat, config_of(**values, env_args=("datasets=synthetic", "hops=2")))
    assert len(found.rows) == 8
    for row, record in zip(found.rows, map(json.loads, found.records), strict=True):
        assert row.reward == 1.0 and row.metrics["citation_recall"] == 1.0
        results = [n["message"]["content"] for n in record["nodes"] if n["message"]["role"] == "tool"]
        assert results and all("Document ID" in text for text in results)
