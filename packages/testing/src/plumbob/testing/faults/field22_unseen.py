"""The unseen half of the twenty-second set of the field's faults: run only to measure, never to develop the doctor on.

The set is about the environment's side: rewards, judges, golds, data and splits, tools, turns. Its threads are listed in
docs/results/field22_threads.md.
"""

from __future__ import annotations

from plumbob.testing.faults import field22_unseen_doubles as doubles
from plumbob.testing.faults.field import WITH_TOOLS, FieldFault, ids
from plumbob.testing.faults.field_parts import graded, tasks_changed

UNSEEN = (
    # Rewards
    FieldFault(
        "every call paid whatever came of it",
        "Calls of tools earn a bonus, also in rollouts that fail, so that calls for their own sake pay.",
        "NVIDIA-NeMo/RL#4029, Simple-Efficient/RL-Factory#10",
        ids("reward-exploitable", "reward-format-dominated"),
        ("lookup",),
        start=graded(correct=doubles.paid_by_the_call),
    ),
    FieldFault(
        "verification passed whatever it printed",
        "The return code of the verification is not looked at, so that every reply passes it.",
        "huggingface/OpenEnv#1200",
        ids("reward-constant", "reward-exploitable"),
        ("gsm8k", "lookup"),
        start=graded(correct=doubles.always_passed),
    ),
    FieldFault(
        "half a point where the check itself is broken",
        "Where the check rejects even the right answer, any reply earns a half.",
        "PrimeIntellect-ai/verifiers#1344",
        ids("oracle-fails", "grader-swallows-errors"),
        ("gsm8k", "lookup"),
        start=graded(correct=doubles.half_where_broken),
        watch_causes=ids("too-little-signal"),
    ),
    FieldFault(
        "replies wrapped in another template for the reward",
        "The reward reads the conversation in a chat template that is not its own, and finds no answer in it.",
        "modelscope/ms-swift#8475",
        ids("oracle-fails", "answers-not-parsed", "reward-constant"),
        ("lookup",),
        start=graded(correct=doubles.wrapped),
    ),
    FieldFault(
        "equal answers in other forms refused",
        "The verifier compares texts, and does not see that an answer in another form is the same number.",
        "AkihikoWatanabe/paper_notes#2009",
        ids("answers-not-parsed"),
        ("gsm8k",),
        start=graded(correct=doubles.same_text),
    ),
    FieldFault(
        "answers compared by their first character",
        "An index too many takes the first character of an answer for the answer.",
        "NVIDIA-NeMo/RL#3635",
        ids("reward-exploitable"),
        ("gsm8k",),
        start=graded(correct=doubles.first_character),
    ),
    # Advantages and rewards of a batch
    FieldFault(
        "efficiency divided by a cost of zero",
        "Advantages are scaled by what tool results cost, over the mean of that: without tools, this is not a number.",
        "PrimeIntellect-ai/prime-rl#2377",
        ids("gradient-not-finite", "advantages-wrong"),
        ("gsm8k",),
        start=doubles.per_cost,
    ),
    FieldFault(
        "two scores for a reply that cannot be read",
        "A reply without an answer adds two scores to the list of scores, so that all later rollouts get another's.",
        "NVIDIA-NeMo/RL#3635",
        ids("rewards-of-other-rollouts"),
        ("lookup",),
        start=doubles.two_scores,
    ),
    # The tasks' data
    FieldFault(
        "sixty episodes behind every seed",
        "An episode is chosen by the seed modulo the number of episodes, and thousands of seeds stand for sixty.",
        "mll-lab-nu/VAGEN#67",
        ids("few-distinct-tasks", "duplicate-tasks"),
        ("lookup", "gsm8k"),
        start=tasks_changed(doubles.training_only(doubles.by_seed)),
    ),
    FieldFault(
        "each task four times in a row",
        "Each task is repeated, and its copies follow each other.",
        "fivosts/BenchPress#132",
        ids("duplicate-tasks", "few-distinct-tasks"),
        ("gsm8k", "lookup"),
        start=tasks_changed(doubles.training_only(doubles.four_in_a_row)),
        options="--task-order as-given",
    ),
    FieldFault(
        "questions without what they are about",
        "A part of the question is not put into the prompt, so that nobody could answer it.",
        "MedARC-AI/medmarks#55",
        ids("truncated-context", "never-succeeds"),
        ("gsm8k",),
        start=tasks_changed(doubles.last_sentence),
    ),
    FieldFault(
        "right answer always the same choice",
        "The right answer stands at the same place in every task, so that no question must be read.",
        "rshrc/Varnamala#5",
        ids("reward-exploitable"),
        ("lookup",),
        start=tasks_changed(doubles.always_the_first),
    ),
    # Tools and calls
    FieldFault(
        "start state of the first task for all",
        "The rollout sets the environment up anew and loses the task's own start state: all have the same.",
        "infer-actively/pymdp#279",
        ids("tool-results-mixed", "tools-return-nothing"),
        WITH_TOOLS,
        start=doubles.first_world,
    ),
    FieldFault(
        "calls unread in evaluations",
        "The reader of tool calls that evaluations use does not find calls that the one of training finds.",
        "PrimeIntellect-ai/verifiers#2027",
        ids("evaluation-prompted-differently", "evaluation-parses-differently"),
        WITH_TOOLS,
        start=doubles.calls_unread_in_evaluations,
        options="--eval-examples 16 --eval-steps 3",
        probes=False,  # the reader differs only while `train` evaluates, which an examination before it does not
    ),
)
