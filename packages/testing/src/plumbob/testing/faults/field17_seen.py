"""The seen half of the seventeenth set of the field's faults: those on which the doctor's rules may be developed.

The set is of the trainer's side: threads in the order in which plain searches return them, listed in
docs/results/field17_threads.md.
"""

from __future__ import annotations

from plumbob.testing.faults import field17_seen_doubles as doubles
from plumbob.testing.faults.doubles import adapter_not_applied
from plumbob.testing.faults.field import EVERYWHERE, MISMATCH, UNCHECKED, FieldFault, ids
from plumbob.testing.faults.field_parts import (
    engine_updates,
    rows_changed,
)

SEEN = (
    FieldFault(
        "reference logits not divided by the temperature",
        "The policy's log-probabilities are those at the sampling temperature, and the reference's are those at 1.",
        "huggingface/trl#3169",
        ids("temperature-not-applied", "reference-is-another-policy"),
        EVERYWHERE,
        start=doubles.reference_at_one,
        options="--temperature 0.7 --kl-beta 0.05",
    ),
    FieldFault(
        "requests to the engine that do not name the adapter",
        "The engine loads the trained adapter, and applies it only to requests that name it, as those of rollouts do not.",
        "verl-project/verl#5220, radixark/miles#2075",
        ids("adapter-not-applied", "weights-not-synced"),
        EVERYWHERE,
        inject=adapter_not_applied,
        options="--peft",
        watch_causes=MISMATCH,
        watch_options=UNCHECKED,
    ),
    FieldFault(
        "rate of full fine-tuning kept for an adapter",
        "An adapter is trained with a rate of 5e-7, as a whole model is, so that a run hardly moves it.",
        "huggingface/trl#2872",
        ids("learning-rate-too-low"),
        EVERYWHERE,
        options="--peft --lora-r 8 --lora-alpha 16 --learning-rate 5e-7 --lr-scheduler-type cosine",
    ),
    FieldFault(
        "adapter faded in over a thousand steps",
        "The adapter's product is multiplied by the step divided by a thousand, so that early updates change nothing.",
        "kyegomez/SingLoRA#6",
        ids("update-without-effect", "learning-rate-too-low"),
        EVERYWHERE,
        start=doubles.faded_in,
        options="--peft",
    ),
    FieldFault(
        "warm-up that begins at zero",
        "The schedule moves on after the update, so that the first update of a warm-up has a rate of 0.",
        "verl-project/verl#3674",
        ids("schedule-hides-rate", "optimizer-moves-nothing"),
        EVERYWHERE,
        start=doubles.from_zero,
        options="--warmup-steps 3",
    ),
    FieldFault(
        "warm-up of four thousand steps in a short run",
        "The warm-up is longer than the run, so that the rate stays a small part of its peak.",
        "ace-step/ACE-Step#198",
        ids("warmup-too-long", "learning-rate-too-low"),
        EVERYWHERE,
        options="--warmup-steps 4000",
    ),
    FieldFault(
        "closing token of every turn not trained",
        "The sampled end token of a turn is not part of the response that is trained.",
        "rasbt/reasoning-from-scratch#185, verl-project/verl#535, NVIDIA-NeMo/Speech#14437, jingyaogong/minimind#850",
        ids("sampled-tokens-masked"),
        EVERYWHERE,
        start=rows_changed(doubles.ends_untrained),
    ),
    FieldFault(
        "finished rollouts taken for cut-off ones by their end token",
        "The filter of cut-off rollouts asks for the tokenizer's end token, and the model ends its turns with another one.",
        "NovaSky-AI/SkyRL#1319",
        ids("signal-masked", "sampled-tokens-masked", "no-gradient"),
        EVERYWHERE,
        start=rows_changed(doubles.taken_for_cut_off),
        options="--overlong mask",
    ),
    FieldFault(
        "base model saved in place of the merged one",
        "The model is saved without its adapter, so that the files hold the weights of the base model.",
        "huggingface/peft#868, instructlab/training#141, huggingface/peft#918",
        ids("saved-model-differs"),
        EVERYWHERE,
        start=doubles.base_saved,
        options="--peft",
    ),
    FieldFault(
        "gate and up matrices exchanged in a synced engine",
        "The engine keeps these matrices in a layout of its own, and a weight sync writes them in that of the files.",
        "NovaSky-AI/SkyRL#1680, vllm-project/vllm#48284",
        ids("weights-not-synced") | MISMATCH,
        EVERYWHERE,
        start=engine_updates(doubles.gate_and_up_exchanged),
        watch_options=UNCHECKED,
    ),
    FieldFault(
        "KL computed and left out of the returns",
        "The KL divergence that the reward is to be lessened by is computed, and the function of the advantages ignores it.",
        "THUDM/slime#1247, THUDM/slime#399",
        ids("advantages-wrong", "kl-backwards"),
        EVERYWHERE,
        start=doubles.kl_ignored,
        options="--kl-beta 0.05 --kl-placement reward",
        probes=False,
    ),
    FieldFault(
        "gradients cleared before each backward pass",
        "Gradients are cleared in every pass and not after the update, so that only the last microbatch counts.",
        "pytorch/torchtitan#3575, tatsu-lab/alpaca_farm#57, huggingface/accelerate#1299",
        ids("normaliser-depends-on-microbatches", "no-gradient"),
        EVERYWHERE,
        start=doubles.last_pass_only,
        options="--microbatch-tokens 512",
    ),
    FieldFault(
        "zero_grad left out of the training loop",
        "Gradients are not cleared after an update, so that every update has the sum of all gradients before it.",
        "tenstorrent/tt-blacksmith#711, meta-pytorch/torchforge#71",
        ids("gradients-not-cleared"),
        EVERYWHERE,
        start=doubles.never_cleared,
    ),
    FieldFault(
        "token mean of each microbatch weighted by its rows",
        "The loss is the mean over a microbatch's tokens, and microbatches count by their number of rows.",
        "modelscope/twinkle#292, databricks/compose-rl#71",
        ids("normaliser-depends-on-microbatches"),
        EVERYWHERE,
        start=doubles.token_mean_by_rows,
        options="--loss-type bnpo --microbatch-tokens 512",
    ),
    FieldFault(
        "reward given to the tokens of the prompt too",
        "The batch has a mask of padding alone, so that every token of the row counts as an action, and the prompt is trained.",
        "NVIDIA-NeMo/Megatron-Bridge#5959",
        ids("context-tokens-trained"),
        EVERYWHERE,
        start=rows_changed(doubles.all_trained),
        watch_causes=MISMATCH,
    ),
)
