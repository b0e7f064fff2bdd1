"""The unseen half of the twentieth set of the field's faults: those on which the doctor is only measured.

The set is about the environment's side. It is a sample of what people ask about: threads in the order in which plain
searches return them, listed in docs/results/field20_threads.md.
"""

from __future__ import annotations

from plumbob.testing.faults import field20_unseen_doubles as doubles
from plumbob.testing.faults.field import EVERYWHERE, MISMATCH, WITH_TOOLS, FieldFault, ids
from plumbob.testing.faults.field20_parts import advantages_as
from plumbob.testing.faults.field_parts import engine_prompts, graded, rows_changed, tasks_changed, tools_answer

UNSEEN = (
    # Rewards
    FieldFault(
        "rating read from the judge's reasoning",
        "The first digit in the judge's text is taken for its rating, and the text first quotes the reply.",
        "NVIDIA-NeMo/Gym#2852",
        ids("reward-exploitable", "oracle-fails"),
        ("gsm8k",),
        start=graded(correct=doubles.first_digit),
    ),
    FieldFault(
        "judge repeats the score of its example",
        "The judge gives most replies, right or wrong, the score of 0.7 that its prompt has as an example.",
        "ServiceNow/insight-bench#17",
        ids("reward-exploitable"),
        EVERYWHERE,
        start=graded(correct=doubles.example_copied),
    ),
    FieldFault(
        "more detail than the reference is marked wrong",
        "The judge counts a right answer as wrong if the reply says more than the reference does.",
        "SREGym/SREGym#507",
        ids("answers-not-parsed"),
        ("gsm8k",),
        start=graded(correct=doubles.no_more_than_the_reference),
    ),
    FieldFault(
        "template removes the thinking that the reward wants",
        "The chat template takes the thinking out of the reply, and the reward refuses replies without thinking.",
        "huggingface/open-r1#349",
        ids("answers-not-parsed", "reward-constant", "oracle-fails"),
        ("musique",),
        start=graded(correct=doubles.thinking_wanted),
    ),
    FieldFault(
        "answer compared with the whole solution",
        "The answer that is found in the reply is compared with the text of the whole reference solution.",
        "huggingface/trl#5026",
        ids("reward-constant", "oracle-fails", "answers-not-parsed"),
        ("gsm8k",),
        start=graded(correct=doubles.whole_solution),
    ),
    FieldFault(
        "ten points for form and one for the answer",
        "A reward of ten points for a reply of four lines or more is added to one point for the right answer.",
        "allenai/open-instruct#659",
        ids("reward-format-dominated", "reward-exploitable"),
        ("gsm8k",),
        start=graded(form=doubles.form),
    ),
    FieldFault(
        "rollouts report their own success",
        "The reward is what the rollout itself reports: any final answer counts as a success.",
        "BitterSecurity/Decepticon#167",
        ids("reward-exploitable"),
        ("lookup",),
        start=graded(correct=doubles.own_report),
    ),
    FieldFault(
        "reward raises after a second search",
        "The reward calls a helper with a wrong argument if a rollout has searched twice, and raises.",
        "allenai/open-instruct#729",
        ids("environment-fails"),
        ("musique",),
        start=graded(correct=doubles.raises_after_searches),
    ),
    # Data
    FieldFault(
        "labels exchanged in the gold data",
        "Reading the data exchanges the gold labels in pairs: where the data mean one word, the reward wants another.",
        "nyu-mll/jiant#778",
        ids("oracle-fails"),
        ("lookup",),
        start=tasks_changed(doubles.exchanged),
    ),
    FieldFault(
        "evaluation set cut from the training rows",
        "The held-out tasks are the first rows of the training data, which are trained on as well.",
        "OpenRLHF/OpenRLHF#1089, OpenRLHF/OpenRLHF#594, Algorineko/AgenticArXiv-RL#49",
        ids("held-out-in-training"),
        EVERYWHERE,
        start=doubles.cut_from_training,
    ),
    # Turns and episodes
    FieldFault(
        "examples invented after the answer",
        "Nothing ends a reply: after its answer the model invents more up to the limit, and the last answer is read.",
        "jsboige/CoursIA#13614",
        ids("stop-token-wrong", "truncated-turns", "answers-not-parsed"),
        ("gsm8k",),
        start=engine_prompts(doubles.never_stops),
    ),
    FieldFault(
        "reader for another family's tool calls",
        "Tool calls are read in another model family's form, so that a call is text, and the rollout ends with it.",
        "verl-project/verl#3008",
        ids("calls-in-unread-form", "tools-never-used", "calls-malformed"),
        WITH_TOOLS,
        start=doubles.replies_read_as(doubles.no_calls),
    ),
    FieldFault(
        "calls with a text argument filtered out",
        "A filter takes text arguments for broken JSON and drops their calls, so that the rollout ends without a search.",
        "PrimeIntellect-ai/verifiers#1463",
        ids("tools-never-used", "calls-malformed", "calls-in-unread-form"),
        ("musique",),
        start=doubles.replies_read_as(doubles.free_text_dropped),
    ),
    FieldFault(
        "tool turns played by the single-turn loop",
        "The rows name no loop for tools, so the one for single turns plays them: no call is run, and no turn follows.",
        "verl-project/verl#2896",
        ids("truncated-rollouts", "tools-never-used"),
        WITH_TOOLS,
        start=doubles.one_turn,
    ),
    FieldFault(
        "cut replies not marked as cut",
        "The mark of a reply that the limit cut off is lost on the way, so that the penalty for cut replies is not taken.",
        "OpenRLHF/OpenRLHF#1327",
        ids("advantages-wrong"),
        ("gsm8k",),
        start=rows_changed(doubles.said_to_be_complete),
        options="--overlong penalise --max-tokens 85",
    ),
    FieldFault(
        "steps after the episode's end trained",
        "Rows go on after the end of the episode, and the loss is not masked there.",
        "instadeepai/Mava#160",
        ids("row-not-what-was-sampled", "context-tokens-trained"),
        EVERYWHERE,
        start=rows_changed(doubles.after_the_end),
        watch_causes=MISMATCH,
    ),
    FieldFault(
        "sessions of cut episodes never released",
        "An episode that the limit on turns ends keeps its session, until the server is full and refuses most rollouts.",
        "modelscope/ms-swift#9745",
        ids("environment-fails"),
        ("lookup",),
        start=doubles.never_released,
        options="--max-turns 5",
        probes=False,  # a server fills up in the course of a run: the few rollouts before the first step find it empty
    ),
    # Tools
    FieldFault(
        "verification result shown after each call",
        "Each tool result is followed by the environment's check of the answer, which says what is expected.",
        "huggingface/OpenEnv#428",
        ids("answer-in-prompt"),
        ("lookup",),
        start=doubles.lookups_changed(doubles.verified),
    ),
    FieldFault(
        "a third of each tool result shown",
        "A limit on tool results lets the model see the first third of each.",
        "myriade-ai/agentlys#346, 2witstudios/PageSpace#2407, unslothai/unsloth#10349",
        ids("tool-results-cut"),
        ("musique",),
        start=tools_answer(doubles.third_shown),
    ),
    FieldFault(
        "one server instance for all sessions",
        "The environment keeps an episode's data in its one instance: all open episodes look up in the latest one's.",
        "huggingface/OpenEnv#194",
        ids("tool-results-mixed", "tools-fail"),
        ("lookup",),
        start=doubles.shared_instance,
    ),
    FieldFault(
        "backend already changed by a sibling rollout",
        "What one rollout of a task has used is gone from the backend that the task's other rollouts share.",
        "weizhepei/WebAgent-R1#6",
        ids("tool-results-mixed", "tools-fail"),
        ("lookup",),
        start=doubles.used_up(),
    ),
    # Groups
    FieldFault(
        "every rollout a group of its own",
        "Groups are found by prompts that hold each rollout's own path, so that no rollout is compared with another.",
        "NVIDIA-NeMo/RL#4013",
        ids("groups-mixed", "advantages-wrong"),
        EVERYWHERE,
        start=advantages_as(doubles.groups_of_one),
    ),
    FieldFault(
        "one mean for the prompts of a whole step",
        "Without a switch for means by prompt, the mean of the whole step is every rollout's baseline.",
        "yifan123/flow_grpo#46",
        ids("advantages-wrong"),
        EVERYWHERE,
        start=advantages_as(doubles.one_mean),
    ),
)
