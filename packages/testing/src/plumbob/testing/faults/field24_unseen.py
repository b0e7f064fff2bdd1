"""The unseen half of set 24 of the field's faults: it is run only to measure, and no rule is developed on it.

The set is about the environment's side. The threads, in the order in which plain searches return them, are listed in
docs/results/field24_threads.md.
"""

from __future__ import annotations

from plumbob.testing.faults import field24_unseen_doubles as doubles
from plumbob.testing.faults.field import EVERYWHERE, MISMATCH, WITH_TOOLS, FieldFault, ids
from plumbob.testing.faults.field3_parts import tools_called
from plumbob.testing.faults.field24_parts import prompt_messages, rollout_results, tools_return
from plumbob.testing.faults.field_parts import graded, tasks_changed, tools_answer

UNSEEN = (
    # Rewards
    FieldFault(
        "first number of the reasoning taken for the answer",
        "The grader takes the first match of the whole reply, and so a number of the reasoning in place of the answer.",
        "vllm-project/tpu-inference#3518",
        ids("answers-not-parsed"),
        ("gsm8k",),
        start=graded(correct=doubles.first_number),
    ),
    FieldFault(
        "answer pattern with a placeholder that is never filled in",
        "The pattern that reads answers holds the name of a variable in place of its value, and matches no reply.",
        "vllm-project/tpu-inference#3518",
        ids("answers-not-parsed", "reward-constant", "oracle-fails"),
        ("gsm8k",),
        start=graded(correct=doubles.placeholder_unfilled),
    ),
    FieldFault(
        "one digit read of a longer answer",
        "The pattern that reads answers takes one character after the mark: of an answer of several digits the first.",
        "groq/openbench#348",
        ids("answers-not-parsed", "oracle-fails"),
        ("gsm8k",),
        start=graded(correct=doubles.one_digit),
    ),
    FieldFault(
        "checks that pass unless something raises",
        "A check counts as passed if running it raised nothing, and what it has found is not looked at.",
        "huggingface/OpenEnv#1210",
        ids("reward-constant", "reward-exploitable"),
        EVERYWHERE,
        start=graded(correct=doubles.unless_it_raises),
    ),
    FieldFault(
        "judge that chats where a score is expected",
        "For some replies the judge writes a sentence in place of a score, which the reader refuses with an error.",
        "gregorydickson/pickle-rick-claude#39",
        ids("environment-fails"),
        EVERYWHERE,
        start=graded(correct=doubles.judge_that_chats),
    ),
    FieldFault(
        "the word false taken as true",
        "The judge's verdict becomes a truth value as it is, and where the judge writes false as a text, it is true.",
        "TIGER-AI-Lab/ClawBench#305",
        ids("reward-exploitable", "reward-wrong"),
        EVERYWHERE,
        start=graded(correct=doubles.word_false),
    ),
    FieldFault(
        "no verdict after a long conversation",
        "Where the agent runs out of time the verifier is not run, and the missing reward fails the rollout.",
        "benchflow-ai/benchflow#234",
        ids("environment-fails"),
        ("lookup",),
        start=graded(correct=doubles.no_verdict_when_long),
        watch_causes=ids("drops-are-biased"),
    ),
    FieldFault(
        "quotients that the verifier cannot compute count as wrong",
        "The verifier fails on some right answers, its error is caught, and the failure becomes a reward of 0.",
        "NVIDIA-NeMo/RL#2207",
        ids("grader-swallows-errors", "answers-not-parsed"),
        ("gsm8k",),
        start=graded(correct=doubles.quotients_fail),
    ),
    # Tasks and groups
    FieldFault(
        "golds with two letters swapped",
        "A part of the golds is mistyped: the right answer is not the gold one.",
        "opensuh/DocumentBinarization#9",
        ids("oracle-fails"),
        ("lookup",),
        start=tasks_changed(doubles.letters_swapped),
    ),
    FieldFault(
        "label column printed under the question",
        "The preprocessing leaves the label among the input columns, so that the prompt shows it.",
        "saif-mahmud/self-attention-HAR#4",
        ids("answer-in-prompt"),
        ("lookup", "gsm8k"),
        start=tasks_changed(doubles.labelled),
    ),
    FieldFault(
        "held-out tasks made of training questions with another table",
        "The held-out split holds instances of the training set in other surroundings, and no new ones.",
        "Tencent/digitalhuman#21, yannlabb/robopose#3",
        ids("held-out-in-training"),
        ("lookup",),
        start=doubles.held_out_from_training,
        options="-a num_examples=192 --eval-examples 16",
        watch_options="--eval-steps 6",
        steps=12,
    ),
    FieldFault(
        "file sorted by length and never shuffled",
        "The source of prompts never calls its shuffle, and the file is sorted: tasks become longer and longer.",
        "radixark/miles_diffusion#238",
        ids("task-order-drifts"),
        ("lookup",),
        start=tasks_changed(doubles.by_length),
        options="-a num_examples=192 --task-order as-given",
        steps=12,
    ),
    FieldFault(
        "a new group id for every rollout",
        "Rollouts are grouped by an id that each of them gets anew: a group of one has a baseline of 0.",
        "rllm-org/rllm#776, PeterGriffinJin/Search-R1#39",
        ids("advantages-wrong", "groups-mixed"),
        EVERYWHERE,
        start=doubles.groups_of_one,
    ),
    # Tools
    FieldFault(
        "each tool result preceded by the conversation so far",
        "Each message is written under the text of all messages before it, in which those before are repeated again.",
        "mozilla-ai/any-agent#541",
        ids("tool-results-mixed", "tool-results-too-long"),
        WITH_TOOLS,
        start=rollout_results(doubles.after_the_conversation),
    ),
    FieldFault(
        "first observation still shows the episode before",
        "The history is not emptied at a reset: the first observation begins with what the episode before has seen.",
        "automl/DACBench#94",
        ids("tool-results-mixed"),
        WITH_TOOLS,
        start=doubles.episode_before,
    ),
    FieldFault(
        "gold written in the state under the tool results",
        "Each observation includes the environment's state, and the state includes the answer.",
        "huggingface/OpenEnv#611",
        ids("answer-in-prompt"),
        WITH_TOOLS,
        start=tools_return(doubles.with_state),
    ),
    FieldFault(
        "search that asks for an index nobody configured",
        "The search names an index that the retriever's settings do not have, so that each search ends in a KeyError.",
        "yhoshi3/RaLLe#1",
        ids("tools-fail"),
        ("musique",),
        start=tools_called(doubles.unconfigured_index),
    ),
    FieldFault(
        "tool results cut at the other end",
        "The side at which long tool results are cut is mistaken: the beginning is kept, and the end is what is needed.",
        "verl-project/verl#6313",
        ids("tool-results-cut"),
        ("musique",),
        start=tools_answer(doubles.head_kept),
    ),
    FieldFault(
        "every tool result sent twice",
        "The message with a tool's result is added to the history by two parts of the loop.",
        "ogx-ai/ogx#1305",
        ids("tool-results-mixed", "tool-results-wrong"),
        WITH_TOOLS,
        start=doubles.results_twice,
    ),
    # Prompts
    FieldFault(
        "engine sees the newest message alone",
        "A follow-up request holds the newest observation and not the turns before it.",
        "eosphoros-ai/DB-GPT#3198",
        ids("prompt-replaced", "row-not-what-was-sampled"),
        WITH_TOOLS,
        inject=prompt_messages(doubles.newest_alone),
        watch_causes=MISMATCH,
    ),
    FieldFault(
        "earlier exchanges in reverse order",
        "The history is put into the prompt from the newest exchange to the oldest.",
        "langgenius/dify#5237",
        ids("prompt-replaced", "row-not-what-was-sampled"),
        WITH_TOOLS,
        inject=prompt_messages(doubles.reversed_exchanges),
        watch_causes=MISMATCH,
    ),
)
