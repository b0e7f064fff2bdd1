"""The unseen half of the thirteenth set of the field's faults, which is run only to measure."""

from __future__ import annotations

from plumbob.testing.faults import doubles as common
from plumbob.testing.faults import field13_unseen_doubles as doubles
from plumbob.testing.faults.field import EVERYWHERE, MISMATCH, UNCHECKED, FieldFault, ids
from plumbob.testing.faults.field2_parts import losses
from plumbob.testing.faults.field_parts import (
    batches_changed,
    engine_logits,
    engine_prompts,
    policy_scores,
    rows_changed,
)

UNSEEN = (
    # Rows and groups
    FieldFault(
        "end tokens left out of the loss as padding",
        "The padding token is the end token, and all tokens with its id are masked: the model never learns to stop.",
        "deepseek-ai/DeepSeek-Coder#163, mlabonne/llm-course#33, ibm-granite/granite-3.1-language-models#2, "
        "arcee-ai/DALM#56",
        ids("sampled-tokens-masked"),
        EVERYWHERE,
        start=rows_changed(doubles.ends_masked),
    ),
    FieldFault(
        "groups cut by a fixed stride after some rollouts failed",
        "Rollouts that failed are missing, and the rest is cut into groups of the full size, so that groups have rollouts "
        "of two tasks.",
        "areal-project/AReaL#1419",
        ids("groups-mixed", "advantages-wrong"),
        EVERYWHERE,
        start=batches_changed(doubles.cut_by_stride),
    ),
    # The engine
    FieldFault(
        "top-k and top-p taken from the model's generation config",
        "Sampling settings that a request leaves out are those of the model's generation_config.json.",
        "NVIDIA-NeMo/RL#3497",
        ids("sampling-truncated") | MISMATCH,
        EVERYWHERE,
        start=engine_logits(doubles.settings_of_the_model, raw=True),
    ),
    FieldFault(
        "repetition penalty taken from the model's generation config",
        "The engine takes its repetition penalty from the model's generation_config.json.",
        "OpenPipe/ART#140",
        ids("sampling-penalised") | MISMATCH,
        EVERYWHERE,
        start=engine_logits(doubles.repetitions_penalised, raw=True),
    ),
    FieldFault(
        "first token of the prompt twice in the engine",
        "The rendered prompt begins with a special token, and the engine's tokenizer puts another one before it.",
        "MakazhanAlpamys/Soup#781, sgl-project/sglang#888, NVIDIA-NeMo/RL#855, janhq/cortex.cpp#618, "
        "chujiezheng/chat_templates#28",
        ids("prompt-replaced", "row-not-what-was-sampled") | MISMATCH,
        EVERYWHERE,
        start=engine_prompts(doubles.first_token_twice),
    ),
    FieldFault(
        "stop token that the engine does not know",
        "The token that ends a turn is not among those at which the engine stops.",
        "huggingface/trl#3425",
        ids("stop-token-wrong", "truncated-turns"),
        EVERYWHERE,
        start=engine_prompts(doubles.end_unknown),
        options="--max-tokens 96",
    ),
    FieldFault(
        "adapter merged onto a bfloat16 grid for the engine",
        "Each sync merges the adapter into weights in bfloat16, which changes the update that they are meant to bring.",
        "NVIDIA-NeMo/RL#3696, huggingface/trl#5188",
        ids("merged-in-bf16") | MISMATCH,
        EVERYWHERE,
        inject=common.merged_in_bf16,
        options="--peft",
        watch_options=UNCHECKED,
        watch_causes=ids("mismatch-grows"),
    ),
    # The trainer's scores
    FieldFault(
        "left padding attended to in the trainer",
        "Prompts are padded on the left, and the forward pass has no attention mask.",
        "huggingface/trl#2708",
        ids("rows-see-each-other", "positions-shifted") | MISMATCH,
        EVERYWHERE,
        start=policy_scores(doubles.padded_on_the_left),
    ),
    FieldFault(
        "trainer's log-probabilities one token ahead",
        "The trainer's log-probabilities are those of the next token, and the engine's those of the token itself.",
        "PrimeIntellect-ai/prime-rl#1525",
        ids("logprobs-permuted", "loss-mask-shifted") | MISMATCH,
        EVERYWHERE,
        start=policy_scores(doubles.one_ahead),
        watch_options=UNCHECKED,
    ),
    # Loss and optimizer
    FieldFault(
        "old log-probabilities taken from the present weights",
        "The old policy's log-probabilities are computed anew in each pass: the ratio is 1, and nothing is ever clipped.",
        "tensorforce/tensorforce#312, higgsfield-ai/higgsfield#20",
        ids("ratio-to-reference"),
        EVERYWHERE,
        start=losses(doubles.ratio_of_one),
        options="--num-iterations 3",
    ),
    FieldFault(
        "KL term as reference minus policy",
        "The penalty is the reference's log-probability minus the policy's, which is negative where the policy has moved.",
        "one-covenant/grail#42",
        ids("kl-backwards"),
        EVERYWHERE,
        start=doubles.kl_turned,
        options="--kl-beta 0.1",
    ),
    FieldFault(
        "advantages relative to the whole batch",
        "Rewards are compared with the mean of the whole batch, in which the tasks differ, and not with their group's.",
        "XU-YIJIE/grpo-flat#2",
        ids("advantages-wrong", "groups-mixed"),
        EVERYWHERE,
        start=doubles.one_group,
        options="--scale-rewards group",
    ),
    FieldFault(
        "weights stored in bfloat16 without a master copy",
        "Trained weights are stored in bfloat16, in which most updates round to nothing.",
        "workofart/ml-by-hand#85",
        ids("weights-in-bf16"),
        EVERYWHERE,
        inject=common.bf16_masters,
        options="--learning-rate 3e-5",
        watch_causes=ids("optimizer-moves-nothing", "learning-rate-too-low"),
    ),
    # A resume
    FieldFault(
        "warm-up and decay begun anew after a resume",
        "The schedule's state is not saved: a resumed run warms up again, and falls from the peak.",
        "PolymathicAI/the_well#63, torch-points3d/torch-points3d#630, lightly-ai/lightly-train#301, PolymathicAI/the_well#77",
        ids("schedule-hides-rate"),
        EVERYWHERE,
        start=doubles.schedule_begun_anew,
        options="--lr-scheduler-type cosine --warmup-steps 2",
        probes=False,
    ),
)
