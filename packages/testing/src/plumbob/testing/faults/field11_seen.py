"""The seen half of the eleventh set of the field's faults: those on which the doctor's rules may be developed.

The set is a sample of what people ask about: threads in the order in which plain searches return them, listed in
docs/results/field11_threads.md.
"""

from __future__ import annotations

from plumbob.testing.faults import field11_seen_doubles as doubles
from plumbob.testing.faults.field import EVERYWHERE, MISMATCH, FieldFault, ids
from plumbob.testing.faults.field2_parts import engine_completions
from plumbob.testing.faults.field_parts import batches_changed, engine_prompts, graded, rows_changed

SEEN = (
    # Rewards
    FieldFault(
        "percent sign left on the gold answer",
        "The scorer takes signs off the numbers of replies and not off gold answers, a third of which have a percent sign.",
        "UKGovernmentBEIS/inspect_ai#838",
        ids("answers-not-parsed", "oracle-fails"),
        ("gsm8k",),
        start=graded(correct=doubles.sign_left_on_gold),
    ),
    FieldFault(
        "lowest mark of a judge read as the highest",
        "Marks from 1 to 10 are divided by 10 unless they look like a score already, as the worst one does, which is 1.",
        "OpenAgentHQ/openagent-eval#74",
        ids("oracle-fails", "reward-exploitable"),
        ("gsm8k", "lookup", "musique"),
        start=graded(correct=doubles.judged),
        watch_causes=ids("length-collapse", "tools-abandoned"),
    ),
    # Rows and groups
    FieldFault(
        "last token of the prompt in the loss",
        "The mask of a completion is copied with one token too many, the last one before it.",
        "unslothai/unsloth-zoo#67, intel/intel-extension-for-transformers#1193",
        ids("context-tokens-trained", "loss-mask-shifted"),
        EVERYWHERE,
        start=rows_changed(doubles.prompt_ends_trained),
    ),
    FieldFault(
        "one row in every place of the batch",
        "The buffer between sampling and training has room for one row, of which a step then consists.",
        "meta-pytorch/torchtune#2981, Itomigna2/Muesli-lunarlander#1",
        ids("groups-without-variety", "too-little-signal", "row-not-what-was-sampled"),
        EVERYWHERE,
        start=batches_changed(doubles.last_row_everywhere),
    ),
    # Sampling
    FieldFault(
        "first token of each completion dropped",
        "The engine returns completions without their first token, which it takes for a part of the prompt.",
        "mmcdermott/MEDS_EIC_AR#111",
        # In environments with tools, the token that is missing is the one that opens a call.
        ids("row-not-what-was-sampled", "calls-malformed", "calls-in-unread-form") | MISMATCH,
        ("gsm8k", "lookup", "musique"),
        start=engine_completions(doubles.without_first_token),
    ),
    FieldFault(
        "top-k of one by default",
        "A server's default keeps the likeliest token alone, whatever the temperature is, so that rollouts of a task are equal.",
        "vllm-project/tpu-inference#1386",
        ids("groups-without-variety", "sampling-truncated", "too-little-signal"),
        EVERYWHERE,
        start=engine_prompts(doubles.greedy),
        watch_causes=MISMATCH,
    ),
    # The trainer
    FieldFault(
        "normalised advantages in the clipped term alone",
        "Advantages are normalised between the two terms of PPO's minimum, so that the first has others than the second.",
        "pytorch/rl#1033",
        ids("advantages-wrong", "loss-differs-from-settings"),
        EVERYWHERE,
        start=doubles.normalised_where_clipped,
    ),
    # The saved model
    FieldFault(
        "adapter trained on rounded weights and saved over exact ones",
        "The adapter was trained over weights of 4 bits, and the final model has it over the weights before the rounding.",
        "artidoro/qlora#254, 2U1/Qwen-VL-Series-Finetune#241, oobabooga/textgen#5182",
        ids("saved-model-differs"),
        EVERYWHERE,
        start=doubles.saved_over_exact_weights,
        options="--peft",
    ),
    FieldFault(
        "one shard of each matrix in the final model",
        "The final model is saved from one process, which has gathered no more than its own part of each matrix.",
        "pytorch/pytorch#136950, microsoft/SeerAttention#10, deepspeedai/DeepSpeed#2413, baichuan-inc/Baichuan-7B#132",
        ids("saved-model-differs"),
        EVERYWHERE,
        start=doubles.first_shards_only,
    ),
)
