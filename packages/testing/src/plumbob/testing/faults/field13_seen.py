"""The seen half of the thirteenth set of the field's faults: those on which the doctor's rules may be developed.

The set is a sample of what people report of trainers, engines and model libraries: the first threads that plain searches
return, listed in docs/results/field13_threads.md.
"""

from __future__ import annotations

from plumbob.testing.faults import doubles as common
from plumbob.testing.faults import field13_seen_doubles as doubles
from plumbob.testing.faults.field import EVERYWHERE, MISMATCH, UNCHECKED, FieldFault, ids
from plumbob.testing.faults.field_parts import engine_model, engine_updates, graded, policy_scores, rows_changed

SEEN = (
    # The reward
    FieldFault(
        "reward decided by the prompt alone",
        "Rewards differ much from task to task, and all rollouts of a task earn the same.",
        "huggingface/trl#3857",
        ids("reward-constant", "oracle-fails", "groups-without-variety", "too-little-signal"),
        EVERYWHERE,
        start=graded(correct=doubles.of_the_prompt),
    ),
    # Rows
    FieldFault(
        "mask of the loss one token early",
        "The mask is not moved by one as the log-probabilities are, so that a turn's last token is left out and the token "
        "before its first one is trained.",
        "CarperAI/trlx#509",
        ids("loss-mask-shifted", "context-tokens-trained", "sampled-tokens-masked"),
        EVERYWHERE,
        start=rows_changed(doubles.mask_one_early),
        watch_causes=MISMATCH,
    ),
    # The engine
    FieldFault(
        "log-probabilities of the engine from before the temperature",
        "The engine samples at a temperature, and reports log-probabilities of the logits as they were before.",
        "allenai/open-instruct#1678",
        ids("temperature-not-applied") | MISMATCH,
        EVERYWHERE,
        start=doubles.logprobs_before_temperature,
        options="--temperature 0.6",
    ),
    FieldFault(
        "frozen weights sent in place of the adapter",
        "Each sync sends the base model's weights and no tensor of the adapter: rollouts stay those of the first policy.",
        "verl-project/verl#7495",
        ids("weights-not-synced", "adapter-not-applied", "adapter-bound-to-no-module"),
        EVERYWHERE,
        start=engine_updates(doubles.frozen_weights),
        options="--peft",
        watch_options=UNCHECKED,
        watch_causes=MISMATCH | ids("engine-stale", "mismatch-grows"),
    ),
    FieldFault(
        "base of the engine without the adapter's first share",
        "The adapter begins from the base's own main directions, which are taken out of the base; the engine has that base.",
        "ISEEKYAN/Megatron-LM#75",
        ids("weights-not-synced") | MISMATCH,
        EVERYWHERE,
        start=engine_model(doubles.first_share_taken_out),
        options="--peft --lora-r 2 --lora-alpha 4",
        watch_options=UNCHECKED,
    ),
    FieldFault(
        "weights of the start restored when the engine wakes",
        "A sync reaches the engine, and when it wakes for the next rollouts, it has the weights that it slept with.",
        "huggingface/trl#5312",
        ids("weights-not-synced", "engine-stale"),
        EVERYWHERE,
        start=doubles.old_weights_when_it_wakes,
        watch_causes=MISMATCH | ids("mismatch-grows"),
    ),
    FieldFault(
        "prefix cache kept over weight updates",
        "After a sync, prompts that the engine knows are read from a cache that old weights computed.",
        "InternLM/lmdeploy#4917, InternLM/lmdeploy#4918, vllm-project/vllm-omni#6739, pytorch/torchtitan#3095, "
        "vllm-project/vllm#9744, PrimeIntellect-ai/prime-rl#1651",
        ids("engine-stale", "weights-not-synced") | MISMATCH,
        EVERYWHERE,
        inject=common.stale_cache,
        watch_causes=ids("mismatch-grows"),
    ),
    # The trainer's scores
    FieldFault(
        "log-probability of the end token ignored as padding",
        "The end token has the id of padding, which the loss function ignores: its log-probability is 0, without a gradient.",
        "pytorch/rl#3580",
        ids("sampled-tokens-masked") | MISMATCH,
        EVERYWHERE,
        start=policy_scores(doubles.end_ignored),
        watch_options=UNCHECKED,
    ),
    FieldFault(
        "packed samples not kept apart",
        "Packed rows are one sequence: their positions go on, and each attends to those before it.",
        "huggingface/trl#3526",
        ids("rows-see-each-other") | MISMATCH,
        EVERYWHERE,
        start=policy_scores(common.one_row),
    ),
    FieldFault(
        "log-probabilities of the row's first tokens",
        "Log-probabilities of the actions are taken from the beginning of the row, where the prompt is.",
        "lucidrains/PaLM-rlhf-pytorch#31",
        ids("loss-mask-shifted", "logprobs-permuted", "context-tokens-trained") | MISMATCH,
        EVERYWHERE,
        start=policy_scores(doubles.of_first_tokens),
        watch_options=UNCHECKED,
    ),
    # Loss and optimizer
    FieldFault(
        "mean over each microbatch's own tokens",
        "Each microbatch's loss is a mean over its own tokens: a token counts more where its microbatch has few.",
        "allenai/open-instruct#1137, huggingface/transformers#34191, pytorch/torchtitan#1803",
        ids("normaliser-depends-on-microbatches"),
        EVERYWHERE,
        start=doubles.mean_of_each_microbatch,
        options="--microbatch-tokens 1024",
    ),
    FieldFault(
        "advantages whitened a second time over all tokens",
        "Advantages that were normalised in their groups are centred and scaled again over all tokens of the step, so that "
        "rollouts of groups without a signal get some.",
        "axon-rl/gem#113, amazon-science/reskill#12",
        ids("advantages-wrong", "loss-differs-from-settings"),
        EVERYWHERE,
        start=doubles.whitened_twice,
        options="--scale-rewards group",
    ),
    FieldFault(
        "learning rate kept from bfloat16 training",
        "The learning rate was tuned where most of an update was rounded away, and is kept for float32 weights.",
        "areal-project/AReaL#1634",
        ids("learning-rate-too-high"),
        EVERYWHERE,
        options="--learning-rate 3e-3",
        watch_causes=ids("entropy-collapse", "entropy-explosion"),
    ),
    # A resume, and what is saved
    FieldFault(
        "moments of the optimizer not loaded after a resume",
        "A resumed run begins with an optimizer that has no state.",
        "NVIDIA-NeMo/Automodel#763",
        ids("optimizer-state-lost"),
        EVERYWHERE,
        start=doubles.moments_lost,
        probes=False,
    ),
    FieldFault(
        "adapter of the first run not continued",
        "Training goes on from the base model in place of the adapter that was trained before.",
        "unslothai/unsloth#2451",
        ids("weights-lost"),
        EVERYWHERE,
        start=doubles.adapter_begun_anew,
        options="--peft",
        probes=False,
    ),
    FieldFault(
        "adapter merged in bfloat16 for the saved model",
        "The adapter is merged into bfloat16 weights when the model is saved, which predicts something else than the "
        "adapter beside its base.",
        "meta-pytorch/torchtune#1101",
        ids("saved-model-differs"),
        EVERYWHERE,
        start=doubles.merged_in_bfloat16,
        options="--peft",
    ),
    FieldFault(
        "merged model saved without its adapter",
        "What is saved as the merged model is the base model.",
        "unslothai/unsloth#2009",
        ids("saved-model-differs"),
        EVERYWHERE,
        start=doubles.without_adapter,
        options="--peft",
    ),
)
