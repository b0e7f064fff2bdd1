"""The unseen half of the fourth set of faults does what each entry says. Rule writers must not read this file.

Each test compares the fault with the plain code, and none runs the doctor.
"""

from contextlib import ExitStack
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from plumbob.rollout import ParsedCall
from plumbob.rollout.tool_formats import named
from plumbob.testing.faults import field4_unseen_doubles as doubles
from plumbob.testing.faults.field2_parts import runs_of
from plumbob.testing.faults.field4_unseen import UNSEEN
from plumbob.testing.faults.field_trial import config_of, gap, texts, tried
from plumbob.trainer.policy import token_logprobs, token_scorer
from plumbob.trainer.training import forward_backward
from plumbob.trainer.training.forward_backward import accumulate
from plumbob.trainer.training.minibatches import make_minibatches

FAULTS = {fault.name: fault for fault in UNSEEN}


def test_names_of_tools_are_doubled():
    text = '<tool_call>\n{"name": "lookup", "arguments": {"key": "1"}}\n</tool_call>'
    with ExitStack() as stack:
        doubles.names_doubled(stack, "lookup")
        assert named("hermes").read(text, {"lookup": {}}).calls == (ParsedCall("lookuplookup", {"key": "1"}),)


def test_the_head_computes_in_half_precision():
    hidden, weight = torch.full((1, 2), 1.001), torch.tensor([[1.001, 0.0], [0.0, 0.5]])
    with ExitStack() as stack:
        doubles.head_in_half(stack, "lookup")
        rough, _ = token_scorer.score_tokens(hidden, weight, torch.tensor([0]), 1.0)
    exact, _ = token_logprobs.score_tokens(hidden, weight, torch.tensor([0]), 1.0)
    assert 1e-6 < (rough - exact).abs().item() < 1e-2


def test_graders_and_tasks():
    said = [SimpleNamespace(content=" amber"), SimpleNamespace(content="x")]
    task = SimpleNamespace(data=SimpleNamespace(answer="amber", id="lookup-eval-0-1"))
    assert doubles.first_message(task, SimpleNamespace(assistant_messages=said), 0.0) == 1.0
    assert doubles.wrong_ones_left_out(task, None, 1.0) == 1.0
    with pytest.raises(RuntimeError):
        doubles.wrong_ones_left_out(task, None, 0.0)


def test_the_reference_is_scored_at_temperature_one():
    assert config_of(FAULTS["reference scored at another temperature"], "lookup").temperature == 1.5


def test_documents_that_a_question_needs_are_missing(tmp_path):
    with tried(FAULTS["supporting documents missing from the corpus"], tmp_path, groups=1) as subject:
        assert not any(d.supporting for d in subject.run.tasks.train[0].data.documents)
        assert subject.run.tasks.train[0].data.documents


def test_completions_come_in_pairs(tmp_path):
    with tried(FAULTS["two workers draw the same completions"], tmp_path) as subject:
        first = [tuple(calls[0].completion.token_ids) for calls in subject.drawn.calls]
        assert len(set(first)) <= len(first) / 2


def test_later_prompts_lack_what_was_said(tmp_path):
    with tried(FAULTS["earlier turns taken out of later prompts"], tmp_path) as subject:
        assert gap(subject) > 1e-3
        assert any(len(texts(trace, "ToolMessage")) > 1 for trace in subject.drawn.traces)


def moved(fault, folder):
    """Name -> how far one optimizer step moves each trained tensor."""
    with tried(fault, folder, groups=2) as subject:
        run, samples = subject.run, subject.drawn.samples
        values = [1.0 if i % 2 else -1.0 for i in range(len(samples))]
        advantages = SimpleNamespace(values=values)
        (minibatch,) = make_minibatches(samples, advantages, run.config, run.world, count=1)
        accumulate(run, minibatch, None)
        before = {n: p.detach().clone() for n, p in run.policy.trainable.items()}
        for group in run.optimizer.param_groups:
            group["lr"] = 1e-3
        run.policy.sharding.update()
        return [(p.detach() - before[n]).abs().max().item() for n, p in run.policy.trainable.items()]


def test_half_of_the_tensors_do_not_move(tmp_path):
    sizes = moved(FAULTS["half of the layers in no optimizer group"], tmp_path)
    assert all(sizes[::2])
    assert not any(sizes[1::2])


def test_half_of_the_tensors_move_thirty_times_as_far(tmp_path):
    sizes = moved(FAULTS["matrices on a scheduler of their own"], tmp_path)
    assert min(sizes[::2]) > 10 * max(sizes[1::2])


def test_only_the_last_turn_has_an_advantage(tmp_path):
    seen, plain = [], forward_backward.policy_loss

    def recorded(inputs, objective):
        seen.append(inputs.advantages)
        return plain(inputs, objective)

    fault = FAULTS["advantages end at the last tool result"]
    with mock.patch.object(forward_backward, "policy_loss", recorded), tried(fault, tmp_path, groups=1) as subject:
        run, samples = subject.run, subject.drawn.samples
        values = SimpleNamespace(values=[1.0] * len(samples))
        (minibatch,) = make_minibatches(samples, values, run.config, run.world, count=1)
        accumulate(run, minibatch, None)
    assert sum(x.sum().item() for x in seen) == sum(len(runs_of(s.loss_mask)[-1]) for s in samples)


pytestmark = pytest.mark.field  # the doubles of the first set are tested in every run of the quick suite, these in CI
