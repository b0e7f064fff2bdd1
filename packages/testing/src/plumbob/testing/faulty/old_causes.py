"""Ids of causes of the doctor before this one -> ids of `plumbob.doctor.causes`, to measure both with the same rows.

It is deleted together with the old doctor.
"""

from __future__ import annotations

_SAME = (
    "adapter-scale-differs advantages-wrong answer-in-prompt answers-not-parsed dropout-in-training "
    "engine-trainer-mismatch few-distinct-tasks groups-without-variety held-out-in-training kl-too-large "
    "learning-rate-too-high learning-rate-too-low loss-differs-from-settings loss-mask-as-attention-mask "
    "never-succeeds no-gradient normaliser-depends-on-microbatches oracle-fails prompt-replaced "
    "reward-exploitable reward-hacked reward-nondeterministic reward-wrong rewards-of-other-rollouts "
    "row-not-what-was-sampled saved-model-differs schedule-hides-rate stop-token-wrong task-order-drifts "
    "temperature-not-applied tiny-std-scaling too-little-signal tool-results-mixed tool-results-wrong tools-fail "
    "truncated-rollouts weights-not-synced evaluation-differs memory-grows policy-breaks"
)

_MERGED = {
    "adapter-scale-differs": "adapter-not-applied",
    "advantages-wrong": "groups-mixed",
    "answers-not-parsed": "grader-swallows-errors",
    "attention-or-positions-wrong": "positions-shifted rows-see-each-other",
    "behaviour-narrows": "entropy-collapse length-collapse length-runaway tools-abandoned",
    "calls-not-read": "call-tokens-untrained calls-in-unread-form calls-malformed tools-never-used",
    "engine-trainer-mismatch": "head-not-tied mismatch-grows",
    "evaluation-differs": "evaluation-parses-differently evaluation-prompted-differently",
    "few-distinct-tasks": "duplicate-tasks",
    "kl-term-wrong": "kl-backwards reference-is-another-policy",
    "learning-rate-too-high": "weight-decay-too-high",
    "learning-rate-too-low": "gradient-clipped-to-nothing warmup-too-long",
    "loss-differs-from-settings": "gradient-backwards logprobs-permuted ratio-to-reference",
    "loss-mask-wrong": "context-tokens-trained loss-mask-shifted sampled-tokens-masked",
    "never-succeeds": "temperature-too-high",
    "no-gradient": "policy-term-missing update-without-effect",
    "not-finite": "gradient-not-finite reward-not-finite",
    "oracle-fails": "reward-constant",
    "policy-breaks": "degenerate-repetition entropy-explosion gradient-explodes policy-changes-in-vain",
    "prompt-incomplete": "assistant-header-missing template-applied-twice tools-not-in-prompt",
    "reward-exploitable": "reward-format-dominated",
    "rollouts-fail": "empty-completions engine-fails environment-fails environment-hangs",
    "row-not-what-was-sampled": "retokenised-turns rollouts-repeated",
    "sampling-altered": "sampling-penalised sampling-truncated",
    "signal-left-out": "correction-mutes-rollouts drops-are-biased ratio-clipped rollouts-too-old signal-masked",
    "too-little-signal": "few-groups-differ task-solved",
    "tool-results-wrong": "tool-arguments-changed tool-results-cut tools-return-nothing",
    "truncated-rollouts": "tool-results-too-long truncated-context truncated-turns",
    "update-differs-from-settings": "does-not-overfit gradients-not-cleared optimizer-moves-nothing "
    "optimizer-state-lost weights-in-bf16 weights-lost",
    "weights-not-synced": "adapter-bound-to-no-module engine-stale merged-in-bf16",
}

NEW_IDS: dict[str, str] = {
    **{cause: cause for cause in (*_SAME.split(), *_MERGED)},
    **{old: new for new, merged in _MERGED.items() for old in merged.split()},
}
"""Id of a cause of the old doctor, or of a new one -> the id of the new catalogue's cause that has its remedy."""
