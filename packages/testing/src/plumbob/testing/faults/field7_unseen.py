"""The unseen half of the seventh set of the field's faults: only for measuring. Rule writers must not read this file."""

from __future__ import annotations

from plumbob.testing.faults import field7_unseen_doubles as doubles
from plumbob.testing.faults.field import EVERYWHERE, MISMATCH, UNCHECKED, WITH_TOOLS, FieldFault, ids
from plumbob.testing.faults.field2_parts import before_updates, losses, since
from plumbob.testing.faults.field3_parts import tools_called
from plumbob.testing.faults.field_parts import (
    batches_changed,
    chat_method,
    engine_logits,
    engine_updates,
    graded,
    rows_changed,
)

UNSEEN = (
    # Rewards and tasks
    FieldFault(
        "held-out answers counted when they are mentioned",
        "Training asks for the exact answer, and a lenient judge of held-out rollouts finds it in any message.",
        "Agent-RL/ReCall#51",
        ids("evaluation-parses-differently"),
        ("lookup",),
        start=graded(correct=doubles.mentioned_is_enough),
        watch=False,
    ),
    FieldFault(
        "rewards out of line after groups were filtered",
        "Groups without a signal are taken out of the step and their rewards are not, so that later rows get wrong ones.",
        "NVIDIA-NeMo/RL#3794",
        ids("rewards-of-other-rollouts"),
        ("lookup",),
        start=batches_changed(doubles.rewards_left_in),
        options="-a max_hops=6",
    ),
    # Rows and prompts
    FieldFault(
        "loss on tool results only",
        "The mask of states is used where that of actions belongs: what the tools wrote is trained, and nothing else.",
        "mll-lab-nu/RAGEN#71",
        ids("context-tokens-trained", "sampled-tokens-masked", "row-not-what-was-sampled"),
        WITH_TOOLS,
        start=rows_changed(doubles.mask_inverted),
        watch_causes=MISMATCH,
    ),
    FieldFault(
        "beginning of each prompt cut off",
        "A limit on prompts keeps their last tokens, and the instructions and tools at their beginning are lost.",
        "verl-project/verl#3948",
        ids("truncated-context", "tools-not-in-prompt", "prompt-replaced"),
        WITH_TOOLS,
        start=chat_method("prompt", doubles.last_tokens_only),
        watch_causes=ids("never-succeeds", "tools-never-used"),
    ),
    # Tools
    FieldFault(
        "least similar documents first",
        "The store sorts by distance from the greatest to the smallest, and returns what fits a query least.",
        "nearai/nearai#719, tencentmusic/supersonic#1644",
        # No cause says that a search ranks wrongly.
        ids("oracle-fails", "tools-return-nothing", "never-succeeds"),
        ("musique",),
        start=tools_called(doubles.farthest_first),
    ),
    FieldFault(
        "argument under another name than in the schema",
        "The function of a tool names its argument otherwise than the schema that the model sees, and each call fails.",
        "shareAI-lab/learn-claude-code#336",
        ids("tools-fail", "tools-return-nothing"),
        WITH_TOOLS,
        start=tools_called(doubles.another_name),
        watch_causes=ids("never-succeeds"),
    ),
    # Sampling and the engine
    FieldFault(
        "replies limited to forty tokens",
        "The limit of a reply is too low for a calculation and its answer, and most replies are cut before they end.",
        "greyhaven-ai/autocontext#1067, jsboige/CoursIA#13596",
        ids("truncated-turns"),
        ("gsm8k",),
        options="--max-tokens 40",
        watch_causes=ids("never-succeeds"),
    ),
    FieldFault(
        "sampler with too much noise",
        "The sampler's noise is too strong: it draws as if at twice the temperature, and reports what the model says.",
        "tenstorrent/tt-metal#56016",
        ids("temperature-not-applied", "temperature-too-high") | MISMATCH,
        EVERYWHERE,
        start=engine_logits(doubles.noisier, raw=True),
        watch_causes=ids("never-succeeds"),
    ),
    FieldFault(
        "first token of the vocabulary again and again",
        "From the fourth step on the engine's numbers overflow, and it returns the vocabulary's first token up to the limit.",
        "OpenRLHF/OpenRLHF#1120",
        ids("degenerate-repetition", "truncated-turns", "length-runaway") | MISMATCH,
        EVERYWHERE,
        start=since(3, doubles.first_token_only),
        probes=False,
        watch_options="--max-tokens 48",
    ),
    FieldFault(
        "gate and up matrices swapped",
        "One side stores the two halves of a feed-forward layer's first matrix in the other order.",
        "nntrainer/nntrainer#4194, sgl-project/sglang#34940",
        ids("weights-not-synced") | MISMATCH,
        EVERYWHERE,
        start=engine_updates(doubles.halves_swapped),
        watch_options=UNCHECKED,
    ),
    FieldFault(
        "prefix cache kept across weight syncs",
        "Generation pauses for a weight sync without clearing its cache, and prompts keep what old weights computed.",
        "huggingface/trl#6344",
        ids("engine-stale", "weights-not-synced"),
        EVERYWHERE,
        start=doubles.cache_kept,
        watch_causes=MISMATCH,
    ),
    # Loss and optimizer
    FieldFault(
        "old log-probabilities renewed before each update",
        "The ratio's denominator is computed anew with the current weights, so that it is 1 and the clip holds nothing.",
        "radixark/miles#1829, jingyaogong/minimind#775",
        ids("ratio-to-reference"),
        EVERYWHERE,
        start=doubles.old_ones_renewed,
        options="--num-iterations 4",
        watch_causes=ids("learning-rate-too-high"),
    ),
    FieldFault(
        "entropy punished instead of rewarded",
        "The entropy bonus has the wrong sign, and the policy is rewarded for being certain of anything.",
        "ray-project/ray#4374, datawhalechina/joyrl#23",
        ids("entropy-collapse", "advantages-wrong", "does-not-overfit", "loss-differs-from-settings"),
        EVERYWHERE,
        start=losses(doubles.certainty_rewarded),
        steps=14,
    ),
    FieldFault(
        "gradients clipped to a norm of minus one",
        "A bound of -1, meant to turn clipping off, multiplies every gradient by a negative number.",
        "strands-labs/robots#2028",
        ids("gradient-backwards", "does-not-overfit"),
        EVERYWHERE,
        start=before_updates(doubles.clipped_to_minus_one),
    ),
    FieldFault(
        "adapter trained at a millionth",
        "An adapter is trained at the learning rate of full training, and the reward stays where it was.",
        "dhcode-cpp/X-R1#66",
        ids("learning-rate-too-low"),
        EVERYWHERE,
        options="--peft --lr 1e-6",
    ),
    # The final model
    FieldFault(
        "weights saved under names that nobody loads",
        "The names of the saved weights have a prefix more, and who loads them gets new weights everywhere.",
        "huggingface/transformers#48722, fla-org/flash-linear-attention#143",
        ids("saved-model-differs"),
        EVERYWHERE,
        start=doubles.saved_with_a_prefix,
    ),
)
