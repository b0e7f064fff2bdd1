"""The seen half of the eighteenth set of the field's faults: those on which the doctor's rules may be developed.

The set is about the environment's side; its threads are listed in docs/results/field18_threads.md.
"""

from __future__ import annotations

from plumbob.testing.faults import field18_seen_doubles as doubles
from plumbob.testing.faults.field import EVERYWHERE, WITH_TOOLS, FieldFault, ids
from plumbob.testing.faults.field_parts import graded, tasks_changed, tools_answer

SEEN = (
    FieldFault(
        "short wrong replies above long right ones",
        "A right reply loses by its length and a wrong one gains at most nothing, so that a long right reply "
        "earns less than a short wrong one.",
        "huggingface/open-r1#360",
        ids("reward-format-dominated", "reward-exploitable"),
        ("gsm8k", "musique"),
        start=graded(correct=doubles.shorter_is_better),
        watch_causes=ids("length-collapse"),
    ),
    FieldFault(
        "gold found anywhere in the working",
        "The whole text is searched for the right answer, the working included, and not only the answer that is given.",
        "huggingface/trl#4563, Jiayi-Pan/TinyZero#120",
        ids("reward-exploitable"),
        ("gsm8k", "musique"),
        start=graded(correct=doubles.gold_anywhere),
    ),
    FieldFault(
        "half of the tasks paid for having a reply at all",
        "Tasks whose answer cannot be checked, half of all, pay the whole reward for any reply.",
        "qiancheng0/ToolRL#51",
        ids("reward-exploitable", "reward-format-dominated"),
        EVERYWHERE,
        start=graded(correct=doubles.unchecked),
        watch_causes=ids("too-little-signal"),
    ),
    FieldFault(
        "environment handed back before it is scored",
        "The environment returns to the pool before its reward is read, so that a rollout gets the reward "
        "that another one left there.",
        "huggingface/trl#6238",
        ids("rewards-of-other-rollouts", "reward-nondeterministic", "oracle-fails"),
        EVERYWHERE,
        start=doubles.scored_too_late,
    ),
    FieldFault(
        "one workspace for all agents that run at a time",
        "Agents that run at the same time share a workspace, and each that begins overwrites what the tools "
        "of all others work on.",
        "PrimeIntellect-ai/verifiers#2418",
        ids("tool-results-mixed", "tools-fail"),
        WITH_TOOLS,
        start=doubles.newest_workspace,
    ),
    FieldFault(
        "rows of a merged file that repeat",
        "The training file was put together from sources that overlap, so that each row stands in it three times.",
        "embeddings-benchmark/mteb#1036",
        ids("duplicate-tasks"),
        EVERYWHERE,
        start=tasks_changed(doubles.thrice),
        watch=False,
    ),
    FieldFault(
        "tool registered under a misspelt name",
        "The tool is registered under another spelling than the prompt's, so that every call is answered with "
        "an error.",
        "2FastLabs/agent-squad#250",
        ids("tools-fail", "tools-return-nothing"),
        WITH_TOOLS,
        start=tools_answer(doubles.misspelt),
    ),
    FieldFault(
        "episode ended by a tool that raises",
        "A tool raises for some arguments, and the error ends the whole episode in place of being shown to the model.",
        "opensearch-project/ml-commons#3900",
        ids("environment-fails", "tools-fail", "drops-are-biased"),
        WITH_TOOLS,
        start=tools_answer(doubles.raises_for_some),
    ),
    FieldFault(
        "instruction repeated after every result",
        "The instruction is written again after each tool result, so that it stands in the conversation once "
        "for every turn.",
        "breadboard-ai/breadboard#1304",
        ids("tool-results-mixed", "tool-results-too-long"),
        WITH_TOOLS,
        start=doubles.instruction_again,
    ),
    FieldFault(
        "held-out file that is the training file",
        "The path of the held-out file is that of the training file.",
        "luting-hnu/EGRCNN#3, JJGO/shrinkbench#7, chrischoy/SpatioTemporalSegmentation#3, audi/MeshGPT#10",
        ids("held-out-in-training"),
        EVERYWHERE,
        start=doubles.same_file,
        watch_options="--eval-examples 16",
    ),
    FieldFault(
        "gold and answer compared as parts of each other",
        "An answer is right if it is part of the right answer or the right answer is part of it, as the empty "
        "answer always is.",
        "Liuziyu77/Visual-RFT#176",
        ids("reward-exploitable"),
        EVERYWHERE,
        start=graded(correct=doubles.part_of_each_other),
    ),
)
