"""The seen half of the tenth set of the field's faults: those on which the doctor's rules may be developed.

The set is a sample of what people ask about: threads in the order in which plain searches return them, listed in
docs/results/field10_threads.md.
"""

from __future__ import annotations

from plumbob.testing.faults import field10_seen_doubles as doubles
from plumbob.testing.faults.field import EVERYWHERE, MISMATCH, UNCHECKED, WITH_TOOLS, FieldFault, ids
from plumbob.testing.faults.field2_parts import losses
from plumbob.testing.faults.field_parts import all_of, engine_logits, graded, policy_scores, rows_changed

SEEN = (
    # Rewards
    FieldFault(
        "gold answers arrive under another name",
        "The reward asks for its gold answers under another name than the data's and gets None, so that length alone pays.",
        "jsboige/CoursIA#13047",
        ids("oracle-fails", "reward-exploitable", "reward-format-dominated"),
        ("gsm8k", "lookup"),
        start=graded(correct=doubles.gold_missing),
        watch_causes=ids("length-runaway", "reward-hacked"),
        steps=10,
    ),
    FieldFault(
        "reward's state kept from the rollout before",
        "The reward adds up in a variable that nothing sets back, and each rollout gets a part of what others earned.",
        "mujocolab/mjlab#170",
        ids("reward-nondeterministic", "rewards-of-other-rollouts"),
        EVERYWHERE,
        start=lambda stack, env: graded(correct=doubles.Carried())(stack, env),
        # A run directory has one score of each rollout, and nothing to compare it with.
        watch=False,
    ),
    # Tasks
    FieldFault(
        "evaluation reads the training tasks",
        "There is no split: evaluations read the tasks on which the run trains.",
        "autowarefoundation/auto_e2e#113, Algorineko/AgenticArXiv-RL#50",
        ids("held-out-in-training"),
        EVERYWHERE,
        start=doubles.evaluated_on_training_tasks,
        watch_options="--eval-examples 16",
    ),
    # Rows
    FieldFault(
        "beginning of each tool message cut from the row",
        "A system prompt that is not there is cut off each message after a turn, whose first tokens the row then lacks.",
        "verl-project/verl#6501",
        ids("row-not-what-was-sampled"),
        WITH_TOOLS,
        start=rows_changed(doubles.beginnings_cut),
        watch_causes=MISMATCH,
    ),
    FieldFault(
        "tool results of a row are all the last one",
        "Results are kept as references to one object, so that the row has the last of them in every place.",
        "keras-rl/keras-rl#51",
        ids("row-not-what-was-sampled"),
        WITH_TOOLS,
        start=rows_changed(doubles.last_result_everywhere),
        watch_causes=MISMATCH,
    ),
    # Sampling
    FieldFault(
        "rejected draft tokens drawn again from all tokens",
        "Speculative decoding draws from the whole distribution after a rejection, and likely tokens have two chances.",
        "ShopeeLLM/Spec-RL#14",
        # No id names a distribution that is sharper in another way than by temperature; these say that it is another one.
        ids("temperature-not-applied") | MISMATCH,
        EVERYWHERE,
        start=engine_logits(doubles.drafted, raw=True),
        watch_options=UNCHECKED,
    ),
    # The trainer
    FieldFault(
        "padding before short rows is attended to",
        "Rows are padded on the left without an attention mask, and short ones see as much padding as the longest is longer.",
        "unslothai/unsloth#3176",
        ids("rows-see-each-other") | MISMATCH,
        EVERYWHERE,
        start=policy_scores(doubles.padding_attended),
        watch_options=UNCHECKED,
    ),
    FieldFault(
        "leave-one-out deviation of equal rewards is rounding",
        "The deviation of the others' equal rewards is a rounding error, by which the lead of the odd one is divided.",
        "NVIDIA-NeMo/RL#4158",
        ids("advantages-wrong", "tiny-std-scaling"),
        EVERYWHERE,
        start=all_of(graded(correct=lambda t, r, c: 0.95 * c), doubles.rounded_deviations),
        options="--baseline leave_one_out --scale-rewards group",
        watch_causes=ids("gradient-explodes"),
    ),
    FieldFault(
        "fused loss without the mask of tool results",
        "The fused loss gets the mask of the completion alone, and trains tool results as if they had been sampled.",
        "huggingface/trl#4975",
        ids("context-tokens-trained", "loss-mask-shifted"),
        WITH_TOOLS,
        start=doubles.unmasked_loss,
    ),
    FieldFault(
        "gradient of half of each row lost",
        "Two processes share a row, and each keeps the gradient of its own half, because they are not added.",
        "ByteDance-Seed/VeOmni#1115",
        ids("sampled-tokens-masked", "loss-mask-shifted"),
        EVERYWHERE,
        start=losses(doubles.first_half_only),
    ),
    FieldFault(
        "KL loss with the wrong sign",
        "The KL term is subtracted from the loss, which pays for each step away from the reference.",
        "qiancheng0/ToolRL#52",
        ids("kl-backwards"),
        EVERYWHERE,
        start=doubles.pushed_away,
        options="--kl-beta 0.1",
    ),
    FieldFault(
        "arguments of the KL penalty exchanged",
        "Policy and reference change places in the penalty, which becomes a bonus for leaving the reference.",
        "RLinf/RLinf#1400",
        ids("kl-backwards", "advantages-wrong"),
        EVERYWHERE,
        start=doubles.arguments_exchanged,
        options="--kl-placement reward --kl-beta 0.1",
        # In a few steps the policy is so near to the reference that the penalty says nothing.
        watch=False,
    ),
    FieldFault(
        "reference without the starting adapter",
        "The run begins with a policy that was tuned before, and its reference is the model from before that.",
        "huggingface/trl#1340, huggingface/trl#3194",
        ids("reference-is-another-policy"),
        EVERYWHERE,
        start=doubles.reference_from_before,
        options="--kl-beta 0.05",
        watch_causes=ids("kl-too-large"),
    ),
    FieldFault(
        "adapter drawn at random on both sides",
        "Both matrices of a new adapter are random, so that the run begins beside the model that is its reference.",
        "hao-ai-lab/FastVideo#781, mflux-community/mflux#739",
        # No id names a policy that begins beside its base; this one says that the two are not the same.
        ids("reference-is-another-policy"),
        ("gsm8k", "lookup", "musique"),
        start=doubles.adapter_at_random,
        options="--peft --kl-beta 0.05",
    ),
)
