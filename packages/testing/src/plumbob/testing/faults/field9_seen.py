"""The seen half of the ninth set of the field's faults: those on which the doctor's rules may be developed.

The set is a sample of what people ask about: threads in the order in which plain searches return them, listed in
docs/results/field9_threads.md.
"""

from __future__ import annotations

from plumbob.testing.faults import field9_seen_doubles as doubles
from plumbob.testing.faults.field import EVERYWHERE, MISMATCH, UNCHECKED, WITH_TOOLS, FieldFault, ids
from plumbob.testing.faults.field2_parts import before_updates
from plumbob.testing.faults.field_parts import (
    all_of,
    batches_changed,
    graded,
    policy_scores,
    rows_changed,
    tasks_changed,
)

NEVER_RIGHT = ids("never-succeeds")
"""What a run directory shows of a reward that is 0 whatever the reply is."""
ALL_ALIKE = ids("groups-without-variety", "too-little-signal")
"""What a run directory shows of a reward that is the same for all rollouts of a task."""

SEEN = (
    # Rewards
    FieldFault(
        "reward model scores the last token of the prompt",
        "The score is read where the first padding token stands, which is the end of a turn of the prompt.",
        "huggingface/trl#6952",
        ids("reward-constant", "oracle-fails"),
        EVERYWHERE,
        start=graded(correct=doubles.of_the_prompt),
        watch_causes=ALL_ALIKE,
    ),
    FieldFault(
        "answer extracted a second time from the extracted text",
        "The answer is taken out of its mark, and the grader then looks for the mark in what was taken out.",
        "THUDM/slime#543",
        ids("answers-not-parsed", "oracle-fails", "reward-constant"),
        ("gsm8k",),
        start=graded(correct=doubles.extracted_twice),
        watch_causes=NEVER_RIGHT,
    ),
    FieldFault(
        "answer must be followed by a line break",
        "The pattern of an answer ends with a line break, and replies end with their answer.",
        "ZHZisZZ/dllm#118",
        ids("answers-not-parsed", "oracle-fails", "reward-constant"),
        ("gsm8k",),
        start=graded(correct=doubles.ends_its_line),
        watch_causes=NEVER_RIGHT,
    ),
    FieldFault(
        "sum of the rewards cut off at one",
        "The parts of the reward are added without a division by their weights and cut off at 1, which form alone reaches.",
        "opendatahub-io/agent-eval-harness#130",
        ids("reward-exploitable", "reward-format-dominated", "reward-constant"),
        ("gsm8k",),
        start=graded(correct=doubles.cut_off_at_one),
        watch_causes=ALL_ALIKE | ids("task-solved"),
    ),
    # Tasks
    FieldFault(
        "solution left in the environment",
        "What the first call returns holds the solution of the task, and the rest of the work is not needed.",
        "sunblaze-ucb/cybergym#6",
        ids("answer-in-prompt", "reward-exploitable"),
        ("lookup",),
        start=tasks_changed(doubles.solution_left),
    ),
    FieldFault(
        "held-out tasks cut from a list with repeats",
        "A small source is repeated until it is as long as the others, and held-out tasks are the end of that list.",
        "MakazhanAlpamys/Soup#680, huggingface/datasets#4261",
        ids("held-out-in-training", "duplicate-tasks"),
        ("lookup", "gsm8k"),
        start=doubles.held_out_from_repeats,
    ),
    # Rows and groups
    FieldFault(
        "assistant messages of the prompt trained",
        "Every message of the assistant is in the loss, those of the conversation in the prompt too.",
        "NVIDIA-NeMo/RL#2176",
        ids("context-tokens-trained", "row-not-what-was-sampled"),
        ("gsm8k",),
        start=all_of(tasks_changed(doubles.with_history), rows_changed(doubles.every_assistant_message)),
        watch_causes=MISMATCH,
    ),
    FieldFault(
        "buffered group under the rewards of another",
        "A group without a signal is replaced by rows of an earlier one, and all but one keep the replaced rewards.",
        "huggingface/trl#6804, huggingface/trl#6821",
        ids("rollouts-repeated", "rewards-of-other-rollouts"),
        EVERYWHERE,
        start=lambda stack, env: batches_changed(doubles.Buffered())(stack, env),
        watch_causes=MISMATCH,
    ),
    FieldFault(
        "first rollouts to finish are kept",
        "More rollouts are begun than are wanted, and those that are finished last, the long ones, are thrown away.",
        "HumanCompatibleAI/imitation#183",
        ids("drops-are-biased"),
        EVERYWHERE,
        start=batches_changed(doubles.first_to_finish),
    ),
    FieldFault(
        "two workers with the same seed",
        "Two workers sample one half of each group with the same seeds, so that every rollout is there twice.",
        "nottombrown/rl-teacher#21, verl-project/verl-omni#112",
        # No id names a group that has each of its rollouts twice; this one is about rollouts that are alike.
        ids("groups-without-variety", "too-little-signal"),
        EVERYWHERE,
        start=doubles.seeds_of_workers,
    ),
    # The trainer
    FieldFault(
        "trainer's log-probabilities one token late",
        "Labels are shifted by one and masks are not, so that each token has the log-probability of the next one.",
        "PrimeIntellect-ai/prime-rl#1525, AI-Hypercomputer/maxtext#2103",
        ids("loss-mask-shifted", "logprobs-permuted") | MISMATCH,
        EVERYWHERE,
        start=policy_scores(doubles.one_late),
        watch_options=UNCHECKED,
    ),
    FieldFault(
        "advantages whitened a second time over all turns",
        "Advantages of groups are centred and scaled again over all turns of the step, where long rollouts count more.",
        "axon-rl/gem#113, amazon-science/reskill#12",
        ids("advantages-wrong", "loss-differs-from-settings"),
        WITH_TOOLS,
        start=doubles.whitened_over_turns,
    ),
    FieldFault(
        "KL coefficient never handed on",
        "The coefficient of the KL term is set and not handed on to the loss, where it is 0 by default.",
        "Roblox/FAI-RL#96",
        # No id names a KL term that is missing; this one says that it does not pull towards the reference.
        ids("kl-backwards"),
        EVERYWHERE,
        start=doubles.no_kl,
        options="--kl-beta 0.1",
    ),
    FieldFault(
        "checkpointed layers get no gradient",
        "With gradient checkpointing the inputs of a layer have no gradient, and only the last adapter is trained.",
        "huggingface/trl#3089, huggingface/trl#3150, locuslab/open-unlearning#178",
        ids("no-gradient"),
        EVERYWHERE,
        start=doubles.last_layer_only,
        options="--peft --gradient-checkpointing",
    ),
    FieldFault(
        "optimizer rebuilt for each step",
        "The training loop makes a new optimizer whenever it is called, which is once in a step, and moments are lost.",
        "CodefyUI/CodefyUI#147, CodefyUI/CodefyUI#118",
        ids("optimizer-state-lost"),
        EVERYWHERE,
        start=before_updates(doubles.without_moments),
        probes=False,
        steps=14,
    ),
)
