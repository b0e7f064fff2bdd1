"""The seen half of set 24 of the field's faults: those on which the doctor's rules may be developed.

The set is about the environment's side. The threads, in the order in which plain searches return them, are listed in
docs/results/field24_threads.md.
"""

from __future__ import annotations

from plumbob.testing.faults import field24_seen_doubles as doubles
from plumbob.testing.faults.field import EVERYWHERE, MISMATCH, WITH_TOOLS, FieldFault, ids
from plumbob.testing.faults.field3_parts import tools_called
from plumbob.testing.faults.field24_parts import prompt_messages
from plumbob.testing.faults.field_parts import chat_method, engine_prompts, graded, tasks_changed

HELD_OUT = "--eval-examples 16"
HELD_OUT_OFTEN = "--eval-steps 3"

SEEN = (
    # Rewards
    FieldFault(
        "reward that raises where a reply states no answer",
        "The reader takes the first line of the answer that it has found, and raises an IndexError where that is empty.",
        "HarleyCoops/Dakota1890#114",
        ids("environment-fails"),
        ("lookup",),
        start=graded(correct=doubles.first_line_of_the_answer),
    ),
    FieldFault(
        "answer pattern whose dot stops at the end of a line",
        "The pattern that reads a reply is matched without the flag for line breaks: replies of several lines earn nothing.",
        "unslothai/notebooks#96",
        ids("answers-not-parsed", "oracle-fails"),
        ("gsm8k",),
        start=graded(correct=doubles.on_one_line),
    ),
    FieldFault(
        "numbers compared by their first digit",
        "As a last resort the grader compares one character: a wrong number that begins as the right one does is right.",
        "vllm-project/tpu-inference#3518",
        ids("reward-exploitable", "reward-wrong"),
        ("gsm8k",),
        start=graded(correct=doubles.same_first_digit),
    ),
    FieldFault(
        "score read from the number that the judge quotes",
        "The judge's score is the last number of its text, which quotes the reply: a reply chooses its own score.",
        "modelscope/evalscope#1578, modelscope/evalscope#1588",
        ids("reward-exploitable", "reward-wrong"),
        ("gsm8k",),
        start=graded(correct=doubles.quoted_number),
    ),
    FieldFault(
        "first rating in the judge's text, which is the rubric's",
        "The judge repeats what a rating is for before it gives its own, and the first rating of its text is read.",
        "NVIDIA-NeMo/Gym#3367",
        ids("reward-constant"),
        EVERYWHERE,
        start=graded(correct=doubles.first_rating),
    ),
    FieldFault(
        "verdict found inside its own negation",
        "A reply is right if the judge's verdict holds the word CORRECT, as INCORRECT does: only silence is wrong.",
        "jaylfc/taosmd#176, modelscope/evalscope#1578",
        ids("reward-exploitable", "reward-constant"),
        ("gsm8k", "musique", "lookup"),
        start=graded(correct=doubles.verdict_in_its_negation),
    ),
    # Held-out tasks
    FieldFault(
        "held-out replies graded by a stricter rule",
        "Validation cannot use the judge that training uses: held-out replies are graded by a rule that wants a bare number.",
        "verl-project/verl#5020",
        ids("evaluation-parses-differently"),
        ("gsm8k",),
        start=graded(correct=doubles.strict_when_held_out),
        options=HELD_OUT,
        watch_options=HELD_OUT_OFTEN,
    ),
    FieldFault(
        "held-out tasks under an outdated system prompt",
        "The evaluation opens each conversation with an earlier version of the system prompt, which asks for another form.",
        "inclusionAI/ASearcher#19",
        ids("evaluation-prompted-differently"),
        EVERYWHERE,
        start=tasks_changed(doubles.held_out_prompt_outdated),
        options=HELD_OUT,
        watch_options=HELD_OUT_OFTEN,
    ),
    # Tasks and groups
    FieldFault(
        "golds of every fourth task exchanged with the next one",
        "In pairs of neighbouring rows the labels are those of the other row.",
        "tsb0601/MMVP#30",
        ids("oracle-fails"),
        WITH_TOOLS,
        start=tasks_changed(doubles.every_fourth_exchanged),
    ),
    FieldFault(
        "first eight records kept before the shuffle",
        "The limit on the number of records is applied before they are shuffled: only the first eight are ever trained on.",
        "billy-enrizky/openbrowser-ai#64",
        ids("few-distinct-tasks"),
        ("gsm8k", "lookup", "musique"),
        start=tasks_changed(doubles.first_eight),
    ),
    FieldFault(
        "groups formed by the words of the prompt",
        "Rollouts are grouped by the text of their prompts without what else differs between tasks, here the numbers.",
        "NVIDIA-NeMo/RL#3882",
        ids("groups-mixed"),
        ("lookup",),
        start=doubles.groups_by_words,
    ),
    # Tools and episodes
    FieldFault(
        "long calls executed with empty arguments",
        "Calls whose arguments look cut off are repaired to a call without arguments, and executed.",
        "NousResearch/hermes-agent#56399",
        ids("tool-arguments-changed", "tools-fail"),
        ("musique",),
        start=tools_called(doubles.long_calls_emptied),
    ),
    FieldFault(
        "calls handed on without name and arguments",
        "Calls are read rightly, and converted by code that looks for name and arguments at another place: both are empty.",
        "rllm-org/rllm#765",
        ids("tools-fail", "calls-malformed", "tool-arguments-changed"),
        WITH_TOOLS,
        start=chat_method("parse", doubles.calls_without_names),
        # Scripts hand their calls on without the reader, but rollouts of the probes do not.
    ),
    FieldFault(
        "searches joined with all earlier searches",
        "The retriever is asked with the words of all earlier searches of the conversation, and finds their documents again.",
        "infiniflow/ragflow#2362",
        ids("tool-arguments-changed"),
        ("musique",),
        start=tools_called(doubles.searches_joined),
    ),
    FieldFault(
        "pooled tools that keep the task of their first episode",
        "Environments are taken from a pool, and one that was used before is not reset: it answers for its first task.",
        "huggingface/trl#6382, vwxyzjn/cleanrl#433",
        ids("tool-results-mixed", "oracle-fails"),
        WITH_TOOLS,
        start=doubles.pooled_without_reset,
    ),
    FieldFault(
        "finished flag that stays up after the first episode",
        "The flag that ends an episode is not lowered when the next one begins: all later ones end after one turn.",
        "seungeunrho/minimalRL#28",
        ids("oracle-fails", "truncated-rollouts"),
        WITH_TOOLS,
        start=doubles.flag_never_lowered,
    ),
    # Prompts
    FieldFault(
        "last four tokens of tool results trimmed",
        "The server trims four tokens for a thought that the template does not write there: those of the tool result.",
        "ROCm/FastFlowLM#722",
        ids("prompt-replaced", "row-not-what-was-sampled", "tool-results-cut"),
        WITH_TOOLS,
        start=engine_prompts(doubles.last_four_trimmed),
        watch_causes=MISMATCH,
    ),
    FieldFault(
        "earlier calls missing from the engine's history",
        "The history that the engine gets holds what tools answered, and not the calls that asked for it.",
        "acon96/home-llm#227",
        ids("prompt-replaced", "row-not-what-was-sampled"),
        WITH_TOOLS,
        inject=prompt_messages(doubles.without_calls),
        watch_causes=MISMATCH,
    ),
)
