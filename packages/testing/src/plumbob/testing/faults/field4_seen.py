"""The seen half of the fourth set of the field's faults: those on which the doctor's rules may be developed."""

from __future__ import annotations

from plumbob.testing.faults import field4_seen_doubles as doubles
from plumbob.testing.faults.field import EVERYWHERE, MISMATCH, WITH_TOOLS, FieldFault, ids
from plumbob.testing.faults.field2_parts import losses, module_function
from plumbob.testing.faults.field3_parts import tools_called
from plumbob.testing.faults.field_parts import (
    batches_changed,
    engine_updates,
    graded,
    policy_scores,
    rows_changed,
)

SEEN = (
    # Rows
    FieldFault(
        "earlier turns stand twice in the row",
        "The row is built from differences of rendered texts, and each earlier turn is also in the part after it.",
        "NVIDIA-NeMo/RL#2821",
        ids("row-not-what-was-sampled"),
        WITH_TOOLS,
        start=rows_changed(doubles.turns_twice),
        watch_causes=MISMATCH,
    ),
    FieldFault(
        "loss mask drifts by a token per tool result",
        "The loss mask is computed from text that is tokenised again, and is off by one token more after each result.",
        "PeterGriffinJin/Search-R1#21",
        ids("context-tokens-trained", "sampled-tokens-masked", "loss-mask-shifted", "row-not-what-was-sampled"),
        WITH_TOOLS,
        start=rows_changed(doubles.drifting),
        watch_causes=MISMATCH,
    ),
    FieldFault(
        "sampling log-probabilities of tool calls are NaN",
        "The reader of log-probabilities does not know messages with tool calls, and gives NaN for their tokens.",
        "OpenPipe/ART#467, OpenPipe/ART#336",
        ids("row-not-what-was-sampled", "gradient-not-finite"),
        WITH_TOOLS,
        start=rows_changed(doubles.calls_without_logprobs),
        watch_causes=MISMATCH,
    ),
    # Trainer
    FieldFault(
        "log-probabilities from the start of the row",
        "The trainer's model ignores which logits are wanted, and those of the first tokens are taken for the reply's.",
        "huggingface/trl#3681",
        ids("loss-mask-shifted", "logprobs-permuted") | MISMATCH,
        EVERYWHERE,
        start=policy_scores(doubles.from_the_start),
    ),
    FieldFault(
        "advantages averaged over the padding",
        "A row's advantage is averaged over its padded tokens, so that short rollouts count less.",
        "areal-project/AReaL#1346",
        ids("advantages-wrong", "rewards-of-other-rollouts", "loss-differs-from-settings"),
        EVERYWHERE,
        start=losses(doubles.averaged_with_padding),
        watch=False,
    ),
    FieldFault(
        "loss divided by the number of microbatches once more",
        "The loss is a mean over the step already, and is divided by the number of microbatches again.",
        "modelscope/ms-swift#10117",
        ids("normaliser-depends-on-microbatches"),
        EVERYWHERE,
        start=doubles.divided_again,
        options="--microbatch-tokens 2048",
        watch=False,
    ),
    FieldFault(
        "baseline counts each turn of a rollout",
        "Each turn of a rollout is a sample of its own in the group's mean, so that long rollouts count several times.",
        "radixark/miles#2378",
        ids("advantages-wrong"),
        WITH_TOOLS,
        start=doubles.turns_counted,
        watch=False,
    ),
    # Weights
    FieldFault(
        "attention outputs arrive as zeros",
        "A weight sync sends buffers for the attention's output matrices that were never filled.",
        "OpenRLHF/OpenRLHF#660, PrimeIntellect-ai/prime-rl#3451",
        ids("weights-not-synced"),
        EVERYWHERE,
        start=engine_updates(doubles.outputs_zero),
        watch_causes=MISMATCH,
    ),
    FieldFault(
        "adapter saved with an alpha of zero",
        "The saved adapter's settings hold an alpha of 0, so that who loads it gets the base model.",
        "verl-project/verl#1821",
        ids("saved-model-differs"),
        EVERYWHERE,
        start=doubles.alpha_zero,
        options="--peft",
    ),
    # Rewards
    FieldFault(
        "a right answer costs what a wrong one earns",
        "The reward's main term has the wrong sign: the better the answer, the lower the reward.",
        "NVlabs/alpamayo-recipes#29",
        ids("oracle-fails", "reward-exploitable"),
        EVERYWHERE,
        start=graded(correct=doubles.inverted),
        watch_causes=ids("length-collapse", "tools-abandoned"),
    ),
    FieldFault(
        "grader stops at the end of a line",
        "The grader's regular expression matches no line end, and replies of several lines are wrong.",
        "unslothai/unsloth#1761",
        ids("oracle-fails", "answers-not-parsed", "reward-constant"),
        ("gsm8k",),
        start=module_function("is_correct", doubles.first_line_only),
        watch_causes=ids("never-succeeds"),
    ),
    FieldFault(
        "score added behind the end token",
        "The score is put on the token after the end of the reply, which is masked: only cut replies keep theirs.",
        "huggingface/trl#3750, huggingface/trl#5338",
        ids("rewards-of-other-rollouts", "reward-constant", "no-gradient", "policy-term-missing"),
        EVERYWHERE,
        start=batches_changed(doubles.behind_the_end),
    ),
    # Tools
    FieldFault(
        "tool calls lose their arguments",
        "The reader looks for another key than the prompt teaches, and runs each tool without arguments.",
        "ahwurm/localharness#104",
        ids("tools-fail", "calls-malformed", "oracle-fails"),
        WITH_TOOLS,
        start=tools_called(doubles.without_arguments),
    ),
    FieldFault(
        "documents of the next index",
        "The retriever's numbers begin at another number than the documents', and each result is the next document.",
        "huggingface/transformers#7372",
        ids("tool-results-mixed", "tools-return-nothing", "oracle-fails"),
        WITH_TOOLS,
        start=tools_called(doubles.next_document),
    ),
)
