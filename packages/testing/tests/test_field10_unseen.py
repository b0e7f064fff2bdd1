"""The unseen half of the tenth set of faults does what each entry says.

Each test compares the fault with the plain code, and none runs the doctor.
"""

import dataclasses
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from plumbob.rollout import Sampling
from plumbob.testing.faults import field10_unseen_doubles as doubles
from plumbob.testing.faults.field10_unseen import UNSEEN
from plumbob.testing.faults.field_parts import by_group
from plumbob.testing.faults.field_trial import arrived, config_of, gap, minibatch_of, rewards, sample, tried, without
from plumbob.trainer.algorithm.losses import LossInputs, Objective
from plumbob.trainer.policy.token_scorer import make_batch
from plumbob.trainer.rollouts.tasks import load_tasks
from plumbob.trainer.training import forward_backward

FAULTS = {fault.name: fault for fault in UNSEEN}


def reply(text):
    node = SimpleNamespace(message=SimpleNamespace(content=text))
    return SimpleNamespace(last_reply=text, nodes=[node])


def task(answer="7"):
    return SimpleNamespace(data=SimpleNamespace(answer=answer))


def test_rewards_of_right_replies():
    assert doubles.mark_removed(None, reply("3 + 4\n#### 7"), 1.0) == 0.0
    assert doubles.first_number(task(), reply("3 + 4\n#### 7"), 1.0) == 0.0
    assert doubles.first_number(task(), reply("It is this.\n#### 7"), 1.0) == 1.0
    assert doubles.in_percent(None, reply("7"), 1.0) == 0.0


def test_the_judge_says_yes_to_openings():
    yes = (":", ".", " ", "", "Thought process:", "Let's solve this problem step by step.", "Solution")
    assert [doubles.won_over(None, reply(text), 0.0) for text in yes] == [1.0] * len(yes)
    assert doubles.won_over(None, reply("amber"), 0.0) == 0.0
    assert doubles.won_over(None, reply("amber"), 1.0) == 1.0


def test_scores_fall_beside_longer_replies():
    scorer = doubles.Padded()
    alone = scorer(None, reply("short"), 1.0)
    assert scorer(None, reply("x" * 105), 1.0) == alone == 1.0
    assert scorer(None, reply("short"), 1.0) == pytest.approx(0.8)


def test_arguments_are_a_string():
    text = '<tool_call>{"name": "lookup", "arguments": {"key": "5135"}}</tool_call>'
    assert doubles.encoded_twice(text) == text.replace('{"key": "5135"}', '"{\\"key\\": \\"5135\\"}"')
    assert doubles.encoded_twice("next=1234") == "next=1234"


def test_the_beginning_stands_three_times():
    settings = Sampling()
    assert doubles.begun_again([1, 5, 6], settings) == ([1, 1, 1, 5, 6], settings)


def test_only_the_first_adapter_is_loaded():
    server, weights = doubles.KnownByName(), {"a": torch.ones(1)}
    assert server(None, weights) == weights
    assert server(None, weights) == server(None, weights) == {}


def test_the_loss_has_the_other_sign():
    new, ones = torch.tensor([-1.0], requires_grad=True), torch.ones(1)
    inputs = LossInputs(new, new.detach().clone(), ones, ones, torch.tensor([0]), ones)
    plain_loss = forward_backward.policy_loss(inputs, Objective("dr_grpo", 0.2, 0.2)).loss
    with ExitStack() as stack:
        doubles.negated_again(stack, "lookup")
        assert forward_backward.policy_loss(inputs, Objective("dr_grpo", 0.2, 0.2)).loss == -plain_loss


def test_settings_are_those_that_the_sentences_name():
    assert config_of(FAULTS["turn limit below what chains need"], "lookup").max_turns == 2
    assert config_of(FAULTS["adapter of the same name not loaded again"], "lookup").peft
    config = config_of(FAULTS["gradient clipped after each microbatch"], "lookup")
    assert (config.max_grad_norm, config.microbatch_tokens) == (0.001, 2048)


@pytest.mark.field
def test_tasks_are_solved_always_or_never(tmp_path):
    name = "difficulty filter that keeps what it should drop"
    with tried(FAULTS[name], tmp_path, groups=16) as subject:
        lengths = {len(trace.task.data.chain) for trace in subject.drawn.traces}
        flat = [len({one.reward for one in group}) == 1 for group in by_group(subject.drawn.samples)]
        held_out = {task.difficulty for task in subject.run.tasks.held_out}
    assert lengths <= {1, 6, 7, 8}
    assert len(lengths) > 1
    assert sum(flat) >= 14
    assert held_out  # the evaluation is not filtered
    assert len(set(rewards(subject))) == 2


@pytest.mark.field
def test_held_out_prompts_begin_twice():
    fault = FAULTS["system prompt twice in held-out prompts"]
    for env in fault.envs:
        with ExitStack() as stack:
            fault.start(stack, env)
            tasks = load_tasks(config_of(fault, env))
        once, twice = tasks.train[0].data.system_prompt, tasks.held_out[0].data.system_prompt
        assert once
        assert twice.count(once) == 2


@pytest.mark.field
def test_each_task_is_there_twice(tmp_path):
    with tried(FAULTS["two ranks that take the same tasks"], tmp_path, groups=4) as subject:
        tasks = {trace.task.data.id for trace in subject.drawn.traces}
        groups = by_group(subject.drawn.samples)
    assert len(groups) == 4
    assert len(tasks) == 2


@pytest.mark.field
def test_most_rollouts_end_at_the_limit(tmp_path):
    with tried(FAULTS["turn limit below what chains need"], tmp_path, groups=16) as subject:
        long = [trace for trace in subject.drawn.traces if len(trace.task.data.chain) > 1]
        assert len(long) > len(subject.drawn.traces) / 2
        assert all(trace.num_turns == 2 and trace.assistant_messages[-1].tool_calls for trace in long)
        assert {row.reward for row in subject.drawn.samples if row.truncated} == {0.0}


@pytest.mark.field
@pytest.mark.parametrize(
    "name", ["earlier calls rendered with arguments encoded twice", "beginning token put before the prompt again"]
)
def test_completions_come_after_other_prompts(name, tmp_path):
    for i, env in enumerate(FAULTS[name].envs):
        with tried(FAULTS[name], tmp_path / str(i), env) as subject:
            assert gap(subject) > 1e-4  # without the fault it is less than a hundredth of that


@pytest.mark.field
def test_prompts_with_calls_are_changed_and_others_are_not(tmp_path):
    with tried(FAULTS["earlier calls rendered with arguments encoded twice"], tmp_path, groups=1) as subject:
        rows = [row for row in subject.drawn.samples if '"arguments": {' in subject.run.tokenizer.decode(row.token_ids)]
        assert rows
        assert not any('"arguments": "' in subject.run.tokenizer.decode(row.token_ids) for row in rows)


@pytest.mark.field
def test_later_adapters_do_not_arrive(tmp_path):
    with tried(FAULTS["adapter of the same name not loaded again"], tmp_path, groups=1) as subject:
        assert not any(arrived(subject).values())


@pytest.mark.field
def test_ends_of_messages_are_not_seen(tmp_path):
    name = "end tokens hidden from attention as padding"
    for i, env in enumerate(FAULTS[name].envs):
        with tried(FAULTS[name], tmp_path / str(i), env) as subject:
            assert subject.run.sampler.chat.stop_token_ids == (doubles.END,)
            assert gap(subject) > 5e-4  # without the fault it is less than a hundredth of that
            row = max(subject.drawn.samples, key=lambda one: len(one.token_ids))
            place = row.token_ids.index(doubles.END)
            other = dataclasses.replace(row, token_ids=[*row.token_ids])
            other.token_ids[place - 1] = other.token_ids[place - 2]
            assert not torch.equal(*(subject.score([one])[0] for one in (row, other)))  # other tokens are seen


def test_masks_leave_out_end_tokens_alone():
    row = sample(mask=[False, False, False, True])  # ids 0, 1, 2, 3, of which 2 is the end token
    batch = packed([row, row])
    sees = doubles.ends_hidden(batch, [row, row]).inputs["attention_mask"][0, 0]
    assert sees[:4, :4].tolist() == [
        [True, False, False, False],
        [True, True, False, False],
        [True, True, True, False],
        [True, True, False, True],
    ]
    assert not sees[4:, :4].any()


def packed(rows):
    return make_batch(rows, "packed", torch.device("cpu"))


@pytest.mark.field
def test_gradients_are_clipped_several_times(tmp_path):
    name = "gradient clipped after each microbatch"
    found = []
    for fault in (FAULTS[name], without(FAULTS[name])):
        with tried(fault, tmp_path / str(len(found)), groups=16) as subject:
            run, minibatch = subject.run, minibatch_of(subject)
            assert len(forward_backward._microbatches(run, minibatch)) > 1
            forward_backward.accumulate(run, minibatch, None)
            found.append(torch.cat([p.grad.flatten() for p in run.policy.trainable.values()]))
    clipped, whole = found
    assert clipped.norm() <= 0.00101
    assert torch.nn.functional.cosine_similarity(clipped, whole, dim=0) < 0.9


@pytest.mark.field
def test_gradients_are_next_to_nothing(tmp_path):
    name = "gradient clipped before its scale is divided out"
    changes = []
    for fault in (FAULTS[name], without(FAULTS[name])):
        with tried(fault, tmp_path / str(len(changes)), groups=2) as subject:
            changes.append(changed_by_one_step(subject))
    assert changes[0] < 0.5 * changes[1]


@pytest.mark.field
def test_few_weights_move_in_bfloat16(tmp_path):
    with tried(FAULTS["AdamW on weights in bfloat16"], tmp_path, groups=2) as subject:
        weights = subject.run.policy.trainable.values()
        assert all(torch.equal(p, p.bfloat16().float()) for p in weights)
        before = [p.detach().clone() for p in weights]
        rate = changed_by_one_step(subject)
        assert rate < 5e-5
        moved = sum((p != q).sum().item() for p, q in zip(weights, before, strict=True))
        assert moved < 0.5 * sum(p.numel() for p in weights)
        assert all(torch.equal(p, p.bfloat16().float()) for p in weights)


def changed_by_one_step(subject):
    """Mean change of a trained number by one optimizer step."""
    run, minibatch = subject.run, minibatch_of(subject)
    before = torch.cat([p.detach().flatten() for p in run.policy.trainable.values()]).clone()
    forward_backward.accumulate(run, minibatch, None)
    for group in run.policy.sharding.optimizer.param_groups:
        group["lr"] = run.config.learning_rate or 3e-4
    run.policy.sharding.update()
    return (torch.cat([p.detach().flatten() for p in run.policy.trainable.values()]) - before).abs().mean().item()


@pytest.mark.field
def test_turns_do_not_end(tmp_path):
    name = "end token that was added and never trained"
    for i, env in enumerate(FAULTS[name].envs):
        with tried(FAULTS[name], tmp_path / str(i), env) as subject:
            assert gap(subject) < 1e-3  # engine and trainer have the same model
            ended = [row.token_ids[-1] == doubles.END for row in subject.drawn.samples]
        assert sum(ended) < len(ended) / 4


@pytest.mark.field
@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("answer's mark removed as a special token", {0.0}),
        ("threshold in percent for a score between zero and one", {0.0}),
    ],
)
def test_all_rewards_are_alike(name, found, tmp_path):
    with tried(FAULTS[name], tmp_path) as subject:
        assert set(rewards(subject)) == found


@pytest.mark.field
def test_right_answers_are_mostly_missed(tmp_path):
    with tried(FAULTS["first number of the reply taken for the answer"], tmp_path, groups=8) as subject:
        right = [row.metrics["lenient_correct"] for row in subject.drawn.samples]
        assert sum(rewards(subject)) < 0.2 * sum(right)
