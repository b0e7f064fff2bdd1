"""The unseen half of the second set of faults does what each entry says. Rule writers must not read this file.

Each test compares the fault with the plain code, and none runs the doctor.
"""

import asyncio
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from plumbob.rollout import Completion, Sample, Sampling
from plumbob.testing.faults import field2_unseen_doubles as doubles
from plumbob.testing.faults import healthy2_unseen as healthy
from plumbob.testing.faults.field2_parts import before_updates
from plumbob.testing.faults.field2_unseen import UNSEEN
from plumbob.testing.faults.field_trial import begin_step, config_of, gap, texts, tried
from plumbob.trainer.algorithm import advantages
from plumbob.trainer.algorithm.losses import LossInputs, Objective, policy_loss
from plumbob.trainer.distributed.base import Replicated
from plumbob.trainer.policy.token_scorer import make_batch

FAULTS = {fault.name: fault for fault in UNSEEN}


def row(mask: list[bool], reward: float = 0.0, group: str = "0/0") -> Sample:
    """A row with the ids 0, 1, 2, ... and this loss mask."""
    return Sample(list(range(len(mask))), mask, [-1.0 if m else 0.0 for m in mask], reward, group, "", False)


def test_rows_are_filled_up_in_the_loss():
    filled = doubles.padding_trained(row([False, True, True]), SimpleNamespace())
    assert len(filled.token_ids) == doubles.PADDED_TO
    assert filled.loss_mask == [False] + [True] * (doubles.PADDED_TO - 1)
    assert set(filled.token_ids[3:]) == {2}


def test_only_the_first_turn_is_in_the_loss():
    cut = doubles.first_turn_only(row([False, True, True, False, True, True]), SimpleNamespace())
    assert cut.loss_mask == [False, True, True, False, False, False]


def test_last_targets_are_the_next_rows_first_ids():
    rows = [row([False, True, True]), row([False, False, False, True])]
    plain = make_batch(rows, "packed", torch.device("cpu"))
    rolled = doubles.targets_rolled(plain, rows)
    assert plain.targets.tolist() == [1, 2, 3]
    assert rolled.targets.tolist() == [1, 0, 0]


def test_positions_jump_by_the_padding_of_a_row():
    long, short = row([False, False, True, True, True]), row([False, False, True])
    assert [p.tolist() for p in doubles.padded_positions([long, short])] == [[0, 1, 2, 3, 4], [0, 1, 4]]
    assert doubles.padded_positions([short])[0].tolist() == [0, 1, 2]


def test_logits_of_a_nucleus_and_of_early_ends():
    logits = torch.tensor([[3.0, 1.0, 0.0, -1.0]])
    kept = doubles.nucleus(0.8)(None, [], logits) > -100
    assert kept.tolist() == [[True, False, False, False]]
    assert (doubles.nucleus(0.9)(None, [], logits) > -100).tolist() == [[True, True, False, False]]
    early, late = (SimpleNamespace(token_ids=[1] * n, sampling=Sampling(stop_token_ids=(2,))) for n in (3, 12))
    changed = doubles.no_early_end(12)(None, [early, late], logits.repeat(2, 1))
    assert (changed < -100).tolist() == [[False, False, True, False], [False] * 4]


def test_completions_and_results():
    cut = doubles.cut_with_an_end(Completion((1, 2), (-1.0, -1.0), "length"), [1], Sampling(stop_token_ids=(7,)))
    assert (cut.token_ids, cut.logprobs, cut.finish_reason) == ((1, 7), (-1.0, 0.0), "stop")
    assert doubles.middle_cut("x" * 64, "search", {}) == "x" * 64
    assert len(doubles.middle_cut("x" * 400, "search", {})) < 64


def test_a_lone_reward_has_a_huge_advantage():
    rewards = [[1, 0, 0, 0], [1, 1, 0, 0]]
    samples = [row([False, True], r, f"0/{g}") for g, group in enumerate(rewards) for r in group]
    with ExitStack() as stack:
        doubles.singletons_divided(stack, "lookup")
        values = advantages.step_advantages(samples, advantages.AdvantageSettings()).values
    assert values[0] == pytest.approx(0.75 / 1.6e-4)
    assert values[1:] == [-0.25, -0.25, -0.25, 0.5, 0.5, -0.5, -0.5]


def test_ratio_of_the_reference_clips_what_the_right_ratio_keeps():
    values, reference = torch.tensor([-1.0, -1.0]), torch.tensor([-2.0, -1.0])
    inputs = LossInputs(
        values, values, torch.ones(2), torch.ones(2), torch.zeros(2, dtype=torch.long), torch.ones(2), reference
    )
    objective = Objective("dr_grpo", 0.2, 0.2, kl_beta=0.001)
    assert policy_loss(inputs, objective).clipped_high == 0
    assert policy_loss(doubles.from_reference(inputs), objective).clipped_high == 1


def test_without_its_state_adam_takes_a_full_step_at_every_gradient():
    def moved(*, lost: bool) -> float:
        weight = torch.nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.AdamW([weight], lr=0.1, weight_decay=0.0)
        path = 0.0
        for sign in (1.0, -1.0) * 4:
            weight.grad = torch.tensor([sign])
            if lost:
                doubles.state_lost(SimpleNamespace(optimizer=optimizer))
            before = weight.item()
            optimizer.step()
            path += abs(weight.item() - before)
        return path

    assert moved(lost=True) == pytest.approx(0.8, abs=1e-4)
    assert moved(lost=False) < 0.4


def test_changes_before_updates_are_called(monkeypatch):
    seen = []
    monkeypatch.setattr(Replicated, "update", lambda self: 1.0)
    with ExitStack() as stack:
        before_updates(seen.append)(stack, "lookup")
        sharding = SimpleNamespace()
        assert Replicated.update(sharding) == 1.0
    assert seen == [sharding]


def test_graders_see_other_parts():
    def message(kind: str, text: str) -> SimpleNamespace:
        return SimpleNamespace(message=type(kind, (), {"content": text})())

    task = SimpleNamespace(data=SimpleNamespace(answer="amber"))
    trace = SimpleNamespace(nodes=[message("ToolMessage", "value=amber"), message("AssistantMessage", "apple")])
    assert doubles.anywhere(task, trace, 0.0) == 1
    assert doubles.anywhere(task, SimpleNamespace(nodes=trace.nodes[1:]), 0.0) == 0
    right = doubles.first_number(lambda *a: True, "3 + 4 = 7\n#### 7", "7")
    assert (right, doubles.first_number(lambda *a: False, "7", "7")) == (False, True)


def test_options_that_are_faults_are_in_the_settings():
    assert config_of(FAULTS["fewer turns than hops"], "lookup").max_turns == 4


@pytest.mark.field
@pytest.mark.parametrize(
    "name",
    [
        "padding of short rows in the loss",
        "targets roll over the ends of packed rows",
        "positions of completions shifted by the batch's padding",
        "engine attends to the last 128 tokens only",
        "end token forbidden in the first tokens",
    ],
)
def test_engine_and_trainer_differ(name, tmp_path):
    with tried(FAULTS[name], tmp_path) as subject:
        assert gap(subject) > 1e-3  # a healthy run has 5e-7


@pytest.mark.field
def test_nucleus_is_invisible_in_log_probabilities(tmp_path):
    with tried(FAULTS["top-p of 0.8 in the server with raw log-probabilities"], tmp_path) as subject:
        assert gap(subject) < 1e-3
        unlikely = [x for s in subject.drawn.samples for x in s.sampled_logprobs if x < -1.7]
        assert not unlikely  # a token outside of the nucleus of 0.8 has a probability below 0.2


@pytest.mark.field
def test_a_layer_is_dropped_from_its_step_on(tmp_path):
    with tried(FAULTS["one layer is no longer synced from the middle of the run"], tmp_path, groups=1) as subject:
        run = subject.run
        differing = []
        for number in (3, 4):
            begin_step(number)
            with torch.no_grad():
                for parameter in run.policy.trainable.values():
                    parameter.mul_(1.01)
            run.engine.update(run.policy.sharding.stream())
            served, trained = run.engine.served_weights(), run.policy.trainable
            differing.append({n for n in trained if not torch.equal(served[n], trained[n].detach())})
        assert not differing[0]
        assert differing[1]
        assert all("layers.1." in name for name in differing[1])


@pytest.mark.field
def test_first_numbers_are_seldom_the_answer(tmp_path):
    rewards = {}
    for fault in (FAULTS["grader reads the first number"], FAULTS["cut completions reported as finished"]):
        with tried(fault, tmp_path / str(len(rewards)), groups=4) as subject:
            traces = subject.drawn.traces
            rewards[fault.name] = sum(t.reward for t in traces) / len(traces)
            if "cut" in fault.name:
                assert max(s.num_sampled for s in subject.drawn.samples) == 24
                assert gap(subject) > 0.01
                assert not any(s.truncated for s in subject.drawn.samples)
    assert all(mean < 0.2 for mean in rewards.values()), rewards


@pytest.mark.field
def test_tools_answer_with_results_of_other_calls(tmp_path):
    with tried(FAULTS["tools answer with the result of the previous call"], tmp_path) as subject:
        wrong = total = 0
        for trace, task in zip(subject.drawn.traces, subject.drawn.tasks, strict=True):
            for text in texts(trace, "ToolMessage"):
                total += 1
                wrong += text not in task.data.table.values() and not text.startswith("unknown")
        assert total > 10
        assert wrong > 0.1 * total  # those of other tasks alone: many calls of the same task are before it


@pytest.mark.field
def test_long_results_lose_their_middle(tmp_path):
    with tried(FAULTS["tool results cut in the middle"], tmp_path, groups=1) as subject:
        results = [text for trace in subject.drawn.traces for text in texts(trace, "ToolMessage")]
        assert sum("...(truncated)..." in text for text in results) > len(results) / 4


@pytest.mark.field
def test_rollouts_end_at_four_turns(tmp_path):
    with tried(FAULTS["fewer turns than hops"], tmp_path) as subject:
        turns = [trace.num_turns for trace in subject.drawn.traces]
        assert max(turns) == 4
        assert any(s.truncated for s in subject.drawn.samples)
        hops = [len(task.data.chain) for task in subject.drawn.tasks]
        assert max(hops) > 3
        assert not any(t.reward for t, n in zip(subject.drawn.traces, hops, strict=True) if n > 3)


@pytest.mark.field
def test_evaluations_see_the_first_weights(tmp_path, monkeypatch):
    from plumbob.trainer.training import train

    with tried(FAULTS["fewer turns than hops"], tmp_path, groups=1) as subject, ExitStack() as stack:
        run = subject.run
        served = run.engine.served_weights()
        name, first = next((n, t.detach().clone()) for n, t in served.items())

        async def seen(sampler: object, *rest: object) -> torch.Tensor:
            return run.engine.served_weights()[name].detach().clone()

        monkeypatch.setattr(train, "evaluate", seen)
        doubles.initial_evaluations(stack, run)
        with torch.no_grad():
            served[name].add_(1.0)
        assert torch.equal(asyncio.run(train.evaluate(run.sampler, run.world, "reward")), first)
        assert torch.equal(run.engine.served_weights()[name], first + 1.0)


def test_healthy_changes():
    errors = [healthy.seldom_an_error("1", "lookup", {"key": str(k)}) != "1" for k in range(1000, 1600)]
    assert 8 < sum(errors) < 40
    tasks = [SimpleNamespace(data=SimpleNamespace(chain=["k"] * n)) for n in (1, 4, 6)]
    assert healthy.harder_held_out(tasks, "train") == tasks
    assert healthy.harder_held_out(tasks, "eval") == tasks[1:]


pytestmark = pytest.mark.field  # the doubles of the first set are tested in every run of the quick suite, these in CI
