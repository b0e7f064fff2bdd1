"""The unseen half of the fourteenth set of the field's faults: they are run only to measure the doctor.

How the set was made is told in docs/results/field14_threads.md.
"""

from __future__ import annotations

from plumbob.testing.faults import field14_unseen_doubles as doubles
from plumbob.testing.faults.field import WITH_TOOLS, FieldFault, ids
from plumbob.testing.faults.field_parts import graded, tasks_changed

UNSEEN = (
    # Rewards
    FieldFault(
        "a guess among two words",
        "There are two answers to choose from, so that a guess without any work is right half of the time.",
        "kaiwenzha/RL-Tango#1",
        ids("reward-exploitable"),
        ("lookup",),
        options="-a num_values=2",
    ),
    FieldFault(
        "whole reply compared with the gold",
        "The rubric is made without the environment's parser, and compares the whole reply with the gold.",
        "PrimeIntellect-ai/verifiers#277",
        ids("answers-not-parsed", "oracle-fails", "reward-constant"),
        ("gsm8k", "musique"),
        start=graded(correct=doubles.whole_reply),
        watch_causes=ids("never-succeeds"),
    ),
    FieldFault(
        "any number of an unmarked reply counts",
        "Where no answer is marked, the parser hands on the whole reply, and any number in it can be the answer.",
        "PrimeIntellect-ai/verifiers#1028",
        ids("reward-exploitable"),
        ("gsm8k",),
        start=graded(correct=doubles.any_number),
    ),
    FieldFault(
        "graded by the scorer of another task",
        "The scorer of another task is chosen, which expects JSON and gives -1 to all other replies.",
        "PRIME-RL/RL-Compositionality#6",
        ids("reward-constant", "oracle-fails", "answers-not-parsed"),
        ("gsm8k", "lookup", "musique"),
        start=graded(correct=doubles.scorer_of_json),
        watch_causes=ids("never-succeeds"),
    ),
    FieldFault(
        "a number copied from the problem paid",
        "The reward is for an answer that was copied from the problem, in place of the one that was worked out.",
        "jsboige/CoursIA#11312",
        ids("oracle-fails", "reward-exploitable"),
        ("gsm8k",),
        start=graded(correct=doubles.copied),
        watch_causes=ids("never-succeeds"),
    ),
    FieldFault(
        "longer replies paid more",
        "Who graded the examples liked long replies, and the reward grows with the length.",
        "jsboige/CoursIA#16172",
        ids("reward-exploitable", "reward-format-dominated"),
        ("gsm8k", "musique"),
        start=graded(correct=doubles.longer),
        watch_causes=ids("length-runaway", "reward-hacked"),
    ),
    FieldFault(
        "a list of all answers counts as right",
        "The grader looks for the gold inside of the answer, so that an answer with all candidates in it is right.",
        "Liuziyu77/Visual-RFT#79",
        ids("reward-exploitable"),
        ("lookup", "musique"),
        start=graded(correct=doubles.listed),
    ),
    FieldFault(
        "tags read that the prompt does not ask for",
        "The prompt asks for tags of one name and the parser reads tags of another, so that all replies are ill-formed.",
        "inclusionAI/AWorld-RL#12",
        ids("answers-not-parsed", "oracle-fails", "reward-constant"),
        ("musique",),
        start=graded(correct=doubles.other_tags),
        watch_causes=ids("never-succeeds"),
    ),
    FieldFault(
        "grader without a time limit waits for ever",
        "The sandbox in which replies are graded does not say when its time is over, and the reward waits for it.",
        "huggingface/open-r1#546, areal-project/AReaL#1426",
        ids("environment-hangs", "environment-fails"),
        ("gsm8k", "lookup", "musique"),
        start=graded(correct=doubles.waits),
        options="--max-tool-seconds 1",
        steps=3,
    ),
    # Tasks and tools
    FieldFault(
        "system message in evaluations alone",
        "Held-out tasks have a system message with instructions, and training tasks have none.",
        "jingyi0000/R1-VL#9, unslothai/unsloth#1746",
        ids("evaluation-prompted-differently"),
        ("gsm8k", "lookup", "musique"),
        start=tasks_changed(doubles.bare_training),
    ),
    FieldFault(
        "tools of all rollouts share one state",
        "One tool server serves all rollouts and keeps one task, so that they get results from each other's tasks.",
        "PrimeIntellect-ai/verifiers#1727",
        ids("tool-results-mixed", "oracle-fails"),
        WITH_TOOLS,
        start=doubles.shared_state,
    ),
    FieldFault(
        "every rollout that calls a tool fails",
        "The environment expects calls in another form than it gets, and raises an error in each rollout that has one.",
        "PrimeIntellect-ai/prime-rl#2524",
        ids("environment-fails", "tools-fail", "drops-are-biased"),
        WITH_TOOLS,
        start=doubles.unreadable_calls,
    ),
    FieldFault(
        "errors of a misconfigured tool returned as its results",
        "Every call fails for want of a token, and the tool returns the error's text as if it were a result.",
        "gleanwork/glean-agent-toolkit#42",
        ids("tools-fail", "tools-return-nothing"),
        ("musique", "lookup"),
        start=doubles.misconfigured,
        steps=3,
    ),
    # Settings
    FieldFault(
        "context used up before the last turn",
        "The context limit ends rollouts long before they have taken the turns that they may take.",
        "Visual-Agent/DeepEyes#118",
        ids("truncated-context", "tool-results-too-long"),
        ("musique",),
        options="--max-context 480",
    ),
    FieldFault(
        "two rollouts a group and two groups a step",
        "Groups are of two rollouts to fit a small batch, and most of them earn twice the same.",
        "jsboige/CoursIA#10603",
        ids("too-little-signal", "groups-without-variety"),
        ("gsm8k", "lookup"),
        options="--num-generations 2 --batch-size 4 --gradient-accumulation-steps 1",
    ),
    FieldFault(
        "rate of supervised training kept for rewards",
        "The learning rate is the one of supervised training, fifty times as high as the one that works.",
        "jjyaoao/HelloAgents#107, datawhalechina/hello-agents#770, datawhalechina/hello-agents#771",
        ids("learning-rate-too-high"),
        ("gsm8k", "lookup", "musique"),
        options="--learning-rate 0.015",
        watch_causes=ids("entropy-collapse", "entropy-explosion", "degenerate-repetition", "tools-abandoned"),
        steps=8,
    ),
)
