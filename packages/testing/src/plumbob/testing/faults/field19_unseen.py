"""The unseen half of the nineteenth set of the field's faults: they are run only to measure.

The set is about the trainer's side. It is a sample of what people ask about: threads in the order in which plain searches
return them, listed in docs/results/field19_threads.md.
"""

from __future__ import annotations

from plumbob.testing.faults import field19_unseen_doubles as doubles
from plumbob.testing.faults.field import EVERYWHERE, MISMATCH, UNCHECKED, WITH_TOOLS, FieldFault, ids
from plumbob.testing.faults.field_parts import batches_changed, engine_prompts, engine_updates, rows_changed

UNSEEN = (
    # Rows
    FieldFault(
        "loss on all that follows the first prompt",
        "The mask is zeros for the first prompt and ones for the rest: tool results and later prompts are trained.",
        "THUDM/slime#1563, unslothai/unsloth#5673, nvidia-cosmos/cosmos-rl#132",
        ids("context-tokens-trained"),
        WITH_TOOLS,
        start=rows_changed(doubles.all_after_the_prompt),
        watch_causes=MISMATCH,
    ),
    FieldFault(
        "padding behind the end token trained",
        "A row that stopped at one of several end tokens keeps the padding behind it in the loss.",
        "huggingface/trl#7039",
        ids("context-tokens-trained", "row-not-what-was-sampled"),
        EVERYWHERE,
        start=rows_changed(doubles.padding_trained),
        watch_causes=MISMATCH,
    ),
    FieldFault(
        "groups cut out of a batch of different prompts",
        "The batches do not repeat their prompts as groups need it: rewards of different tasks are compared.",
        "om-ai-lab/VLM-R1#98",
        ids("groups-mixed"),
        EVERYWHERE,
        start=batches_changed(doubles.dealt_out),
    ),
    # The engine
    FieldFault(
        "log-probabilities of other requests of the batch",
        "A tensor was expanded until its shape fitted: a token's log-probability is that of another request's logits.",
        "pytorch/torchtitan#3629",
        ids("logprobs-permuted") | MISMATCH,
        EVERYWHERE,
        start=doubles.of_other_requests,
        options="--importance-correction token_truncate",
    ),
    FieldFault(
        "temperature of evaluations taken over by rollouts",
        "The settings of the evaluation are written over those of the rollouts, which are sampled at a temperature of 0.01.",
        "agentscope-ai/Trinity-RFT#400",
        ids("groups-without-variety", "temperature-not-applied"),
        EVERYWHERE,
        start=engine_prompts(doubles.cold),
        watch_causes=MISMATCH,
    ),
    FieldFault(
        "example script that samples from the best few tokens",
        "The settings of an example sample from the two likeliest tokens, and the trainer scores with all.",
        "radixark/miles#338",
        ids("sampling-truncated"),
        EVERYWHERE,
        options="--temperature 1.2 --top-k 2",
    ),
    FieldFault(
        "adapter gone from the engine after it woke",
        "An engine that sleeps discards its adapter's tensors, and none comes back when it wakes and gets the weights.",
        "verl-project/verl#3516, vllm-project/vllm#53888",
        ids("adapter-not-applied", "weights-not-synced"),
        EVERYWHERE,
        start=engine_updates(doubles.no_adapter),
        options="--peft",
        watch_causes=MISMATCH,
        watch_options=UNCHECKED,
    ),
    FieldFault(
        "adapter sent inside the base and beside it",
        "The base weights are exported with the adapter merged in, and the adapter is sent too: it counts twice.",
        "radixark/miles#1087",
        ids("adapter-scale-differs") | MISMATCH,
        EVERYWHERE,
        start=doubles.merged_and_beside,
        options="--peft",
        watch_options=UNCHECKED,
    ),
    FieldFault(
        "engine's weights finished again after each bucket",
        "What the engine does with its weights once they are loaded is done after every bucket of a weight sync.",
        "sgl-project/sglang#14178, verl-project/verl-recipe#13, sgl-project/sglang#17114",
        ids("weights-not-synced") | MISMATCH,
        EVERYWHERE,
        start=engine_updates(doubles.finished_by_bucket),
        watch_options=UNCHECKED,
    ),
    FieldFault(
        "decoding two positions ahead of the prompt",
        "Engine and trainer count positions differently: decoded tokens are further from the prompt than they should be.",
        "areal-project/AReaL#218",
        ids("positions-shifted") | MISMATCH,
        EVERYWHERE,
        start=doubles.decoding_ahead,
    ),
    # Evaluations and the saved model
    FieldFault(
        "evaluations at temperature one whatever is asked",
        "The evaluation's temperature is written into the code: it is 1, and training samples at 0.6.",
        "thinking-machines-lab/tinker-cookbook#724",
        ids("evaluation-prompted-differently"),
        EVERYWHERE,
        start=doubles.at_temperature_one,
        options="--temperature 0.6",
        probes=False,  # the temperature belongs to the run's evaluations, and the examination before it has none
        watch_options="--eval-examples 32 --eval-steps 3",
    ),
    FieldFault(
        "saved adapter that nobody can load",
        "Whoever merges the saved adapter does not find its names, and writes the base model as the trained one.",
        "verl-project/verl#3110",
        ids("saved-model-differs"),
        EVERYWHERE,
        start=doubles.base_alone_saved,
        options="--peft",
        probes=False,  # the model is saved at a run's end
    ),
    # The trainer
    FieldFault(
        "loss of every pass added and never divided",
        "With several passes per update, each one's loss is a mean, and their sum is not divided by their number.",
        "huggingface/trl#2617, huggingface/trl#3716",
        ids("normaliser-depends-on-microbatches", "loss-differs-from-settings"),
        EVERYWHERE,
        start=doubles.loss_scaled(float),
        options="--microbatch-tokens 2048",
        watch=False,  # a run directory does not say how large a gradient should have been
    ),
    FieldFault(
        "loss divided twice by the number of passes",
        "The loss is normalised over the whole update already, and is divided by the number of passes once more.",
        "PrimeIntellect-ai/prime-rl#517, rwth-i6/returnn#1379, modelscope/ms-swift#10116",
        ids("normaliser-depends-on-microbatches", "loss-differs-from-settings"),
        EVERYWHERE,
        start=doubles.loss_scaled(lambda passes: 1 / passes),
        options="--microbatch-tokens 2048",
        watch=False,  # a run directory does not say how large a gradient should have been
    ),
    FieldFault(
        "credit that fades over the tools' tokens too",
        "The discount counts every token of the row, tool results too: what comes before them gets hardly any advantage.",
        "radixark/miles#1827",
        ids("advantages-wrong", "loss-differs-from-settings"),
        ("musique", "lookup"),
        start=doubles.credit_fades,
    ),
    FieldFault(
        "cut-off rollouts kept in the loss although masked",
        "The mask of cut-off rollouts is applied to one of two masks, and the loss uses the other.",
        "huggingface/trl#4976",
        ids("advantages-wrong", "loss-differs-from-settings"),
        ("gsm8k",),
        start=doubles.mask_forgotten,
        options="--overlong mask --max-tokens 96",
    ),
    FieldFault(
        "rate that grows because the schedule has no end",
        "The number of steps is -1 where the decay is computed, which makes the rate larger with each step.",
        "pytorch/torchtitan#99",
        ids("schedule-hides-rate", "learning-rate-too-high"),
        EVERYWHERE,
        start=doubles.growing_rate,
        steps=10,
    ),
    FieldFault(
        "warm-up of ten runs in place of a tenth",
        "The expression for a warm-up of a tenth of the steps gives ten times as many as the run has.",
        "wri-dssg-omdena/policy-data-analyzer#76",
        ids("warmup-too-long"),
        EVERYWHERE,
        options="--warmup-steps 300",
    ),
    FieldFault(
        "half of each up projection repeated when sharded",
        "Wrapped a second time for sharding, both halves of a matrix become its first half in the trainer.",
        "pytorch/pytorch#102280",
        MISMATCH,
        EVERYWHERE,
        start=doubles.half_repeated,
        options="--peft",
        watch_options=UNCHECKED,
    ),
)
"""The unseen faults."""
