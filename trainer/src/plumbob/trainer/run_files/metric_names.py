"""Every name in a line of metrics.jsonl, with its unit and meaning. docs/reference/metrics.md is generated from them.

A part in capitals is a placeholder for a name that the environment, the run or the machine gives: `env/NAME`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from plumbob.console import UserError
from plumbob.trainer.config.options import did_you_mean
from plumbob.trainer.config.text_table import table_rows


@dataclass(frozen=True)
class Metric:
    """One metric. Example: `Metric("rollout/turns", "turns", "Assistant turns per rollout, mean.")`."""

    name: str
    unit: str
    meaning: str

    def matches(self, name: str) -> bool:
        """Whether `name` is this metric's name, with any placeholder replaced."""
        return re.fullmatch(re.sub(r"[A-Z]+", ".+", self.name), name) is not None


TABLE = """
  step | steps | Number of the training step, counted from 1.

Rewards
  reward/mean | reward | Mean reward of the step's rollouts.
  reward/std | reward | Standard deviation of the step's rewards.
  reward/smallest | reward | Smallest reward of the step's rollouts.
  reward/largest | reward | Largest reward of the step's rollouts.
  reward/COMPONENT | reward | Mean of this component of the reward, weight applied. A component named like another
      number here, for example mean or std, is reward/component/NAME.
  reward/COMPONENT/variance_share | share | Variance of this component within groups, as a share of the sum over all
      components. Absent with a single component.
  reward/group_std | reward | Standard deviation of the groups' mean rewards, from which intervals of the mean reward
      are computed: the rollouts of a group are not independent.
  reward/length_correlation | - | Correlation of a rollout's reward and its number of sampled tokens, within groups.
      Absent if either never differs.
  groups/count | groups | Number of groups with at least one finite reward.
  groups/zero_signal | groups | Number of groups whose rewards are all equal, which add nothing to the gradient.
  groups/zero_signal_share | share | Share of groups whose rewards are all equal.
  groups/all_fail | groups | Number of groups whose rewards all equal the step's lowest reward. If all rewards of the
      step are equal, only a reward of 0 or less counts.
  groups/all_pass | groups | Number of groups without a signal that are not in groups/all_fail: their rewards are all
      equal and above the step's lowest.
  groups/tiny_spread_share | share | Share of the groups with a signal whose rewards differ by less than 2% of the
      largest reward. --scale-rewards group turns such differences into full-size advantages.
  groups/broken | groups | Number of groups left out of training because the engine failed on some of their rollouts.
  groups/rounds | rounds | Number of sampling rounds; with --zero-signal refill it can be more than 1.
  groups/replaced | groups | Number of groups without a signal that --zero-signal refill replaced.
  tasks/difficulty | - | Mean difficulty of the step's tasks, as the tasks state it. Absent if they state none.
  tasks/epoch | epochs | Number of whole passes over the training tasks before the step's tasks, mean.
  advantage/mean_abs | advantage | Mean absolute advantage of the step's rollouts.
  advantage/largest | advantage | Largest absolute advantage of the step's rollouts.

Under the names, and with the meanings, of a debugging checklist that many people use
  debug/advantage_max | advantage | The same as advantage/largest.
  debug/advantage_mean | advantage | Mean absolute advantage: the same as advantage/mean_abs.
  debug/reward_std | reward | Mean of the groups' own standard deviations of rewards: 0 if no group has a signal.
      reward/std is that of all rewards of the step.
  debug/context_length_mean | tokens | The same as rollout/row_tokens.
  debug/context_truncation_rate | share | Share of rollouts whose row is at most 10 tokens shorter than --max-context.
      rollout/stopped/max_total_tokens is the share that this limit ended, some of them long before because a tool
      result would not fit; rollout/truncated_share counts every limit.

Rollouts and evaluations
  rollout/count | rollouts | Number of rollouts sampled in the step.
  rollout/errored | rollouts | Number of rollouts that failed in the environment or the engine. A rollout that failed in
      the environment is left out of its group; if the engine failed, the whole group is left out (groups/broken).
  rollout/engine_errors | rollouts | Number of rollouts that failed in the engine, or where the chat template turns
      messages into tokens: the part of rollout/errored that is not the environment's.
  rollout/stuck | rollouts | Number of failed rollouts (they are also in rollout/errored) in which a tool, hook or
      reward did not end within a fifth of --max-seconds, or scoring within --max-seconds.
  rollout/no_turn | rollouts | Number of rollouts left out because they ended before the model's first turn, for example
      because the prompt alone reaches --max-context.
  rollout/repetitive_share | share | Share of rollouts whose last 64 sampled tokens repeat themselves: fewer than half
      of their sequences of four tokens are different.
  rollout/stale | rollouts | Number of rollouts discarded because a rollout of their group is older than --max-staleness
      allows.
  rollout/stale_tokens | tokens | Mean number of sampled tokens of the rollouts in rollout/stale; compare
      rollout/sampled_tokens. Absent without such rollouts.
  rollout/not_finite | rollouts | Number of rollouts left out because a reward or log-probability is NaN or infinite.
  rollout/truncated_share | share | Share of rollouts that a limit cut off (--max-tokens, --max-context, --max-turns or
      --max-seconds).
  rollout/stopped/REASON | share | Share of rollouts that ended for this stop reason.
  rollout/turns | turns | Mean number of assistant turns per rollout.
  rollout/tools | tools | Mean number of tools that a rollout has.
  rollout/tool_calls | calls | Mean number of tool calls per rollout.
  rollout/tool_errors | calls | Mean number of tool calls per rollout that ended in an error.
  rollout/malformed_calls | calls | Mean number of tool calls per rollout that could not be parsed.
  rollout/unread_calls | replies | Mean number of replies per rollout that look like a tool call in a form that is not
      read.
  rollout/cut_texts | texts | Mean number of tool results per rollout that are longer than any context, and of errors of
      over 20,000 characters: the rest of them is not kept.
  rollout/sampled_tokens | tokens | Mean number of sampled tokens per rollout.
  rollout/row_tokens | tokens | Mean number of tokens per rollout, prompt and tool results included.
  env/NAME | - | Mean of this metric of the environment over the rollouts that report it.
  eval/greedy | reward | Held-out reward at temperature 0, in steps with an evaluation.
  eval/sampled | reward | Held-out reward at the training temperature, in steps with an evaluation.
  eval/pass@K | share | Estimated probability that at least one of K rollouts of a held-out task passes
      (a reward of at least 1), with --eval-rollouts above 1, in steps with an evaluation.
  eval/prompts_differ | - | 1 if the evaluation before the step prompted held-out tasks with another system prompt or
      other tools than the step's tasks, else absent. Only in the step after an evaluation, in runs of one environment.
  eval/cut_off | share | Share of the held-out rollouts, at the training temperature, that limits cut off, where it
      differs from the step's by more than half. Only in the step after an evaluation, in runs of one environment.
  eval/count | tasks | Number of held-out tasks that were evaluated.
  reward/mean/ENV | reward | As reward/mean, of this environment. Only with several environments.
  groups/count/ENV | groups | As groups/count, of this environment. Only with several environments.
  groups/zero_signal/ENV | groups | As groups/zero_signal, of this environment. Only with several environments.
  rollout/turns/ENV | turns | As rollout/turns, of this environment. Only with several environments.
  rollout/sampled_tokens/ENV | tokens | As rollout/sampled_tokens, of this environment. Only with several environments.
  rollout/truncated_share/ENV | share | As rollout/truncated_share, of this environment. Only with several environments.
  eval/greedy/ENV | reward | As eval/greedy, of this environment. Only with several environments.
  eval/sampled/ENV | reward | As eval/sampled, of this environment. Only with several environments.
  eval/pass@K/ENV | share | As eval/pass@K, of this environment. Only with several environments.

Supervised fine-tuning
  sft/loss | nats/token | Mean cross-entropy of the trained tokens of the step's demonstrations, before the step's
      update. Only in runs of `sft`.
  sft/epoch | epochs | Number of passes over the demonstrations up to the end of the step.

The policy
  loss | - | Loss of the step: a sum over sampled tokens, whose weights are computed from the whole step.
  policy/entropy | nats/token | Mean entropy of the policy at sampled tokens, over the rollouts that were trained on, or
      over a few rollouts if none was.
  policy/kl | nats/token | Estimated KL divergence to the reference policy, with --kl-beta.
  policy/step_kl | nats/token | KL divergence (k3 estimate) between the policy that sampled the rollouts and the policy
      after the step, on at most 8 rollouts. It is not measured in every step.
  policy/good_rollouts_shift | nats/token | Mean change, by the step's updates, of the log-probabilities of the tokens
      of rollouts with a positive advantage, among those that policy/step_kl is measured on; absent if none has one.
      Training makes good rollouts more likely: where it is below 0 in step after step, other gradients push them down
      with the bad ones (arXiv:2512.04220).
  policy/clip_fraction | share | Share of sampled tokens whose gradient the ratio clip removed.
  policy/clip_fraction_low | share | Share of sampled tokens clipped at the lower bound of the importance ratio.
  policy/clip_fraction_high | share | Share of sampled tokens clipped at the upper bound of the importance ratio.

The optimizer
  optimizer/learning_rate | - | Learning rate that the optimizer holds at the end of the step.
  optimizer/grad_norm | - | Gradient norm before clipping, mean over the step's optimizer steps.
  optimizer/updates | updates | Number of optimizer steps that were applied.
  optimizer/skipped | updates | Number of optimizer steps skipped because the gradient was NaN or infinite.
  optimizer/update_rms | - | Root mean square change of the trained weights in the step, on a sample of them.
  optimizer/relative_update | - | Norm of the step's change of the trained weights, divided by the norm of the weights,
      on a sample of them.
  optimizer/moved_share | share | Share of trained weights that changed in the step, on a sample of them.
  optimizer/still_tensors | share | Share of the trained tensors of which no weight of the sample changed in the step.

Engine against trainer
  sync/version | syncs | Policy version that the engine serves after the step (number of weight syncs).
  sync/bytes | bytes | Number of bytes that the weight sync sent.
  sync/bound_modules | modules | Number of modules of the server's model to which the synced adapter is bound.
  sync/parity | nats | Mean absolute difference of engine and trainer log-probabilities of fixed tokens, right after the
      weight sync.
  sync/sampling_gap | nats/token | Mean absolute difference of engine and trainer log-probabilities of the step's
      sampled tokens.
  sync/largest_gap | nats | Largest absolute difference of engine and trainer log-probabilities of a token sampled in
      the step.
  sync/mismatch_kl | nats/token | KL divergence (k3 estimate) between the engine's distribution and the trainer's.
  correction/mean_weight | - | Mean importance weight (trainer over engine probability) before it is truncated or
      masked; 1 if engine and trainer agree.
  correction/truncated_share | share | Share of sampled tokens whose importance weight was cut by
      --importance-correction token_truncate.
  correction/masked_share | share | Share of sampled tokens whose importance weight was set to 0 by
      --importance-correction sequence_mask.

Work and resources
  train/rows | rows | Number of rollouts that added to the gradient.
  train/tokens | tokens | Number of sampled tokens in the step's forward and backward passes.
  train/computed_tokens | tokens | Number of tokens that these passes computed, prompts and tool results included, and
      what the rows of a pass have in common at their beginning once.
  train/largest_pass | tokens | Most tokens that one of these passes computed.
  train/microbatch_tokens | tokens | Current maximum number of tokens in one microbatch.
  train/out_of_memory | retries | Number of out-of-memory retries since the run began.
  memory/peak_gib | GiB | Peak GPU memory of tensors since the end of the step before, an evaluation between them
      included, on the process with the highest peak. Where it grows from step to step although train/largest_pass does
      not, something is never freed.
  memory/gpu_gib | GiB | GPU memory that this process can have: what it holds, and what is free. Other processes hold
      the rest.
  memory/resident_gib | GiB | Main memory that the process holds at the end of the step, the largest of all processes.
  memory/main_gib | GiB | Main memory of the machine, or of the container if it is given less.
  time/rollout | s | Time for which the step waited for its rollouts.
  time/train | s | Time to compute advantages and gradients and to update the weights.
  time/sync | s | Time of the weight sync, including the comparison of log-probabilities after it.
  time/sampling | s | Time to sample the rollouts; longer than time/rollout if sampling began during the previous step
      (--max-staleness).
  time/tools | s | Time for which a rollout waited for the results of its tools, such as searches, mean.
  time/tools_share | share | Time for which the step's rollouts waited for the results of their tools, as a share of the
      time from their beginning to the end of their last turn, all rollouts added up.
  time/rollout_tokens_per_second | tokens/s | Sampled tokens per second of sampling, on all processes together.
  time/train_tokens_per_second | tokens/s | Tokens per second of training (time/train), prompts and tool results
      included.
"""
"""Name, unit and meaning of each metric: see `table_rows`."""

METRICS = tuple(Metric(*row) for row in table_rows(TABLE))
"""All metrics, in the order of the documentation."""


_OWN_REWARD_NAMES = frozenset(m.name.removeprefix("reward/") for m in METRICS if m.name.startswith("reward/"))


def component_metric(component: str) -> str:
    """The metric of a component of the environment's reward. Example: `component_metric("exact") == "reward/exact"`.

    A component named like one of the trainer's own numbers about rewards, or with a slash, is kept apart from them:
    `component_metric("mean") == "reward/component/mean"`.
    """
    apart = component in _OWN_REWARD_NAMES or "/" in component
    return f"reward/component/{component}" if apart else f"reward/{component}"


def describe(name: str) -> Metric | None:
    """The metric of this name; None for a name that no run writes. Example: `describe("env/f1").unit == "-"`.

    A metric of exactly this name comes before one with a placeholder, and of those with a placeholder the last one
    counts.
    """
    exact = next((metric for metric in METRICS if metric.name == name), None)
    return exact or next((metric for metric in reversed(METRICS) if metric.matches(name)), None)


NOT_EARNED = frozenset({"std", "group_std", "length_correlation", "misplaced", "prompts_differ", "cut_off", "count"})
"""Metrics of rewards and evaluations, without their family, of which a higher value is not a better one."""


def earned(metric: str) -> bool:
    """Whether a metric is what a model earns, and not, for example, how much it varies or how many tasks were evaluated."""
    family, _, rest = metric.partition("/")
    about_rewards = rest in NOT_EARNED or rest.endswith("/variance_share")
    return metric == "groups/all_pass" or (family in ("eval", "reward", "env") and not about_rewards)


def check_metric(name: str | None, option: str) -> None:
    """Raise UserError if no run writes a metric of this name, which was given for `option`, or if no model earns it.

    What a model earns is in rewards and evaluations. What an environment measures (env/NAME) has a meaning of its own.
    """
    if name is not None and describe(name) is None:
        known = [metric.name for metric in METRICS if not re.search("[A-Z]", metric.name)]
        raise UserError(f"{option} {name}: there is no such metric{did_you_mean(name, known)}")
    if name is not None and not earned(name):
        raise UserError(
            f"{option} {name}: a higher value does not say that a model earns more; use eval/greedy (with --eval-steps) or "
            "reward/mean"
        )
