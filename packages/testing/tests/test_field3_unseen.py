"""The unseen half of the third set of faults does what each entry says. It has been read since 2026-11-24.

Each test compares the fault with the plain code, and none runs the doctor.
"""

import asyncio
from types import SimpleNamespace

import pytest
import torch
from plumbob.rollout import Sampling
from plumbob.testing.faults import field3_unseen_doubles as doubles
from plumbob.testing.faults.field3_unseen import UNSEEN
from plumbob.testing.faults.field_trial import begin_step, config_of, gap, saved_and_trained, texts, tried

FAULTS = {fault.name: fault for fault in UNSEEN}


def test_requests_and_weights():
    logits = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    assert doubles.leaking(0.1)(None, [], logits)[0].tolist() == pytest.approx([0.9, 0.1])
    asked = Sampling(stop_token_ids=(7,))
    assert doubles.end_ignored([5], asked)[1].stop_token_ids == ()
    weights = {"a.k_proj.weight": torch.zeros(1), "a.v_proj.weight": torch.ones(1), "b": torch.ones(1)}
    swapped = doubles.values_for_keys(None, weights)
    assert [swapped[name].item() for name in weights] == [1, 0, 1]


def test_graders_tools_and_tasks():
    assert (doubles.distance(None, None, 1.0), doubles.distance(None, None, 0.0)) == (0, 1)
    assert doubles.bare_numbers(lambda reply, answer, strict: strict, "4 + 3", "7", strict=False)
    assert doubles.whole_page("next=1", "lookup", {}).startswith("next=1\n")
    assert doubles.as_numbers(None, "lookup", {"key": "4711", "text": "a"})[1] == {"key": "4711.0", "text": "a"}
    tasks = [SimpleNamespace(data=SimpleNamespace(chain=["k"] * n)) for n in (1, 8, 9)]
    assert doubles.hardest(tasks, "train") == tasks[1:]
    assert doubles.hardest(tasks, "eval") == tasks


def test_engine_and_trainer_differ(tmp_path):
    with tried(FAULTS["requests of a batch leak into each other"], tmp_path) as subject:
        assert gap(subject) > 1e-3  # a healthy run has 5e-7


def test_a_sync_swaps_keys_and_values(tmp_path):
    with tried(FAULTS["values loaded in the place of keys"], tmp_path, groups=1) as subject:
        run = subject.run
        served, trained = run.engine.served_weights(), run.policy.trainable
        differing = {n for n in trained if not torch.equal(served[n], trained[n].detach())}
        assert differing
        assert all("k_proj" in name or "v_proj" in name for name in differing)


def test_a_replica_keeps_the_first_weights(tmp_path):
    with tried(FAULTS["one of two replicas never gets new weights"], tmp_path, groups=1) as subject:
        prompt = subject.drawn.calls[0][0].prompt_ids
        asked = [Sampling(max_tokens=4, seed=seed) for seed in (2, 3)]
        before = [subject.generate([prompt], one)[0].logprobs for one in asked]
        with torch.no_grad():
            for parameter in subject.run.policy.trainable.values():
                parameter.mul_(1.05)
        subject.run.engine.update(subject.run.policy.sharding.stream())
        after = [subject.generate([prompt], one)[0].logprobs for one in asked]
        assert [a == b for a, b in zip(after, before, strict=True)] == [True, False]


def test_completions_do_not_end(tmp_path):
    with tried(FAULTS["end token ignored by the server"], tmp_path, groups=1) as subject:
        assert all(s.truncated for s in subject.drawn.samples)
        assert {s.num_sampled for s in subject.drawn.samples} == {96}


def test_the_reference_is_another_policy(tmp_path):
    with tried(FAULTS["reference policy is another checkpoint"], tmp_path, groups=1) as subject:
        policy, samples = subject.run.policy, subject.drawn.samples[:4]
        own = torch.cat(subject.score(samples))
        other = policy.reference_logprobs(samples, 1.0)
        assert (own - other).abs().mean() > 0.1
        assert torch.equal(torch.cat(subject.score(samples)), own)


def test_epsilon_is_set_before_an_update():
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.AdamW([weight], lr=1.0, weight_decay=0.0)
    doubles.large_epsilon(SimpleNamespace(optimizer=optimizer))
    weight.grad = torch.tensor([1e-3])
    optimizer.step()
    assert -0.02 < weight.item() < 0


def test_calculations_are_no_answers(tmp_path):
    with tried(FAULTS["grader accepts bare numbers only"], tmp_path, groups=4) as subject:
        traces = subject.drawn.traces
        assert sum(t.reward for t in traces) < 0.1 * len(traces)
        assert sum(t.metrics["lenient_correct"] for t in traces) >= 0


def test_pages_fill_the_context(tmp_path):
    with tried(FAULTS["web pages fill the context"], tmp_path) as subject:
        assert any(s.truncated for s in subject.drawn.samples)


def test_a_quota_ends_and_begins_again(tmp_path):
    with tried(FAULTS["search quota used up in each step"], tmp_path) as subject:
        results = [text for trace in subject.drawn.traces for text in texts(trace, "ToolMessage")]
        refused = sum(text.startswith("HTTP 429") for text in results)
        assert refused
        answered = [text for text in results if not text.startswith(("HTTP 429", "Error"))]
        assert len(answered) <= 40
        begin_step(1)  # nothing is sampled, and the quota is there again


def test_what_was_asked_for_is_not_answered_again(tmp_path):
    with tried(FAULTS["environment keeps the state of earlier rollouts"], tmp_path) as subject:
        results = [text for trace in subject.drawn.traces for text in texts(trace, "ToolMessage")]
        assert results.count("already visited") > len(results) / 4


def test_no_key_is_known(tmp_path):
    with tried(FAULTS["keys parsed as numbers"], tmp_path, groups=1) as subject:
        results = {text for trace in subject.drawn.traces for text in texts(trace, "ToolMessage")}
        assert results
        assert not any(text.startswith(("next=", "value=")) for text in results)


def test_only_long_chains_are_left(tmp_path):
    with tried(FAULTS["only the hardest tasks left by the filter"], tmp_path, groups=1) as subject:
        assert min(len(task.data.chain) for task in subject.run.tasks.train) == 8
        assert min(len(task.data.chain) for task in subject.run.tasks.held_out) < 8


def test_requests_are_greedy_after_an_evaluation(tmp_path, monkeypatch):
    from plumbob.trainer.training import train

    async def nothing(sampler: object, *rest: object) -> None:
        return None

    monkeypatch.setattr(train, "evaluate", nothing)
    with tried(FAULTS["greedy sampling stays on after an evaluation"], tmp_path, groups=1) as subject:
        prompt = subject.drawn.calls[0][0].prompt_ids

        def sampled() -> set[tuple[int, ...]]:
            return {
                subject.generate([prompt], Sampling(max_tokens=12, temperature=1.5, seed=k))[0].token_ids
                for k in range(6)
            }

        before = sampled()
        asyncio.run(train.evaluate(subject.run.sampler))
        assert len(before) > 1
        assert len(sampled()) == 1


def test_the_final_model_has_its_first_embeddings(tmp_path):
    with tried(FAULTS["final model has its first embeddings"], tmp_path, groups=1) as subject:
        saved, right = saved_and_trained(subject, tmp_path)
        differing = {n for n, t in saved.items() if not torch.allclose(t, right[n])}
        assert differing
        assert all("embed_tokens" in name or "lm_head" in name for name in differing)


def test_options_that_are_faults_are_in_the_settings():
    assert config_of(FAULTS["reference policy is another checkpoint"], "lookup").kl_beta == 0.5


pytestmark = pytest.mark.field  # the doubles of the first set are tested in every run of the quick suite, these in CI
