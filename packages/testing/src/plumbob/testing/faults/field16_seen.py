"""The seen half of the sixteenth set of the field's faults: those on which the doctor's rules may be developed.

The set is about the environment's side: threads in the order in which plain searches return them, listed in
docs/results/field16_threads.md.
"""

from __future__ import annotations

from plumbob.testing.faults import field16_seen_doubles as doubles
from plumbob.testing.faults.field import EVERYWHERE, WITH_TOOLS, FieldFault, ids
from plumbob.testing.faults.field2_parts import module_function
from plumbob.testing.faults.field3_parts import tools_called
from plumbob.testing.faults.field_parts import batches_changed, chat_method, graded, tasks_changed

SEEN = (
    # Reading the answer
    FieldFault(
        "first figure of the reply taken as its answer",
        "The parser takes the first match of its pattern, which is a number of the working and not the answer.",
        "PrimeIntellect-ai/verifiers#1336",
        ids("answers-not-parsed", "oracle-fails"),
        ("gsm8k",),
        start=module_function("is_correct", doubles.first_figure),
        watch_causes=ids("never-succeeds"),
    ),
    FieldFault(
        "only the first line of a reply read",
        "The metric cuts a reply at its first line break, so that an answer after some reasoning counts as wrong.",
        "stanfordnlp/dspy#651",
        ids("answers-not-parsed", "oracle-fails", "reward-constant"),
        ("gsm8k",),
        start=module_function("is_correct", doubles.first_line),
        watch_causes=ids("never-succeeds"),
    ),
    FieldFault(
        "every fourth verdict of the judge lost",
        "The judge leaves out its markers in a quarter of its replies, and what cannot be parsed is a score of 0.",
        "greyhaven-ai/autocontext#26, lm-sys/FastChat#2074",
        ids("reward-nondeterministic"),
        EVERYWHERE,
        start=graded(correct=doubles.every_fourth_lost),
    ),
    # Tools
    FieldFault(
        "tools described without their parameters",
        "The schema of each tool is lost on the way to the prompt, which shows tools that take no arguments.",
        "SnarfNL/HA_MistralAI#37, netease-lcap/wave-agent#1091, anomalyco/opencode#15956",
        ids("tools-not-in-prompt"),
        WITH_TOOLS,
        start=chat_method("prompt", doubles.without_parameters),
        watch_causes=ids("calls-malformed", "tools-fail", "tools-never-used"),
    ),
    FieldFault(
        "every document number leading to one stored document",
        "The index finds the right documents, but their offsets all lead to the same stored text.",
        "quickwit-oss/tantivy#226",
        ids("tools-return-nothing", "tool-results-mixed"),
        ("musique",),
        start=doubles.one_document,
    ),
    FieldFault(
        "search tool that waits without end",
        "Some calls of a search tool never return, and the whole batch waits for them until the limit.",
        "verl-project/verl#1948, verl-project/verl#1696",
        ids("environment-hangs", "environment-fails"),
        ("musique", "lookup"),
        start=tools_called(doubles.waits_without_end),
        options="--max-tool-seconds 1",
    ),
    # Tasks
    FieldFault(
        "golds joined by a key that many rows share",
        "Questions and golds are joined by a text that many rows have, so that a task has the gold of another one.",
        "kxfan2002/SophiaVL-R1#11",
        ids("oracle-fails", "never-succeeds"),
        ("lookup", "musique"),
        start=doubles.joined,
    ),
    FieldFault(
        "reference solution sent with the first observation",
        "The environment's reset returns all of the problem's fields, and with them the reference solution.",
        "huggingface/OpenEnv#446, sunblaze-ucb/cybergym#6",
        ids("answer-in-prompt"),
        EVERYWHERE,
        start=tasks_changed(doubles.solution_sent),
    ),
    FieldFault(
        "evaluation calls the reward without an argument",
        "The path of evaluations leaves out an argument of the reward, whose error is caught and counted as 0.",
        "AI-Hypercomputer/maxtext#4140",
        ids("evaluation-parses-differently", "grader-swallows-errors"),
        ("gsm8k", "lookup", "musique"),
        start=doubles.zero_when_evaluated,
        watch_options="--eval-examples 16 --eval-steps 3",
    ),
    # Rewards of a batch
    FieldFault(
        "one reward spread over the whole batch",
        "A reward function returns one value in place of one per completion, and it is broadcast to all of them.",
        "huggingface/trl#6534",
        ids("rewards-of-other-rollouts", "reward-constant", "too-little-signal"),
        EVERYWHERE,
        start=batches_changed(doubles.one_reward),
    ),
    FieldFault(
        "rewards of the unfiltered batch laid over the filtered one",
        "After groups without a signal were taken out, the rewards of the whole batch are written over the rest's.",
        "NVIDIA-NeMo/RL#3794",
        ids("rewards-of-other-rollouts"),
        EVERYWHERE,
        start=batches_changed(doubles.laid_over),
        options="--num-generations 4",
    ),
    # Settings
    FieldFault(
        "room for forty tokens only",
        "The limit on a completion is far below what a worked answer needs: many are cut off and earn nothing.",
        "huggingface/trl#5697, greyhaven-ai/autocontext#1067, modelscope/ms-swift#4950",
        ids("truncated-turns"),
        ("gsm8k",),
        options="--max-tokens 40",
    ),
)
