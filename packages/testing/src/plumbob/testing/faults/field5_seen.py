"""The seen half of the fifth set of the field's faults: those on which the doctor's rules may be developed."""

from __future__ import annotations

from plumbob.testing.faults import field5_seen_doubles as doubles
from plumbob.testing.faults.field import EVERYWHERE, MISMATCH, WITH_TOOLS, FieldFault, ids
from plumbob.testing.faults.field2_parts import before_updates, engine_completions
from plumbob.testing.faults.field3_parts import tools_called
from plumbob.testing.faults.field_parts import engine_model, engine_prompts, engine_updates, graded, policy_scores

SEEN = (
    # Rewards
    FieldFault(
        "judge samples its verdicts",
        "The judge is asked at its default temperature, and gives the same reply another verdict each time.",
        "UKGovernmentBEIS/inspect_ai#4136",
        ids("reward-nondeterministic"),
        EVERYWHERE,
        start=graded(correct=doubles.judge_sampled),
        watch=False,
    ),
    FieldFault(
        "gold kept in its answer tags",
        "The grader takes the answer tags off the reply and not off the gold, so that right answers are wrong.",
        "wenet-e2e/west#117",
        ids("oracle-fails", "answers-not-parsed", "reward-constant"),
        ("gsm8k", "lookup"),
        start=graded(correct=doubles.gold_in_tags),
        watch_causes=ids("never-succeeds"),
    ),
    FieldFault(
        "format bonus five times the answer's reward",
        "Any reply with the mark of an answer earns 1, and a right answer 0.2 more.",
        "huggingface/open-r1#359, huggingface/trl#5298",
        ids("reward-exploitable", "reward-format-dominated"),
        ("gsm8k",),
        start=graded(0.2, correct=lambda task, trace, correct: correct, form=doubles.has_form),
        watch=False,
    ),
    FieldFault(
        "seconds on a busy machine taken off the reward",
        "The reward is lowered by wall-clock time, which depends on the load of the machine.",
        "NVIDIA-NeMo/RL#4029",
        ids("reward-nondeterministic"),
        EVERYWHERE,
        start=graded(correct=doubles.seconds_taken_off),
        watch=False,
    ),
    FieldFault(
        "grader gives up on messages without text",
        "The grader fails on messages that hold a tool call and no text, and counts their rollouts as wrong.",
        "huggingface/trl#5366",
        ids("oracle-fails", "grader-swallows-errors", "reward-constant"),
        WITH_TOOLS,
        start=graded(correct=doubles.needs_text),
        watch_causes=ids("never-succeeds", "tools-abandoned"),
    ),
    # Tasks
    FieldFault(
        "tasks begin again after each restart",
        "A checkpoint does not hold the place in the data, and a job that is often restarted sees the first tasks alone.",
        "PrimeIntellect-ai/prime-rl#1036",
        ids("few-distinct-tasks", "duplicate-tasks"),
        EVERYWHERE,
        start=doubles.restarted,
        probes=False,
        steps=8,
    ),
    # Trainer
    FieldFault(
        "pass-at-k advantages leave the others untouched",
        "Only the best rollout of a group should have an advantage, but the others keep their rewards in its place.",
        "hiyouga/EasyR1#585",
        ids("advantages-wrong"),
        EVERYWHERE,
        start=doubles.best_of_group_only,
        watch=False,
    ),
    FieldFault(
        "dropout of the checkpoint on in training",
        "The checkpoint's settings have a dropout of a tenth, which is on in training passes and off in rollouts.",
        "huggingface/trl#3500",
        ids("dropout-in-training"),
        EVERYWHERE,
        start=doubles.dropout_on,
        watch_causes=MISMATCH,
    ),
    FieldFault(
        "logits divided by the temperature twice",
        "Logits are divided by the temperature in place, and a pass that is computed again divides them once more.",
        "huggingface/trl#6621",
        ids("temperature-not-applied") | MISMATCH,
        EVERYWHERE,
        start=policy_scores(doubles.divided_twice),
        options="--temperature 1.4",
    ),
    FieldFault(
        "every update overflows in half precision",
        "Gradients overflow in half precision at a loss scale that is never lowered, and every update is skipped.",
        "radixark/miles#611, deepspeedai/DeepSpeed#697",
        ids("gradient-not-finite", "optimizer-moves-nothing"),
        EVERYWHERE,
        start=before_updates(doubles.overflowing),
    ),
    # Engine
    FieldFault(
        "top-k of the generation config",
        "The server takes settings that a request lacks from the model's generation config, here a top-k of 3.",
        "NVIDIA-NeMo/RL#3497, OpenPipe/ART#140",
        ids("sampling-truncated"),
        EVERYWHERE,
        start=engine_prompts(doubles.few_likely_tokens),
        options="--temperature 1.5",
        watch_causes=MISMATCH,
    ),
    FieldFault(
        "norm weights arrive one too high",
        "One side stores a norm's weight, the other its difference from one, and nobody converts it.",
        "vllm-project/vllm#31464",
        ids("weights-not-synced") | MISMATCH,
        EVERYWHERE,
        start=engine_updates(doubles.norms_plus_one),
    ),
    FieldFault(
        "rotary embeddings scaled in the engine only",
        "The engine ignores the attention factor of the model's settings, and scales rotary embeddings by its own.",
        "PrimeIntellect-ai/prime-rl#2802",
        ids("positions-shifted") | MISMATCH,
        EVERYWHERE,
        start=engine_model(doubles.rotary_scaled),
    ),
    FieldFault(
        "sixteen tokens by the server's default",
        "The request does not say how long a reply may be, and the server's default cuts every reply.",
        "huggingface/trl#5697",
        ids("truncated-turns"),
        ("gsm8k", "musique"),
        start=engine_completions(doubles.unchanged, most=16),
    ),
    # Tools
    FieldFault(
        "last character of tool arguments lost",
        "The streaming parser of tool calls loses the last piece of the arguments.",
        "vllm-project/vllm#10781",
        ids("tool-arguments-changed", "tools-return-nothing", "tools-fail", "oracle-fails"),
        WITH_TOOLS,
        start=tools_called(doubles.arguments_cut),
    ),
)
