"""What the doctor says: findings, each a verdict with its evidence, and the causes that the probes can name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["pass", "fail", "unsure", "error"]
"""`unsure`: it was asked, and the answer is neither. `error`: it could not be asked; what it would have said is not known."""


@dataclass(frozen=True)
class Cause:
    """One reason why a run does not learn.

    `id` is stable and in kebab case. `hypotheses` are the usual suspicions it belongs to: H01 scaling by a tiny
    deviation, H02 masks, H03 the KL term, H04 truncation, H05 the reward, H06 weight sync, H07 several steps against
    one, H08 evaluation against training. `source`: where it was seen.
    """

    id: str
    sentence: str
    fix: str
    hypotheses: tuple[str, ...] = ()
    source: str = ""


@dataclass(frozen=True)
class Finding:
    """One check's result. `cause` is the id of an entry of the catalogue where the verdict is `fail`, else None."""

    check: str
    verdict: Verdict
    evidence: str
    cause: str | None = None
    step: int | None = None

    def __post_init__(self) -> None:
        if (self.verdict == "fail") != (self.cause is not None):
            raise ValueError(f"A finding names a cause exactly if it failed: {self.check!r} is {self.verdict}.")


_PROBED = (
    # Data
    Cause(
        "environment-fails",
        "Rollouts end in errors of the environment or the engine: what is left of their groups is not a fair sample.",
        "Mend the environment: the evidence names the error; `evaluate ENV --oracle` shows whether it is sound.",
        ("H05",),
    ),
    Cause(
        "groups-mixed",
        "A group holds rollouts of different tasks, so a rollout is compared with others that had another question: the "
        "advantage is mostly how easy the question was.",
        "Give every rollout of one task, and no other, the same group.",
        ("H05",),
        "PeterGriffinJin/Search-R1#88",
    ),
    Cause(
        "held-out-in-training",
        "Tasks are trained on and held out at once: the held-out reward says nothing about learning.",
        "Use --eval-datasets with other tasks, or another split.",
        ("H08",),
    ),
    Cause(
        "stop-token-wrong",
        "Turns do not end with the token that ends them in this model's chat template: they run on to a limit, or stop in "
        "the middle, and are scored as they stand.",
        "Put the chat template's end token into the model's generation_config (eos_token_id), or use the model's own template.",
        ("H04",),
        "huggingface/trl#7039",
    ),
    Cause(
        "truncated-turns",
        "Turns are cut by --max-tokens before the model has finished: what is scored is an answer that was never given.",
        "Raise --max-tokens.",
        ("H04",),
        "arXiv:2503.14476, sec. 3.4",
    ),
    Cause(
        "truncated-context",
        "The conversation is cut off, so evidence or answer is lost: the reward is that of a rollout nobody let finish.",
        "Raise --max-context (and the engine's own limit), or let tools return less.",
        ("H04",),
    ),
    Cause(
        "truncated-rollouts",
        "Rollouts are ended by --max-turns or --max-seconds before they come to an answer.",
        "Raise --max-turns or --max-seconds.",
        ("H04", "H07"),
    ),
    # Reward
    Cause(
        "reward-not-finite",
        "The reward is not a finite number of moderate size.",
        "Bound the environment's reward, best to [0, 1].",
        ("H05",),
    ),
    Cause(
        "reward-nondeterministic",
        "The same transcript earns another reward when it is scored again: advantages are partly a lottery.",
        "Make the reward a function of the transcript: no random draw, no clock, no judge with a temperature.",
        ("H05",),
    ),
    Cause(
        "reward-constant",
        "Every transcript earns the same, a perfect one no more than an empty one: no group has an advantage.",
        "Mend the environment's reward: `evaluate ENV --oracle` must score 1.",
        ("H05",),
    ),
    Cause(
        "oracle-fails",
        "The environment's own perfect transcript does not earn the full reward: what is right is not rewarded.",
        "Mend the environment's reward or its oracle: `evaluate ENV --oracle` must score 1.",
        ("H05",),
    ),
    Cause(
        "evaluation-parses-differently",
        "The same transcript of the same task scores differently as a training task and as a held-out one: the run "
        "learns one thing and another is measured.",
        "Use one reward and one parser for both.",
        ("H08",),
    ),
    Cause(
        "task-out-of-reach",
        "The model never succeeds: all rollouts of every group earn the least, so nothing tells good from bad.",
        "Make the tasks easier (the environment's difficulty settings), use a stronger model, or train on demonstrations first.",
        ("H05",),
        "arXiv:2503.14476, sec. 3.2",
    ),
    Cause(
        "task-solved",
        "The model succeeds already: all rollouts of nearly every group earn the most, so there is nothing to learn.",
        "Make the tasks harder, or choose others.",
        ("H05",),
        "arXiv:2503.14476, sec. 3.2",
    ),
    Cause(
        "reward-format-dominated",
        "Nearly all that tells one rollout of a group from another is how it is written, not whether it is right: "
        "training improves the form and the answers stay.",
        "Lower the weight of the named component, or give it only to right answers.",
        ("H05",),
        "modelscope/ms-swift#4570",
    ),
    Cause(
        "tiny-std-scaling",
        "Advantages are divided by a deviation that is almost nothing: differences too small to mean anything become full "
        "advantages, and drown those that mean something.",
        "Leave out --scale-rewards (none is the default), or use --scale-rewards batch.",
        ("H01",),
        "arXiv:2503.20783, sec. 3.1; arXiv:2508.08221",
    ),
    # Tokens
    Cause(
        "tools-not-in-prompt",
        "The tool descriptions that the model acts on are absent from the prompt it is trained on.",
        "Render the trained prompt with the same `tools` as the sampled one; use a chat template that takes tools.",
        ("H02", "H07"),
        "verifiers' GRPOTrainer, July-October 2025",
    ),
    Cause(
        "assistant-header-missing",
        "The header that opens an assistant turn is missing before turns, so they are sampled in one context and trained in "
        "another.",
        "Build the row from the engine's own ids: prompt and completion of each turn, verbatim.",
        ("H02", "H07"),
        "verifiers' GRPOTrainer, July-October 2025",
    ),
    Cause(
        "retokenised-turns",
        "Sampled turns were decoded and tokenised again: the trained ids are not those that were drawn, so their "
        "log-probabilities belong to another text.",
        "Append sampled ids verbatim; never tokenise a sampled turn again.",
        ("H02", "H07"),
        "huggingface/trl#5224",
    ),
    Cause(
        "row-not-what-was-sampled",
        "The trained row holds other ids than the engine saw and drew.",
        "Build the row from the engine's own ids: prompt and completion of each turn, verbatim.",
        ("H02",),
    ),
    Cause(
        "context-tokens-trained",
        "Tokens that the environment wrote (tool results, prompts, headers) are in the loss: the model learns to imitate "
        "the tools instead of using them.",
        "The loss mask must be true exactly where a token was sampled.",
        ("H02",),
        "NVIDIA-NeMo/RL#2176",
    ),
    Cause(
        "sampled-tokens-masked",
        "Tokens that the model drew are left out of the loss: what they decided earns no credit.",
        "The loss mask must be true exactly where a token was sampled.",
        ("H02", "H07"),
        "huggingface/trl#4970",
    ),
    # Conditioning
    Cause(
        "loss-mask-as-attention-mask",
        "The trainer scores completions without seeing what stands before them: other prompts or tool results give the same "
        "log-probabilities. So it is when the loss mask is passed as the attention mask.",
        "Give the model an attention mask that covers every token of the row; the loss mask is for the loss alone.",
        ("H02", "H07"),
        "verifiers' GRPOTrainer, July-October 2025",
    ),
    Cause(
        "rows-see-each-other",
        "A token's log-probability depends on other rows of the same pass, or on tokens after it.",
        "Attention must end at the bounds of a row, and be causal.",
        ("H02",),
    ),
    # Parity
    Cause(
        "engine-trainer-mismatch",
        "Engine and trainer give the same ids different log-probabilities: the policy that is trained is not the one that acts.",
        "Compare model, dtype, chat template and attention of both sides; --importance-correction hides it at best.",
        ("H06",),
        "fengyao.notion.site/off-policy-rl",
    ),
    Cause(
        "temperature-not-applied",
        "Engine and trainer use different temperatures: log-probabilities, and with them the gradient, belong to another "
        "distribution than the one that was sampled.",
        "Score with the sampling temperature; for vLLM use --logprobs-mode processed_logprobs.",
        ("H06",),
        "huggingface/trl#4159",
    ),
    Cause(
        "sampling-truncated",
        "Sampling leaves out unlikely tokens, and the trainer's log-probabilities are those of the whole vocabulary: the "
        "gradient is not that of the policy that acts.",
        "Train with --top-p 1 --top-k 0 --min-p 0, and see that the engine has no sampling defaults of its own.",
        ("H06",),
        "huggingface/trl#6789",
    ),
    # Sync
    Cause(
        "adapter-not-applied",
        "The engine holds the adapter and does not compute with it: every rollout is the base model's.",
        "Send requests under the adapter's name; see that it is active and not unmerged before sampling.",
        ("H06",),
        "verl-project/verl#7495, huggingface/trl#2856",
    ),
    Cause(
        "adapter-bound-to-no-module",
        "The adapter's tensors reach no module of the engine's model, so rollouts never change.",
        "Compare the names of the sent tensors with the engine's modules; a sync must refuse names that it does not know.",
        ("H06",),
        "verl-project/verl-omni#552",
    ),
    Cause(
        "weights-not-synced",
        "The engine does not serve the trainer's weights after a sync: rollouts come from a policy that never changes.",
        "See which tensors arrive: the evidence counts them.",
        ("H06",),
        "OpenRLHF/OpenRLHF#1349",
    ),
    Cause(
        "engine-stale",
        "The engine serves the weights of an earlier sync than it says.",
        "Wait for the engine's acknowledgement before sampling; drop what it has cached.",
        ("H06",),
        "verl-project/verl#7495",
    ),
    Cause(
        "merged-in-bf16",
        "The engine gets weights rounded to bfloat16, which loses most of a small update: it does not see what early "
        "training changes.",
        "Sync the adapter itself, or merge in float32.",
        ("H06",),
        "huggingface/trl#6688",
    ),
    # Gradient
    Cause(
        "no-gradient",
        "An advantage leaves no gradient in the trained weights.",
        "See that trained parameters require gradients and that the loss reaches them (a frozen adapter, a detached graph).",
        ("H06",),
        "huggingface/trl#3452",
    ),
    Cause(
        "gradient-backwards",
        "A step along the gradient makes rewarded tokens less likely, or unrewarded ones more likely.",
        "Look at the sign of advantage and loss.",
        (),
    ),
    Cause(
        "normaliser-depends-on-passes",
        "The gradient depends on how the step is cut into passes: the normaliser is taken per pass instead of over the step.",
        "Divide by totals of the whole step, computed before the first pass.",
        (),
        "huggingface/trl#6024, modelscope/ms-swift#10116",
    ),
    Cause(
        "kl-backwards",
        "The KL term pushes the policy away from the reference instead of towards it.",
        "Look at the sign of the KL term and at its estimator: k2 in the loss, k1 in the reward.",
        ("H03",),
        "arXiv:2512.21852",
    ),
    Cause(
        "kl-too-large",
        "The KL term holds the policy so close to the reference that the reward cannot move it.",
        "Lower --kl-beta, or leave it out.",
        ("H03",),
    ),
    Cause(
        "gradient-clipped-to-nothing",
        "Clipping leaves a gradient so small that the optimizer's epsilon outweighs it: updates are a fraction of the "
        "learning rate.",
        "Raise --max-grad-norm (1 is usual; 0 turns clipping off).",
        (),
        "arXiv:1412.6980, sec. 2",
    ),
    # Movement
    Cause(
        "weights-in-bf16",
        "The trained weights are stored in a precision in which an update of this size rounds to nothing.",
        "Keep float32 master weights; --bf16 does.",
        ("H06",),
        "areal-project/AReaL#1634",
    ),
    Cause(
        "optimizer-moves-nothing",
        "There is a gradient, and the optimizer's step changes no weight.",
        "Build the optimizer on the very tensors that the model computes with, after they were moved or divided.",
    ),
    Cause(
        "learning-rate-too-low",
        "Updates are so small that a hundred of them leave the policy where it was.",
        "Raise --learning-rate; LoRA wants about ten times the rate of full training.",
        (),
        "Schulman et al., LoRA Without Regret, 2025; huggingface/trl#2872",
    ),
    Cause(
        "learning-rate-too-high",
        "One update moves the policy further than the rollouts it was computed from can justify: it breaks what works.",
        "Lower --learning-rate.",
        (),
        "areal-project/AReaL#1634",
    ),
    Cause(
        "does-not-overfit",
        "Updates on one group do not make its good rollouts likelier against its bad ones.",
        "Everything before this passed: look at the optimizer, its schedule and the objective's settings.",
        (),
    ),
)

CAUSES: dict[str, Cause] = {cause.id: cause for cause in _PROBED}
"""What the probes can name, by id. What only a run's records show is in watch_causes.py."""
