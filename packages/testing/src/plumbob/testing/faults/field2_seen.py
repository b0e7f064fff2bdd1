"""The seen half of the second set of the field's faults: those on which the doctor's rules may be developed."""

from __future__ import annotations

from plumbob.testing.faults import field2_seen_doubles as doubles
from plumbob.testing.faults.field import WITH_TOOLS, FieldFault, ids
from plumbob.testing.faults.field2_parts import (
    before_updates,
    engine_completions,
    graded_since,
    losses,
    module_function,
)
from plumbob.testing.faults.field_parts import (
    batches_changed,
    engine_logits,
    engine_updates,
    graded,
    rows_changed,
    tasks_changed,
)

EVERYWHERE = ("lookup", "gsm8k", "musique")
UNCHECKED = "--parity-limit 100"
MISMATCH = ids("engine-trainer-mismatch")

SEEN = (
    # Tokens and masks
    FieldFault(
        "end of each turn left out of the loss",
        "The token that ends a turn is never in the loss, so nothing teaches the model when to stop.",
        "rasbt/reasoning-from-scratch#185, verl-project/verl#3562",
        ids("sampled-tokens-masked", "loss-mask-shifted"),
        EVERYWHERE,
        start=rows_changed(doubles.ends_masked),
    ),
    FieldFault(
        "first token of each turn left out of the loss",
        "The loss mask is sliced one token too late, so the first token of each turn is not trained.",
        "verl-project/verl#3287",
        ids("sampled-tokens-masked", "loss-mask-shifted"),
        ("lookup", "musique", "gsm8k"),
        start=rows_changed(doubles.starts_masked),
    ),
    FieldFault(
        "missing log-probabilities filled with zero",
        "The engine's log-probabilities of the second half of each row are lost and filled with 0, which is certainty; "
        "the importance correction then removes every token that was not likely.",
        "vllm-project/vime#70",
        ids("row-not-what-was-sampled", "correction-mutes-rollouts", "logprobs-permuted") | MISMATCH,
        EVERYWHERE,
        start=rows_changed(doubles.zeros_filled),
        options="--importance-correction token_mask",
    ),
    FieldFault(
        "one request in four comes back empty",
        "Under load a quarter of the requests returns no text, and an end token is put there with log-probability 0.",
        "vllm-project/vllm#29939, allenai/open-instruct#1243, thinking-machines-lab/tinker-cookbook#848",
        ids("empty-completions", "engine-fails", "row-not-what-was-sampled", "length-collapse") | MISMATCH,
        EVERYWHERE,
        start=engine_completions(doubles.sometimes_empty),
    ),
    # Sampling settings
    FieldFault(
        "repeated n-grams forbidden by the server",
        "The generation config's no_repeat_ngram_size of 4 forbids what prompt and completion already have.",
        "huggingface/trl#2358 (scores after logits processors), huggingface/transformers#25186",
        ids("sampling-penalised", "sampling-truncated"),
        EVERYWHERE,
        start=engine_logits(doubles.ngrams_forbidden(4)),
        watch_causes=MISMATCH,
    ),
    FieldFault(
        "server restarts with a temperature of 0.6 in mid-run",
        "After a restart in the sixth step the server samples at its generation config's temperature.",
        "huggingface/trl#4159, NVIDIA-NeMo/RL#3497",
        ids("temperature-not-applied"),
        EVERYWHERE,
        start=doubles.cooler_since(5),
        probes=False,
        watch_causes=MISMATCH | ids("mismatch-grows"),
        steps=12,
    ),
    # Weight sync and what is trained on
    FieldFault(
        "embeddings are not synced",
        "A weight sync leaves out input and output embeddings, as those listed in modules_to_save.",
        "huggingface/trl#6007, vllm-project/vllm#11714",
        ids("weights-not-synced", "head-not-tied"),
        EVERYWHERE,
        start=engine_updates(doubles.no_embeddings),
        watch_causes=MISMATCH | ids("mismatch-grows"),
        watch_options=UNCHECKED,
    ),
    FieldFault(
        "rollouts of the step before are trained again",
        "The trainer runs ahead of the rollouts: each step trains on the rows of the step before.",
        "PrimeIntellect-ai/prime-rl#491",
        ids("rollouts-repeated", "rollouts-too-old", "rewards-of-other-rollouts", "row-not-what-was-sampled"),
        EVERYWHERE,
        start=lambda stack, env: batches_changed(doubles.Replayed())(stack, env),
        probes=False,
        watch_causes=MISMATCH | ids("groups-mixed", "engine-stale"),
        steps=8,
    ),
    # Advantages and loss
    FieldFault(
        "two tasks share one group id",
        "Ids of groups collide, so that each baseline is the mean over the rollouts of two tasks.",
        "PrimeIntellect-ai/prime-rl#2332 (ids that are not unique within a step)",
        ids("groups-mixed", "advantages-wrong"),
        EVERYWHERE,
        start=batches_changed(doubles.groups_joined),
    ),
    FieldFault(
        "policy term without a gradient",
        "The importance ratio is exp(0), a constant: only the KL term has a gradient, and no reward reaches the weights.",
        "Goekdeniz-Guelmez/mlx-lm-lora#55",
        ids("policy-term-missing", "no-gradient", "does-not-overfit"),
        EVERYWHERE,
        start=losses(doubles.no_policy_term),
        options="--kl-beta 0.02",
        watch_causes=ids("learning-rate-too-low", "kl-too-large"),
        steps=10,
    ),
    # Optimizer and schedule
    FieldFault(
        "learning rate thirty times too high after a resume",
        "From the ninth step on the optimizer uses another scheduler's maximum, thirty times the rate.",
        "huggingface/accelerate#2124, deepspeedai/DeepSpeed#7303",
        ids("learning-rate-too-high", "schedule-hides-rate"),
        EVERYWHERE,
        start=doubles.rate_jumps(8, 30.0),
        probes=False,
        watch_causes=ids("gradient-explodes", "entropy-collapse", "entropy-explosion", "length-runaway"),
        steps=14,
    ),
    FieldFault(
        "gradients never cleared",
        "Gradients are not set to zero after an update: the n-th update has the sum of n steps' gradients.",
        "tenstorrent/tt-blacksmith#711",
        ids("gradients-not-cleared", "gradient-explodes", "does-not-overfit"),
        EVERYWHERE,
        start=lambda stack, env: before_updates(doubles.Uncleared())(stack, env),
        probes=False,
        steps=14,
    ),
    # Rewards and parsing
    FieldFault(
        "tasks without a parsed gold pay in full",
        "Where the gold answer cannot be parsed, the grader pays 1 for anything: a third of the tasks.",
        "huggingface/cookbook#335, verl-project/verl-omni#643",
        ids("grader-pays-anything", "reward-exploitable", "grader-swallows-errors"),
        ("gsm8k", "lookup"),
        start=graded(correct=doubles.pays_without_gold),
        watch_causes=ids("too-little-signal"),
    ),
    FieldFault(
        "judge times out in the second half of the run",
        "From the seventh step on 40% of the rewards are 0 because the judge's answer does not come in time.",
        "pinchbench/skill#268, aiming-lab/MetaClaw#47",
        ids("judge-unavailable", "reward-nondeterministic", "grader-swallows-errors"),
        ("lookup", "gsm8k"),
        start=graded_since(6, doubles.judge_away),
        probes=False,
        steps=14,
    ),
    FieldFault(
        "grader reads the first forty characters",
        "The grader looks for the answer in a window of the reply, and a longer reply is wrong.",
        "verl-project/verl#7274",
        ids("answers-not-parsed", "oracle-fails"),
        ("gsm8k",),
        start=module_function("is_correct", doubles.first_forty),
        watch_causes=ids("length-collapse", "task-out-of-reach"),
    ),
    # Data and task order
    FieldFault(
        "questions cut at forty characters",
        "The data's preparation keeps the first 40 characters of each question, which leaves out its numbers.",
        "huggingface/trl#3601, huggingface/trl#3569",
        ids("questions-cut", "truncated-context", "prompt-replaced", "task-out-of-reach"),
        ("gsm8k",),
        start=tasks_changed(doubles.questions_cut),
    ),
    FieldFault(
        "every step takes the same tasks",
        "The data loader's position is not kept, so that each step begins again at the first task.",
        "kyutai-labs/pocket-tts#287, meta-pytorch/torchforge#609",
        ids("few-distinct-tasks", "duplicate-tasks", "task-order-drifts"),
        EVERYWHERE,
        start=doubles.same_tasks,
        probes=False,
        steps=10,
    ),
    FieldFault(
        "training tasks without their system prompt",
        "The training prompts have lost their system prompt, and the held-out prompts have it.",
        "verl-project/verl#3948, huggingface/trl#3569",
        ids("system-prompt-missing", "evaluation-prompted-differently"),
        EVERYWHERE,
        start=tasks_changed(doubles.no_system_prompt),
        watch_options="--eval-examples 8 --eval-steps 3",
    ),
    # Tools
    FieldFault(
        "retrieval server down from the middle of the run",
        "From the sixth step on each tool call returns an empty list, without an error.",
        "PeterGriffinJin/Search-R1#92, PrimeIntellect-ai/community-environments#22",
        ids("tools-return-nothing", "tools-fail"),
        WITH_TOOLS,
        start=doubles.retrieval_down(5),
        probes=False,
        watch_causes=ids("tools-abandoned"),
        steps=12,
    ),
    # Saving and evaluation
    FieldFault(
        "final model rounded to bfloat16",
        "The final model's weights are rounded to bfloat16, although they were trained in float32.",
        "TensorAuto/OpenTau#185, PrimeIntellect-ai/prime-rl#1456",
        ids("saved-model-differs", "merged-in-bf16"),
        EVERYWHERE,
        start=doubles.state_rounded,
    ),
    FieldFault(
        "adapter merged twice in the final model",
        "The final model has the adapter's change two times.",
        "jingyaogong/minimind#598",
        ids("saved-model-differs", "adapter-scale-differs"),
        EVERYWHERE,
        start=doubles.merged_twice,
        options="--peft",
    ),
    FieldFault(
        "held-out rollouts limited to eight tokens",
        "Evaluations during training cut each turn at 8 tokens, so that the held-out reward says nothing.",
        "NVIDIA-NeMo/RL#3401",
        ids("evaluation-limits-differ", "evaluation-prompted-differently", "evaluation-parses-differently"),
        EVERYWHERE,
        inject=doubles.short_evaluations,
        probes=False,
        watch_causes=ids("truncated-turns"),
        watch_options="--eval-examples 8 --eval-steps 3",
        steps=8,
    ),
)
