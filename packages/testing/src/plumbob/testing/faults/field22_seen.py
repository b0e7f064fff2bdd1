"""The seen half of the twenty-second set of the field's faults: those on which the doctor's rules may be developed.

The set is about the environment's side: rewards, judges, golds, data and splits, tools, turns. Its threads are listed in
docs/results/field22_threads.md.
"""

from __future__ import annotations

from plumbob.testing.faults import field22_seen_doubles as doubles
from plumbob.testing.faults.field import MISMATCH, WITH_TOOLS, FieldFault, ids
from plumbob.testing.faults.field3_parts import tools_called
from plumbob.testing.faults.field_parts import decoded_as, graded, rows_changed, tasks_changed, tools_answer

SEEN = (
    # Rewards
    FieldFault(
        "right replies that the checker cannot take apart",
        "The checker raises an error on some right replies, here those that end in a quotient, and returns 0 for them.",
        "NVIDIA-NeMo/RL#431",
        ids("grader-swallows-errors", "answers-not-parsed"),
        ("gsm8k",),
        start=graded(correct=doubles.unless_it_divides),
    ),
    FieldFault(
        "judge outages weighed in as scores of nothing",
        "A judge has three tenths of the reward, and where he cannot be reached these count as 0.",
        "NVIDIA-NeMo/RL#2479",
        ids("reward-nondeterministic", "grader-swallows-errors"),
        ("gsm8k", "lookup"),
        start=doubles.judge_with_outages,
    ),
    FieldFault(
        "returns carried over from episode to episode",
        "A reset does not clear the sum of rewards, so that an episode's reward includes that of the worker's last one.",
        "isaac-sim/IsaacLab#974",
        ids("reward-nondeterministic", "rewards-of-other-rollouts"),
        ("gsm8k", "lookup"),
        start=doubles.carried_over,
    ),
    FieldFault(
        "answer cue never matched in capitals",
        "A pattern in small letters is searched in a reply in capitals, so that the last number is taken as the answer.",
        "jundot/omlx#3668",
        ids("answers-not-parsed"),
        ("gsm8k",),
        start=graded(correct=doubles.last_number),
    ),
    FieldFault(
        "reward read from what the agent wrote",
        "The reward is a number that the agent can write itself, and it is taken as it stands, without bounds.",
        "huggingface/OpenEnv#1199",
        ids("reward-exploitable"),
        ("gsm8k",),
        start=graded(correct=doubles.written_by_the_agent),
    ),
    FieldFault(
        "missing verdicts of some tasks graded as failures",
        "The tests of some tasks end before they write a verdict, and that is scored like an answer that failed them.",
        "huggingface/OpenEnv#1025",
        ids("grader-swallows-errors", "oracle-fails"),
        ("gsm8k", "lookup"),
        start=graded(correct=doubles.without_verdict),
    ),
    FieldFault(
        "scores of ten clamped to one",
        "The judge is not told the range of scores: it gives up to ten points, and all that are above one become one.",
        "opendatahub-io/agent-eval-harness#184",
        ids("reward-exploitable", "reward-constant"),
        ("gsm8k", "lookup"),
        start=graded(correct=doubles.out_of_ten),
    ),
    # Held-out tasks
    FieldFault(
        "splits drawn by shuffles of their own",
        "Training and held-out tasks are drawn by two shuffles of the same rows, so that many rows are in both.",
        "allenai/RL4LMs#47, iarai/NeurIPS2022-traffic4cast#22",
        ids("held-out-in-training"),
        ("gsm8k", "lookup", "musique"),
        inject=doubles.shuffled_apart,
        options="--eval-examples 16",
    ),
    FieldFault(
        "held-out scores never computed",
        "The evaluation does not ask the reward for its scores, and each held-out rollout has 0.",
        "verl-project/verl#5054",
        ids("evaluation-parses-differently"),
        ("gsm8k", "lookup"),
        start=doubles.graded_when_held_out(doubles.never_computed),
        options="--eval-examples 16 --eval-steps 3",
    ),
    FieldFault(
        "held-out rows without their answers",
        "The held-out rows lack the column with which the reward compares, so that each of their rollouts fails.",
        "modelscope/ms-swift#7316",
        ids("environment-fails", "evaluation-parses-differently"),
        ("gsm8k", "lookup"),
        start=doubles.graded_when_held_out(doubles.no_such_column),
        options="--eval-examples 16 --eval-steps 3",
    ),
    # The tasks' data
    FieldFault(
        "a third of the golds written by a model",
        "The right answers were written by a model and checked by nobody, and a third of them are wrong.",
        "gydpku/Data_Synthesis_RL#5",
        ids("oracle-fails", "grader-swallows-errors"),
        ("lookup",),
        start=tasks_changed(doubles.golds_by_a_model),
    ),
    # Tools and their state
    FieldFault(
        "world kept from the episode before",
        "A reset does not reset: every other episode of a worker goes on in the world of its episode before.",
        "sail-sg/envpool#120, JuliaReinforcementLearning/ReinforcementLearningBase.jl-Archive#72",
        ids("tool-results-mixed"),
        WITH_TOOLS,
        start=doubles.world_of_the_episode_before,
    ),
    FieldFault(
        "six calls of ten answered by an unknown error",
        "The address of the sandbox is a placeholder, and six calls of ten are answered with an error that says nothing.",
        "GAIR-NLP/ToRL#27, Gen-Verse/Open-AgentRL#7",
        ids("tools-fail", "tools-return-nothing"),
        WITH_TOOLS,
        start=tools_answer(doubles.unknown_error),
    ),
    FieldFault(
        "dropped connections told as tool results",
        "Where the tool's server was away for a moment, the model is told so, in place of a second try.",
        "verl-project/verl#6978",
        ids("tools-fail", "tool-results-mixed"),
        WITH_TOOLS,
        start=doubles.dropped_connections,
    ),
    FieldFault(
        "hung calls without a time limit",
        "Nothing ends a tool call that waits for ever, so that it takes the whole turn with it.",
        "MervinPraison/PraisonAI#2957, browserbase/stagehand#1766, PrimeIntellect-ai/verifiers#659",
        ids("environment-hangs"),
        WITH_TOOLS,
        start=lambda stack, env: tools_called(doubles.every_sixth_hangs())(stack, env),
        options="--max-tool-seconds 1",
    ),
    FieldFault(
        "messages of a task shared by its rollouts",
        "All rollouts of a task add to one list of messages, so that each reads the tool results of the others.",
        "areal-project/AReaL#432",
        ids("tool-results-mixed"),
        ("lookup",),
        start=doubles.shared_messages,
    ),
    FieldFault(
        "episode over at its second success",
        "The episode ends as soon as a part of the goal is reached, so that longer tasks can never be finished.",
        "Emerge-Lab/gpudrive#44, chandar-lab/RLHive#205",
        ids("oracle-fails", "truncated-rollouts"),
        ("lookup",),
        start=doubles.second_success_ends_it,
    ),
    # Calls
    FieldFault(
        "rollouts lost to calls that are no JSON",
        "Arguments that are no JSON raise an error that nothing catches, in place of a message to the model.",
        "NVIDIA-NeMo/Gym#1180, NVIDIA-NeMo/Gym#605, PrimeIntellect-ai/verifiers#1763, radixark/miles#2689, "
        "hud-evals/hud-python#480, vllm-project/vime#97, verl-project/verl#6722",
        ids("environment-fails", "drops-are-biased", "calls-malformed"),
        ("lookup",),
        start=doubles.malformed_ends_it,
        options="--temperature 1.4",  # at 1, the bundled policy writes hardly any such call
    ),
    FieldFault(
        "arguments quoted once too often",
        "The arguments of a call come as a text in quotes, and its own quotes are not escaped.",
        "continuedev/continue#7491",
        ids("calls-malformed", "calls-in-unread-form"),
        WITH_TOOLS,
        start=decoded_as(doubles.quoted_arguments),
        steps=4,  # such rollouts go on up to their limits
    ),
    # Rows and prompts
    FieldFault(
        "each turn sampled after the first prompt",
        "Every turn is sampled with the prompt of the first one, while the rows grow by what is said.",
        "Gabesarch/grounded-rl#22",
        ids("prompt-replaced", "row-not-what-was-sampled"),
        WITH_TOOLS,
        inject=doubles.after_the_first_prompt,
        watch_causes=MISMATCH,
    ),
    FieldFault(
        "observations trained as actions",
        "What the environment says between two turns is in the loss like what the model says.",
        "asuzukosi/post-training-experiments#19",
        ids("context-tokens-trained"),
        WITH_TOOLS,
        start=rows_changed(doubles.observations_trained),
    ),
    FieldFault(
        "token cap before the last observation",
        "The limit of tokens ends many episodes before their last turn, so that they earn nothing.",
        "asuzukosi/post-training-experiments#19",
        ids("truncated-context"),
        ("lookup",),
        options="--max-context 235",
    ),
)
