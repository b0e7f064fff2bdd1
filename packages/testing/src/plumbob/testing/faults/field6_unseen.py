"""The unseen half of the sixth set of the field's faults: only for measuring. Rule writers must not read this file."""

from __future__ import annotations

from plumbob.testing.faults import field6_unseen_doubles as doubles
from plumbob.testing.faults.doubles import rewritten
from plumbob.testing.faults.field import EVERYWHERE, MISMATCH, UNCHECKED, WITH_TOOLS, FieldFault, ids
from plumbob.testing.faults.field3_parts import tools_called
from plumbob.testing.faults.field_parts import engine_model, engine_updates, graded, tasks_changed

EVALUATED = "--eval-examples 8 --eval-steps 3"

UNSEEN = (
    # Rewards and tasks
    FieldFault(
        "answers within a tenth are right",
        "The grader accepts numbers that are up to a tenth away from the gold.",
        "QWED-AI/qwed-verification#144",
        # No cause says that some wrong answers are accepted; this is the nearest.
        ids("reward-exploitable"),
        ("gsm8k",),
        start=graded(correct=doubles.nearly_right),
        watch=False,
    ),
    FieldFault(
        "rewards clipped below the best answer",
        "Rewards are clipped at a fifth, and a right answer earns no more than a search that finds something.",
        "coreylynch/async-rl#10",
        ids("reward-exploitable", "oracle-fails", "reward-format-dominated"),
        ("musique",),
        start=graded(correct=doubles.clipped_low),
        watch=False,
    ),
    FieldFault(
        "two possible answers",
        "There are two possible answers, and a guess without any look-up is right half of the time.",
        "BradyFU/Awesome-Multimodal-Large-Language-Models#53, MedARC-AI/medmarks#63",
        ids("reward-exploitable"),
        ("lookup",),
        options="-a num_values=2",
        watch=False,
    ),
    FieldFault(
        "limit on prompts leaves a handful of tasks",
        "The filter on the length of prompts removes all but the shortest tasks, which a run takes again and again.",
        "verl-project/verl#502, turbo-llm/turbo-alignment#27",
        ids("few-distinct-tasks"),
        ("gsm8k",),
        options="--max-prompt-length 73",
    ),
    FieldFault(
        "rollouts of a group start from different seeds",
        "Each rollout of a group resets the environment with a seed of its own, and plays another task than the others.",
        "JackSwitzer/StSRLSolver#210",
        ids("groups-mixed"),
        EVERYWHERE,
        start=doubles.own_start_for_each,
    ),
    FieldFault(
        "held-out golds of other tasks",
        "Only the questions of the held-out data were shuffled, and each is scored with the gold of another.",
        "allenai/open-instruct#1484, Chengsong-Huang/R-Zero#31",
        ids("evaluation-parses-differently", "oracle-fails", "answers-not-parsed", "evaluation-prompted-differently"),
        ("gsm8k", "lookup"),
        start=tasks_changed(doubles.held_out_golds_moved),
        watch_options=EVALUATED,
    ),
    FieldFault(
        "held-out rollouts without tools",
        "Evaluations run the loop of a model without tools, because only the training data asks for the other one.",
        "verl-project/verl#2896",
        ids("evaluation-prompted-differently", "tools-not-in-prompt", "evaluation-limits-differ"),
        WITH_TOOLS,
        start=tasks_changed(doubles.toolless_when_held_out),
        watch_options=EVALUATED,
    ),
    # Replies and tools
    FieldFault(
        "closing answer tag swallowed by a stop string",
        "The server stops at the closing tag of the answer and does not return it, so that no answer is found.",
        "vllm-project/vllm#1973, InternLM/lmdeploy#3984",
        ids("answers-not-parsed", "row-not-what-was-sampled", "stop-token-wrong") | MISMATCH,
        ("musique",),
        inject=doubles.closing_tag_swallowed,
        watch_causes=ids("never-succeeds"),
    ),
    FieldFault(
        "every turn forced to call a tool",
        'The request has the tool choice "required", and no turn can be an answer.',
        "vllm-project/vllm#21026",
        ids("sampling-truncated", "truncated-rollouts", "never-succeeds", "end-token-suppressed") | MISMATCH,
        WITH_TOOLS,
        inject=doubles.call_forced,
        watch_causes=ids("truncated-turns", "truncated-context", "too-little-signal"),
    ),
    FieldFault(
        "tools show the answer at the first call",
        "Each tool result also has the value that should be found at the end, and one call is enough.",
        "SWE-bench/SWE-bench#465, SWE-agent/mini-swe-agent#787",
        # No cause says that tools give the answer away; that of prompts is the nearest.
        ids("answer-in-prompt", "reward-exploitable", "tools-fail"),
        ("lookup",),
        start=tools_called(doubles.value_shown),
        watch_causes=ids("task-solved", "tools-abandoned"),
    ),
    # The engine
    FieldFault(
        "best of two completions by likelihood",
        "The server samples two replies and returns the likelier one.",
        "vllm-project/vllm#4646, vllm-project/vllm#1820",
        ids("temperature-not-applied", "sampling-truncated", "groups-without-variety", "too-little-signal") | MISMATCH,
        EVERYWHERE,
        start=doubles.best_of_two,
    ),
    FieldFault(
        "temperature of a tenth",
        "Rollouts are sampled at a temperature of a tenth, and those of a group are nearly all equal.",
        "billy-enrizky/openbrowser-ai#60",
        ids("groups-without-variety", "too-little-signal"),
        EVERYWHERE,
        options="--temperature 0.1",
        watch_causes=ids("entropy-collapse"),
    ),
    FieldFault(
        "rotary base of the default in the engine",
        "The engine does not find the base of rotary embeddings in the model's settings, and takes its own default.",
        "vllm-project/vllm#9490, InternLM/lmdeploy#4304",
        ids("positions-shifted") | MISMATCH,
        EVERYWHERE,
        start=engine_model(doubles.another_base),
        watch_causes=ids("never-succeeds"),
        watch_options=UNCHECKED,
    ),
    FieldFault(
        "feed-forward adapters not served",
        "The engine was started for adapters of attention, and skips those of feed-forward layers.",
        "vllm-project/vllm#55193, vllm-project/vllm#37877",
        ids("weights-not-synced", "adapter-bound-to-no-module", "adapter-not-applied"),
        EVERYWHERE,
        start=engine_updates(doubles.attention_adapters_only),
        options="--peft",
        watch_causes=MISMATCH | ids("mismatch-grows"),
        watch_options=UNCHECKED,
    ),
    # Training and its end
    FieldFault(
        "each rollout a group of its own",
        "Groups are formed by the ids of rollouts, so that each raw reward is its own advantage.",
        "rllm-org/rllm#605, rllm-org/rllm#924",
        ids("advantages-wrong"),
        EVERYWHERE,
        start=doubles.groups_of_one,
        watch=False,
    ),
    FieldFault(
        "working left out of the loss",
        "Only the line with the answer is in the loss, because what is before it counts as thinking.",
        "NVIDIA-NeMo/Automodel#3739",
        ids("sampled-tokens-masked", "row-not-what-was-sampled"),
        ("gsm8k",),
        inject=rewritten(doubles.working_masked),
    ),
    FieldFault(
        "checkpointing cuts the gradient of the first layers",
        "Inputs of checkpoints ask for no gradient, because the embeddings are frozen, and only the last layer has one.",
        "huggingface/trl#3089, locuslab/open-unlearning#178",
        ids("no-gradient", "optimizer-moves-nothing"),
        EVERYWHERE,
        start=doubles.first_layers_cut,
        options="--peft --gradient-checkpointing",
    ),
    FieldFault(
        "each update taken twice",
        "The wrapper takes an optimizer step in its backward pass, and the training loop takes a second one.",
        "huggingface/transformers#45656, PKU-YuanGroup/Helios#130",
        ids("schedule-hides-rate", "learning-rate-too-high"),
        EVERYWHERE,
        start=doubles.updated_twice,
        steps=8,
    ),
    FieldFault(
        "layer missing from the final model",
        "The final model's file lacks the last layer, and who loads it gets new weights there.",
        "huggingface/accelerate#1054, huggingface/accelerate#2155",
        ids("saved-model-differs"),
        EVERYWHERE,
        start=doubles.last_layer_new,
    ),
)
