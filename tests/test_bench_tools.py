"""The rollouts that TRL's fastest arm plays: tools/bench/tools_step.py."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools" / "bench"))

TABLE = json.dumps({"1234": "next=5678", "5678": "value=amber"})


class Scripted:
    """A GRPOTrainer whose model follows the links; its rollout number 1 answers at once."""

    num_generations, max_completion_length = 2, 200

    def __init__(self, tokenizer):
        self.tokenizer, self.prompts = tokenizer, []

    def _generate_single_turn(self, prompts, images, fields, generations):
        self.prompts.append([self.tokenizer.decode(ids) for ids in prompts])
        ids = [self.tokenizer(self.reply(i, text))["input_ids"] for i, text in enumerate(self.prompts[-1])]
        return ids, [[-0.5] * len(x) for x in ids]

    def reply(self, i, text):
        key = "5678" if "next=5678" in text else "1234"
        first = len(self.prompts) == 1
        if "value=amber" in text or (first and i == 1):
            return "amber<|im_end|>"
        return f'<tool_call>{{"name": "lookup", "arguments": {{"key": "{key}"}}}}</tool_call><|im_end|>'


@pytest.mark.trl
def test_sampled_tokens_are_marked_and_tools_are_answered_in_the_templates_own_words():
    templates = pytest.importorskip("trl.chat_template_utils")
    from plumbob.trainer.policy.loading import load_tokenizer
    from tools_step import concurrent_rollouts

    reader = load_tokenizer("tiny")
    reader.response_template = templates.qwen3_template
    trainer = Scripted(reader)
    prompt = [{"role": "user", "content": "Start key: 1234", "table": TABLE}]
    out = concurrent_rollouts(reader, 2)([prompt, prompt], trainer)
    assert out["calls"] == [2, 0] and out["said"] == ["amber", "amber"]
    assert [len(x) for x in trainer.prompts] == [2, 1, 1]
    # The last prompt is the first one and what came after it, without a token that was made anew.
    assert trainer.prompts[2][0].startswith(trainer.prompts[1][0]) and trainer.prompts[1][0].startswith(
        trainer.prompts[0][0]
    )
    assert "<tool_response>next=5678</tool_response><|im_end|>\n<|im_start|>assistant\n" in trainer.prompts[2][0]
    for ids, mask, logprobs in zip(out["completion_ids"], out["env_mask"], out["logprobs"], strict=True):
        assert len(ids) == len(mask) == len(logprobs)
        assert [x == -0.5 for x in logprobs] == [m == 1 for m in mask]
    sampled = [i for i, m in zip(out["completion_ids"][0], out["env_mask"][0], strict=True) if m]
    assert reader.decode(sampled).count("<tool_call>") == 2 and "tool_response" not in reader.decode(sampled)
    assert out["prompt_ids"][0] == out["prompt_ids"][1]
