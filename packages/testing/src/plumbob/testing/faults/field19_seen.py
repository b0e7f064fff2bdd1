"""The seen half of the nineteenth set of the field's faults: those on which the doctor's rules may be developed.

The set is about the trainer's side. It is a sample of what people ask about: threads in the order in which plain searches
return them, listed in docs/results/field19_threads.md.
"""

from __future__ import annotations

from plumbob.testing.faults import field19_seen_doubles as doubles
from plumbob.testing.faults.field import EVERYWHERE, MISMATCH, UNCHECKED, FieldFault, ids
from plumbob.testing.faults.field2_parts import before_updates, evaluations, packed_positions
from plumbob.testing.faults.field_parts import engine_logits, engine_updates, rows_changed

SEEN = (
    # What is trained on
    FieldFault(
        "a policy that was never shown the form of the answers",
        "The run begins with a model that no imitation has taught this task's prompt and answers, and waits for a reward.",
        "unslothai/unsloth#2614",
        ids("never-succeeds", "tools-never-used"),
        ("lookup",),
        options="--model tiny-gsm8k",
    ),
    FieldFault(
        "small groups on tasks far beyond the model",
        "A step has four groups of four rollouts, of tasks so hard that whole groups are wrong: no advantage is left.",
        "Tencent-Hunyuan/UniRL#310",
        ids("never-succeeds", "too-little-signal"),
        ("lookup",),
        options="--batch-size 4 --gradient-accumulation-steps 4 --num-generations 4 -a min_hops=12 -a max_hops=12",
    ),
    # Rows
    FieldFault(
        "end tokens left out of the loss by hand",
        "The mask of the end token says that it is never trained: it is in the row, and the model does not learn to stop.",
        "meta-pytorch/torchtune#2967",
        ids("sampled-tokens-masked"),
        EVERYWHERE,
        start=rows_changed(doubles.ends_masked),
    ),
    FieldFault(
        "ends by a second end token taken for cuts",
        "The trainer knows one end token and the turns end by another: all rollouts count as cut off and are masked.",
        "huggingface/trl#7039",
        ids("signal-masked", "stop-token-wrong"),
        EVERYWHERE,
        start=rows_changed(doubles.taken_for_cut),
        options="--overlong mask",
    ),
    # Advantages
    FieldFault(
        "advantages over the spread of the other rewards",
        "A reward is divided by the standard deviation of its group's other rewards, which is 0 where these are equal.",
        "NVIDIA-NeMo/RL#1518, NVIDIA-NeMo/RL#1519",
        ids("tiny-std-scaling", "advantages-wrong"),
        EVERYWHERE,
        start=doubles.spread_of_others,
        options="--baseline leave_one_out --scale-rewards group",
    ),
    FieldFault(
        "rewards centred within each rollout",
        "Rewards are centred over the steps of one rollout, which all have the same reward: every advantage is 0.",
        "alibaba/ROLL#397",
        ids("advantages-wrong"),
        EVERYWHERE,
        start=doubles.centred_alone,
    ),
    # The engine
    FieldFault(
        "end token forbidden at the start of a turn",
        "The generation settings have a smallest length: no turn can end among its first tokens, however likely that is.",
        "huggingface/trl#235, huggingface/trl#925",
        ids("sampling-truncated", "sampling-penalised"),
        ("lookup",),
        start=engine_logits(doubles.no_early_end),
        watch_causes=MISMATCH,
    ),
    FieldFault(
        "server's raw log-probabilities at a low temperature",
        "The server reports log-probabilities of the logits before the temperature, and the trainer divides by it.",
        "PrimeIntellect-ai/prime-rl#679",
        ids("temperature-not-applied"),
        EVERYWHERE,
        start=doubles.raw_logprobs,
        options="--temperature 0.5 --importance-correction token_truncate",
        watch_causes=MISMATCH,
    ),
    FieldFault(
        "adapter sent in every fourth step alone",
        "Three of four weight syncs send the adapter that the engine has already: rollouts lag behind the policy.",
        "Tencent-Hunyuan/UniRL#192",
        ids("engine-stale", "weights-not-synced"),
        EVERYWHERE,
        start=lambda stack, env: engine_updates(doubles.EveryFourth())(stack, env),
        options="--peft",
        watch_causes=MISMATCH,
        watch_options=UNCHECKED,
        steps=8,
    ),
    # Evaluations
    FieldFault(
        "evaluations with a fraction of the tokens",
        "The evaluation has a limit of tokens of its own, an eighth of that of training, and cuts answers off.",
        "NVIDIA-NeMo/RL#502",
        ids("evaluation-prompted-differently"),
        EVERYWHERE,
        start=lambda stack, env: evaluations(doubles.short_evaluation)(stack),
        probes=False,  # the limit belongs to the run's evaluations, and the examination before it has none
        watch_options="--eval-examples 32 --eval-steps 3",
    ),
    # The trainer
    FieldFault(
        "all positions one from the second packed row on",
        "Positions are computed from a mask of ones; later rows of a pack have other numbers in it, and get position 1.",
        "hiyouga/LlamaFactory#7754",
        ids("positions-shifted", "rows-see-each-other"),
        EVERYWHERE,
        start=packed_positions(doubles.ones_after_the_first),
        watch_causes=MISMATCH,
    ),
    FieldFault(
        "packed rows under one causal mask",
        "The attention mask of packed rows is all ones: a row sees the rows before it.",
        "mit-han-lab/fastrl#14, allenai/open-instruct#669, OpenRLHF/OpenRLHF#377",
        ids("rows-see-each-other"),
        EVERYWHERE,
        start=doubles.one_causal_mask,
        watch_causes=MISMATCH,
    ),
    FieldFault(
        "reference scored one place late",
        "The reference model's logits are not cut at the end as the policy's are: they belong to the next token.",
        "unslothai/unsloth#2736",
        ids("reference-is-another-policy", "logprobs-permuted"),
        EVERYWHERE,
        start=doubles.one_place_late,
        options="--kl-beta 0.02",
    ),
    FieldFault(
        "reference without the adapter of the earlier training",
        "The policy begins with an adapter that was trained before; the reference is the base model, with no adapter.",
        "huggingface/trl#495, huggingface/trl#3196, huggingface/trl#5877, huggingface/trl#6621",
        ids("reference-is-another-policy"),
        EVERYWHERE,
        start=doubles.trained_before,
        options="--peft --kl-beta 0.05",
    ),
    FieldFault(
        "gradients of two like matrices mixed in one bucket",
        "Ranks put their gradients into the bucket in different orders: a matrix gets half of the gradient of another.",
        "deepspeedai/DeepSpeed#2343",
        ids("does-not-overfit"),
        EVERYWHERE,
        start=before_updates(doubles.mixed_in_pairs),
        options="--peft",
    ),
    FieldFault(
        "constant rate of another settings file",
        "The settings file of the sharding library has a schedule of its own: the rate stays at its peak.",
        "hiyouga/LlamaFactory#1220",
        ids("schedule-hides-rate"),
        EVERYWHERE,
        start=doubles.constant_rate,
        options="--lr-scheduler-type cosine",
        steps=10,
    ),
    FieldFault(
        "weights and moments kept in bfloat16",
        "The whole model is in bfloat16, and so are the optimizer's moments: small updates round to nothing.",
        "hp-l33/AiM#10, meta-pytorch/torchtune#2254, huggingface/blog#2133",
        ids("weights-in-bf16"),
        EVERYWHERE,
        start=doubles.all_in_bf16,
        options="--learning-rate 5e-5",
    ),
)
"""The seen faults."""
