"""The seen half of the fourteenth set of the field's faults: those on which the doctor's rules may be developed.

The set is a sample of what people ask about the environment's side: threads in the order in which plain searches return
them, listed in docs/results/field14_threads.md.
"""

from __future__ import annotations

from plumbob.testing.faults import field14_seen_doubles as doubles
from plumbob.testing.faults.field import EVERYWHERE, MISMATCH, UNCHECKED, FieldFault, ids
from plumbob.testing.faults.field_parts import (
    all_of,
    batches_changed,
    decoded_as,
    graded,
    policy_scores,
    rows_changed,
    tasks_changed,
)

SEEN = (
    # Rewards
    FieldFault(
        "full reward where the gold cannot be read",
        "The grader reads the gold of every second task as nothing, and gives the full reward to any reply to it.",
        "huggingface/open-r1#55, huggingface/open-r1#215, huggingface/cookbook#335",
        ids("reward-exploitable", "reward-constant", "too-little-signal"),
        ("gsm8k", "musique", "lookup"),
        start=graded(correct=doubles.unread_gold),
        watch_causes=ids("groups-without-variety"),
    ),
    FieldFault(
        "answers in a box of another name not read",
        "The model puts its answers into boxes of a name that the grader finds, and then does not unpack.",
        "THUDM/slime#2150, OpenRLHF/OpenRLHF#1285",
        ids("answers-not-parsed"),
        ("gsm8k",),
        start=all_of(decoded_as(doubles.in_fbox), graded(correct=doubles.fbox_unread)),
        watch_causes=ids("never-succeeds"),
    ),
    FieldFault(
        "a second reward noted after a failure of the grader",
        "The grader notes a reward, fails afterwards and notes a 0 as well, so that later rollouts get those of others.",
        "NVIDIA-NeMo/RL#3058",
        ids("rewards-of-other-rollouts", "advantages-wrong"),
        ("gsm8k", "lookup", "musique"),
        start=batches_changed(doubles.noted_twice),
    ),
    FieldFault(
        "a judge that gives every reply top marks",
        "The judge's prompt says too little of what is good, and it gives the highest mark to all that it reads.",
        "lucidrains/self-rewarding-lm-pytorch#7",
        ids("reward-constant", "reward-exploitable"),
        EVERYWHERE,
        start=graded(correct=doubles.top_marks),
        watch_causes=ids("task-solved"),
    ),
    FieldFault(
        "distance from the gold paid",
        "The reward is the distance from the target, which is to be small, and the trainer makes it large.",
        "huggingface/trl#2771",
        ids("oracle-fails", "reward-exploitable"),
        ("gsm8k",),
        start=graded(correct=doubles.distance),
    ),
    FieldFault(
        "gold looked for in the tools' results",
        "The grader gets all messages in place of the last one, and takes what a search has found as the answer.",
        "janhq/ReZero#1",
        ids("reward-exploitable"),
        ("musique", "lookup"),
        start=graded(correct=doubles.seen_by_a_tool),
    ),
    # Tasks and tools
    FieldFault(
        "a fifth of the held-out tasks generated for training too",
        "The generator makes few different tasks, so that other seeds give some of the training tasks again.",
        "openai/procgen#100, miroblog/deep_rl_trader#4",
        ids("held-out-in-training"),
        EVERYWHERE,
        inject=doubles.generated_again,
    ),
    FieldFault(
        "search results of numbers without texts",
        "The search tool looks for the documents' texts under another name, and shows their numbers alone.",
        "rllm-org/rllm#392, rllm-org/rllm#396",
        ids("tools-return-nothing", "tool-results-cut"),
        ("musique",),
        start=doubles.without_texts,
        watch_causes=ids("never-succeeds"),
    ),
    FieldFault(
        "golds in capitals and tools in small letters",
        "Answers are compared letter by letter, and the golds are written with other letters than the tools' results.",
        "UKGovernmentBEIS/inspect_ai#291, Stanford-AIMI/radgraph#15",
        ids("answers-not-parsed", "oracle-fails"),
        ("lookup",),
        start=tasks_changed(doubles.capitals),
        watch_causes=ids("never-succeeds"),
    ),
    FieldFault(
        "gold in the prompt as a hint of its form",
        "A part of the prompts gets an example of the answer's form, which is made from the gold.",
        "ucbepic/DataAgentBench#56",
        ids("answer-in-prompt"),
        EVERYWHERE,
        start=tasks_changed(doubles.hinted),
    ),
    FieldFault(
        "golds of other tasks in a third of the data",
        "Many golds of the data set are wrong.",
        "THUDM/AgentBench#220, ParticleMedia/RAGTruth#2",
        ids("oracle-fails"),
        EVERYWHERE,
        start=tasks_changed(doubles.golds_of_others),
    ),
    FieldFault(
        "one problem with a wrong gold",
        "All training is on one problem, whose gold is wrong, so that the model hardly ever gives it.",
        "ypwang61/One-Shot-RLVR#8",
        ids("few-distinct-tasks", "never-succeeds", "oracle-fails"),
        ("gsm8k", "lookup"),
        start=tasks_changed(doubles.one_wrong),
    ),
    # Training
    FieldFault(
        "gradients never set to zero",
        "The training loop has no call that clears the gradients.",
        "huggingface/trl#149",
        ids("gradients-not-cleared"),
        EVERYWHERE,
        start=doubles.never_cleared,
        steps=12,
    ),
    FieldFault(
        "rollouts of one turn left out of the loss",
        "The trainer learns from a step and the one after it, so that an episode of a single step is no example.",
        "Unity-Technologies/ml-agents#974",
        ids("sampled-tokens-masked", "no-gradient", "drops-are-biased"),
        ("gsm8k", "lookup"),
        start=rows_changed(doubles.single_turns_masked),
    ),
    FieldFault(
        "given rate ignored for the default",
        "The tool that starts the training does not pass the given learning rate on, and the default is fifty times it.",
        "jjyaoao/HelloAgents#107, jjyaoao/HelloAgents#108",
        ids("schedule-hides-rate", "learning-rate-too-high"),
        ("gsm8k", "lookup", "musique"),
        start=doubles.given_rate_ignored,
        options="--learning-rate 1e-4",
    ),
    FieldFault(
        "temperature left out of the trainer's scores",
        "Rollouts are sampled at a temperature by which the trainer does not divide the logits.",
        "huggingface/trl#3029",
        ids("temperature-not-applied") | MISMATCH,
        EVERYWHERE,
        start=policy_scores(doubles.at_temperature_one),
        options="--temperature 0.7",
        watch_options=UNCHECKED,
    ),
)
