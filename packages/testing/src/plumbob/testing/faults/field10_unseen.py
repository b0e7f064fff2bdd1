"""The unseen half of the tenth set of the field's faults: they are run only to measure.

The set is a sample of what people ask about: threads in the order in which plain searches return them, listed in
docs/results/field10_threads.md.
"""

from __future__ import annotations

from plumbob.testing.faults import field10_unseen_doubles as doubles
from plumbob.testing.faults.field import EVERYWHERE, MISMATCH, UNCHECKED, WITH_TOOLS, FieldFault, ids
from plumbob.testing.faults.field2_parts import batches, before_updates
from plumbob.testing.faults.field_parts import engine_prompts, engine_updates, graded, tasks_changed

NEVER_RIGHT = ids("never-succeeds")
"""What a run directory shows of a reward that is 0 whatever the reply is."""

UNSEEN = (
    # Rewards
    FieldFault(
        "answer's mark removed as a special token",
        "Replies are decoded without special tokens before they are graded, and the mark of an answer is one of them.",
        "huggingface/trl#2897, huggingface/trl#4521",
        ids("answers-not-parsed", "oracle-fails", "reward-constant"),
        ("gsm8k",),
        start=graded(correct=doubles.mark_removed),
        watch_causes=NEVER_RIGHT,
    ),
    FieldFault(
        "first number of the reply taken for the answer",
        "The pattern takes the first number that it finds, which is one of the calculation and not the answer.",
        "PrimeIntellect-ai/verifiers#1336",
        ids("answers-not-parsed"),
        ("gsm8k",),
        start=graded(correct=doubles.first_number),
        watch_causes=NEVER_RIGHT,
    ),
    FieldFault(
        "threshold in percent for a score between zero and one",
        "A score that is a share is compared with a threshold in percent, and nothing passes.",
        "modelscope/ms-swift#10148",
        ids("oracle-fails", "reward-constant"),
        ("musique", "lookup", "gsm8k"),
        start=graded(correct=doubles.in_percent),
        watch_causes=NEVER_RIGHT,
    ),
    FieldFault(
        "judge won over by an opening phrase",
        "The judge says yes to replies that are a sign alone or only announce a solution.",
        "LeeKyungwook/get-arxiv-noti#1705",
        ids("reward-exploitable"),
        EVERYWHERE,
        start=graded(correct=doubles.won_over),
        # The bundled policies always answer, so that their rollouts earn what they should.
        watch=False,
    ),
    FieldFault(
        "score depends on the padding of its batch",
        "The reward model reads padding, and a reply's score depends on how long the replies beside it are.",
        "NVIDIA/NeMo-Aligner#439",
        ids("reward-nondeterministic"),
        EVERYWHERE,
        start=lambda stack, env: graded(correct=doubles.Padded())(stack, env),
        # A run directory has one score of each rollout, and nothing to compare it with.
        watch=False,
    ),
    # Tasks
    FieldFault(
        "difficulty filter that keeps what it should drop",
        "The condition of the filter is negated twice, and what is left is always solved or never.",
        "PrimeIntellect-ai/prime-rl#570",
        ids("too-little-signal", "groups-without-variety"),
        ("lookup",),
        start=tasks_changed(doubles.band_left_out),
        options="-a max_hops=8",
    ),
    FieldFault(
        "system prompt twice in held-out prompts",
        "The evaluation renders system prompt and question by themselves, and the template puts the former before both.",
        "NVIDIA-NeMo/RL#4185",
        ids("evaluation-prompted-differently"),
        EVERYWHERE,
        start=tasks_changed(doubles.told_twice),
        watch_options="--eval-examples 16",
    ),
    FieldFault(
        "two ranks that take the same tasks",
        "Each process reads the tasks from the first on, so that every task of a step is there twice.",
        "unslothai/unsloth-zoo#832",
        ids("duplicate-tasks", "few-distinct-tasks"),
        EVERYWHERE,
        start=doubles.same_tasks_twice,
    ),
    FieldFault(
        "turn limit below what chains need",
        "Most tasks need more turns than a rollout may have, and end without an answer and with a reward of 0.",
        "allenai/olmo-eval#249, andreasronge/ptc_runner#1226",
        ids("truncated-rollouts"),
        ("lookup",),
        options="--max-turns 2",
    ),
    # Prompts
    FieldFault(
        "earlier calls rendered with arguments encoded twice",
        "The server renders the calls of earlier turns with arguments that are a string, and rows have what was sampled.",
        "JetBrains/koog#2095, JetBrains/koog#2096",
        ids("prompt-replaced", "row-not-what-was-sampled"),
        WITH_TOOLS,
        inject=doubles.calls_encoded_twice,
        watch_causes=MISMATCH,
    ),
    FieldFault(
        "beginning token put before the prompt again",
        "Tokenizer and sampler each put the beginning token before a prompt that the template has begun with it.",
        "google/tunix#822, verl-project/verl#3682, databricks/compose-rl#73",
        ids("prompt-replaced", "row-not-what-was-sampled"),
        EVERYWHERE,
        start=engine_prompts(doubles.begun_again),
        watch_causes=MISMATCH,
    ),
    # The engine
    FieldFault(
        "adapter of the same name not loaded again",
        "The server has an adapter of that name since the first sync, and does not read the later ones.",
        "ace-step/ACE-Step#226, vllm-project/vllm-metal#351",
        ids("weights-not-synced", "engine-stale") | MISMATCH,
        EVERYWHERE,
        start=lambda stack, env: engine_updates(doubles.KnownByName())(stack, env),
        options="--peft",
        watch_causes=ids("mismatch-grows"),
        watch_options=UNCHECKED,
    ),
    # The trainer
    FieldFault(
        "end tokens hidden from attention as padding",
        "The end token is the padding too, and the trainer's mask of padding hides the ends of all earlier messages.",
        "huggingface/trl#4974",
        MISMATCH,
        WITH_TOOLS,
        start=batches(doubles.ends_hidden),
        watch_options=UNCHECKED,
    ),
    FieldFault(
        "loss negated twice",
        "The loss is multiplied by -1 twice, and good rollouts become less likely.",
        "fla-org/flash-linear-attention#1073, KanishJebaMathewM/Truxify#11885",
        ids("gradient-backwards", "does-not-overfit"),
        EVERYWHERE,
        start=doubles.negated_again,
    ),
    FieldFault(
        "gradient clipped after each microbatch",
        "What has been accumulated is clipped after each microbatch, so that the last ones decide a step.",
        "Deci-AI/super-gradients#653",
        ids("normaliser-depends-on-microbatches"),
        ("gsm8k", "lookup", "musique"),
        start=doubles.clipped_per_microbatch,
        options="--max-grad-norm 0.001 --microbatch-tokens 2048",
        # The norm of what is left looks like one that was clipped once.
        watch=False,
    ),
    FieldFault(
        "gradient clipped before its scale is divided out",
        "The gradient is clipped with the scale of the loss in it, and is next to nothing without the scale.",
        "milesial/Pytorch-UNet#470, rwth-i6/returnn#1595",
        ids("gradient-clipped-to-nothing"),
        EVERYWHERE,
        start=before_updates(doubles.clipped_with_scale),
        watch_causes=ids("learning-rate-too-low"),
    ),
    FieldFault(
        "AdamW on weights in bfloat16",
        "The optimizer adds its updates to weights in bfloat16, which are rounded to what they were.",
        "NVIDIA-NeMo/RL#2322, areal-project/AReaL#1369",
        ids("weights-in-bf16", "optimizer-moves-nothing"),
        EVERYWHERE,
        start=doubles.in_bfloat16,
        options="--learning-rate 5e-5",
        watch_causes=ids("learning-rate-too-low"),
    ),
    FieldFault(
        "end token that was added and never trained",
        "The end token is a new row of the embeddings, and the model never writes it.",
        "unslothai/unsloth#1273",
        ids("truncated-turns", "stop-token-wrong"),
        ("gsm8k", "musique"),
        start=doubles.end_token_new,
    ),
)
