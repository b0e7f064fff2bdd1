"""The unseen half of the eleventh set of the field's faults: they are run only to measure.

The set is a sample of what people ask about: threads in the order in which plain searches return them, listed in
docs/results/field11_threads.md.
"""

from __future__ import annotations

from plumbob.testing.faults import field11_unseen_doubles as doubles
from plumbob.testing.faults.doubles import generating, rewritten
from plumbob.testing.faults.field import EVERYWHERE, MISMATCH, UNCHECKED, WITH_TOOLS, FieldFault, ids
from plumbob.testing.faults.field2_parts import since
from plumbob.testing.faults.field_parts import batches_changed, engine_updates, graded, rows_changed

UNSEEN = (
    # Rewards
    FieldFault(
        "two rewards with the settings of the last one",
        "Two rewards of one kind share their settings, so that that of the answer is computed as the other, a short reply's.",
        "AVSLab/bsk_rl#294",
        ids("oracle-fails", "reward-exploitable", "reward-format-dominated"),
        ("gsm8k", "musique", "lookup"),
        start=graded(correct=doubles.brevity, brevity=doubles.brevity),
        watch_causes=ids("length-collapse", "tools-abandoned"),
        steps=10,
    ),
    # Rows and groups
    FieldFault(
        "arguments of calls cleaned up before they are trained",
        "The environment changes the arguments of an action in place, and what it made of them is trained.",
        "rlworkgroup/garage#291",
        ids("row-not-what-was-sampled", "retokenised-turns"),
        ("musique",),
        inject=rewritten(doubles.arguments_cleaned),
        watch_causes=MISMATCH,
    ),
    FieldFault(
        "turns found by their text at an earlier place",
        "The mask of a turn is put where its text stands first, which for a short answer is the tool result that it is from.",
        "snowflakedb/ArcticTraining#339",
        ids("loss-mask-shifted", "context-tokens-trained", "sampled-tokens-masked"),
        ("lookup", "musique"),
        start=rows_changed(doubles.turns_found_by_text),
    ),
    FieldFault(
        "failed rollouts trained as one token",
        "A rollout that has failed becomes one token of padding, which is in the loss and has a reward of 0 in its group.",
        "awslabs/agentcore-rl-toolkit#122",
        ids("row-not-what-was-sampled", "empty-completions"),
        EVERYWHERE,
        start=rows_changed(doubles.failed_as_one_token),
        watch_causes=MISMATCH,
    ),
    FieldFault(
        "odd rollout of a group filtered out",
        "A filter asks whether the others' rewards differ, and takes the only right or wrong rollout out of its group.",
        "NVIDIA-NeMo/RL#3469",
        ids("too-little-signal", "groups-without-variety"),
        ("lookup", "gsm8k"),
        start=batches_changed(doubles.odd_one_filtered),
        options="--baseline leave_one_out --scale-rewards group",
    ),
    FieldFault(
        "rollouts with tool calls left without scaling",
        "Advantages are scaled in one of two paths of the code, and rollouts with several turns take the other one.",
        "rlworkgroup/garage#620",
        ids("advantages-wrong"),
        WITH_TOOLS,
        start=doubles.unscaled_with_tools,
        options="--scale-rewards group",
    ),
    # The engine
    FieldFault(
        "agent not reset between rollouts",
        "What the agent saw last, in another rollout, is still in its memory when the next one begins.",
        "StanfordVL/iGibson#38, ucl-dark/pax#74, pybrain/pybrain#67",
        ids("prompt-replaced", "row-not-what-was-sampled"),
        ("gsm8k", "lookup", "musique"),
        inject=lambda stack, run: generating(doubles.NotReset())(stack, run),
        watch_causes=MISMATCH,
    ),
    FieldFault(
        "probabilities returned as log-probabilities",
        "The field of the log-probability holds the probability itself.",
        "ggml-org/llama.cpp#10783",
        MISMATCH,
        EVERYWHERE,
        inject=doubles.probabilities,
    ),
    FieldFault(
        "rotary buffers lost while the engine sleeps",
        "A sleep of the engine discards what is no weight, rotary frequencies too, and a weight sync does not bring it back.",
        "NVIDIA-NeMo/RL#2631, sgl-project/sglang#27140",
        ids("positions-shifted") | MISMATCH,
        EVERYWHERE,
        start=lambda stack, env: engine_updates(doubles.BuffersLost())(stack, env),
        watch_causes=ids("mismatch-grows"),
        watch_options=UNCHECKED,
    ),
    # The trainer
    FieldFault(
        "attention window on one side only",
        "One side computes attention with a window, and the other lets each token see all before it.",
        "vllm-project/vllm#49202",
        MISMATCH,
        EVERYWHERE,
        inject=doubles.windowed,
        watch_options=UNCHECKED,
    ),
    FieldFault(
        "KL coefficient that becomes infinite",
        "A controller divides by a horizon of 0, and from the second step on the coefficient is minus infinity.",
        "OpenRLHF/OpenRLHF#1289",
        ids("gradient-not-finite"),
        EVERYWHERE,
        start=since(1, doubles.infinite_kl),
        options="--kl-beta 0.01",
        # Before the second step nothing is wrong.
        probes=False,
    ),
    FieldFault(
        "learning-rate schedule longer than the run",
        "The schedule is made for more steps than the run has, and the learning rate never comes near its end.",
        "huggingface/diffusers#8312, vllm-project/speculators#1104",
        ids("schedule-hides-rate"),
        EVERYWHERE,
        start=doubles.schedule_of_more_steps,
    ),
    # The model
    FieldFault(
        "new tokens with random embeddings",
        "Tokens that were added have embeddings like no other token's, and replies are full of them.",
        "huggingface/transformers#8472, huggingface/tokenizers#1490",
        ids("degenerate-repetition", "truncated-turns", "never-succeeds"),
        ("gsm8k", "musique", "lookup"),
        start=doubles.new_tokens_at_random,
    ),
)
