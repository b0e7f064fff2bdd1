"""The invariants of an exact training row, for any conversation that a scripted engine has played."""

from plumbob.rollout import to_sample


def assert_exact(trace, engine, family):
    """What must hold of every rollout that drew a turn."""
    prompts, drawn = engine.prompts, engine.drawn
    assert len(prompts) == len(drawn) == trace.num_turns > 0
    for i in range(1, len(prompts)):
        before = prompts[i - 1] + list(drawn[i - 1].token_ids)
        assert prompts[i][: len(before)] == before
    for prompt in prompts:
        assert family.text(prompt).endswith(family.header)
        assert prompt[-len(family.ids(family.header)) :] == family.ids(family.header)

    assert len(trace.branches) == 1
    branch = trace.branches[0]
    assert branch.token_ids == prompts[-1] + list(drawn[-1].token_ids)
    mask, logprobs = [False] * len(branch.token_ids), [0.0] * len(branch.token_ids)
    for prompt, completion in zip(prompts, drawn, strict=True):
        for i, logprob in enumerate(completion.logprobs, len(prompt)):
            mask[i], logprobs[i] = True, logprob
    assert branch.sampled_mask == mask
    assert branch.logprobs == logprobs

    for node in trace.nodes:
        assert len(node.mask) == len(node.is_content) == len(node.token_ids)
        assert len(node.logprobs) == sum(node.mask)
    assert [call.node for call in trace.calls] == [i for i, node in enumerate(trace.nodes) if node.sampled]
    assert trace.num_total_tokens == len(branch.token_ids)
    assert trace.num_output_tokens == sum(mask)
    sample = to_sample(trace, "group")
    assert (sample.token_ids, sample.loss_mask, sample.sampling_logprobs) == (branch.token_ids, mask, logprobs)
    assert sample.num_sampled == sum(len(completion.token_ids) for completion in drawn)
