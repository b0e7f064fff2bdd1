"""The unseen half of the eighth set of the field's faults: they are run only to measure.

The set is a sample of what people ask about: threads in the order in which plain searches return them, listed in
docs/results/field8_threads.md.
"""

from __future__ import annotations

from plumbob.testing.faults import field8_unseen_doubles as doubles
from plumbob.testing.faults.field import EVERYWHERE, MISMATCH, UNCHECKED, WITH_TOOLS, FieldFault, ids
from plumbob.testing.faults.field2_parts import losses
from plumbob.testing.faults.field2_seen_doubles import no_policy_term
from plumbob.testing.faults.field_parts import graded, policy_scores, rows_changed, tasks_changed

UNSEEN = (
    # Rewards and tasks
    FieldFault(
        "empty answer is a part of every gold answer",
        "A reply is right if it is a part of the gold answer, and an empty reply is a part of every text.",
        "Liuziyu77/Visual-RFT#176",
        ids("reward-exploitable"),
        ("lookup", "gsm8k"),
        start=graded(correct=doubles.part_of_each_other),
        # Before a policy has found out, no rollout shows it.
        watch=False,
    ),
    FieldFault(
        "each tool call costs more than an answer earns",
        "Calls are priced so highly that a guess without tools earns more than an answer found with them.",
        "axon-rl/gem#39, verl-project/verl#4998, verl-project/verl#1569",
        ids("oracle-fails", "reward-exploitable", "tools-abandoned"),
        WITH_TOOLS,
        start=graded(correct=doubles.calls_priced),
        steps=15,
    ),
    FieldFault(
        "None of a reward becomes NaN",
        "A reward function has no value for some tasks, and None becomes NaN among the numbers.",
        "modelscope/ms-swift#8125, modelscope/ms-swift#8123",
        ids("reward-not-finite"),
        EVERYWHERE,
        start=graded(correct=doubles.none_for_other_tasks),
    ),
    FieldFault(
        "format and number of steps outweigh a rare answer",
        "Rewards for the form and for a number of steps are larger than that of a right answer, which becomes rarer.",
        "huggingface/open-r1#255, huggingface/open-r1#373, huggingface/open-r1#257",
        ids("reward-format-dominated", "reward-exploitable"),
        ("gsm8k",),
        start=graded(written=doubles.written_shortly, steps=doubles.few_steps),
        steps=10,
    ),
    FieldFault(
        "gold answers with a capital that the table lacks",
        "The exact match compares with gold answers in another spelling than that of the texts to read.",
        "PeterGriffinJin/Search-R1#75",
        ids("oracle-fails", "answers-not-parsed"),
        ("lookup",),
        start=tasks_changed(doubles.capitals),
        watch_causes=ids("never-succeeds"),
    ),
    # Settings
    FieldFault(
        "replies limited to sixteen tokens",
        "The limit of a reply is shorter than any reply that could be right.",
        "modelscope/ms-swift#4789",
        ids("truncated-turns"),
        ("gsm8k",),
        options="--max-tokens 16",
    ),
    FieldFault(
        "token limit at the median length of a solution",
        "About half of the solutions are cut off by the default limit before their answer.",
        "huggingface/trl#5697, huggingface/trl#6263, greyhaven-ai/autocontext#1067, jsboige/CoursIA#13596",
        ids("truncated-turns"),
        ("gsm8k",),
        options="--max-tokens 60",
    ),
    FieldFault(
        "temperature of one twentieth",
        "Rollouts of a task are almost always the same, and so are their rewards.",
        "modelscope/ms-swift#4570, huggingface/trl#3857",
        ids("groups-without-variety", "too-little-signal"),
        EVERYWHERE,
        options="--temperature 0.05",
    ),
    FieldFault(
        "groups of two in a step of four",
        "With two rollouts of a task and two tasks in a step, most steps have one group to learn from, or none.",
        "jsboige/CoursIA#10603, benchflow-ai/posttrainarena#31",
        ids("too-little-signal"),
        ("lookup", "gsm8k"),
        options="--num-generations 2 --batch-size 4 --gradient-accumulation-steps 1",
        steps=20,
    ),
    FieldFault(
        "twenty times the usual learning rate",
        "Full training has a learning rate that is twenty times that of the recipes.",
        "huggingface/open-r1#436",
        ids("learning-rate-too-high"),
        EVERYWHERE,
        options="--learning-rate 6e-3",
        steps=10,
    ),
    FieldFault(
        "LoRA at half a millionth",
        "The adapter has a learning rate that is small for full training, and is far too small for LoRA.",
        "huggingface/trl#2872",
        ids("learning-rate-too-low"),
        EVERYWHERE,
        options="--peft --learning-rate 5e-7",
        steps=10,
    ),
    # Rows
    FieldFault(
        "mask placed by encoding tool results again",
        "Where a turn begins is counted from tool results that are encoded again, and is off by one token for each.",
        "PeterGriffinJin/Search-R1#20, PeterGriffinJin/Search-R1#21",
        ids("loss-mask-shifted", "context-tokens-trained", "sampled-tokens-masked"),
        WITH_TOOLS,
        start=rows_changed(doubles.mask_encoded_again),
        watch_causes=MISMATCH,
    ),
    # The engine
    FieldFault(
        "engine still at the first model after a resume",
        "After a resume the engine holds other weights than the trainer for the first steps.",
        "THUDM/slime#1695",
        ids("weights-not-synced", "engine-stale") | MISMATCH,
        EVERYWHERE,
        start=doubles.first_model_after_resume,
        watch_options=UNCHECKED,
    ),
    FieldFault(
        "adapter merged into four-bit weights",
        "Each sync merges the adapter into weights of 4 bits, which rounds most of what was learned away.",
        "huggingface/trl#3466",
        # No id names 4 bits; that of bfloat16 describes the same loss.
        ids("merged-in-bf16", "weights-not-synced") | MISMATCH,
        EVERYWHERE,
        inject=doubles.merged_in_four_bits,
        options="--peft",
        watch_options=UNCHECKED,
    ),
    # The update
    FieldFault(
        "asked for plain advantages and got scaled ones",
        "The setting of the advantages' scale is accepted and not used: they are divided by the group's deviation.",
        "NVIDIA-NeMo/nemo-platform#1504",
        ids("advantages-wrong"),
        ("musique", "lookup", "gsm8k"),
        start=doubles.always_scaled,
    ),
    FieldFault(
        "one ratio for a whole reply",
        "Log-probabilities are summed over a reply before the ratio is taken, which a token's bounds then clip.",
        "walkinglabs/hands-on-modern-rl#75",
        ids("ratio-clipped"),
        ("gsm8k", "musique", "lookup"),
        start=losses(doubles.one_ratio_per_reply),
        options="--num-iterations 4",
        steps=8,
    ),
    FieldFault(
        "ratio that is a constant",
        "By default the importance ratio is exp(0), and only the KL term has a gradient.",
        "Goekdeniz-Guelmez/mlx-lm-lora#49",
        ids("policy-term-missing"),
        EVERYWHERE,
        start=losses(no_policy_term),
        options="--kl-beta 0.01",
    ),
    FieldFault(
        "entropy bonus left on by a default",
        "The loss has an entropy bonus that nobody asked for, and the policy becomes more and more random.",
        "verl-project/verl#781, verl-project/verl#514",
        # No id names an entropy bonus; this is what it does, and where a user would look.
        ids("entropy-explosion", "loss-differs-from-settings"),
        EVERYWHERE,
        start=losses(doubles.entropy_bonus),
        probes=False,
        steps=20,
    ),
    FieldFault(
        "passes of the trainer without gradients",
        "Log-probabilities are computed with gradients off, and loss, gradient norm and KL divergence stay at 0.",
        "HarryHsing/EchoInk#4",
        ids("no-gradient"),
        EVERYWHERE,
        start=policy_scores(doubles.without_gradients),
    ),
    FieldFault(
        "final model saved without its adapter",
        "The model that is saved at the end holds the base weights, and answers as if it had not been trained.",
        "unslothai/unsloth#2009",
        ids("saved-model-differs"),
        EVERYWHERE,
        start=doubles.saved_without_adapter,
        options="--peft",
        # Before the first step the adapter is 0, and the two models are the same.
        probes=False,
        steps=8,
    ),
)
