"""Probes on the real trainer: a healthy run passes, and faults of each stage are named. All of them: tools/bench/doctor.py."""

from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plumbob.rollout import Chat, Sample
from plumbob.testing.faults.catalogue import FAULTS, HEALTHY, Fault
from plumbob.testing.faults.rewards import rewarded
from plumbob.testing.vllm_double import Double, serving
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.diagnosis.causes import CAUSES, named, stands_for
from plumbob.trainer.diagnosis.findings import Finding
from plumbob.trainer.doctor import run_probes
from plumbob.trainer.doctor.probes.conditioning import _tool_spans
from plumbob.trainer.doctor.probes.parity import LeftOut, left_out
from plumbob.trainer.doctor.probes.signal import variance_shares
from plumbob.trainer.doctor.run_probes import PROBES, examine
from plumbob.trainer.doctor.subject import Subject, matched, undone

EARLY = ("tool tokens trained", "missing assistant header in the row", "evaluation and training parse differently")
"""Named from rollouts alone: a few, for the quick tests."""
LATE = {
    "stale engine": "sync",
    "normaliser wrong by the accumulation factor": "gradient",
    "learning rate far too low": "movement",
}
"""And the probe that names each, which alone is run."""
FAULTS_BY_NAME = {fault.name: fault for fault in FAULTS}
ONE_OF_EACH_CAUSE = [fault for fault in {fault.cause: fault for fault in FAULTS}.values() if fault.name not in EARLY]
"""All faults: tools/bench/doctor.py."""


@pytest.fixture
def subject_with(tmp_path, set_up_subject):
    """A subject of a few rollouts of lookup, with a fault in it."""
    with ExitStack() as stack:

        def make(fault: Fault | None = None, *, groups: int = 4, **settings) -> Subject:
            config: dict[str, Any] = {
                "num_generations": 4,
                "eval_examples": 4,
                **settings,
                **(fault.settings_in("lookup") if fault else {}),
            }
            subject = set_up_subject(TrainConfig(**config), tmp_path, groups)
            stack.callback(subject.close)
            if fault is not None:
                fault.inject(stack, subject.run)
            return subject

        yield make


@pytest.mark.slow
def test_a_healthy_run_passes_every_probe(subject_with):
    findings, run = examined(subject_with(peft=True))
    assert list(dict(findings)) == list(PROBES)
    assert [(f.check, f.evidence) for _, f in findings if f.verdict in ("fail", "error")] == []
    # And is as it was.
    assert not run.optimizer.state


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("env", HEALTHY)
def test_a_healthy_run_passes_in_full_training(subject_with, env):
    subject = subject_with(groups=8, env=env, **HEALTHY[env])
    weights = {name: p.detach().clone() for name, p in subject.run.policy.trainable.items()}
    findings, run = examined(subject)
    assert [(f.check, f.evidence) for _, f in findings if f.verdict in ("fail", "error")] == []
    assert all(torch.equal(p, weights[name]) for name, p in run.policy.trainable.items())


def examined(subject: Subject):
    return list(examine(subject, everything=True)), subject.run


@pytest.mark.slow
@pytest.mark.parametrize("name", EARLY)
def test_a_fault_of_rollouts_is_named_first(subject_with, name):
    fault = FAULTS_BY_NAME[name]
    causes = [finding.cause for _, finding in examine(subject_with(fault)) if finding.cause]
    assert causes == [fault.cause]


@pytest.mark.slow
@pytest.mark.parametrize("name", LATE)
def test_a_fault_of_engine_or_update_is_named(subject_with, name):
    fault = FAULTS_BY_NAME[name]
    causes = [finding.cause for finding in PROBES[LATE[name]](subject_with(fault)) if finding.cause]
    assert causes[0] == fault.cause


@pytest.mark.field
@pytest.mark.parametrize("fault", ONE_OF_EACH_CAUSE, ids=lambda fault: fault.name)
def test_a_fault_of_each_cause_is_named_first(subject_with, fault):
    """By its own id, or by a cause that includes it."""
    findings = [finding for _, finding in examine(subject_with(fault, groups=8, num_generations=8))]
    first = named(findings)[0]
    assert fault.cause in stands_for(first), [f for f in findings if f.cause]


def test_a_probe_that_breaks_off_is_no_pass_and_others_are_asked(monkeypatch):
    def broken(subject):
        yield Finding("first", "pass", "")
        raise KeyError("lost")

    def sound(subject):
        yield Finding("second", "pass", "")

    monkeypatch.setattr(run_probes, "PROBES", {"data": broken, "reward": sound})
    findings = list(examine(SimpleNamespace(is_drawn=True, agrees=True)))
    assert [(name, f.verdict) for name, f in findings] == [("data", "pass"), ("data", "error"), ("reward", "pass")]
    assert "KeyError: 'lost' (test_probes.py, line" in findings[1][1].evidence


def test_without_rollouts_nothing_else_is_asked(monkeypatch):
    def failed(subject):
        yield Finding("rollouts", "fail", "", "environment-fails")

    monkeypatch.setattr(run_probes, "PROBES", {"data": failed, "reward": failed})
    findings = list(examine(SimpleNamespace(is_drawn=False, agrees=True), everything=True))
    assert len(findings) == 1


def test_every_fault_has_a_cause_of_the_catalogue():
    assert {fault.cause for fault in FAULTS} <= set(CAUSES)
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 24


def row(reward: float, group: str, rewards: dict[str, float]) -> Sample:
    return Sample([0, 1], [False, True], [0.0, -1.0], reward, group, "", False, rewards=rewards)


@given(st.lists(st.tuples(st.integers(-8, 8), st.integers(-8, 8), st.sampled_from("ab")), min_size=2, max_size=12))
def test_variance_shares_sum_to_one(rewards):
    samples = [row(float(x + y), group, {"x": float(x), "y": float(y)}) for x, y, group in rewards]
    shares = variance_shares(samples)
    assert not shares or sum(shares.values()) == pytest.approx(1.0)


def test_a_component_that_differs_between_groups_only_has_no_share():
    samples = [row(x + y, str(y), {"x": x, "y": float(y)}) for x in (0.0, 1.0) for y in (0, 5)]
    assert variance_shares(samples) == {"x": pytest.approx(1.0)}


def test_tool_spans_are_what_stands_between_sampled_turns():
    mask = [False, False, True, True, False, True, False, False, True]
    sample = replace(row(0.0, "", {}), token_ids=[0] * 9, loss_mask=mask, sampling_logprobs=[0.0] * 9)
    assert _tool_spans(sample) == [(4, 5), (6, 8)]


def trace_of(ids: list[int], drawn: list[float]) -> SimpleNamespace:
    return SimpleNamespace(branches=[SimpleNamespace(token_ids=ids, logprobs=drawn)])


def test_samples_are_matched_to_traces_by_ids_then_by_what_was_drawn_then_in_order():
    traces: list[Any] = [trace_of([0, i], [0.0, -float(i)]) for i in range(5)]
    rows = [(4, -4.0), (9, -3.0), (0, 0.0), (8, -8.0), (1, -1.0)]
    samples = [replace(row(0.0, "", {}), token_ids=[0, i], sampling_logprobs=[0.0, lp]) for i, lp in rows]
    assert matched(samples, traces) == [4, 3, 0, 2, 1]
    same: list[Any] = [trace_of([0, 7], [0.0, 0.0])] * 2
    assert matched([replace(samples[0], token_ids=[0, 7])] * 2, same) == [0, 1]


def test_what_the_engine_leaves_out_is_told_from_a_mere_difference():
    torch.manual_seed(0)
    logits = torch.randn(4000, 8)
    trainer = logits.log_softmax(-1)

    def drawn_from(other: torch.Tensor) -> LeftOut:
        picked = torch.distributions.Categorical(logits=other).sample()[:, None]
        return left_out(other.log_softmax(-1).gather(-1, picked)[:, 0], trainer.gather(-1, picked)[:, 0], 1e-3)

    exact, noisy = drawn_from(logits), drawn_from(logits + 0.3 * torch.randn(4000, 8))
    assert not exact.certain and not exact.one_sided
    assert not noisy.one_sided and abs(noisy.mass) < 0.02
    cut = drawn_from(logits.masked_fill(logits < logits.topk(3).values[:, -1:], -torch.inf))
    left = 1 - trainer.exp().topk(3).values.sum(-1).mean().item()
    assert cut.certain and cut.one_sided and cut.mass == pytest.approx(left, abs=0.02)


def test_what_is_done_to_the_weights_is_undone(subject_with):
    run = subject_with().run
    before = {name: p.detach().clone() for name, p in run.policy.trainable.items()}
    with undone(run):
        for parameter in run.policy.trainable.values():
            parameter.grad = torch.ones_like(parameter)
        run.policy.sharding.update()
        assert not all(torch.equal(p, before[name]) for name, p in run.policy.trainable.items())
    assert all(torch.equal(p, before[name]) for name, p in run.policy.trainable.items())
    assert not run.optimizer.state and all(p.grad is None for p in run.policy.trainable.values())


@pytest.mark.slow
def test_where_no_reward_is_a_number_that_is_the_cause(subject_with):
    never = rewarded(correct=lambda task, trace, correct: float("nan"))
    fault = Fault("no reward is a number", "reward-not-finite", never)
    findings = [finding for _, finding in examine(subject_with(fault), everything=True)]
    assert {f.cause for f in findings if f.verdict != "pass"} == {"reward-not-finite"}


@pytest.mark.slow
@pytest.mark.parametrize("spared", [False, True], ids=["every rollout", "some rollouts"])
@pytest.mark.parametrize("where", ["forward pass", "engine", "template"])
def test_an_error_of_the_engine_is_never_called_one_of_the_environment(subject_with, monkeypatch, where, spared):
    """Whether torch fails in a forward pass, the engine raises what it may not raise, or a template cannot be rendered."""
    subject, count = subject_with(max_concurrent=4), 0

    def fails_at(owner, name):
        original = getattr(owner, name)

        def failing(*args, **kwargs):
            nonlocal count
            count += 1
            if count % 3 or not spared:
                raise RuntimeError("unsupported operation: some elements refer to a single memory location")
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, failing)

    if where == "template":
        fails_at(Chat, "suffix")
    else:
        fails_at(subject.run.engine, "_forward" if where == "forward pass" else "generate")
    findings = [finding for _, finding in examine(subject)]
    assert [f.cause for f in findings if f.cause] == ["engine-fails"]
    assert "unsupported operation" in findings[-1].evidence


@pytest.mark.slow
def test_prompts_at_the_limit_of_the_context_leave_room_for_what_is_drawn(subject_with):
    subject = subject_with(max_context=260, max_tokens=32)
    longest = max(len(calls[-1].prompt_ids) for calls in subject.drawn.calls)
    subject.run = replace(subject.run, config=replace(subject.run.config, max_context=longest))
    subject.run.engine.max_length = longest
    for name in ("conditioning", "sync"):
        assert list(PROBES[name](subject))


@pytest.mark.slow
@pytest.mark.parametrize("ignored", [False, True], ids=["healthy", "adapter ignored"])
def test_a_server_is_asked_as_the_engine_in_the_process_is(subject_with, ignored):
    """It draws other completions each time, scores prompts at temperature 1 only, and shows none of its weights."""
    double = Double()
    with serving(double) as url:
        subject = subject_with(engine="vllm", vllm_url=(url,), max_context=1024, peft=True, lora_r=8)
        double.faults.ignore_adapter = ignored
        findings = [f for name in ("conditioning", "parity", "sync") for f in PROBES[name](subject)]
    assert [f.cause for f in findings if f.verdict != "pass"][:1] == ["adapter-not-applied"] * ignored
