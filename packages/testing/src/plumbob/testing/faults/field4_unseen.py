"""The unseen half of the fourth set of the field's faults: run only to measure, after it was written."""

from __future__ import annotations

from plumbob.testing.faults import field4_unseen_doubles as doubles
from plumbob.testing.faults.field import EVERYWHERE, MISMATCH, WITH_TOOLS, FieldFault, ids
from plumbob.testing.faults.field_parts import graded, tasks_changed

UNSEEN = (
    # The engine
    FieldFault(
        "earlier turns taken out of later prompts",
        "The chat template takes what the assistant said in earlier turns out of the prompt, and the row has it.",
        "verl-project/verl#6854, modelscope/ms-swift#4390",
        ids("prompt-replaced", "row-not-what-was-sampled") | MISMATCH,
        WITH_TOOLS,
        inject=doubles.earlier_turns_removed,
    ),
    FieldFault(
        "two workers draw the same completions",
        "Two workers begin with the same seed, and each completion of a group is there twice.",
        "modelscope/ms-swift#7858",
        ids("groups-without-variety", "rollouts-repeated"),
        EVERYWHERE,
        inject=doubles.half_seeds,
    ),
    # Trainer
    FieldFault(
        "advantages end at the last tool result",
        "Advantages are summed up from the end of a rollout and begin anew at each tool result, so that earlier turns "
        "have none.",
        "verl-project/verl#6376",
        ids("sampled-tokens-masked", "advantages-wrong", "rewards-of-other-rollouts", "loss-differs-from-settings"),
        WITH_TOOLS,
        start=doubles.last_turn_only,
        watch=False,
    ),
    FieldFault(
        "reference scored at another temperature",
        "Rollouts are sampled and scored at temperature 1.5, and the reference policy is scored at 1: the KL term pulls "
        "towards another temperature.",
        "thinking-machines-lab/tinker-cookbook#689",
        ids("temperature-not-applied", "kl-too-large"),
        EVERYWHERE,
        start=doubles.reference_at_one,
        options="--temperature 1.5 --kl-beta 0.05",
    ),
    FieldFault(
        "output head in half precision in the trainer",
        "The trainer computes logits in bfloat16, and the engine in float32.",
        "vllm-project/vllm#22103, PrimeIntellect-ai/prime-rl#3451",
        ids("mismatch-grows") | MISMATCH,
        EVERYWHERE,
        start=doubles.head_in_half,
    ),
    FieldFault(
        "half of the layers in no optimizer group",
        "The optimizer's groups are chosen by name, and half of the trained tensors are in none of them.",
        "ACEsuit/mace#1529, huggingface/peft#3499",
        ids("optimizer-moves-nothing", "gradients-not-cleared"),
        EVERYWHERE,
        start=doubles.half_of_the_layers,
    ),
    FieldFault(
        "matrices on a scheduler of their own",
        "The scheduler has kept the rates of groups that were removed, and half of the tensors have thirty times the rate.",
        "deepspeedai/DeepSpeedExamples#756",
        ids("schedule-hides-rate", "learning-rate-too-high"),
        EVERYWHERE,
        start=doubles.faster_matrices(30),
        watch_causes=ids("entropy-explosion", "gradient-explodes"),
        steps=10,
    ),
    # Tools and tasks
    FieldFault(
        "tool names arrive doubled",
        "The reader of calls adds up parts of a stream, and has each tool's name twice.",
        "NousResearch/hermes-agent#6841",
        ids("tools-fail", "calls-malformed", "calls-in-unread-form", "tools-never-used"),
        WITH_TOOLS,
        start=doubles.names_doubled,
    ),
    FieldFault(
        "supporting documents missing from the corpus",
        "The retriever's corpus was built from another split, and has no document that a question needs.",
        "Agent-RL/ReCall#30",
        ids("oracle-fails", "tools-return-nothing", "never-succeeds"),
        ("musique",),
        start=tasks_changed(doubles.unsupported),
    ),
    # Rewards
    FieldFault(
        "grader reads the first message",
        "The grader is given the first message of the assistant, which calls a tool, instead of the last.",
        "janhq/ReZero#1",
        ids("oracle-fails", "reward-constant", "answers-not-parsed"),
        ("lookup",),
        start=graded(correct=doubles.first_message),
        watch_causes=ids("never-succeeds"),
    ),
    # Evaluation
    FieldFault(
        "failed held-out rollouts left out",
        "Held-out rollouts without a right answer end in an error and are left out of the mean.",
        "rllm-org/rllm#382",
        ids("evaluation-parses-differently", "environment-fails", "drops-are-biased"),
        ("lookup",),
        start=graded(correct=doubles.wrong_ones_left_out),
        watch_options="--eval-examples 8 --eval-steps 3",
    ),
)
