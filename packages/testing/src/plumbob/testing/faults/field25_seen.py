"""The seen half of the twenty-fifth set of the field's faults: those on which the doctor's rules may be developed.

The set is about the trainer's side: threads in the order in which plain searches return them, listed in
docs/results/field25_threads.md.
"""

from __future__ import annotations

from plumbob.testing.faults import field25_seen_doubles as doubles
from plumbob.testing.faults.field import EVERYWHERE, MISMATCH, UNCHECKED, FieldFault, ids
from plumbob.testing.faults.field25_parts import (
    advantages_changed,
    loads_changed,
    loss_term,
    microbatches_changed,
    schedule_changed,
)
from plumbob.testing.faults.field_parts import batches_changed, engine_logits, policy_scores, rows_changed

GSM8K_FIRST = ("gsm8k", "lookup", "musique")
"""All environments, first that whose replies differ most in length."""

SEEN = (
    # Loss
    FieldFault(
        "token means of microbatches weighted by rows",
        "Each microbatch's loss is a mean over its own tokens, and counts by its share of the rows in place of the tokens.",
        "verl-project/verl#5625, NVIDIA/Megatron-LM#4590",
        ids("normaliser-depends-on-microbatches"),
        GSM8K_FIRST,
        start=microbatches_changed(doubles.means_by_rows),
        options="--loss-type dapo --microbatch-tokens 1500",
    ),
    FieldFault(
        "sequence advantage averaged over masked tokens",
        "The advantage of a sequence is a mean over all of its places, also over those that the loss mask leaves out.",
        "areal-project/AReaL#1346",
        ids("loss-differs-from-settings", "advantages-wrong"),
        EVERYWHERE,
        start=microbatches_changed(doubles.averaged_over_all_tokens),
        options="--loss-type gspo",
    ),
    FieldFault(
        "entropy pushed down in place of up",
        "The loss has an entropy term with the wrong sign, which makes the policy more deterministic at each update.",
        "nebuly-ai/optimate#247",
        ids("loss-differs-from-settings"),
        EVERYWHERE,
        start=loss_term(doubles.less_entropy),
        watch_causes=ids("entropy-collapse"),
    ),
    FieldFault(
        "entropy bonus of sampled tokens alone",
        "The entropy bonus is p log p of the sampled token, and not the sum over all tokens that could be sampled.",
        "AI4Finance-Foundation/ElegantRL#4",
        ids("loss-differs-from-settings"),
        EVERYWHERE,
        start=loss_term(doubles.sampled_entropy),
    ),
    FieldFault(
        "k1 penalty as a term of the loss",
        "The KL penalty of the loss is the difference of log-probabilities itself, whose gradient is 0 on average.",
        "OpenRLHF/OpenRLHF#797, verl-project/verl#2953, OpenRLHF/OpenRLHF#1101",
        ids("kl-backwards"),
        EVERYWHERE,
        options="--kl-beta 0.05 --kl-estimator k1 --kl-placement loss",
    ),
    # Advantages
    FieldFault(
        "mean added back after whitening",
        "Rewards are whitened over the step, and their mean is added again, so that no baseline is left.",
        "THUDM/slime#1369",
        ids("advantages-wrong"),
        EVERYWHERE,
        start=advantages_changed(doubles.plus_mean),
        options="--scale-rewards batch",
    ),
    # Log-probabilities
    FieldFault(
        "mask one place before the log-probabilities",
        "The completion mask is one place before the log-probabilities: the last prompt token is trained, the last sampled not.",
        "modelscope/ms-swift#8427",
        ids("loss-mask-shifted", "logprobs-permuted"),
        EVERYWHERE,
        start=policy_scores(doubles.mask_moved),
        watch_causes=MISMATCH,
    ),
    FieldFault(
        "training logits without the temperature",
        "Rollouts are sampled at a temperature of 0.7, and the trainer's logits are not divided by it.",
        "modelscope/ms-swift#8427",
        ids("temperature-not-applied"),
        EVERYWHERE,
        start=policy_scores(doubles.temperature_left_out),
        options="--temperature 0.7",
        watch_causes=MISMATCH,
    ),
    FieldFault(
        "trainer's log-softmax in half precision",
        "The trainer computes log-probabilities over the vocabulary in bfloat16, in every pass.",
        "billy-enrizky/openbrowser-ai#63, THUDM/slime#892",
        MISMATCH,
        GSM8K_FIRST,
        start=policy_scores(doubles.rounded),
        options="--num-iterations 2",
        watch_options=UNCHECKED,
    ),
    FieldFault(
        "hidden dropout of a tenth by default",
        "The trainer's model has a dropout of 0.1 in its layers, a library's default, and the engine's has none.",
        "Human-Agent-Society/reef#536, huggingface/trl#4",
        ids("dropout-in-training"),
        EVERYWHERE,
        start=doubles.hidden_dropout,
        watch_causes=MISMATCH,
    ),
    # Rows
    FieldFault(
        "prompt among the labels",
        "The labels are all tokens of a row: only padding is left out of the loss, and not the prompt.",
        "RL-Align/RL-Kernel#218",
        ids("context-tokens-trained"),
        EVERYWHERE,
        start=rows_changed(doubles.all_labelled),
    ),
    FieldFault(
        "mask of the longest reply on every row",
        "One number of tokens to keep, that of the longest reply, is used for all rows: shorter replies' prompts are trained.",
        "modelscope/ms-swift#3069",
        ids("context-tokens-trained"),
        GSM8K_FIRST,
        start=batches_changed(doubles.longest_reply_on_all),
    ),
    # The engine
    FieldFault(
        "engine's logits kept in bfloat16",
        "The engine computes probabilities from logits in bfloat16, which moves unlikely tokens most.",
        "genlm/genlm-backend#66, huggingface/transformers#31267",
        MISMATCH,
        GSM8K_FIRST,
        start=engine_logits(doubles.half_logits),
    ),
    FieldFault(
        "stop text cut from the reply",
        "The engine cuts what ended a reply out of its output, so that the trained row has turns without an end.",
        "vllm-project/vllm#1973, vllm-project/vllm#3672",
        ids("stop-token-wrong", "row-not-what-was-sampled", "sampled-tokens-masked"),
        EVERYWHERE,
        start=rows_changed(doubles.ends_cut),
        watch_causes=MISMATCH,
    ),
    FieldFault(
        "prefixes kept across weight updates",
        "The engine's cache of prefixes stays when new weights are loaded: prompts are read with the old weights.",
        "nvidia-cosmos/cosmos-rl#209",
        ids("engine-stale"),
        EVERYWHERE,
        start=loads_changed(doubles.prefixes_kept),
        watch_causes=MISMATCH,
    ),
    FieldFault(
        "adapter scaled in place at each load",
        "To load the adapter, its second matrices are multiplied by alpha / r in place, which changes the trained ones.",
        "unslothai/unsloth-zoo#941",
        ids("weights-lost", "adapter-scale-differs"),
        EVERYWHERE,
        start=loads_changed(doubles.scaled_in_place),
        options="--peft --max-tokens 128",
        watch_causes=MISMATCH,
    ),
    # Optimizer, schedule, files
    FieldFault(
        "optimizer holds parameters from before they were flattened",
        "The optimizer was made with the parameters that sharding has since replaced, and updates those.",
        "huggingface/accelerate#3256",
        ids("optimizer-moves-nothing"),
        EVERYWHERE,
        start=doubles.optimizer_of_earlier_tensors,
    ),
    FieldFault(
        "blank optimizer step before the first",
        "To make its state, the optimizer takes a step without a gradient, which counts: the first updates are too small.",
        "NVIDIA/Megatron-LM#5976",
        ids("schedule-hides-rate"),
        EVERYWHERE,
        start=doubles.blank_first_step,
    ),
    FieldFault(
        "restart counts past steps twice",
        "A resumed run restores the scheduler's place and then steps it there again, so that the rate falls too early.",
        "THUDM/slime#1547, THUDM/slime#1546",
        ids("schedule-hides-rate"),
        EVERYWHERE,
        start=schedule_changed(doubles.counted_twice),
        probes=False,  # the first four steps have the right rate
        watch_causes=ids("optimizer-moves-nothing"),
        steps=12,
    ),
    FieldFault(
        "decay runs during the warm-up",
        "The rate falls from the first step on, although it still warms up: it drops at the end of the warm-up.",
        "huggingface/transformers#4940",
        ids("schedule-hides-rate"),
        EVERYWHERE,
        start=schedule_changed(doubles.decay_from_the_start),
        options="--warmup-steps 5",
        probes=False,  # the rate is right until the warm-up ends
        steps=12,
    ),
    FieldFault(
        "adapter skipped by the final merge",
        "The names of the adapter's layers do not match when the final model is written, so that it is the base model.",
        "PrimeIntellect-ai/prime-rl#1456",
        ids("saved-model-differs"),
        EVERYWHERE,
        start=doubles.base_saved,
        options="--peft",
    ),
)
