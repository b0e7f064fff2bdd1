"""The unseen half of the ninth set of the field's faults: they are run only to measure.

The set is a sample of what people ask about: threads in the order in which plain searches return them, listed in
docs/results/field9_threads.md.
"""

from __future__ import annotations

from plumbob.testing.faults import field9_unseen_doubles as doubles
from plumbob.testing.faults.field import EVERYWHERE, MISMATCH, UNCHECKED, WITH_TOOLS, FieldFault, ids
from plumbob.testing.faults.field2_parts import engine_completions, losses
from plumbob.testing.faults.field_parts import (
    chat_method,
    engine_model,
    engine_updates,
    graded,
    rows_changed,
    tasks_changed,
    tools_answer,
)

NEVER_RIGHT = ids("never-succeeds")
"""What a run directory shows of a reward that is 0 whatever the reply is."""
ALL_ALIKE = ids("groups-without-variety", "too-little-signal", "task-solved")
"""What a run directory shows of a reward that is the same whatever the reply is."""

UNSEEN = (
    # Rewards
    FieldFault(
        "overflow reward written over finished long rollouts",
        "The reward of an overflow is given to every rollout beyond a length, finished and right ones too.",
        "thinking-machines-lab/tinker-cookbook#506",
        ids("oracle-fails", "answers-not-parsed"),
        ("lookup",),
        start=graded(correct=doubles.long_is_overflow),
    ),
    FieldFault(
        "safety cap below every score",
        "A cap for unsafe runs is applied to all, and every reply's score is above it.",
        "Algorineko/AgenticArXiv-RL#76",
        ids("reward-constant", "oracle-fails", "reward-exploitable"),
        EVERYWHERE,
        start=graded(correct=doubles.capped),
        watch_causes=ALL_ALIKE,
    ),
    FieldFault(
        "tool results graded as part of the reply",
        "The grader looks for the answer in everything after the prompt, tool results among it.",
        "verl-project/verl#6392, janhq/ReZero#1",
        ids("reward-exploitable"),
        ("musique",),
        start=graded(correct=doubles.found_anywhere),
        # The bundled policy answers rightly wherever it has found the answer, so that its rollouts do not show it.
        watch=False,
    ),
    FieldFault(
        "whole reply compared with the gold answer",
        "A reply is right if all of it is the gold answer, and solutions stand before answers.",
        "PrimeIntellect-ai/verifiers#277, PrimeIntellect-ai/verifiers#276",
        ids("answers-not-parsed", "oracle-fails", "reward-constant"),
        ("gsm8k",),
        start=graded(correct=doubles.whole_reply_equals),
        watch_causes=NEVER_RIGHT,
    ),
    FieldFault(
        "wrong short answers earn more than right long ones",
        "A reward for short replies is given to wrong ones, and right long ones get less than nothing.",
        "huggingface/open-r1#360",
        ids("oracle-fails", "reward-exploitable", "reward-format-dominated"),
        ("gsm8k",),
        start=graded(correct=doubles.shortness),
        watch_causes=ids("length-collapse"),
        steps=10,
    ),
    # Tasks and tools
    FieldFault(
        "held-out prompts ask for a box",
        "The evaluation has a system prompt of its own, which asks for another form of answer than training.",
        "dllm-reasoning/d1#27, huggingface/open-r1#473",
        ids("evaluation-prompted-differently"),
        ("gsm8k",),
        start=tasks_changed(doubles.boxed_when_held_out),
    ),
    FieldFault(
        "tool results cut to a fixed number of characters",
        "Of each document the first characters reach the model, and what it needs stands further on.",
        "vcmf/dim0#292",
        ids("tool-results-cut"),
        ("musique",),
        start=tools_answer(doubles.cut_short),
    ),
    FieldFault(
        "tool server's state shared by all rollouts",
        "The tool server keeps one state for all its callers, and rollouts get the results of each other's calls.",
        "PrimeIntellect-ai/verifiers#1727, anthropics/claude-ai-mcp#676",
        ids("tool-results-mixed"),
        WITH_TOOLS,
        start=lambda stack, env: tools_answer(doubles.Shared())(stack, env),
    ),
    FieldFault(
        "no parser for the model's tool calls",
        "The server was started without a parser of tool calls, and calls remain text of the reply.",
        "verl-project/uni-agent#115",
        ids("calls-in-unread-form", "calls-malformed", "tools-never-used"),
        WITH_TOOLS,
        start=chat_method("parse", doubles.calls_unparsed),
        watch_causes=NEVER_RIGHT,
    ),
    # Prompts, completions and rows
    FieldFault(
        "server renders the prompt again without the tools",
        "The trainer renders a prompt with tools, and the server renders it once more and gets no tools.",
        "huggingface/trl#6515",
        ids("tools-not-in-prompt", "prompt-replaced", "row-not-what-was-sampled"),
        WITH_TOOLS,
        start=doubles.rendered_without_tools,
        watch_causes=MISMATCH,
    ),
    FieldFault(
        "special tokens removed from the engine's prompts",
        "Prompts are decoded without special tokens on their way to the engine, and the trainer's rows have them.",
        "unslothai/unsloth#2980",
        ids("prompt-replaced", "row-not-what-was-sampled", "assistant-header-missing"),
        EVERYWHERE,
        start=doubles.special_tokens_removed,
        watch_causes=MISMATCH,
    ),
    FieldFault(
        "end token written over the last token of a cut reply",
        "A reply that reached its limit gets the end token in place of its last one, which the model did not sample.",
        "OpenRLHF/OpenRLHF#238",
        ids("stop-token-wrong", "row-not-what-was-sampled", "truncated-turns"),
        ("gsm8k",),
        start=engine_completions(doubles.end_over_last),
        options="--max-tokens 75",
        watch_causes=MISMATCH,
    ),
    FieldFault(
        "line break after each turn missing in the row",
        "The row is put together of turns, and the line break that the template writes after each is left out.",
        "verl-project/verl#3720",
        ids("row-not-what-was-sampled"),
        WITH_TOOLS,
        start=rows_changed(doubles.without_line_breaks),
        watch_causes=MISMATCH,
    ),
    FieldFault(
        "padding after the end trained as sampled",
        "Rows are filled up with the end token, and the mask includes everything after the prompt.",
        "bingreeky/MemGen#33",
        ids("row-not-what-was-sampled", "context-tokens-trained"),
        EVERYWHERE,
        start=rows_changed(doubles.padding_trained),
        watch_causes=MISMATCH,
    ),
    # The engine
    FieldFault(
        "fused matrices never written back",
        "New weights of attention and MLP are written into copies of the engine's fused matrices.",
        "pytorch/torchtitan#3867, Tencent-Hunyuan/UniRL#166",
        ids("weights-not-synced") | MISMATCH,
        EVERYWHERE,
        start=engine_updates(doubles.fused_left),
        watch_options=UNCHECKED,
    ),
    FieldFault(
        "rollouts from weights in eight bits",
        "The engine rounds its weights to eight bits, and the trainer does not.",
        "InternLM/xtuner#2044, radixark/miles#1678, PrimeIntellect-ai/prime-rl#3112",
        # No id names weights in eight bits; the second one is the same thing with sixteen.
        ids("merged-in-bf16", "weights-not-synced") | MISMATCH,
        EVERYWHERE,
        start=doubles.in_eight_bits,
        watch_options=UNCHECKED,
    ),
    FieldFault(
        "tied head keeps the first embedding",
        "Embedding and head are one tensor in the trainer and two in the engine, which gets the embedding alone.",
        "PrimeIntellect-ai/prime-rl#2823",
        ids("head-not-tied", "weights-not-synced") | MISMATCH,
        EVERYWHERE,
        start=engine_model(doubles.untied),
        watch_options=UNCHECKED,
    ),
    # The trainer
    FieldFault(
        "advantages passed as the loss mask",
        "Two arguments of the loss are exchanged, and each token's term is multiplied by its advantage once more.",
        "verl-project/verl#2506",
        ids(
            "gradient-backwards",
            "advantages-wrong",
            "policy-term-missing",
            "does-not-overfit",
            "loss-differs-from-settings",
        ),
        EVERYWHERE,
        start=losses(doubles.advantages_as_mask),
    ),
    FieldFault(
        "warm-up begins again after each resume",
        "The schedule's step is not saved, and each resume begins with the small rates of the warm-up.",
        "paiml/entrenar#113, CodefyUI/CodefyUI#118",
        ids("schedule-hides-rate", "warmup-too-long", "learning-rate-too-low"),
        EVERYWHERE,
        start=doubles.warm_up_after_resumes,
        options="--warmup-steps 6",
        probes=False,
        steps=10,
    ),
)
