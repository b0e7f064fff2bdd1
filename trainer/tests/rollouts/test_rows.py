"""From the bundled policy's rollouts to training rows: exact, and the context matters to what is trained."""

import asyncio
from dataclasses import replace

import pytest
import torch
from plumbob.rollout import Limits, Sampling, run_group, to_sample
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.inference.transformers.engine import TransformersEngine
from plumbob.trainer.policy.loading import load_model
from plumbob.trainer.policy.policy import Policy
from plumbob.trainer.rollouts.tasks import load_tasks


@pytest.fixture(scope="module")
def policy():
    return Policy(load_model("tiny"), TrainConfig(), torch.device("cpu"))


@pytest.fixture(scope="module")
def rollouts(policy, chat):
    """(what the engine saw and drew, turn by turn; the training row) of 32 rollouts of lookup."""
    engine = TransformersEngine(policy.engine_model(), max_slots=24)
    tasks = load_tasks(TrainConfig(eval_examples=0)).train[:8]

    class Recorder:
        def __init__(self):
            self.turns = []

        async def generate(self, prompt_ids, sampling):
            completion = await engine.generate(prompt_ids, sampling)
            self.turns.append((list(prompt_ids), completion))
            return completion

    async def run():
        recorders, jobs = [], []
        for i, task in enumerate(tasks):
            for j in range(4):
                recorders.append(Recorder())
                sampling = Sampling(max_tokens=64, seed=100 * i + j)
                jobs.append(run_group(task, recorders[-1], chat, sampling, Limits(), 1))
        return recorders, [trace for group in await asyncio.gather(*jobs) for trace in group]

    recorders, traces = asyncio.run(run())
    assert all(trace.ok for trace in traces)
    return [(recorder.turns, to_sample(trace, "g")) for recorder, trace in zip(recorders, traces, strict=True)]


def test_a_row_is_what_the_engine_saw_plus_what_it_drew(rollouts):
    assert max(len(turns) for turns, _ in rollouts) >= 3
    for turns, row in rollouts:
        prompt, completion = turns[-1]
        assert row.token_ids == [*prompt, *completion.token_ids]
        mask, logprobs = [False] * len(row.token_ids), [0.0] * len(row.token_ids)
        for prompt, completion in turns:
            assert row.token_ids[: len(prompt)] == prompt
            for i, (token, logprob) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
                assert row.token_ids[len(prompt) + i] == token
                mask[len(prompt) + i], logprobs[len(prompt) + i] = True, logprob
        assert row.loss_mask == mask
        assert row.sampling_logprobs == logprobs


def test_the_trainer_scores_what_the_engine_drew(policy, rollouts):
    rows = [row for _, row in rollouts]
    with torch.no_grad():
        own = policy.score(rows, 1.0).logprobs
    drawn = torch.tensor([lp for r in rows for lp, m in zip(r.sampling_logprobs, r.loss_mask, strict=True) if m])
    assert (own - drawn).abs().mean() < 1e-5
    assert (own - drawn).abs().max() < 1e-3


def test_other_prompts_and_other_tool_results_change_the_scores(policy, chat, rollouts):
    """On real rows: another start key, and another tool result, each change what the policy thinks of the calls."""
    digits = [chat.tokenizer.convert_tokens_to_ids(str(d)) for d in range(10)]
    turns, row = max(rollouts, key=lambda r: len(r[0]))
    with torch.no_grad():
        before = policy.score([row], 1.0).logprobs
        first = len(turns[0][1].token_ids)
        bounds = [(0, len(turns[0][0])), (len(turns[0][0]) + first, len(turns[1][0]))]
        for (start, end), affected in zip(bounds, (slice(0, first), slice(first, None)), strict=True):
            ids = list(row.token_ids)
            for t in range(start, end):
                if ids[t] in digits:
                    ids[t] = digits[(digits.index(ids[t]) + 3) % 10]
            assert ids != row.token_ids
            after = policy.score([replace(row, token_ids=ids)], 1.0).logprobs
            assert (after[affected] - before[affected]).abs().max() > 1.0
            assert torch.equal(after[: affected.start or 0], before[: affected.start or 0])
