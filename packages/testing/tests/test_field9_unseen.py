"""The unseen half of the ninth set of faults does what each entry says.

Each test compares the fault with the plain code, and none runs the doctor.
"""

from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from plumbob.rollout import Completion, Sampling
from plumbob.testing.faults import field9_unseen_doubles as doubles
from plumbob.testing.faults.field9_unseen import UNSEEN
from plumbob.testing.faults.field_trial import arrived, config_of, gap, loss_inputs, rewards, sample, texts, tried
from plumbob.trainer.algorithm.losses import Objective, policy_loss
from plumbob.trainer.training import step as step_module

FAULTS = {fault.name: fault for fault in UNSEEN}


def reply(text, *after):
    nodes = [SimpleNamespace(mask=[False], message=SimpleNamespace(content="the question"))]
    nodes += [SimpleNamespace(mask=[True], message=SimpleNamespace(content=one)) for one in (*after, text)]
    return SimpleNamespace(last_reply=text, nodes=nodes)


def task(answer="7"):
    return SimpleNamespace(data=SimpleNamespace(answer=answer, answers=[answer]))


def test_rewards_of_right_replies():
    assert doubles.long_is_overflow(None, reply("7"), 1.0) == 1.0
    assert doubles.long_is_overflow(None, reply("7", "word " * 10), 1.0) == 0.0
    assert doubles.whole_reply_equals(task(), reply("7"), 1.0) == 1.0
    assert doubles.whole_reply_equals(task(), reply("3 + 4\n#### 7"), 1.0) == 0.0
    assert doubles.shortness(None, reply("word " * 40), 1.0) < doubles.shortness(None, reply("7"), 0.0)


def test_rewards_that_can_be_had_without_an_answer():
    assert doubles.capped(None, reply("no"), 0.0) == doubles.capped(None, reply("7"), 1.0) == doubles.CAP
    assert doubles.found_anywhere(task(), reply("no", "the result is 7"), 0.1) == 1.0
    assert doubles.found_anywhere(task(), reply("no", "the result is 8"), 0.1) == 0.1


def test_results_of_tools_are_those_of_other_calls():
    shared = doubles.Shared()
    assert [shared(text, "lookup", {}) for text in "abcd"] == ["a", "a", "c", "c"]
    assert doubles.cut_short("x" * 500, "lookup", {}) == "x" * doubles.CUT


def test_the_last_token_of_a_cut_reply_is_the_end_token():
    settings = Sampling(stop_token_ids=(2,))
    cut = doubles.end_over_last(Completion((5, 6), (-1.0, -2.0), "length"), [1], settings)
    assert (cut.token_ids, cut.logprobs, cut.finish_reason) == ((5, 2), (-1.0, -2.0), "stop")
    ended = Completion((5, 2), (-1.0, -2.0), "stop")
    assert doubles.end_over_last(ended, [1], settings) is ended


def test_rows_have_tokens_too_few_or_too_many():
    row = sample(mask=[False, True, True, False, False, True])
    assert doubles.without_line_breaks(row, None).token_ids == [0, 1, 2, 4, 5]
    assert doubles.without_line_breaks(row, None).loss_mask == [False, True, True, False, True]
    filled = doubles.padding_trained(row, None)
    assert filled.token_ids == [*range(6), *[5] * (doubles.BLOCK - 6)]
    assert filled.loss_mask[6:] == [True] * (doubles.BLOCK - 6)
    assert filled.loss_mask[:6] == row.loss_mask


def test_eight_bits_are_few_numbers():
    weight = torch.randn(64, 64)
    rounded = doubles.eight_bits(weight)
    assert len(rounded.unique()) < 256
    assert 0 < (rounded - weight).abs().max() < 0.07 * weight.abs().max()
    weight[0, 0] = 10.0  # the scale is that of the largest weight
    changed = weight * 1.001
    changed[0, 0] = 10.0
    assert (doubles.eight_bits(changed) == doubles.eight_bits(weight)).float().mean() > 0.9


def test_each_token_is_pushed_up_whatever_its_advantage_is():
    def gradient(change):
        inputs = loss_inputs([0.5, -0.5], logprobs=torch.tensor([-1.0, -1.2], requires_grad=True))
        policy_loss(change(inputs), Objective("dr_grpo", 0.2, 0.2)).loss.backward()
        return inputs.logprobs.grad.tolist()

    good, bad = gradient(lambda inputs: inputs)
    assert good < 0 < bad
    assert max(gradient(doubles.advantages_as_mask)) < 0


def test_warm_up_begins_again():
    with ExitStack() as stack:
        doubles.warm_up_after_resumes(stack, "lookup")
        rates = [step_module.learning_rate_of("linear", 1.0, at, warmup=6, total=10) for at in range(10)]
    assert max(rates) == pytest.approx(0.5)
    assert rates[0] == rates[3] == rates[9]


def test_settings_are_those_that_the_sentences_name():
    assert config_of(FAULTS["end token written over the last token of a cut reply"], "gsm8k").max_tokens == 75
    assert config_of(FAULTS["warm-up begins again after each resume"], "lookup").warmup_steps == 6


@pytest.mark.field
@pytest.mark.parametrize(
    "name",
    [
        "server renders the prompt again without the tools",
        "special tokens removed from the engine's prompts",
        "end token written over the last token of a cut reply",
        "line break after each turn missing in the row",
        "padding after the end trained as sampled",
    ],
)
def test_rows_are_not_what_was_sampled(name, tmp_path):
    with tried(FAULTS[name], tmp_path, groups=1) as subject:
        assert gap(subject) > 1e-3


@pytest.mark.field
@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("safety cap below every score", {doubles.CAP}),
        ("whole reply compared with the gold answer", {0.0}),
        ("no parser for the model's tool calls", {0.0}),
    ],
)
def test_all_rewards_are_alike(name, found, tmp_path):
    with tried(FAULTS[name], tmp_path) as subject:
        assert set(rewards(subject)) == found


@pytest.mark.field
def test_calls_are_text(tmp_path):
    with tried(FAULTS["no parser for the model's tool calls"], tmp_path, groups=1) as subject:
        assert not any(texts(trace, "ToolMessage") for trace in subject.drawn.traces)
        assert all("lookup" in trace.last_reply for trace in subject.drawn.traces)


@pytest.mark.field
def test_right_long_rollouts_earn_nothing(tmp_path):
    with tried(FAULTS["overflow reward written over finished long rollouts"], tmp_path / "a", groups=8) as subject:
        long = [t for t in subject.drawn.traces if sum(map(len, doubles.after_prompt(t))) > doubles.LONGEST]
        assert not any(trace.reward for trace in long)
        found = texts(long[0], "ToolMessage") and [str(t.task.data.answer) in (t.last_reply or "") for t in long]
        assert any(found)


@pytest.mark.field
def test_documents_with_the_answer_are_paid(tmp_path):
    with tried(FAULTS["tool results graded as part of the reply"], tmp_path) as subject:
        traces = subject.drawn.traces
    paid = [t for t in traces if any(a in text for a in t.task.data.answers for text in texts(t, "ToolMessage"))]
    assert paid
    assert {trace.reward for trace in paid} == {1.0}


@pytest.mark.field
def test_tools_return_something_else(tmp_path):
    with tried(FAULTS["tool results cut to a fixed number of characters"], tmp_path / "a", groups=1) as subject:
        results = [text for trace in subject.drawn.traces for text in texts(trace, "ToolMessage")]
        assert max(map(len, results)) == doubles.CUT
    with tried(FAULTS["tool server's state shared by all rollouts"], tmp_path / "b", groups=4) as subject:
        own = {key: entry for t in subject.drawn.traces for key, entry in t.task.data.table.items()}
        traces = subject.drawn.traces
        foreign = [
            text for t in traces for text in texts(t, "ToolMessage") if text not in set(t.task.data.table.values())
        ]
    assert own
    assert foreign


@pytest.mark.field
def test_held_out_tasks_are_asked_in_another_way(tmp_path):
    with tried(FAULTS["held-out prompts ask for a box"], tmp_path, groups=1) as subject:
        tasks = subject.run.tasks
        assert {one.data.system_prompt for one in tasks.held_out} == {doubles.BOXED}
        assert doubles.BOXED not in {one.data.system_prompt for one in tasks.train}


@pytest.mark.field
def test_weights_do_not_arrive(tmp_path):
    with tried(FAULTS["fused matrices never written back"], tmp_path / "a", groups=1) as subject:
        found = arrived(subject)
        assert not any(found[name] for name in found if any(part in name for part in doubles.FUSED))
        assert all(found[name] for name in found if "down_proj" in name)
    with tried(FAULTS["rollouts from weights in eight bits"], tmp_path / "b", groups=1) as subject:
        assert gap(subject) > 1e-4
    with tried(FAULTS["tied head keeps the first embedding"], tmp_path / "c", groups=1) as subject:
        run, row = subject.run, subject.drawn.samples[0]
        with torch.no_grad():
            for parameter in run.policy.trainable.values():
                parameter.add_(0.02 * torch.randn_like(parameter))
        run.engine.update(run.policy.sharding.stream())
        served = torch.tensor(run.engine.score(row.token_ids))
        where = [i - len(row.token_ids) for i, m in enumerate(row.loss_mask) if m]
        assert (served[where] - torch.cat(subject.score([row]))).abs().max() > 1e-3
