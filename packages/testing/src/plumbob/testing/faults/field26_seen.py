"""The seen half of the twenty-sixth set of the field's faults: those on which the doctor's rules may be developed.

The set is about the environment's side. It is a sample of what people ask about: threads in the order in which plain
searches return them, listed in docs/results/field26_threads.md.
"""

from __future__ import annotations

from plumbob.testing.faults import field26_seen_doubles as doubles
from plumbob.testing.faults.doubles import rewritten
from plumbob.testing.faults.field import EVERYWHERE, MISMATCH, WITH_TOOLS, FieldFault, ids
from plumbob.testing.faults.field26_parts import everything_passes, some_tasks
from plumbob.testing.faults.field_parts import chat_method, graded

SEEN = (
    # Rewards and judges
    FieldFault(
        "any text after the marker paid in full",
        "The reward looks for the marks of an answer and for anything after them, and never at what it says.",
        "MakazhanAlpamys/Soup#814",
        ids("reward-exploitable", "reward-format-dominated"),
        ("gsm8k", "lookup", "musique"),
        start=graded(correct=doubles.marker_pays),
    ),
    FieldFault(
        "first label in the judge's reasoning taken",
        "The judge reasons before its verdict, and the parser takes the first label in its text, so wrong answers pass.",
        "OpenWebRL/OpenWebRL#5, PyModel/pythinker-cli#178",
        ids("reward-wrong", "reward-exploitable"),
        EVERYWHERE,
        start=graded(correct=doubles.first_label),
    ),
    FieldFault(
        "gold read as the reply and the reply as the gold",
        "The two arguments of the comparison are in the wrong order, so that replies are read with the golds' strict reader.",
        "huggingface/open-r1#557",
        ids("answers-not-parsed", "reward-wrong", "grader-swallows-errors"),
        ("gsm8k",),
        start=graded(correct=doubles.swapped),
    ),
    FieldFault(
        "number from the reasoning taken for the answer",
        "The reward reads the first value in the whole reply, reasoning included, and compares that with the gold.",
        "huggingface/trl#5298",
        ids("answers-not-parsed", "reward-wrong"),
        ("gsm8k",),
        start=graded(correct=doubles.first_number),
    ),
    FieldFault(
        "number of a judge that checked nothing",
        "A judge that found no claim to check in a reply writes a number nevertheless, which is kept as its score.",
        "Dancode-188/reeve#348",
        ids("reward-wrong"),
        EVERYWHERE,
        start=graded(correct=doubles.unchecked),
    ),
    FieldFault(
        "passed because no check was left to run",
        "All checks were skipped because of a wrong name in the settings, and of no checks all have passed.",
        "NVIDIA-NeMo/Gym#2142",
        ids("reward-constant", "reward-exploitable"),
        EVERYWHERE,
        start=graded(correct=doubles.no_checks),
    ),
    FieldFault(
        "unreadable gold pays everyone",
        "The gold of a third of the tasks cannot be parsed, and any reply to them earns 1.",
        "huggingface/open-r1#509",
        ids("reward-exploitable", "reward-wrong", "grader-swallows-errors"),
        ("gsm8k", "lookup", "musique"),
        start=graded(correct=some_tasks(3, everything_passes, "gold/")),
    ),
    FieldFault(
        "scorer trips over wrong answers",
        "The scoring function looks up what the answer names, and fails with a KeyError where there is no such thing.",
        "open-thought/reasoning-gym#417",
        ids("environment-fails", "drops-are-biased"),
        EVERYWHERE,
        start=graded(correct=doubles.trips),
    ),
    # Golds
    FieldFault(
        "gold of another row with the same name",
        "Rows are found by a name that several have, so that a quarter of them get the right answer of another one.",
        "vl-rewardbench/VL_RewardBench#7",
        ids("oracle-fails", "reward-wrong"),
        WITH_TOOLS,
        start=doubles.gold_of_namesake,
    ),
    FieldFault(
        "gold rounded and the question not",
        "The golds are shortened to a fixed precision, and the task shows the values as they are.",
        "open-thought/reasoning-gym#377",
        ids("oracle-fails", "reward-wrong"),
        ("lookup",),
        start=doubles.shortened_golds,
    ),
    # Tools
    FieldFault(
        "middle of tool results elided",
        "Tool results above a limit keep their start and their end, with a remark in between in place of the rest.",
        "zeroclaw-labs/zeroclaw#10115",
        ids("tool-results-cut"),
        ("musique", "lookup"),
        start=doubles.middle_elided,
    ),
    FieldFault(
        "long tool results crash the code that shortens them",
        "The code that shortens long tool results takes them for texts, which they are not, and fails.",
        "PrimeIntellect-ai/verifiers#2454",
        ids("tools-fail", "environment-fails"),
        WITH_TOOLS,
        start=doubles.crashing,
    ),
    FieldFault(
        "settings of rollouts in one global place",
        "Each rollout writes its settings into a place that all rollouts of the process share; the last writer wins.",
        "benchflow-ai/benchflow#539",
        ids("tool-results-mixed", "tool-results-wrong"),
        WITH_TOOLS,
        start=doubles.one_global_place,
    ),
    FieldFault(
        "tool server down from the middle of the run",
        "A server behind the tools is gone after three steps; all results are empty, and training goes on.",
        "NVIDIA-NeMo/Gym#1351",
        ids("tools-return-nothing", "tool-results-wrong"),
        WITH_TOOLS,
        start=doubles.server_down,
        probes=False,  # before the first step the server runs
        watch_causes=ids("tool-results-mixed"),
        steps=8,
    ),
    # Prompts and rows
    FieldFault(
        "tool results lost where the prompt is sliced",
        "What follows a turn is cut out of the new rendering by the length of another one, and nothing is left of it.",
        "NVIDIA-NeMo/labs-molt#20",
        ids("tools-return-nothing", "tool-results-wrong", "tool-results-cut"),
        WITH_TOOLS,
        start=chat_method("suffix", doubles.only_header),
    ),
    FieldFault(
        "empty thinking put into earlier turns of the row",
        "The trainer's template opens each earlier turn with an empty thought, which the engine's template does not write.",
        "hiyouga/LlamaFactory#10336",
        ids("row-not-what-was-sampled"),
        WITH_TOOLS,
        inject=rewritten(doubles.with_empty_thoughts),
        watch_causes=MISMATCH,
    ),
)
