"""The unseen half of the twenty-seventh set of healthy settings: what recipes and threads have, without a fault."""

from __future__ import annotations

from typing import Any

import verifiers.v1 as vf
from plumbob.testing.faults.field import HealthySetting
from plumbob.testing.faults.field_parts import graded


def calls_pay(task: Any, trace: vf.Trace, own: float) -> float:
    """Half a point beside the outcome for the share of the chain that calls have followed."""
    followed = getattr(trace.state, "links_followed", 0)
    return own + 0.5 * min(1.0, followed / len(task.data.chain))


def wrong_marked_costs(task: Any, trace: vf.Trace, own: float) -> float:
    """One for a right answer, nothing for a wrong one, and minus one for a reply that states none."""
    return own if own > 0 or "####" in (trace.last_reply or "") else -1.0


def sections(task: Any, trace: vf.Trace, own: float) -> float:
    """Half a point for a last message with a thought, citations and an answer."""
    reply = trace.last_reply or ""
    return 0.5 * all(tag in reply for tag in ("<think>", "<cite>", "<answer>"))


UNSEEN = (
    # swift.readthedocs.io, REINFORCE++ baseline.
    HealthySetting(
        "deviation of the step with a penalty in the reward",
        "lookup",
        "--scale-rewards batch --kl-placement reward --kl-beta 0.001 --num-minibatches 2",
        steps=6,
    ),
    # tinker-docs.thinkingmachines.ai, CISPO; rl-llm-wiki/knowledge-base#385.
    HealthySetting(
        "weights capped at six with a deviation of the step",
        "lookup",
        "--loss-type cispo --epsilon-high 5 --num-minibatches 4 --scale-rewards batch",
        steps=6,
    ),
    # modelscope.github.io/Trinity-RFT, cispo_policy_loss.
    HealthySetting(
        "weights capped at 1.28 in two passes",
        "gsm8k",
        "--loss-type cispo --epsilon-high 0.28 --num-iterations 2",
        steps=6,
    ),
    # huggingface/trl#3801: two rollouts of each prompt, as RLOO has by default.
    HealthySetting(
        "pairs in steps of 256 rollouts",
        "lookup",
        "--num-generations 2 --batch-size 64 --gradient-accumulation-steps 4 --baseline leave_one_out",
        steps=6,
    ),
    # docs.nvidia.com/nemo/rl, the walkthrough of DAPO: large groups in large steps.
    HealthySetting(
        "thirty-two rollouts of each of eight tasks",
        "lookup",
        "--num-generations 32 --batch-size 64 --gradient-accumulation-steps 4",
        steps=6,
    ),
    # huggingface/trl#4772: the default mode and cap.
    # modelscope/ms-swift#6678: its default threshold.
    # agentscope-ai/Trinity-RFT#426: batch of 96, no shuffling, means over tokens.
    HealthySetting(
        "steps of 192 word problems in their order",
        "gsm8k",
        "--batch-size 96 --gradient-accumulation-steps 2 --task-order as-given --loss-type dapo "
        "--epsilon-high 0.28 --num-minibatches 2",
        steps=6,
    ),
    # unslothai/notebooks#130: batches of one group.
    HealthySetting(
        "a notebook's adapter in groups of four",
        "gsm8k",
        "--peft --num-generations 4 --batch-size 4 --gradient-accumulation-steps 16 "
        "--lr-scheduler-type cosine --weight-decay 0.1",
        steps=6,
    ),
    # unslothai/notebooks#130.
    HealthySetting(
        "a notebook's adapter of rank thirty-two over chains",
        "lookup",
        "--seed 3407 --peft --lora-r 32 --lora-alpha 64 --num-generations 4 --batch-size 4 "
        "--gradient-accumulation-steps 16 --adam-beta2 0.99 --weight-decay 0.001 --warmup-steps 1",
        steps=6,
    ),
    # NousResearch/atropos#162: half weight on the turns beside the outcome.
    HealthySetting("half a point for the links that calls follow", "lookup", start=graded(correct=calls_pay), steps=6),
    # huggingface/trl#2961: minus one for a reply in no form.
    HealthySetting(
        "minus one for a reply that states no number", "gsm8k", start=graded(correct=wrong_marked_costs), steps=6
    ),
    # huggingface.co/papers/2601.05242: GDPO.
    # jsboige/CoursIA#10603: in larger groups fewer are uniform.
    HealthySetting(
        "sixteen groups of sixteen word problems",
        "gsm8k",
        "--num-generations 16 --batch-size 32 --gradient-accumulation-steps 8",
        steps=6,
    ),
    # huggingface/open-r1#239: a loss that begins at zero and rises with the penalty.
    HealthySetting(
        "token means with a penalty of four hundredths",
        "lookup",
        "--loss-type bnpo --kl-beta 0.04 --kl-estimator k3",
        steps=6,
    ),
    # huggingface/trl#3020: batches of more than one group.
    HealthySetting(
        "twelve groups of documents in six accumulated parts",
        "musique",
        "--batch-size 16 --gradient-accumulation-steps 6",
        steps=6,
    ),
    # OpenRLHF/OpenRLHF#553.
    HealthySetting(
        "leave-one-out of four over two minibatches",
        "gsm8k",
        "--baseline leave_one_out --num-generations 4 --batch-size 64 --gradient-accumulation-steps 2 "
        "--num-minibatches 2 --kl-placement reward --kl-beta 0.01",
        steps=6,
    ),
    # inclusionai.github.io/AReaL, DAPO.
    HealthySetting(
        "token means with overlong replies penalised in two minibatches",
        "gsm8k",
        "--loss-type dapo --overlong penalise --max-tokens 200 --epsilon-high 0.28 --num-minibatches 2",
        steps=6,
    ),
    # NVIDIA-NeMo/Gym#1499: weights and thresholds of a verifier are tuned.
    HealthySetting(
        "weight on F1 and on recall", "musique", "-a weights=f1=0.6,retrieval_recall=0.2 -a f1_floor=0.3", steps=6
    ),
)
