"""The unseen half of the twenty-sixth set of the field's faults, which is run only to measure the doctor.

The set is about the environment's side. It is a sample of what people ask about: threads in the order in which plain
searches return them, listed in docs/results/field26_threads.md.
"""

from __future__ import annotations

from plumbob.testing.faults import field26_unseen_doubles as doubles
from plumbob.testing.faults.field import EVERYWHERE, WITH_TOOLS, FieldFault, ids
from plumbob.testing.faults.field26_parts import everything_passes, some_tasks
from plumbob.testing.faults.field_parts import graded

UNSEEN = (
    # Rewards and judges
    FieldFault(
        "whole reply compared as the answer",
        "The reward was made without the environment's parser and compares the whole reply with the gold.",
        "PrimeIntellect-ai/verifiers#276, PrimeIntellect-ai/verifiers#327",
        ids("answers-not-parsed", "oracle-fails", "reward-constant"),
        ("gsm8k", "musique"),
        start=graded(correct=doubles.whole_reply),
    ),
    FieldFault(
        "text reward fed a list of messages",
        "The reward function expects a text and gets a list of messages; its error is caught and counts as 0.",
        "PrimeIntellect-ai/verifiers#1487",
        ids("reward-constant", "oracle-fails", "grader-swallows-errors"),
        EVERYWHERE,
        start=graded(correct=doubles.fed_messages),
    ),
    FieldFault(
        "any answer that contains the gold passes",
        "The exact comparison was switched off for one that looks for the gold anywhere in the last message.",
        "AgentR1/Agent-R1#71",
        ids("reward-exploitable"),
        ("musique", "lookup"),
        start=graded(correct=doubles.contains_gold),
    ),
    FieldFault(
        "missing answer called right by the judge",
        "A judge is asked about answers that are missing or say nothing too, and calls them right.",
        "tteon/seocho#192",
        ids("reward-exploitable", "reward-wrong"),
        EVERYWHERE,
        start=graded(correct=doubles.nothing_is_right),
    ),
    FieldFault(
        "unreadable verdict counted as a tie",
        "Verdicts that the parser cannot read, two in five, are counted as half a success.",
        "NVIDIA-NeMo/Gym#2103",
        ids("reward-wrong", "grader-swallows-errors"),
        EVERYWHERE,
        start=graded(correct=doubles.tie),
    ),
    FieldFault(
        "right verdict lost among other words",
        "The judge writes more than the one word that the parser expects, and right answers count as wrong.",
        "web-arena-x/webarena#272, KeyValueSoftwareSystems/agent-opfor#84",
        ids("reward-wrong", "oracle-fails", "answers-not-parsed"),
        EVERYWHERE,
        start=graded(correct=doubles.verdict_lost),
    ),
    FieldFault(
        "text for the user paid for being there",
        "Half of the tasks ask for a text for the user, which is paid for being there; nobody looks at what it says.",
        "qiancheng0/ToolRL#22",
        ids("reward-exploitable", "reward-format-dominated"),
        EVERYWHERE,
        start=graded(correct=some_tasks(2, doubles.present, "text/")),
    ),
    FieldFault(
        "judge shown only the head of the reply",
        "What the judge is shown is cut after some characters, and the decisive last line is what is missing.",
        "mindsdb/anton#305",
        ids("answers-not-parsed", "reward-wrong"),
        ("gsm8k",),
        start=graded(correct=doubles.head_only),
    ),
    FieldFault(
        "assistant messages without a type not scored",
        "The check reads only messages that name their type, and the model's messages are passed on without it.",
        "PrimeIntellect-ai/verifiers#2212",
        ids("reward-constant", "oracle-fails", "answers-not-parsed"),
        ("musique", "lookup", "gsm8k"),
        start=graded(correct=doubles.unheard),
    ),
    FieldFault(
        "tasks that change nothing always pass",
        "A task passes if the database is as it should be in the end, and half of the tasks are not to change it.",
        "sierra-research/tau2-bench#15, sierra-research/tau2-bench#224",
        ids("reward-exploitable", "reward-wrong"),
        WITH_TOOLS,
        start=graded(correct=some_tasks(2, everything_passes, "database/")),
    ),
    # Data
    FieldFault(
        "evaluation from the middle of the training file",
        "The held-out tasks are rows from the middle of the file whose rows are all trained on.",
        "herniqeu/extract0#1",
        ids("held-out-in-training"),
        EVERYWHERE,
        inject=doubles.held_out_of_training,
        options="--eval-examples 16",
        watch_options="--eval-steps 3",
    ),
    FieldFault(
        "rows shuffled after their golds were taken",
        "The golds are taken from the rows first and the rows are shuffled then, so that each has the gold of another.",
        "Borda/kaggle_image-classify#12",
        ids("oracle-fails", "reward-wrong"),
        WITH_TOOLS,
        start=doubles.golds_stay,
    ),
    FieldFault(
        "all later turns written into the first prompt",
        "What would be said in the course of the conversation is put into the first prompt, the answer with it.",
        "bug-ops/zeph#4233",
        ids("answer-in-prompt"),
        WITH_TOOLS,
        start=doubles.told_at_once,
    ),
    # Tools
    FieldFault(
        "tool results capped by tool and by engine",
        "A tool shortens its result, and the engine that runs the tools shortens all results once more.",
        "gossipcat-ai/gossipcat-ai#731",
        ids("tool-results-cut"),
        ("musique", "lookup"),
        start=doubles.capped_twice,
    ),
    FieldFault(
        "first result left over from the episode before",
        "The reset does not go back to the start: what an episode sees first is the state in which another one ended.",
        "Total-RD/pymgrid#21",
        ids("tool-results-mixed", "tool-results-wrong"),
        WITH_TOOLS,
        start=doubles.left_over,
    ),
    FieldFault(
        "second reset draws another task",
        "The environment is reset to the task, and then once more, which draws another task than the prompt states.",
        "peract/peract#32",
        ids("tool-results-wrong", "tool-results-mixed", "oracle-fails"),
        WITH_TOOLS,
        start=doubles.reset_twice,
    ),
    FieldFault(
        "simulated side errs in a quarter of its turns",
        "A model plays the other side of the conversation, and in a quarter of its turns says what is not so.",
        "sierra-research/tau2-bench#392",
        ids("tool-results-wrong", "tool-results-mixed"),
        WITH_TOOLS,
        start=doubles.errs,
    ),
    # Ends of episodes
    FieldFault(
        "conversation closed before the agent can act",
        "The other side ends the conversation as soon as it has said what it has to, before the agent's last turn.",
        "sierra-research/tau2-bench#297",
        ids("truncated-rollouts", "oracle-fails", "never-succeeds", "reward-constant"),
        ("lookup",),
        start=doubles.closed_early,
    ),
    FieldFault(
        "one finished rollout ends its siblings",
        "The end of one episode ends all others that are played beside it, of the same task.",
        "Ericonaldo/ILSwiss#14",
        ids("truncated-rollouts", "rewards-of-other-rollouts"),
        WITH_TOOLS,
        start=doubles.siblings_end,
    ),
    FieldFault(
        "turns used up before the answer",
        "The limit of turns is reached with a tool call, and there is no turn left for the answer.",
        "deepset-ai/haystack#10001, softwaremill/sttp-ai#529",
        ids("truncated-rollouts"),
        ("lookup",),
        options="--max-turns 3",
    ),
)
