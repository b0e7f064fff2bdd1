"""The unseen half of the field's faults does what each entry says. Authors of the doctor's rules do not read this file."""

from collections import Counter
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from peft.tuners.lora import Linear as LoraLinear
from plumbob.rollout import Sample
from plumbob.rollout.tool_formats import named
from plumbob.testing.faults import field_unseen_doubles as doubles
from plumbob.testing.faults import field_unseen_environment as environment
from plumbob.testing.faults.field_trial import gap, texts, tried
from plumbob.testing.faults.field_unseen import UNSEEN
from plumbob.trainer.algorithm import advantages
from plumbob.trainer.rollouts import collect
from plumbob.trainer.rollouts.batch import Batch

FAULTS = {fault.name: fault for fault in UNSEEN}
DIFFERENT = (
    "tied head served untied and random",
    "weights served in eight bits",
    "engine reports the log-probability of the likeliest token",
    "labels shifted by one from the start",
    "zeroed log-probabilities of the first turn",
)
CALL = '<tool_call>{"name": "lookup", "arguments": {"key": "1234"}}</tool_call>'


def sample(reward: float, group: str, length: int = 2) -> Sample:
    """A row with this reward and this number of sampled tokens."""
    mask = [False] + [True] * length
    return Sample([1] * (length + 1), mask, [0.0] + [-1.0] * length, reward, group, "", False)


def test_rewards_come_from_neighbours_or_in_the_order_of_length():
    drawn = [sample(1, "0/0"), sample(2, "0/0"), sample(3, "0/1"), sample(4, "0/1")]
    assert [s.reward for s in doubles.swapped(drawn)] == [3, 4, 1, 2]
    drawn = [sample(1, "0/0", 5), sample(2, "0/0", 2), sample(3, "0/0", 9)]
    assert [s.reward for s in doubles.in_order_of_length(drawn)] == [2, 1, 3]


def test_baseline_is_the_group_befores():
    drawn = [sample(1, "0/0"), sample(3, "0/0"), sample(10, "0/1"), sample(20, "0/1")]
    with ExitStack() as stack:
        doubles.baseline_of_the_group_before(stack, "lookup")
        found = advantages.step_advantages(drawn, advantages.AdvantageSettings())
    assert found.values == [-14, -12, 8, 18]


def test_groups_with_the_longest_rollouts_are_discarded():
    drawn = [sample(1, f"0/{g}", length) for g, length in enumerate((5, 9, 2, 3, 4))]
    batch = Batch(samples=list(drawn), drawn=list(drawn))
    with ExitStack() as stack:
        doubles.discard_long(stack, "lookup")
        collect.discard_stale(batch, 0)
    assert {s.group for s in batch.stale} == {"0/0", "0/1"}
    assert {s.group for s in batch.drawn} == {"0/2", "0/3", "0/4"}


@pytest.mark.parametrize("rewrite", [environment.as_react, environment.as_python])
def test_calls_in_other_forms_are_not_read(rewrite):
    text = rewrite(CALL)
    assert "lookup" in text
    assert "1234" in text
    assert "tool_call" not in text
    for form in ("hermes", "auto"):
        assert not any(type(c).__name__ == "ParsedCall" for c in named(form).read(text, {"lookup": {}}).calls)


def test_python_calls_are_python():
    code = environment.as_python(CALL).removeprefix("```python\n").removesuffix("\n```")
    compile(code, "reply", "exec")


def test_tool_results_are_cut_or_lose_their_bodies():
    document = "Document ID: 3\n# Title\nA long text about something.\n\nDocument ID: 5\n# Other\nText."
    assert environment.headers_only(document, "retrieve_documents", {}) == "Document ID: 3\nDocument ID: 5"
    assert environment.cut("next=1234", "lookup", {}) == "next=12"
    assert len(environment.cut(document, "retrieve_documents", {})) == 60
    assert environment.nothing(document, "lookup", {}) == ""


def reply(text: str, key: str = "t") -> tuple[SimpleNamespace, SimpleNamespace]:
    """(task with gold "amber", rollout whose last turn is `text`)."""
    turn = SimpleNamespace(content=text, tool_calls=[])
    branch = SimpleNamespace(sampled_mask=[False, True, True])
    task = SimpleNamespace(key=key, data=SimpleNamespace(answer="amber"))
    return task, SimpleNamespace(last_reply=text, assistant_messages=[turn], branches=[branch])


def test_graders_can_be_exploited_as_described():
    assert environment.within_gold(*reply(""), 0.0) == 1
    assert environment.within_gold(*reply("cedar"), 0.0) == 0
    assert environment.gold_within(*reply("cedar or amber or coral"), 0.0) == 1
    assert environment.gold_within(*reply("ambers"), 0.0) == 0
    assert environment.guesses_pay(*reply("coral"), 0.0) == 1
    assert environment.guesses_pay(*reply("two words"), 0.0) == 0
    assert environment.long_replies_zero(*reply("x" * 61), 1.0) == 0
    assert environment.long_replies_zero(*reply("amber"), 1.0) == 1
    cached = environment.CachedByTask()
    assert [cached(*reply("a"), 0.0), cached(*reply("b"), 1.0), cached(*reply("c", "u"), 1.0)] == [0, 0, 1]
    assert environment.loops_pay(*reply("a b a b a b"), 0.0) == pytest.approx(0.3)
    assert environment.long_pays(*reply("x"), 0.0) == pytest.approx(0.02)
    assert environment.short_pays(*reply("x"), 0.0) == pytest.approx(-0.02)


def test_about_three_tasks_in_ten_are_scored_zero():
    zero = sum(environment.thirty_percent_zero(*reply("amber", f"task-{i}"), 1.0) == 0 for i in range(1000))
    assert 250 < zero < 350


def test_eight_bits_change_matrices_by_less_than_a_percent_of_their_largest_value():
    weight = torch.randn(8, 64)
    rounded = doubles.in_eight_bits(weight)
    assert 0 < (rounded - weight).abs().max() < 0.01 * weight.abs().max()


def test_error_of_the_logits_doubles_with_each_sync():
    request, logits = SimpleNamespace(length=7), torch.zeros(1, 50)
    sizes = [doubles.noise_of_version(SimpleNamespace(version=v), [request], logits).std() for v in (2, 3)]
    assert sizes[1] / sizes[0] == pytest.approx(2.0)


@pytest.mark.field
@pytest.mark.parametrize("name", DIFFERENT)
def test_engine_and_trainer_differ(name, tmp_path):
    with tried(FAULTS[name], tmp_path) as subject:
        assert gap(subject) > 1e-5  # a healthy run has 5e-7


@pytest.mark.field
def test_copied_head_is_right_until_weights_change(tmp_path):
    with tried(FAULTS["tied head served as a copy that syncs never reach"], tmp_path) as subject:
        run = subject.run
        ids = run.parity_row.token_ids

        def difference() -> float:
            with torch.no_grad():
                trained = run.policy.score([run.parity_row], 1.0).logprobs
            return (trained - torch.tensor(run.engine.score(ids))).abs().mean().item()

        assert difference() < 1e-4
        with torch.no_grad():
            run.policy.model.get_input_embeddings().weight.mul_(1.1)
        run.engine.update(run.policy.sharding.stream())
        assert difference() > 1e-3


@pytest.mark.field
def test_adapter_counts_twice(tmp_path):
    with tried(FAULTS["adapter served merged and active at once"], tmp_path) as subject:
        served = [m.scaling["default"] for m in subject.run.engine.model.modules() if isinstance(m, LoraLinear)]
        trained = [m.scaling["default"] for m in subject.run.policy.model.modules() if isinstance(m, LoraLinear)]
        assert served == [2 * value for value in trained]


@pytest.mark.field
def test_mask_is_early_in_the_backward_pass_alone(tmp_path):
    with tried(FAULTS["loss mask shifted by one in the backward pass"], tmp_path) as subject:
        rows = subject.drawn.samples[:2]
        assert gap(subject) < 1e-4
        with_gradient = subject.run.policy.score(rows, 1.0).logprobs.detach()
        with torch.no_grad():
            without = subject.run.policy.score(rows, 1.0).logprobs
        assert len(without) == len(with_gradient)
        assert not torch.allclose(with_gradient, without)


@pytest.mark.field
def test_hidden_scheduler_leaves_the_rate_that_is_shown(tmp_path):
    with tried(FAULTS["rate held near zero by a hidden scheduler"], tmp_path) as subject:
        run = subject.run
        before = {n: p.detach().clone() for n, p in run.policy.trainable.items()}
        for parameter in run.policy.trainable.values():
            parameter.grad = torch.ones_like(parameter)
        run.optimizer.step()
        moved = max((p.detach() - before[n]).abs().max().item() for n, p in run.policy.trainable.items())
        assert moved < 1e-7
        assert run.optimizer.param_groups[0]["lr"] == run.config.learning_rate


@pytest.mark.field
def test_policy_that_never_calls_agrees_with_its_engine(tmp_path):
    with tried(FAULTS["policy never calls its tools"], tmp_path) as subject:
        calls = sum(environment.calls_of(trace) for trace in subject.drawn.traces)
        assert calls / len(subject.drawn.traces) < 0.2
        assert gap(subject) < 1e-4


@pytest.mark.field
def test_empty_tool_results_are_what_the_model_sees(tmp_path):
    with tried(FAULTS["tools answer with an empty text"], tmp_path) as subject:
        results = Counter(text for trace in subject.drawn.traces for text in texts(trace, "ToolMessage"))
        # What is not empty says that a call could not be read, which no tool has answered.
        assert results[""]
        assert all(text.startswith("Error: ") for text in results if text)


@pytest.mark.field
def test_results_come_one_call_late(tmp_path):
    with tried(FAULTS["tool results one call late"], tmp_path) as subject:
        results = [texts(trace, "ToolMessage") for trace in subject.drawn.traces]
        assert any(results)
        assert {first for first, *_ in filter(None, results)} <= {"ok"}


@pytest.mark.field
def test_calls_are_in_the_text_and_not_run(tmp_path):
    with tried(FAULTS["calls as ReAct actions"], tmp_path) as subject:
        replies = [text for trace in subject.drawn.traces for text in texts(trace, "AssistantMessage")]
        assert sum("Action Input:" in text for text in replies) > len(replies) / 2
        assert not any(texts(trace, "ToolMessage") for trace in subject.drawn.traces)


@pytest.mark.field
@pytest.mark.parametrize(
    ("name", "check"),
    [
        ("forty copies of each task", lambda train: len({t.data.prompt for t in train}) * 30 < len(train)),
        ("eight tasks in the dataset", lambda train: len(train) == 8),
        ("every prompt is the template without its question", lambda train: len({t.data.prompt for t in train}) == 1),
        ("gold shown in the system prompt", lambda train: all(t.data.answer in t.data.system_prompt for t in train)),
        ("gold hidden in the middle of the question", lambda train: all(t.data.answer in t.data.prompt for t in train)),
    ],
)
def test_tasks_are_what_the_entry_says(name, check, tmp_path):
    with tried(FAULTS[name], tmp_path) as subject:
        assert check(subject.run.tasks.train)


@pytest.mark.field
@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("evaluation without the system prompt", "system_prompt"),
        ("evaluation with another answer instruction", "prompt"),
        ("held-out tasks with other whitespace", "prompt"),
    ],
)
def test_held_out_tasks_differ_from_training_tasks(name, field, tmp_path):
    with tried(FAULTS[name], tmp_path) as subject:
        tasks = subject.run.tasks
        train, held = ({getattr(t.data, field) for t in some} for some in (tasks.train, tasks.held_out))
        assert train.isdisjoint(held)
        if "whitespace" in name:
            assert {prompt.strip() for prompt in held} <= train
