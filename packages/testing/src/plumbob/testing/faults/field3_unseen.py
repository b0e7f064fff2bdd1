"""The unseen half of the third set of the field's faults, which authors of rules have read since 2026-11-24."""

from __future__ import annotations

from plumbob.testing.faults import field3_unseen_doubles as doubles
from plumbob.testing.faults.field import EVERYWHERE, MISMATCH, UNCHECKED, WITH_TOOLS, FieldFault, ids
from plumbob.testing.faults.field2_parts import before_updates, module_function
from plumbob.testing.faults.field_parts import (
    engine_logits,
    engine_prompts,
    engine_updates,
    graded,
    tasks_changed,
    tools_answer,
)

UNSEEN = (
    # The engine
    FieldFault(
        "one of two replicas never gets new weights",
        "Half of the requests are answered by a replica that weight syncs do not reach.",
        "sgl-project/sglang#2050",
        ids("weights-not-synced", "engine-stale"),
        EVERYWHERE,
        inject=doubles.second_replica,
        watch_causes=MISMATCH | ids("mismatch-grows"),
        steps=10,
    ),
    FieldFault(
        "requests of a batch leak into each other",
        "What the engine computes for a request depends on the other requests of its batch.",
        "vllm-project/vllm#22103, vllm-project/vllm#17652, vllm-project/vllm#22003",
        ids("batch-dependent-numerics", "rows-see-each-other", "mismatch-grows") | MISMATCH,
        EVERYWHERE,
        start=engine_logits(doubles.leaking(0.35)),
    ),
    FieldFault(
        "end token ignored by the server",
        "The server goes on after the end token, up to the limit of a turn.",
        "vllm-project/guidellm#982",
        ids("stop-token-wrong", "truncated-turns", "end-token-suppressed", "end-token-ignored"),
        EVERYWHERE,
        start=engine_prompts(doubles.end_ignored),
        options="--max-tokens 96",
    ),
    FieldFault(
        "values loaded in the place of keys",
        "A weight sync writes the projection of the values into that of the keys, and the other way round.",
        "vllm-project/vllm#42803, sgl-project/sglang#24321",
        ids("weights-not-synced", "weights-permuted") | MISMATCH,
        EVERYWHERE,
        start=engine_updates(doubles.values_for_keys),
        watch_options=UNCHECKED,
    ),
    # Loss and optimizer
    FieldFault(
        "reference policy is another checkpoint",
        "The KL term pulls the policy towards another model than the one with which the run began.",
        "huggingface/trl#3194, huggingface/trl#1340",
        ids("reference-is-another-policy", "kl-too-large"),
        EVERYWHERE,
        start=doubles.other_reference(2.0),
        options="--kl-beta 0.5",
        steps=10,
    ),
    FieldFault(
        "optimizer's epsilon of a tenth",
        "Adam's epsilon is 0.1, far above the gradients' size, and updates are a hundredth of the learning rate.",
        "marin-community/marin#5250, okoge-kaz/llm-recipes#8",
        ids(
            "optimizer-epsilon-too-large", "gradient-clipped-to-nothing", "learning-rate-too-low", "schedule-hides-rate"
        )
        | ids("does-not-overfit"),
        EVERYWHERE,
        start=before_updates(doubles.large_epsilon),
        steps=10,
    ),
    # Rewards and parsing
    FieldFault(
        "distance from the answer taken as the reward",
        "The reward function returns how far the answer is from the right one, which training then makes larger.",
        "huggingface/trl#2771, NVlabs/alpamayo-recipes#29",
        ids("oracle-fails", "reward-exploitable", "reward-backwards"),
        ("lookup", "gsm8k"),
        start=graded(correct=doubles.distance),
        watch_causes=ids("tools-abandoned", "length-collapse"),
        steps=12,
    ),
    FieldFault(
        "grader accepts bare numbers only",
        "The grader takes nothing but a bare number for an answer, and the policy writes a calculation or a unit.",
        "NVIDIA-NeMo/Gym#1844",
        ids("answers-not-parsed", "grader-too-strict"),
        ("gsm8k",),
        start=module_function("is_correct", doubles.bare_numbers),
        watch_causes=ids("never-succeeds"),
    ),
    # Tools
    FieldFault(
        "web pages fill the context",
        "Each tool result brings the whole page on which it was found, and two pages fill the context.",
        "huggingface/smolagents#2164",
        ids("truncated-context", "truncated-rollouts", "tool-results-too-long", "drops-are-biased"),
        ("lookup",),
        start=tools_answer(doubles.whole_page),
        options="--max-context 2048",
    ),
    FieldFault(
        "search quota used up in each step",
        "After the first forty tool calls of a step the service answers that its quota is exhausted, as plain text.",
        "AtomicBot-ai/atomic-agent#179, octos-org/octos#578",
        ids("tools-fail", "tools-return-nothing", "tool-quota"),
        WITH_TOOLS,
        start=doubles.quota(40),
    ),
    FieldFault(
        "environment keeps the state of earlier rollouts",
        "Rollouts share one environment, in which what one of them has looked up is not shown to the others.",
        "weizhepei/WebAgent-R1#6",
        ids("tool-results-mixed", "tools-return-nothing", "tools-fail", "state-shared-between-rollouts"),
        WITH_TOOLS,
        start=lambda stack, env: doubles.visited_once()(stack, env),
    ),
    FieldFault(
        "keys parsed as numbers",
        'The reader of tool calls makes numbers of arguments that are texts of digits, so that "4711" becomes "4711.0".',
        "ml-explore/mlx-lm#1910, ml-explore/mlx-lm#1417",
        ids("tool-arguments-changed", "tools-return-nothing", "tools-fail", "calls-malformed"),
        ("lookup",),
        start=doubles.keys_parsed,
    ),
    # Data
    FieldFault(
        "only the hardest tasks left by the filter",
        "A filter by difficulty has kept the tasks that the policy hardly ever solves.",
        "asuzukosi/post-training-experiments#8, PrimeIntellect-ai/verifiers#363",
        ids("never-succeeds", "too-little-signal"),
        ("lookup",),
        start=tasks_changed(doubles.hardest),
        options="-a max_hops=9",
    ),
    # Evaluation and saving
    FieldFault(
        "greedy sampling stays on after an evaluation",
        "The first evaluation's greedy setting stays in the engine, and all rollouts of a group are equal from then on.",
        "THUDM/slime#2297",
        ids("temperature-not-applied", "groups-without-variety", "too-little-signal"),
        EVERYWHERE,
        start=doubles.greedy_after_evaluation,
        probes=False,
        watch_causes=MISMATCH,
        watch_options="--eval-examples 8 --eval-steps 4",
        steps=10,
    ),
    FieldFault(
        "final model has its first embeddings",
        "The final model's embeddings and head are those with which the run began; all other weights are trained.",
        "NVIDIA-NeMo/Automodel#2511",
        ids("saved-model-differs", "head-not-tied"),
        EVERYWHERE,
        start=doubles.first_embeddings_saved,
    ),
)
