"""A game in which the environment is the user trains, from its id for verifiers to the weight update."""

import pytest
from plumbob.rollout import to_sample
from plumbob.testing.quick_runs import quick_config, traces
from plumbob.testing.upstream_style import FOLDER
from plumbob.trainer.policy.loading import load_tokenizer
from plumbob.trainer.run_files.run_directory import read_metrics
from plumbob.trainer.training.train import run


@pytest.mark.slow
@pytest.mark.parametrize("opens", ["false", "true"])
def test_a_game_trains_and_its_rows_are_exact(tmp_path, monkeypatch, capsys, opens):
    monkeypatch.syspath_prepend(FOLDER)
    settings = {"max_steps": 3, "max_tokens": 128, "eval_examples": 4, "model": "tiny-gsm8k"}
    config = quick_config(tmp_path, env="number-game", env_args=(f"opens={opens}", "guesses=3"), **settings)
    assert run(config) == 0
    metrics = read_metrics(tmp_path / "r")
    assert [row["step"] for row in metrics] == [1, 2, 3]
    for row in metrics:
        assert row["rollout/errored"] == 0 and row["rollout/turns"] > 2
        assert row["sync/parity"] < 1e-4 and row["sync/sampling_gap"] < 1e-4  # the trainer scores what was sampled
    assert any(row["groups/zero_signal_share"] < 1 for row in metrics)
    assert "generates tasks without end" in capsys.readouterr().err

    tokenizer = load_tokenizer("tiny-gsm8k")
    rollouts = traces(tmp_path / "r", 1)
    assert len(rollouts) == 16 and max(trace.num_turns for trace in rollouts) > 1
    for trace in rollouts:
        row = to_sample(trace, "g")
        assert row.num_sampled == sum(trace.calls[i].usage.completion_tokens for i in range(trace.num_turns))
        assert all((p < 0) or sampled for p, sampled in zip(row.sampling_logprobs, row.loss_mask, strict=True) if p)
        sampled = [node for node in trace.nodes if node.sampled]
        assert all(sum(node.mask) == len(node.logprobs) for node in sampled)
        text = tokenizer.decode(row.token_ids)
        said = [node.message.content for node in trace.nodes if not node.sampled]
        assert all(part in text for part in said)
        # What is not sampled is, word for word, what the template renders around the replies.
        context = tokenizer.decode([i for i, mask in zip(row.token_ids, row.loss_mask, strict=True) if not mask])
        assert context.count("<|im_start|>assistant\n") == len(sampled)
