"""The seen half of the fifth set of faults does what each entry says.

Each test compares the fault with the plain code, and none runs the doctor.
"""

from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from plumbob.rollout import Sample, Sampling
from plumbob.testing.faults import field5_seen_doubles as doubles
from plumbob.testing.faults.field5_seen import SEEN
from plumbob.testing.faults.field_trial import config_of, gap, texts, tried
from plumbob.trainer.algorithm import advantages
from plumbob.trainer.rollouts import collect

FAULTS = {fault.name: fault for fault in SEEN}


def said(*messages: tuple[str, list[str] | None], state: object = None) -> SimpleNamespace:
    """A trace of these assistant messages: (text, calls)."""
    turns = [SimpleNamespace(content=text, tool_calls=calls) for text, calls in messages]
    return SimpleNamespace(assistant_messages=turns, last_reply=turns[-1].content, state=state)


def test_graders():
    task = SimpleNamespace(data=SimpleNamespace(answer="amber", chain=["1", "2"]))
    assert doubles.gold_in_tags(task, said(("<answer>amber</answer>", None)), 1.0) == 0.0
    assert doubles.needs_text(task, said(("", ["call"]), ("amber", None)), 1.0) == 0.0
    assert doubles.needs_text(task, said(("amber", None)), 1.0) == 1.0
    assert doubles.has_form(task, said(("#### 3", None)), 0.0) == 1.0
    assert doubles.quarters(task, said(("", None), state=SimpleNamespace(links_followed=1)), 0.0) == 0.25


@pytest.mark.parametrize("grade", [doubles.judge_sampled, doubles.seconds_taken_off])
def test_the_same_reply_earns_several_rewards(grade):
    assert len({grade(None, None, 1.0) for _ in range(50)}) > 1


def test_every_third_step_begins_at_the_first_task(monkeypatch):
    monkeypatch.setattr(collect, "next_groups", lambda environments, cursor, count: cursor)
    with ExitStack() as stack:
        doubles.restarted(stack, "lookup")
        assert [collect.next_groups((), 4 * step, 4) for step in range(4)] == [0, 4, 0, 4]


def test_all_but_the_best_rollout_keep_their_rewards():
    samples = [Sample([0, 1], [False, True], [0.0, -1.0], r, "0/0", "", False) for r in (0.0, 1.0, 0.5)]
    with ExitStack() as stack:
        doubles.best_of_group_only(stack, "lookup")
        found = advantages.compute_advantages(samples)
    assert found.values == [0.0, 0.5, 0.5]


def test_gradients_overflow():
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.tensor([1e-3, 0.0])
    doubles.overflowing(SimpleNamespace(trainable={"a": parameter}))
    assert parameter.grad.tolist() == [float("inf"), 0.0]


def test_prompts_weights_and_arguments():
    sampling = Sampling()
    assert doubles.few_likely_tokens([5], sampling)[1].top_k == 3
    weights = doubles.norms_plus_one(None, {"input_layernorm.weight": torch.ones(1), "q_proj.weight": torch.ones(1)})
    assert [w.item() for w in weights.values()] == [2, 1]
    assert doubles.arguments_cut(len, "lookup", {"key": "1234", "top_k": 3}) == (len, {"key": "123", "top_k": 3})


@pytest.mark.field
@pytest.mark.parametrize(
    "name",
    [
        "top-k of the generation config",
        "logits divided by the temperature twice",
        "rotary embeddings scaled in the engine only",
        "norm weights arrive one too high",
    ],
)
def test_engine_and_trainer_differ(name, tmp_path):
    with tried(FAULTS[name], tmp_path) as subject:
        assert gap(subject) > 5e-3


@pytest.mark.field
def test_dropout_is_on_with_gradients_alone(tmp_path):
    with tried(FAULTS["dropout of the checkpoint on in training"], tmp_path, groups=1) as subject:
        policy, rows = subject.run.policy, subject.drawn.samples[:2]
        once, again = (policy.score(rows, 1.0).logprobs for _ in range(2))
        assert not torch.equal(once, again)
        with torch.no_grad():
            assert torch.equal(policy.score(rows, 1.0).logprobs, policy.score(rows, 1.0).logprobs)


@pytest.mark.field
def test_replies_have_sixteen_tokens_and_tools_get_short_keys(tmp_path):
    with tried(FAULTS["sixteen tokens by the server's default"], tmp_path / "a", groups=1) as subject:
        assert all(sample.num_sampled <= 16 and sample.truncated for sample in subject.drawn.samples)
    with tried(FAULTS["last character of tool arguments lost"], tmp_path / "b", groups=1) as subject:
        results = [text for trace in subject.drawn.traces for text in texts(trace, "ToolMessage")]
    assert results
    assert all("unknown key" in text for text in results)


def test_the_temperature_is_not_one():
    assert config_of(FAULTS["logits divided by the temperature twice"], "lookup").temperature == 1.4
