"""The unseen half of the eighteenth set of the field's faults, which is run only to measure.

The set is about the environment's side; its threads are listed in docs/results/field18_threads.md.
"""

from __future__ import annotations

from plumbob.testing.faults import field18_unseen_doubles as doubles
from plumbob.testing.faults.field import EVERYWHERE, WITH_TOOLS, FieldFault, ids
from plumbob.testing.faults.field_parts import graded, tasks_changed, tools_answer

UNSEEN = (
    FieldFault(
        "right answers refused without thinking tags",
        "The form is judged first, and a reply without thinking and answer tags, which the prompt does not "
        "ask for, has the lowest score whatever it answers.",
        "Unakar/Logic-RL#71, huggingface/open-r1#235, huggingface/open-r1#405",
        ids("reward-constant", "answers-not-parsed", "oracle-fails"),
        ("gsm8k", "lookup"),
        start=graded(correct=doubles.tags_first),
    ),
    FieldFault(
        "completions limited to sixteen tokens",
        "The limit of a completion is sixteen tokens, which no worked answer fits.",
        "modelscope/ms-swift#4789",
        ids("truncated-turns"),
        ("gsm8k", "musique"),
        options="--max-tokens 16",
    ),
    FieldFault(
        "own question among the worked examples",
        "Worked examples are drawn from the tasks themselves without leaving out the one that is asked, so "
        "that two of three prompts hold their own answer.",
        "EleutherAI/lm-evaluation-harness#4145, EleutherAI/lm-evaluation-harness#4146, "
        "sbintuitions/flexeval#293, google-research/FLAN#19",
        ids("answer-in-prompt"),
        ("gsm8k", "lookup", "musique"),
        start=tasks_changed(doubles.own_example),
    ),
    FieldFault(
        "judge's marks out of a hundred cut at one",
        "A judge gives marks out of a hundred to a reader that expects at most one and cuts what is above, so "
        "that any reply has full marks.",
        "modelscope/evalscope#1575",
        ids("reward-exploitable", "reward-constant"),
        EVERYWHERE,
        start=graded(correct=doubles.marks_cut),
    ),
    FieldFault(
        "judge's verdict that cannot be read counts as zero",
        "For a third of the replies the judge's verdict is no valid JSON, and the reader gives them zero.",
        "NVIDIA-NeMo/Evaluator#1094",
        ids("grader-swallows-errors", "oracle-fails", "answers-not-parsed"),
        EVERYWHERE,
        start=graded(correct=doubles.verdict_lost),
    ),
    FieldFault(
        "rate a hundred times the usual one",
        "The learning rate is a hundred times what the model needs, and the reward jumps up and down and falls.",
        "huggingface/open-r1#403, yifan123/flow_grpo#204, yifan123/flow_grpo#212",
        ids("learning-rate-too-high"),
        EVERYWHERE,
        options="--learning-rate 0.03",
        watch_causes=ids("entropy-explosion", "entropy-collapse", "degenerate-repetition"),
    ),
    FieldFault(
        "upstream's error object taken for a result",
        "Two of five calls fail upstream, and the error object is handed on as the tool's result.",
        "karashiiro/my-cool-proxy#50",
        ids("tools-fail", "tool-results-mixed"),
        WITH_TOOLS,
        start=tools_answer(doubles.upstream_failed),
    ),
    FieldFault(
        "paid again for every step taken",
        "What a step earned is added again at each later step, so that an episode earns by its number of steps.",
        "video-language-planning/vlp_code#4, AffineFoundation/affine-cortex#62",
        ids("reward-exploitable", "reward-format-dominated"),
        WITH_TOOLS,
        start=graded(correct=doubles.paid_per_call),
        watch_causes=ids("length-runaway"),
    ),
    FieldFault(
        "every turn costs more than giving up",
        "Each turn costs so much that a rollout which solves its task earns less than one that ends at once.",
        "upb-lea/gym-electric-motor#24",
        ids("oracle-fails", "reward-exploitable"),
        WITH_TOOLS,
        start=graded(correct=doubles.turns_cost),
        watch_causes=ids("tools-abandoned", "length-collapse"),
    ),
    FieldFault(
        "one hit in all places of a search",
        "Copies of the same piece of text take all places of a search's result, and the other hits are lost.",
        "SillyTavern/SillyTavern#1741, Mintplex-Labs/anything-llm#4308",
        ids("tool-results-mixed", "tool-results-cut"),
        ("musique",),
        start=tools_answer(doubles.same_hit),
    ),
    FieldFault(
        "golds taken by the index before the shuffle",
        "Prompts are shuffled and right answers are looked up by the index before the shuffle, so that each "
        "task has the answer of another.",
        "allenai/open-instruct#1484, huggingface/datasets#3190",
        ids("oracle-fails"),
        EVERYWHERE,
        start=tasks_changed(doubles.golds_of_others),
    ),
    FieldFault(
        "scorer's failed requests counted as zero",
        "Three of ten requests to the server that scores fail, and each failure becomes a reward of zero.",
        "verl-project/verl-omni#366, radixark/miles#2800",
        ids("reward-nondeterministic", "grader-swallows-errors"),
        EVERYWHERE,
        start=graded(correct=doubles.request_failed),
    ),
    FieldFault(
        "every reset seeded alike",
        "Each reset sets the same seed again, so that every episode is the same task.",
        "openai/gym#250",
        ids("few-distinct-tasks", "duplicate-tasks"),
        EVERYWHERE,
        start=tasks_changed(doubles.one_task),
    ),
)
