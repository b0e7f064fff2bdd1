"""The seen half of the twentieth set of the field's faults: those on which the doctor's rules may be developed.

The set is about the environment's side. It is a sample of what people ask about: threads in the order in which plain
searches return them, listed in docs/results/field20_threads.md.
"""

from __future__ import annotations

from plumbob.testing.faults import field20_seen_doubles as doubles
from plumbob.testing.faults.field import EVERYWHERE, MISMATCH, WITH_TOOLS, FieldFault, ids
from plumbob.testing.faults.field2_parts import engine_completions
from plumbob.testing.faults.field3_parts import tools_called
from plumbob.testing.faults.field20_parts import advantages_as
from plumbob.testing.faults.field_parts import all_of, batches_changed, chat_method, engine_prompts, graded

SEEN = (
    # Rewards
    FieldFault(
        "judgement without a score counts as wrong",
        "The judge's text about a third of the replies names no score, and the reward takes that for a wrong answer.",
        "ServiceNow/insight-bench#17",
        ids("grader-swallows-errors", "oracle-fails"),
        ("gsm8k", "musique"),
        start=graded(correct=doubles.no_score_is_wrong),
    ),
    FieldFault(
        "format tags that the prompt never asks for",
        "The reward wants thinking and answer in tags of which the prompt says nothing, so that no reply earns anything.",
        "huggingface/open-r1#395",
        ids("answers-not-parsed", "reward-constant", "oracle-fails"),
        ("gsm8k", "lookup"),
        start=graded(correct=doubles.tags_wanted),
    ),
    FieldFault(
        "reply searched after another model's header",
        "The reward looks for the reply after the assistant's header of another chat template, and finds none.",
        "allenai/open-instruct#538",
        ids("reward-constant", "oracle-fails", "answers-not-parsed"),
        EVERYWHERE,
        start=graded(correct=doubles.after_another_header),
    ),
    FieldFault(
        "an opening think tag voids the answer",
        "A reply that writes its opening think tag itself, as all of this model do, counts as wrong.",
        "alibaba/ROLL#281",
        ids("answers-not-parsed", "reward-constant", "oracle-fails"),
        ("musique",),
        start=graded(correct=doubles.opening_tag_voids),
    ),
    FieldFault(
        "five points off for each line too many",
        "A term without a bound takes five points off for each line beyond the third; a right answer is worth one.",
        "infly-ai/INF-MLLM#18",
        ids("reward-format-dominated"),
        ("gsm8k",),
        start=graded(correct=doubles.five_off_each),
    ),
    FieldFault(
        "only the last turn's reward handed on",
        "The environment rewards each turn, and the rollout's reward is that of its last turn, which is 0.",
        "NovaSky-AI/SkyRL#201",
        ids("reward-constant", "oracle-fails"),
        ("lookup",),
        start=graded(correct=doubles.last_turn_only),
    ),
    FieldFault(
        "unreadable golds reward every reply",
        "A gold answer that the checker cannot read makes the reward 1, whatever the reply says; half of the golds do.",
        "huggingface/open-r1#503",
        ids("reward-exploitable", "reward-constant"),
        ("gsm8k",),
        start=graded(correct=doubles.short_golds_unreadable),
    ),
    FieldFault(
        "annotator that prefers long replies",
        "The reward adds so much for a reply's length that it outweighs the answer.",
        "jsboige/CoursIA#16172",
        ids("reward-format-dominated", "reward-exploitable"),
        ("gsm8k",),
        start=graded(correct=doubles.longer_is_better),
        watch_causes=ids("length-runaway"),
    ),
    # Data
    FieldFault(
        "test questions given training labels",
        "The held-out questions are read with the answers of the training questions.",
        "FluxML/fluxml.github.io#119",
        ids("evaluation-parses-differently", "oracle-fails"),
        ("lookup", "gsm8k"),
        start=doubles.training_labels,
    ),
    FieldFault(
        "held-out rows drawn from training under new numbers",
        "There is no test split, so half of the held-out tasks are drawn from the training rows and numbered anew.",
        "sileod/reasoning-core#21",
        ids("held-out-in-training"),
        EVERYWHERE,
        start=doubles.drawn_from_training,
    ),
    # Prompts
    FieldFault(
        "server template without the messages' text",
        "The server has a chat template that writes the roles and leaves out what the messages say.",
        "oobabooga/textgen#5225",
        ids("prompt-replaced", "row-not-what-was-sampled"),
        EVERYWHERE,
        start=engine_prompts(doubles.without_text),
        watch_causes=MISMATCH,
    ),
    FieldFault(
        "system message lost in the server's template",
        "The server's chat template has no system role, and the server samples without the system message.",
        "EricLBuehler/mistral.rs#45, EleutherAI/lm-evaluation-harness#3076",
        ids("prompt-replaced", "row-not-what-was-sampled", "tools-not-in-prompt"),
        EVERYWHERE,
        start=engine_prompts(doubles.without_system),
        watch_causes=MISMATCH,
    ),
    FieldFault(
        "question sent as plain text",
        "The chat template is not applied to the first prompt: the model gets the texts alone, without any header.",
        "tmllab/2025_ICLR_PiF#5",
        ids("assistant-header-missing", "tools-not-in-prompt"),
        ("gsm8k", "lookup"),
        start=chat_method("prompt", doubles.plain_text),
    ),
    # Turns and episodes
    FieldFault(
        "reply closed at the cap as if complete",
        "A reply that reaches the server's cap on tokens is closed with an end token, and goes on as a complete turn.",
        "CherryHQ/stella#1079, macanderson/stella#1024, FMXExpress/PasClaw#420",
        ids("stop-token-wrong", "truncated-turns"),
        ("gsm8k",),
        start=engine_completions(doubles.closed_at_cap, most=doubles.CAP),
        watch_causes=MISMATCH,
    ),
    FieldFault(
        "episode goes on after the final answer",
        "The environment does not see that the episode is over, and asks for turns until the limit on turns ends it.",
        "krumiaa/MindMaker#24, PrimeIntellect-ai/verifiers#22",
        ids("truncated-rollouts"),
        WITH_TOOLS,
        start=doubles.goes_on,
        options="--max-turns 8",
    ),
    FieldFault(
        "second session refused",
        "The environment's server allows one session, and refuses all other rollouts while it is open.",
        "huggingface/OpenEnv#517",
        ids("environment-fails"),
        WITH_TOOLS,
        start=doubles.one_session,
    ),
    FieldFault(
        "episode waits for the mission before it",
        "One of sixteen episodes waits at its first call for a mission that still runs, and does not come back in time.",
        "crowdAI/marLo#75",
        ids("environment-hangs"),
        ("lookup",),
        start=all_of(doubles.waits_for_another, tools_called(doubles.waiting)),
        options="--max-tool-seconds 1 --max-concurrent 16",
    ),
    # Tools
    FieldFault(
        "first episode's table kept for all",
        "The tools are not reset between episodes: all rollouts look up in the first one's data.",
        "higgsfield-ai/higgsfield#12, rlgraph/rlgraph#51, tensorforce/tensorforce#28, beyretb/AnimalAI-Olympics#52",
        ids("tool-results-mixed", "tools-return-nothing", "tools-fail"),
        WITH_TOOLS,
        start=doubles.first_table_kept,
    ),
    FieldFault(
        "arguments cut at the output cap",
        "A call that is cut at a cap is run with the part of its arguments that is there.",
        "ahwurm/localharness#77, OpenRouterTeam/typescript-agent#125",
        ids("tool-arguments-changed"),
        ("musique",),
        start=tools_called(doubles.arguments_cut),
    ),
    # Groups
    FieldFault(
        "groups counted off one rollout late",
        "Rollouts are dealt to groups by a count that begins one late: each group has one rollout of another task.",
        "huggingface/trl#2803, huggingface/trl#3725",
        ids("groups-mixed", "advantages-wrong"),
        EVERYWHERE,
        start=batches_changed(doubles.one_late),
    ),
    FieldFault(
        "four copies of each reply in a group",
        "The processes sample with one seed, so that a group of eight has two different rollouts, four times each.",
        "modelscope/ms-swift#3450",
        ids("groups-without-variety"),
        EVERYWHERE,
        start=doubles.same_seeds,
    ),
    FieldFault(
        "rewards of the successful put first",
        "The successful rollouts' rewards are collected in a list of their own, and dealt out again from the first on.",
        "Desearch-ai/subnet-22#137",
        ids("rewards-of-other-rollouts"),
        EVERYWHERE,
        start=batches_changed(doubles.successful_first),
    ),
    FieldFault(
        "turn baseline that rewards stopping",
        "A baseline that is summed over a rollout's own turns takes more off the advantage of each further turn.",
        "verl-project/verl#7244",
        ids("advantages-wrong"),
        WITH_TOOLS,
        start=advantages_as(doubles.stopping_rewarded),
    ),
)
