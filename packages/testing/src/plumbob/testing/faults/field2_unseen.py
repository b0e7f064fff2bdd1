"""The other half of the second set of the field's faults: measured once unseen, and read by rule writers since 2026-11-24."""

from __future__ import annotations

from plumbob.testing.faults import field2_unseen_doubles as doubles
from plumbob.testing.faults.field import EVERYWHERE, MISMATCH, UNCHECKED, WITH_TOOLS, FieldFault, ids
from plumbob.testing.faults.field2_parts import (
    batches,
    before_updates,
    engine_completions,
    losses,
    module_function,
    packed_positions,
)
from plumbob.testing.faults.field_parts import (
    engine_logits,
    graded,
    rows_changed,
    tools_answer,
)

EVALUATED = "--eval-examples 16 --eval-steps 4"

UNSEEN = (
    # Tokens, masks and positions
    FieldFault(
        "padding of short rows in the loss",
        "Rows are filled up, and the filling counts as sampled where no end token is found.",
        "verl-project/verl#3805",
        ids("context-tokens-trained", "row-not-what-was-sampled"),
        EVERYWHERE,
        start=rows_changed(doubles.padding_trained),
        watch_causes=MISMATCH,
    ),
    FieldFault(
        "loss ends at the first end token",
        "The mask ends at the first end token, which in a conversation is that of the first turn.",
        "verl-project/verl#3805, huggingface/trl#2810",
        ids("sampled-tokens-masked"),
        WITH_TOOLS,
        start=rows_changed(doubles.first_turn_only),
    ),
    FieldFault(
        "targets roll over the ends of packed rows",
        "Targets are made by rolling the packed ids, so that each row's last target is the next row's first token.",
        "verl-project/verl#6475",
        ids("targets-shifted", "rows-see-each-other", "row-not-what-was-sampled", "logprobs-permuted") | MISMATCH,
        EVERYWHERE,
        start=batches(doubles.targets_rolled),
        watch_options=UNCHECKED,
    ),
    FieldFault(
        "positions of completions shifted by the batch's padding",
        "Completions are padded on the right and their positions on the left: in a batch, shorter rows jump.",
        "verl-project/verl#4159",
        ids("positions-shifted", "rows-see-each-other"),
        EVERYWHERE,
        start=packed_positions(doubles.padded_positions),
        watch_causes=MISMATCH,
    ),
    # The engine
    FieldFault(
        "engine attends to the last 128 tokens only",
        "The engine has a sliding window that the trainer's attention does not have.",
        "vllm-project/vllm#3385, vllm-project/vllm#49202",
        ids("attention-window-differs", "truncated-context", "prompt-replaced") | MISMATCH,
        ("lookup", "musique"),
        start=doubles.windowed(128),
    ),
    FieldFault(
        "top-p of 0.8 in the server with raw log-probabilities",
        "The server samples from the nucleus of its generation config and reports log-probabilities without it.",
        "NVIDIA-NeMo/RL#3497, thinking-machines-lab/tinker-feedback#148",
        ids("sampling-truncated"),
        EVERYWHERE,
        start=engine_logits(doubles.nucleus(0.8), raw=True),
        watch_causes=ids("temperature-not-applied"),
    ),
    FieldFault(
        "end token forbidden in the first tokens",
        "A server default of min_tokens 12 forbids the end token, so that short answers cannot be given.",
        "vllm-project/vllm#32634, vllm-project/vllm#3124",
        ids("end-token-suppressed", "sampling-penalised", "sampling-truncated", "stop-token-wrong") | MISMATCH,
        ("lookup", "musique"),
        start=engine_logits(doubles.no_early_end(12)),
    ),
    FieldFault(
        "one layer is no longer synced from the middle of the run",
        "From the fifth step on a weight sync leaves out the second layer.",
        "PrimeIntellect-ai/prime-rl#1857, huggingface/trl#5312",
        ids("weights-not-synced"),
        EVERYWHERE,
        start=doubles.layer_dropped(4),
        probes=False,
        watch_causes=MISMATCH | ids("mismatch-grows"),
        watch_options=UNCHECKED,
        steps=12,
    ),
    # Advantages, loss and optimizer
    FieldFault(
        "singleton's advantage divided by a rounding residue",
        "The leave-one-out deviation of equal rewards is a rounding residue, by which a lone advantage is divided.",
        "NVIDIA-NeMo/RL#4161",
        ids("advantages-wrong", "tiny-std-scaling"),
        ("lookup", "gsm8k"),
        start=doubles.singletons_divided,
        watch_causes=ids("gradient-explodes"),
        steps=8,
    ),
    FieldFault(
        "ratio taken against the reference policy",
        "The importance ratio compares the policy with the reference instead of the step's first weights, so that the "
        "clip removes more and more tokens.",
        "huggingface/trl#2837",
        ids("ratio-to-reference", "ratio-clipped", "logprobs-permuted"),
        EVERYWHERE,
        start=losses(doubles.from_reference),
        options="--kl-beta 0.001",
        probes=False,
        watch_causes=ids("kl-too-large"),
        steps=16,
    ),
    FieldFault(
        "optimizer state lost at every step",
        "The optimizer is made anew for each step, so that Adam's update is the sign of one noisy gradient.",
        "OpenPipe/ART#72, NVIDIA-NeMo/RL#3171",
        ids("optimizer-state-lost", "learning-rate-too-high", "schedule-hides-rate"),
        EVERYWHERE,
        start=before_updates(doubles.state_lost),
        probes=False,
        steps=14,
    ),
    # Rewards and parsing
    FieldFault(
        "answer counted anywhere in the transcript",
        "The grader looks for the answer in the whole transcript, and finds it in the tools' results.",
        "janhq/ReZero#1",
        ids("reward-exploitable", "reward-hacked"),
        ("lookup",),
        start=graded(correct=doubles.anywhere),
    ),
    FieldFault(
        "grader reads the first number",
        "The grader takes a reply's first number for its answer, which is a number of the working.",
        "PrimeIntellect-ai/verifiers#277, PrimeIntellect-ai/verifiers#354",
        ids("grader-reads-other-part", "answers-not-parsed"),
        ("gsm8k",),
        start=module_function("is_correct", doubles.first_number),
        watch_causes=ids("reward-hacked", "length-collapse"),
    ),
    # Tools
    FieldFault(
        "tools answer with the result of the previous call",
        "Rollouts share one tool object, and each call gets the result of the call before it.",
        "PrimeIntellect-ai/verifiers#1067, PrimeIntellect-ai/prime-envs#204",
        ids("tool-results-mixed", "tools-return-nothing"),
        WITH_TOOLS,
        start=doubles.previous_result,
    ),
    FieldFault(
        "tool results cut in the middle",
        "A long tool result loses its middle, where the fact stands that was searched for.",
        "verl-project/verl#6309, verl-project/verl#4814",
        ids("tool-results-cut", "tools-return-nothing"),
        ("musique",),
        start=tools_answer(doubles.middle_cut),
    ),
    # Limits
    FieldFault(
        "fewer turns than hops",
        "At most four turns are allowed, and tasks need up to seven.",
        "huggingface/trl#4751, RUC-NLPIR/ARPO#7",
        ids("truncated-rollouts", "oracle-fails", "never-succeeds"),
        ("lookup",),
        options="-a min_hops=3 -a max_hops=6 --max-turns 4",
    ),
    FieldFault(
        "cut completions reported as finished",
        "Completions are cut at 24 tokens, and an end token that was not sampled is put at the end.",
        "agentscope-ai/Trinity-RFT#608, PrimeIntellect-ai/verifiers#58",
        ids("cut-unmarked", "truncated-turns", "stop-token-wrong", "answers-not-parsed", "row-not-what-was-sampled")
        | ids("length-collapse")
        | MISMATCH,
        ("gsm8k",),
        start=engine_completions(doubles.cut_with_an_end, most=24),
    ),
    # Evaluation
    FieldFault(
        "held-out rollouts from the initial weights",
        "Evaluations during training sample from an engine that never gets the trained weights.",
        "linhaowei1/NLPDL-2025Fall#31, huggingface/open-r1#659",
        ids("evaluation-of-other-weights", "engine-stale", "evaluation-prompted-differently")
        | ids("evaluation-parses-differently"),
        EVERYWHERE,
        inject=doubles.initial_evaluations,
        probes=False,
        watch_options=EVALUATED,
        steps=16,
    ),
)
