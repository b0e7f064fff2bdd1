"""The unseen half of the twenty-fifth set of the field's faults: those on which the doctor is measured only.

The set is about the trainer's side: threads in the order in which plain searches return them, listed in
docs/results/field25_threads.md.
"""

from __future__ import annotations

from plumbob.testing.faults import field25_unseen_doubles as doubles
from plumbob.testing.faults.field import EVERYWHERE, MISMATCH, UNCHECKED, FieldFault, ids
from plumbob.testing.faults.field2_parts import batches, losses
from plumbob.testing.faults.field25_parts import (
    advantages_changed,
    loads_changed,
    microbatches_changed,
    schedule_changed,
)
from plumbob.testing.faults.field_parts import engine_model, engine_prompts, engine_updates

GSM8K_FIRST = ("gsm8k", "lookup", "musique")
"""All environments, first that whose replies differ most in length."""

UNSEEN = (
    # Loss
    FieldFault(
        "reference never handed to the loss",
        "A key is missing in what the loss gets, so that the KL term is left out whatever its coefficient.",
        "NVIDIA-NeMo/RL#3792",
        ids("loss-differs-from-settings", "kl-backwards"),
        EVERYWHERE,
        start=losses(doubles.without_reference),
        options="--kl-beta 0.05",
    ),
    FieldFault(
        "ratio taken against itself in every pass",
        "The importance ratio is that of the current policy to itself, also in later passes over the same rollouts.",
        "xiaomi-research/time-r1#20, sidhantls/ppo_lightning#3",
        ids("ratio-to-reference", "loss-differs-from-settings"),
        EVERYWHERE,
        start=losses(doubles.against_itself),
        options="--num-iterations 3",
    ),
    FieldFault(
        "loss over the padded width of a microbatch",
        "Sums over tokens are divided by the width of their microbatch, as padded, in place of one constant length.",
        "verl-project/verl#5366",
        ids("normaliser-depends-on-microbatches", "loss-differs-from-settings"),
        GSM8K_FIRST,
        start=microbatches_changed(doubles.over_padded_width),
        options="--microbatch-tokens 1500",
    ),
    FieldFault(
        "log-ratio of a token over its row's length",
        "In place of the mean log-ratio of a row, each token's own is divided by the row's length: ratios hardly leave 1.",
        "agentscope-ai/Trinity-RFT#154",
        ids("loss-differs-from-settings"),
        EVERYWHERE,
        start=doubles.token_over_length,
        options="--loss-type gspo --num-iterations 3",
    ),
    # Advantages
    FieldFault(
        "halves of a row whitened apart",
        "Rows are divided among processes, and each whitens the advantages of its part by that part's mean and deviation.",
        "radixark/miles#3229",
        ids("loss-differs-from-settings", "advantages-wrong"),
        EVERYWHERE,
        start=losses(doubles.halves_whitened),
    ),
    FieldFault(
        "mean of advantages over padding",
        "Advantages are normalised by a mean over all places, padding included, and a deviation over the sampled ones.",
        "NovaSky-AI/SkyRL#1305, NovaSky-AI/SkyRL#1782, ray-project/ray#63900",
        ids("advantages-wrong"),
        GSM8K_FIRST,
        start=advantages_changed(doubles.over_padding),
        options="--scale-rewards batch",
    ),
    # Log-probabilities
    FieldFault(
        "old policy scored with dropout on",
        "The model is in training mode where old log-probabilities are computed, so that its dropout changes them.",
        "verl-project/verl#4708",
        ids("dropout-in-training", "ratio-to-reference", "loss-differs-from-settings"),
        EVERYWHERE,
        start=doubles.scored_with_dropout,
        options="--num-minibatches 2",
        watch_causes=ids("ratio-clipped"),
    ),
    FieldFault(
        "completion unseen by the trainer",
        "The trainer's attention mask is 1 on the prompt alone: each sampled token is scored without those before it.",
        "huggingface/trl#3733",
        ids("loss-mask-as-attention-mask"),
        EVERYWHERE,
        start=batches(doubles.completion_unseen),
        watch_causes=MISMATCH,
    ),
    FieldFault(
        "shift after packing foretells the next row",
        "Labels are shifted once more after rows were packed: the last token of a row is trained to foretell the next row.",
        "pytorch/torchtitan#3347",
        ids("loss-mask-shifted", "logprobs-permuted"),
        EVERYWHERE,
        start=batches(doubles.next_token_labelled),
        watch_causes=MISMATCH,
    ),
    # Sampling
    FieldFault(
        "fifty likeliest tokens by default",
        "The sampler keeps the fifty likeliest tokens, a library's default, although the run does not ask for it.",
        "huggingface/trl#3494",
        ids("sampling-truncated"),
        EVERYWHERE,
        start=engine_prompts(doubles.fifty_likeliest),
        options="--temperature 1.3",
        watch_causes=MISMATCH,
    ),
    FieldFault(
        "script samples at seven tenths and nine tenths",
        "The script that samples has a temperature of 0.7 and a top-p of 0.9 of its own, in place of the run's.",
        "uclaml/SPPO#20",
        ids("temperature-not-applied", "sampling-truncated"),
        EVERYWHERE,
        start=engine_prompts(doubles.own_settings),
        watch_causes=MISMATCH,
    ),
    FieldFault(
        "devices of a group seeded alike",
        "The rollouts of a group are sampled on several devices with the same seeds, so that most of them are copies.",
        "tenstorrent/tt-metal#48829, huggingface/trl#2824, modelscope/ms-swift#3143, NVIDIA/Megatron-LM#5983",
        ids("groups-without-variety", "rollouts-repeated"),
        EVERYWHERE,
        start=doubles.seeds_of_two,
        watch_causes=ids("too-little-signal", "few-groups-differ"),
    ),
    # Weight sync
    FieldFault(
        "sync left out where the cache is kept",
        "Weights are sent when the engine wakes up, and with a cache that is kept it never sleeps: it keeps the first weights.",
        "verl-project/verl#4248, rllm-org/rllm#291",
        ids("weights-not-synced"),
        EVERYWHERE,
        start=loads_changed(doubles.never_loaded),
        watch_options=UNCHECKED,
        watch_causes=MISMATCH,
    ),
    FieldFault(
        "asynchronous requests without the adapter",
        "The engine gets each update of the adapter, but its asynchronous requests do not name it: the base model answers.",
        "modelscope/ms-swift#9855, unslothai/unsloth#8701",
        ids("adapter-not-applied", "weights-not-synced"),
        EVERYWHERE,
        start=engine_model(doubles.adapter_left_out),
        options="--peft",
        watch_options=UNCHECKED,
        watch_causes=MISMATCH,
    ),
    FieldFault(
        "up projection served with the gate's adapter",
        "Where gate and up projection are loaded as one, the gate's adapter is taken twice, and the other never arrives.",
        "unslothai/unsloth-zoo#941",
        ids("weights-not-synced"),
        EVERYWHERE,
        start=engine_updates(doubles.gate_for_up),
        options="--peft",
        watch_options=UNCHECKED,
        watch_causes=MISMATCH,
    ),
    FieldFault(
        "base rounded by each merge and unmerge",
        "The adapter is merged into bfloat16 weights at every sync, and subtracted from them again: they drift.",
        "KohakuBlueleaf/LyCORIS#267",
        ids("merged-in-bf16"),
        EVERYWHERE,
        inject=doubles.merged_and_unmerged,
        options="--peft",
        watch_options=UNCHECKED,
        watch_causes=ids("mismatch-grows") | MISMATCH,
    ),
    FieldFault(
        "tied head built of zeros",
        "The engine builds an output head of its own for a model whose head is its embedding, and nothing ever fills it.",
        "GradientHQ/parallax#444",
        ids("head-not-tied", "weights-not-synced") | MISMATCH,
        EVERYWHERE,
        start=engine_model(doubles.zero_head),
        options="--max-tokens 48",
        watch_options=UNCHECKED,
    ),
    # The schedule
    FieldFault(
        "schedule begun anew by a restart",
        "A resumed run makes a new scheduler, which begins at its first step: the rate jumps back to its peak.",
        "mlbench/mlbench-old#50, victoresque/pytorch-template#68",
        ids("schedule-hides-rate"),
        EVERYWHERE,
        start=schedule_changed(doubles.begun_anew),
        probes=False,  # the first four steps have the right rate
        steps=8,
    ),
)
