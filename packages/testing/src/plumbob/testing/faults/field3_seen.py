"""The seen half of the third set of the field's faults: those on which the doctor's rules may be developed."""

from __future__ import annotations

from plumbob.testing.faults import field3_seen_doubles as doubles
from plumbob.testing.faults.doubles import rewritten
from plumbob.testing.faults.field import EVERYWHERE, MISMATCH, WITH_TOOLS, FieldFault, ids
from plumbob.testing.faults.field2_parts import losses, module_function
from plumbob.testing.faults.field_parts import graded

SEEN = (
    # The engine
    FieldFault(
        "keys and values cached in eight bits",
        "The engine's cache holds keys and values in eight bits, with a scale that was never calibrated; the trainer "
        "computes with exact ones.",
        "PrimeIntellect-ai/prime-rl#3555",
        ids("cache-in-low-precision", "mismatch-grows") | MISMATCH,
        ("gsm8k", "musique"),
        start=doubles.cache_in_eight_bits,
    ),
    # Rows
    FieldFault(
        "turns encoded again with a leading space",
        "Each turn's text is tokenised again for training, by a tokeniser that puts a space before every text.",
        "NVIDIA-NeMo/RL#2844, radixark/miles#1319, huggingface/transformers#31513",
        ids("retokenised-turns", "row-not-what-was-sampled"),
        EVERYWHERE,
        inject=rewritten(doubles.with_leading_spaces),
        watch_causes=MISMATCH,
    ),
    # Advantages and loss
    FieldFault(
        "rows sorted for packing and advantages not",
        "Rows are sorted by length before they are packed, and each is trained with the advantage of another row.",
        "NovaSky-AI/SkyRL#2209",
        ids("advantages-wrong", "rewards-of-other-rollouts", "rows-permuted", "does-not-overfit"),
        EVERYWHERE,
        start=doubles.advantages_unsorted,
        steps=10,
    ),
    FieldFault(
        "entropy bonus out of proportion",
        "The loss has an entropy bonus, left on by a default, that outweighs the advantages.",
        "verl-project/verl#781",
        ids(
            "entropy-bonus-too-large",
            "entropy-explosion",
            "advantages-wrong",
            "does-not-overfit",
            "loss-differs-from-settings",
        ),
        EVERYWHERE,
        start=losses(doubles.entropy_bonus(1.0)),
        watch_causes=ids("length-runaway", "degenerate-repetition"),
        steps=14,
    ),
    # Resume
    FieldFault(
        "initial weights come back after a resume",
        "From the eleventh step on the run goes on from the initial weights, because a resume discards the trained ones.",
        "huggingface/lerobot#3459, unslothai/unsloth#2451",
        ids("weights-lost", "saved-model-differs"),
        EVERYWHERE,
        inject=doubles.initial_weights_at(10),
        probes=False,
        steps=14,
    ),
    # Rewards and parsing
    FieldFault(
        "each tool call earns half a point",
        "A bonus of 0.5 is paid for each tool call, not once for a rollout that uses tools.",
        "Visual-Agent/DeepEyes#83",
        ids("reward-exploitable", "reward-hacked", "reward-format-dominated"),
        WITH_TOOLS,
        start=graded(correct=doubles.calls_pay),
        watch_causes=ids("length-runaway", "truncated-rollouts", "degenerate-repetition"),
        steps=10,
    ),
    FieldFault(
        "grader wants a box that nobody asked for",
        "The grader reads boxed answers only, and the prompt asks for a last line with four hashes.",
        "Visual-Agent/DeepEyes#103, knoveleng/open-rs#2",
        ids("oracle-fails", "answers-not-parsed", "reward-constant"),
        ("gsm8k",),
        start=module_function("is_correct", doubles.boxed_only),
        watch_causes=ids("never-succeeds"),
    ),
    # Tools
    FieldFault(
        "some tool calls hang",
        "Every thirtieth tool call hangs until its time limit, and the rollout fails.",
        "NousResearch/hermes-agent#84719, Agenta-AI/agenta#6102",
        ids("environment-hangs", "environment-fails", "tools-fail", "drops-are-biased"),
        WITH_TOOLS,
        start=lambda stack, env: doubles.one_in_thirty_hangs()(stack, env),
        options="--max-tool-seconds 0.3",
    ),
    # Data and template
    # Limits
    FieldFault(
        "half of the rollouts cut and masked",
        "Rollouts that reach the context limit are left out of the loss, and half of them do, the longer ones.",
        "huggingface/trl#3476, modelscope/ms-swift#4950",
        ids("drops-are-biased", "signal-masked", "truncated-context", "truncated-rollouts"),
        ("lookup",),
        options="--overlong mask --max-context 265",
    ),
    # Evaluation
    FieldFault(
        "held-out rollouts of one turn",
        "Evaluations during training end each rollout after one turn, because only training plays several.",
        "NVIDIA-NeMo/RL#1089",
        ids("evaluation-limits-differ", "evaluation-prompted-differently", "evaluation-parses-differently"),
        WITH_TOOLS,
        inject=doubles.one_turn,
        probes=False,
        watch_causes=ids("truncated-rollouts"),
        watch_options="--eval-examples 8 --eval-steps 3",
        steps=8,
    ),
)
