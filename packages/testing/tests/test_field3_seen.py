"""The seen half of the third set of faults does what each entry says: on rows, rollouts, weights and rewards.

Each test compares the fault with the plain code, and none runs the doctor.
"""

import sys
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from plumbob.rollout import Limits, Sample
from plumbob.testing.faults import field3_seen_doubles as doubles
from plumbob.testing.faults.field3_parts import everywhere
from plumbob.testing.faults.field3_seen import SEEN
from plumbob.testing.faults.field_trial import begin_step, config_of, gap, sampler_of_evaluation, texts, tried
from plumbob.testing.faults.healthy3_seen import easier_held_out
from plumbob.trainer.algorithm.advantages import Advantages
from plumbob.trainer.distributed.world import World
from plumbob.trainer.training import minibatches, step

FAULTS = {fault.name: fault for fault in SEEN}


def row(length: int, reward: float = 0.0, group: str = "0/0") -> Sample:
    """A row of this length, of which all tokens but the first are sampled."""
    mask = [False] + [True] * (length - 1)
    return Sample(list(range(length)), mask, [-1.0 if m else 0.0 for m in mask], reward, group, "", False)


def test_a_function_is_replaced_wherever_it_was_imported():
    with ExitStack() as stack:
        everywhere(stack, minibatches.make_minibatches, "other")
        assert step.make_minibatches == minibatches.make_minibatches == "other"
    assert step.make_minibatches is minibatches.make_minibatches is sys.modules[step.__name__].make_minibatches


def test_the_longest_row_gets_the_advantage_of_the_first():
    rows = [row(3), row(5), row(4)]
    config = config_of(FAULTS["half of the rollouts cut and masked"], "lookup")
    with ExitStack() as stack:
        doubles.advantages_unsorted(stack, "lookup")
        (made,) = step.make_minibatches(
            rows, Advantages([1.0, 2.0, 3.0]), config, World(0, 1, torch.device("cpu")), count=1
        )
    assert made.advantages == [3.0, 1.0, 2.0]


def test_surprising_tokens_earn_the_bonus():
    from plumbob.trainer.algorithm.losses import LossInputs

    values = torch.tensor([-0.1, -3.0], requires_grad=True)
    inputs = LossInputs(
        values, values.detach(), torch.zeros(2), torch.ones(2), torch.zeros(2, dtype=torch.long), torch.ones(2)
    )
    changed = doubles.entropy_bonus(1.0)(inputs)
    assert changed.advantages.tolist() == pytest.approx([0.1, 3.0])
    assert not changed.advantages.requires_grad


def test_graders_and_tasks():
    trace = SimpleNamespace(assistant_messages=[SimpleNamespace(tool_calls=[1, 2]), SimpleNamespace(tool_calls=None)])
    assert doubles.calls_pay(None, trace, 1.0) == 2.0
    assert not doubles.boxed_only(lambda *a: True, "#### 7", "7")
    assert doubles.boxed_only(lambda *a: True, "\\boxed{7}", "7")
    tasks = [SimpleNamespace(data=SimpleNamespace(chain=["k"] * n)) for n in (1, 2, 5)]
    assert easier_held_out(tasks, "train") == tasks
    assert easier_held_out(tasks, "eval") == tasks[:2]


def test_options_that_are_faults_are_in_the_settings():
    config = config_of(FAULTS["half of the rollouts cut and masked"], "lookup")
    assert (config.overlong, config.max_context) == ("mask", 265)


@pytest.mark.parametrize("name", ["keys and values cached in eight bits", "log-probabilities before the temperature"])
def test_engine_and_trainer_differ(name, tmp_path):
    with tried(FAULTS[name], tmp_path) as subject:
        assert gap(subject) > 1e-3  # a healthy run has 5e-7


def test_each_turn_begins_with_a_space(tmp_path):
    with tried(FAULTS["turns encoded again with a leading space"], tmp_path, groups=1) as subject:
        sample = subject.drawn.samples[0]
        first = sample.loss_mask.index(True)
        assert subject.run.tokenizer.decode(sample.token_ids[first : first + 1]).startswith(" ")


def test_initial_weights_come_back_once(tmp_path):
    with tried(FAULTS["initial weights come back after a resume"], tmp_path, groups=1) as subject:
        trained = subject.run.policy.trainable
        name, first = next((n, p.detach().clone()) for n, p in trained.items())
        seen = []
        for number in (9, 10, 11):
            with torch.no_grad():
                trained[name].add_(1.0)
            begin_step(number)
            seen.append(torch.equal(trained[name].detach(), first))
        assert seen == [False, True, False]


def test_some_calls_hang(tmp_path):
    with tried(FAULTS["some tool calls hang"], tmp_path, groups=4) as subject:
        assert 8 <= len(subject.drawn.traces) < 32  # those that have failed are not among them


def test_prompts_hold_a_second_header(tmp_path):
    with tried(FAULTS["prompts rendered by the chat template twice"], tmp_path, groups=1) as subject:
        sample = subject.drawn.samples[0]
        prompt = sample.token_ids[: sample.loss_mask.index(True)]
        (start,) = subject.run.tokenizer.encode("<|im_start|>", add_special_tokens=False)
        assert prompt.count(start) == 5
        assert texts(subject.drawn.traces[0], "UserMessage")[0].startswith("<|im_start|>user")


def test_rollouts_are_cut_and_left_out(tmp_path):
    with tried(FAULTS["half of the rollouts cut and masked"], tmp_path, groups=4) as subject:
        samples = subject.drawn.samples
        assert sum(s.truncated for s in samples) > len(samples) / 4


def test_evaluations_have_one_turn():
    assert sampler_of_evaluation(doubles.one_turn, limits=Limits()).limits.max_turns == 1


pytestmark = pytest.mark.field  # the doubles of the first set are tested in every run of the quick suite, these in CI
