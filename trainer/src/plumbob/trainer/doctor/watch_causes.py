"""The causes that a run's own metrics and traces can show; besides those of the catalogue in findings.py.

Sources: numbers of arXiv papers, or owner/repository#issue on GitHub.
"""

from __future__ import annotations

from plumbob.trainer.doctor.findings import CAUSES, Cause

_ENTRIES = (
    # Sampling and sync: what draws is not what is trained
    Cause(
        "dropout-in-training",
        "Dropout is on while gradients are computed and off while rollouts are drawn: the distribution that is trained is "
        "not the one that acts.",
        "Leave --lora-dropout at 0.",
        ("H06",),
        "Goekdeniz-Guelmez/mlx-lm-lora#50",
    ),
    Cause(
        "correction-mutes-rollouts",
        "The correction for engine against trainer takes a large part of the tokens out of the gradient.",
        "Use --importance-correction token_truncate: a weight over a long row leaves any bounds, a token's does not.",
        ("H06",),
        "huggingface/trl#5815",
    ),
    Cause(
        "rollouts-too-old",
        "Most rollouts were drawn by too old a policy and are thrown away.",
        "Raise --max-staleness, or draw fewer rollouts per step (--batch-size, --gradient-accumulation-steps).",
        (),
        "verl-project/verl#7495",
    ),
    # The environment and its reward
    Cause(
        "tools-fail",
        "A large part of the tool calls ends in an error: the policy is taught on broken results.",
        "Look at the tool messages in traces/; `evaluate ENV --oracle` shows whether the tools are sound.",
        ("H07",),
    ),
    Cause(
        "calls-malformed",
        "A large part of the tool calls cannot be parsed, so the tools are hardly ever used.",
        "Look at the calls in traces/; use a model whose chat template has tools, and raise --max-tokens if calls are cut off.",
        ("H07",),
    ),
    Cause(
        "groups-without-variety",
        "Groups succeed or fail as one: the rollouts of a task hardly differ, so there is nothing to compare.",
        "Raise --temperature (1 is the policy itself) or --num-generations.",
        ("H05",),
        "arXiv:2503.14476, sec. 3.2",
    ),
    Cause(
        "answers-not-parsed",
        "The right answer stands in replies that the reward counts as wrong: it is lost in parsing.",
        "Have the prompt ask for the form that the reward reads (-a answer_style=...), or let the reward read this one.",
        ("H05", "H08"),
        "modelscope/ms-swift#4570",
    ),
    Cause(
        "reward-hacked",
        "The training reward rises while the held-out reward falls: the policy learns what the reward measures, not what "
        "it is meant for.",
        "Read the best-rewarded rollouts in traces/ and close the hole; keep the checkpoint of the best evaluation.",
        ("H05", "H08"),
    ),
    # Limits
    Cause(
        "signal-masked",
        "Groups have a signal, but --overlong mask takes all their rollouts out of the loss.",
        "Use --overlong keep, and raise the limit that cuts them (--max-context, --max-tokens, --max-turns).",
        ("H02", "H04"),
    ),
    # The update
    Cause(
        "gradient-not-finite",
        "Gradients or log-probabilities are NaN or infinite, and what has them is left out.",
        "Lower --learning-rate, keep --max-grad-norm 1; the reward and the model's own logits must be finite.",
        (),
        "huggingface/trl#6266",
    ),
    Cause(
        "warmup-too-long",
        "The learning rate is still near zero: warm-up takes up the run.",
        "Lower --warmup-steps, or raise --max-steps.",
    ),
    Cause(
        "update-without-effect",
        "The trained weights move, and the log-probabilities do not: the adapter is bound to nothing, or scaled to zero.",
        "Check --lora-targets and --lora-alpha against the model's module names.",
        ("H06",),
        "verl-project/verl-omni#552",
    ),
    Cause(
        "ratio-clipped",
        "The clip takes most tokens out of the gradient.",
        "Raise --epsilon and --epsilon-high, or make fewer updates on the same rollouts (--num-iterations, --num-minibatches).",
        (),
        "arXiv:1707.06347, sec. 3",
    ),
    Cause(
        "temperature-too-high",
        "Rollouts are drawn so hot that hardly one succeeds.",
        "Use --temperature 1.",
        ("H05",),
    ),
    Cause(
        "entropy-collapse",
        "The policy has become nearly deterministic without a better reward: it explores no more.",
        "Try --epsilon-high 0.28, a higher --temperature, a lower --learning-rate, or --kl-beta 0.001.",
        (),
        "arXiv:2503.14476, sec. 3.1; arXiv:2505.22617",
    ),
    Cause(
        "entropy-explosion",
        "The policy dissolves into noise while the reward falls.",
        "Lower --learning-rate, keep --max-grad-norm 1, or add --kl-beta 0.001.",
        (),
        "arXiv:2505.22617",
    ),
)

WATCH_CAUSES: dict[str, Cause] = {cause.id: cause for cause in _ENTRIES}

ALL_CAUSES: dict[str, Cause] = {**CAUSES, **WATCH_CAUSES}
"""The whole catalogue."""


def causes_table() -> str:
    """The catalogue as Markdown, for docs/causes.md."""
    lines = ["| cause | why nothing is learned | what to do | suspicion | source |", "|---|---|---|---|---|"]
    for cause in ALL_CAUSES.values():
        cells = (f"`{cause.id}`", cause.sentence, cause.fix, ", ".join(cause.hypotheses), cause.source)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(causes_table(), end="")
