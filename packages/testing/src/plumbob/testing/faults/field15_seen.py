"""The seen half of the fifteenth set of the field's faults: those on which the doctor's rules may be developed.

The set is a sample of what people report of trainers, engines and model libraries: threads in the order in which plain
searches return them, listed in docs/results/field15_threads.md.
"""

from __future__ import annotations

from plumbob.testing.faults import field15_seen_doubles as doubles
from plumbob.testing.faults.field import EVERYWHERE, MISMATCH, UNCHECKED, WITH_TOOLS, FieldFault, ids
from plumbob.testing.faults.field_parts import (
    all_of,
    batches_changed,
    engine_model,
    engine_prompts,
    graded,
    policy_scores,
    rows_changed,
)

SEEN = (
    # Temperatures
    FieldFault(
        "trainer at temperature one whatever the setting",
        "Rollouts are sampled at temperature 0.7, and the log-probabilities of policy and reference are those at 1.",
        "databricks/compose-rl#105, radixark/miles#68",
        ids("temperature-not-applied") | MISMATCH,
        EVERYWHERE,
        start=policy_scores(doubles.at_temperature_one),
        options="--temperature 0.7",
    ),
    FieldFault(
        "raw log-probabilities from an engine below temperature one",
        "The engine samples at temperature 0.6 and reports the log-probabilities from before the temperature.",
        "thinking-machines-lab/tinker-feedback#148, huggingface/trl#4159, huggingface/trl#4163, vllm-project/vime#64",
        ids("temperature-not-applied") | MISMATCH,
        EVERYWHERE,
        start=doubles.reported(0.6, 1.0),
        options="--temperature 0.6",
    ),
    FieldFault(
        "log-probabilities of the engine divided by the temperature",
        "In place of the logits, the engine's log-probabilities are divided by the temperature of 0.7.",
        "PrimeIntellect-ai/prime-rl#697",
        ids("temperature-not-applied") | MISMATCH,
        EVERYWHERE,
        start=doubles.reported(0.7, 1 / 0.7),
        options="--temperature 0.7",
    ),
    # The schedule and the tasks
    FieldFault(
        "schedule stepped once per process",
        "The schedule counts the training's own steps, and is stepped by each of four processes: the rate soon is 0.",
        "huggingface/transformers#24088, ludwig-ai/ludwig#3555, crowsonkb/k-diffusion#50",
        ids("schedule-hides-rate"),
        EVERYWHERE,
        start=doubles.stepped_by_each_process,
        watch_causes=ids("optimizer-moves-nothing"),
        steps=8,
    ),
    FieldFault(
        "tasks from the beginning after each restart",
        "A run is restarted every second step, and the checkpoint does not have the place in the data: it begins again.",
        "OpenRLHF/OpenRLHF#1103",
        ids("few-distinct-tasks"),
        EVERYWHERE,
        start=doubles.restarted,
        probes=False,
        steps=8,
    ),
    # Rows
    FieldFault(
        "end tokens as padding in the loss",
        "Replies are filled up with end tokens to the longest one, and these count as sampled, because only the token of "
        "padding is masked.",
        "bingreeky/MemGen#33, databricks/compose-rl#31",
        ids("context-tokens-trained", "row-not-what-was-sampled"),
        EVERYWHERE,
        start=batches_changed(doubles.padded_with_ends),
        watch_causes=MISMATCH | ids("stop-token-wrong"),
    ),
    FieldFault(
        "end token left out of the loss because it pads",
        "The mask is made from the ids, and the token of padding is the end token: no reply's end is ever trained.",
        "huggingface/trl#4970",
        ids("sampled-tokens-masked"),
        EVERYWHERE,
        start=rows_changed(doubles.without_end_tokens),
    ),
    FieldFault(
        "head of each tool result missing from the rows",
        "Where a tool result begins in the row is computed from lengths that are too large by some tokens: its head is lost.",
        "NovaSky-AI/SkyRL#2075",
        ids("row-not-what-was-sampled"),
        WITH_TOOLS,
        start=rows_changed(doubles.results_without_head),
        watch_causes=MISMATCH,
    ),
    FieldFault(
        "long rollouts discarded as too old",
        "Rollouts that take long are too old when they end, and are discarded with their groups: short ones are trained.",
        "thinking-machines-lab/tinker-cookbook#822",
        ids("drops-are-biased", "rollouts-too-old"),
        EVERYWHERE,
        start=batches_changed(doubles.without_slow_groups),
    ),
    # Advantages and loss
    FieldFault(
        "rewards that are no numbers in each group's mean",
        "Some rewards are no numbers where advantages are computed, and are in the mean: so are the group's advantages.",
        "Tencent-Hunyuan/UniRL#335, huggingface/trl#5773",
        ids("gradient-not-finite", "advantages-wrong"),
        EVERYWHERE,
        start=doubles.no_number_counts,
    ),
    FieldFault(
        "lone failures divided by a rounding error",
        "Advantages are divided by the deviation of the others' rewards; where these are equal, it is what rounding leaves.",
        "NVIDIA-NeMo/RL#4158",
        ids("tiny-std-scaling", "advantages-wrong"),
        EVERYWHERE,
        start=all_of(graded(correct=doubles.ninety_five), doubles.divided_by_rounding),
        options="--baseline leave_one_out --scale-rewards group",
        watch_causes=ids("gradient-explodes"),
    ),
    FieldFault(
        "dual clip on the good rollouts too",
        "The bound of dual-clip PPO, meant for negative advantages, holds for positive ones: their gain is a constant.",
        "thu-ml/tianshou#433, opendilab/PPOxFamily#95",
        ids("ratio-clipped", "no-gradient", "sampled-tokens-masked", "advantages-wrong", "loss-differs-from-settings"),
        EVERYWHERE,
        start=doubles.dual_clip_everywhere,
    ),
    FieldFault(
        "no gradient through a reentrant checkpoint",
        "With gradient checkpointing no input of a layer of the frozen model has a gradient, and so the adapter gets none.",
        "microsoft/LoRA#120, cloneofsimo/lora#26, lm-sys/FastChat#1489, huggingface/trl#3150, huggingface/peft#1142",
        ids("no-gradient"),
        EVERYWHERE,
        start=policy_scores(doubles.without_gradient),
        options="--peft",
    ),
    # The engine
    FieldFault(
        "rank-stabilised adapter scaled by its rank in the engine",
        "The trainer multiplies the adapter by alpha over the square root of its rank, and the engine by alpha over the rank.",
        "NVIDIA/TensorRT-LLM#1668, dphnAI/sonar#647, hao-ai-lab/FastVideo#870, kohya-ss/sd-scripts#2204",
        ids("adapter-scale-differs"),
        EVERYWHERE,
        start=all_of(doubles.rank_stabilised, engine_model(doubles.scaled_by_rank)),
        options="--peft --lora-alpha 8",
        watch_causes=MISMATCH,
        watch_options=UNCHECKED,
    ),
    FieldFault(
        "positions of shorter prompts counted with their padding",
        "Prompts of one batch get the positions of the longest, padding included, and what is sampled after them its own.",
        "unslothai/unsloth#3699, unslothai/unsloth#3795, unslothai/unsloth#3803, unslothai/unsloth#4078, ndif-team/nnsight#673",
        ids("positions-shifted") | MISMATCH,
        ("musique", "gsm8k", "lookup"),
        start=doubles.padding_counted,
    ),
    FieldFault(
        "norms in half precision in the engine",
        "The engine's norms add up squares in bfloat16, and the trainer's in float32.",
        "vllm-project/vllm#36101, NVIDIA/TransformerEngine#1132, vllm-project/vllm#49616",
        MISMATCH,
        ("musique", "gsm8k"),
        start=engine_model(doubles.half_norms),
        watch_options=UNCHECKED,
    ),
    FieldFault(
        "rotary angles rounded in the engine",
        "The engine's rotary embedding is computed in bfloat16, so that positions are wrong by more the later they are.",
        "NVIDIA-NeMo/RL#2981, PrimeIntellect-ai/prime-rl#1167",
        MISMATCH | ids("positions-shifted"),
        WITH_TOOLS,
        start=engine_model(doubles.rounded_angles),
        watch_options=UNCHECKED,
    ),
    FieldFault(
        "rollouts one update behind the trainer without a correction",
        "The next rollouts begin before the update is there, and are trained as if the new weights had sampled them.",
        "radixark/miles#1829, THUDM/slime#1800",
        ids("engine-stale", "weights-not-synced"),
        EVERYWHERE,
        start=doubles.one_behind(),
        options="--importance-correction none",
        watch_causes=MISMATCH,
        watch_options=UNCHECKED,
    ),
    FieldFault(
        "another end token than that of the template",
        "The engine ends turns at another token than the chat template's, so that replies go on up to the limit.",
        "vllm-project/vllm#4180, vllm-project/vllm#792, vllm-project/vllm#1183",
        ids("stop-token-wrong", "truncated-turns"),
        ("gsm8k", "musique"),
        start=engine_prompts(doubles.never_ended),
        watch_causes=ids("degenerate-repetition"),
    ),
)
