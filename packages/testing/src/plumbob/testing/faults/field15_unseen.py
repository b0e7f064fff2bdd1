"""The unseen half of the fifteenth set of the field's faults: they are run only to measure.

The set is a sample of what people report of trainers, engines and model libraries: threads in the order in which plain
searches return them, listed in docs/results/field15_threads.md.
"""

from __future__ import annotations

from plumbob.testing.faults import field15_unseen_doubles as doubles
from plumbob.testing.faults.doubles import normalised_per_microbatch
from plumbob.testing.faults.field import EVERYWHERE, MISMATCH, UNCHECKED, WITH_TOOLS, FieldFault, ids
from plumbob.testing.faults.field2_parts import losses
from plumbob.testing.faults.field_parts import (
    engine_logits,
    engine_prompts,
    engine_updates,
    rows_changed,
)

UNSEEN = (
    # Loss, schedule and optimizer
    FieldFault(
        "a mean per microbatch that nothing divides",
        "Each microbatch's loss is a mean over its own rows, and nothing divides by the number of microbatches.",
        "huggingface/trl#5828",
        ids("normaliser-depends-on-microbatches"),
        EVERYWHERE,
        inject=normalised_per_microbatch,
        options="--loss-type grpo --microbatch-tokens 2048",
    ),
    FieldFault(
        "entropy bonus with the wrong sign",
        "The loss has plus the entropy in place of minus: the policy is taught to be sure of whatever it writes.",
        "nebuly-ai/optimate#250, NJUxlj/Travel-Agent-based-on-Qwen2-RLHF#2",
        ids("entropy-collapse", "advantages-wrong", "loss-differs-from-settings"),
        EVERYWHERE,
        start=losses(doubles.less_entropy),
        steps=12,
    ),
    FieldFault(
        "warm-up whose first step has no rate",
        "The warm-up counts from 0, so that the first step's rollouts are sampled and trained on with a rate of 0.",
        "pytorch/torchtitan#1261",
        ids("schedule-hides-rate", "optimizer-moves-nothing"),
        EVERYWHERE,
        start=doubles.from_zero,
        options="--warmup-steps 2",
        steps=8,
    ),
    FieldFault(
        "clipping of gradients that are still scaled up",
        "Gradients are clipped before the loss scale of mixed precision is taken out, and become tiny when it is.",
        "rwth-i6/returnn#1595, Deci-AI/super-gradients#653, pytorch/examples#1196, milesial/Pytorch-UNet#468",
        ids("gradient-clipped-to-nothing"),
        EVERYWHERE,
        start=doubles.clipped_scaled_up,
        options="--max-grad-norm 0.1",
        watch_causes=ids("schedule-hides-rate", "learning-rate-too-low"),
    ),
    FieldFault(
        "optimizer of parameters from before the sharding",
        "The optimizer was made from tensors that the sharded model no longer computes with: its steps change those.",
        "pytorch/pytorch#149205, huggingface/accelerate#3209, huggingface/accelerate#2665, Lightning-Universe/lightning-GPT#17",
        ids("optimizer-moves-nothing", "gradients-not-cleared"),
        EVERYWHERE,
        start=doubles.optimizer_of_other_tensors,
    ),
    FieldFault(
        "gradient in the first layer's adapters alone",
        "The sharding ends the backward pass early: only the adapters of one layer get a gradient.",
        "meta-pytorch/torchforge#592, locuslab/open-unlearning#178",
        ids("no-gradient"),
        EVERYWHERE,
        start=doubles.first_layer_alone,
        options="--peft",
    ),
    # The policy
    FieldFault(
        "dropout while the log-probabilities are computed",
        "The model's dropout is on while gradients are computed, and off in the reference and in sampling.",
        "huggingface/trl#2042",
        ids("dropout-in-training"),
        EVERYWHERE,
        start=doubles.dropout_with_gradients,
        watch_causes=MISMATCH,
    ),
    FieldFault(
        "trained head lost when the embeddings are tied again",
        "The output embeddings are trained as a tensor of their own, and saving ties them to the input embeddings again.",
        "unslothai/unsloth#9331, NVIDIA-NeMo/Automodel#2511, huggingface/transformers#31467, hiyouga/ChatGLM-Efficient-Tuning#171",
        ids("saved-model-differs", "head-not-tied"),
        EVERYWHERE,
        start=doubles.head_of_its_own,
    ),
    FieldFault(
        "reference policy that nothing freezes",
        "The reference policy is updated with the policy, so that the KL term is always 0.",
        "irom-princeton/dppo#47, aburkov/theLMbook#8",
        ids("reference-is-another-policy", "kl-backwards"),
        EVERYWHERE,
        start=doubles.never_frozen,
        options="--kl-beta 0.05",
    ),
    # Rows
    FieldFault(
        "end tokens removed from the rows",
        "The engine takes the end token off what it returns, so that rows have turns without an end.",
        "vllm-project/vllm#2611, vllm-project/vllm#28185, tatsu-lab/stanford_alpaca#126",
        ids("row-not-what-was-sampled", "sampled-tokens-masked"),
        EVERYWHERE,
        start=rows_changed(doubles.ends_removed),
        watch_causes=MISMATCH | ids("stop-token-wrong"),
    ),
    FieldFault(
        "earlier replies twice in the rows",
        "Rows are made from the differences of rendered conversations, in which earlier replies change: they stand there twice.",
        "NVIDIA-NeMo/RL#2821, NVIDIA-NeMo/RL#2822",
        ids("row-not-what-was-sampled"),
        WITH_TOOLS,
        start=rows_changed(doubles.replies_twice),
        watch_causes=MISMATCH,
    ),
    FieldFault(
        "prompt cut in the trainer alone",
        "The trainer keeps the last tokens of a prompt, and the engine gets all of it.",
        "huggingface/trl#3601, huggingface/trl#3569, huggingface/trl#4358",
        ids("row-not-what-was-sampled", "tools-not-in-prompt"),
        EVERYWHERE,
        start=rows_changed(doubles.prompt_cut),
        watch_causes=MISMATCH,
    ),
    # The engine
    FieldFault(
        "nucleus sampling unknown to the trainer",
        "Rollouts are sampled with a top-p of 0.8, and the trainer's log-probabilities are over the whole vocabulary.",
        "NVIDIA-NeMo/RL#69, vllm-project/vllm#42259, vllm-project/vime#69, huggingface/trl#2358",
        ids("sampling-truncated"),
        ("musique", "gsm8k", "lookup"),
        options="--top-p 0.8",
        watch_causes=MISMATCH,
    ),
    FieldFault(
        "repetition penalty from the checkpoint's generation config",
        "The engine takes a repetition penalty of 1.1 from the checkpoint, and reports log-probabilities without it.",
        "PrimeIntellect-ai/prime-rl#886, verl-project/verl#7270, verl-project/verl#7298, verl-project/verl#7314",
        ids("sampling-penalised"),
        EVERYWHERE,
        start=engine_logits(doubles.penalised, raw=True),
    ),
    FieldFault(
        "prompts padded on the right before sampling",
        "The engine's prompts are padded at their end, and it samples after the padding.",
        "ruimalheiro/gradient-garden#91, huggingface/transformers#48161",
        ids("prompt-replaced", "row-not-what-was-sampled"),
        EVERYWHERE,
        start=engine_prompts(doubles.padded_right),
        watch_causes=MISMATCH,
    ),
    FieldFault(
        "weights under another prefix skipped in the sync",
        "The tensors' names have a prefix that the engine does not know, and names that it does not know are skipped.",
        "pytorch/examples#1029, bowang-lab/scGPT#296, pytorch/pytorch#141256",
        ids("weights-not-synced", "engine-stale"),
        EVERYWHERE,
        start=engine_updates(doubles.under_other_names),
        watch_causes=MISMATCH,
        watch_options=UNCHECKED,
    ),
)
