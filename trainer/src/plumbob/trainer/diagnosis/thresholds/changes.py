"""Thresholds of what changes in the course of a run: tool use, entropy, lengths, evaluations."""

from plumbob.trainer.diagnosis.thresholds.kinds import Threshold

CALLS_AT_FIRST = Threshold(
    0.5, "fewest tool calls per rollout in the first steps of a policy that counts as using its tools",
    "tools-abandoned",
)  # fmt: skip
CALLS_LEFT = Threshold(
    0.5, "smallest number of tool calls per rollout (or of turns, without tools) in each of the last five steps, as a "
    "share of the first five, while the reward does not rise: half of the conversation is gone",
    "tools-abandoned",
)  # fmt: skip
CALLS_GONE = Threshold(
    0.1, "smallest number of tool calls per rollout in the last five steps, as a share of the first five, even if the "
    "reward rises",
    "tools-abandoned",
)  # fmt: skip
CALLS_AT_ALL = Threshold(
    0.02, "tool calls per rollout in the first steps below which tools count as never used: with a group of eight, fewer "
    "than one group in six has a call to learn from",
    "tools-never-used",
)  # fmt: skip
SHORTEST = Threshold(
    0.3, "smallest mean length in the last five steps, as a share of the first five, while the reward does not rise",
    "length-collapse",
)  # fmt: skip
LONGEST = Threshold(
    3.0, "largest mean length in the last five steps, as a multiple of the first five, while the reward does not rise",
    "length-runaway",
)  # fmt: skip
REPETITIVE = Threshold(
    0.3, "largest share of rollouts whose end repeats itself; human text repeats 1% of its sequences of four tokens, and "
    "text of a model that loops most of them (arXiv:1908.04319)",
    "degenerate-repetition",
)  # fmt: skip
NORM_SPIKE = Threshold(
    100, "largest gradient norm, as a multiple of the median of the last twenty, if it is also above --max-grad-norm. "
    "Loss spikes of language models come with gradients of 50 to 1000 times the usual (arXiv:2501.06842)",
    "gradient-explodes",
)  # fmt: skip
STEADY = Threshold(
    4.0, "slope of a straight line over the run, in standard errors, above which a change is steady: by chance in one of "
    "30,000 runs",
    "mismatch-grows", "task-order-drifts", "memory-grows", "policy-breaks",
)  # fmt: skip
STILL_GROWING = Threshold(
    0.8, "smallest growth of memory in each half of the last fifteen steps, as a share of the run's slope and of these steps' own",
    "memory-grows",
)  # fmt: skip
MEMORY_GROWTH = Threshold(
    1.02,
    "largest growth of a step's memory within fifteen steps, as a multiple of the growth of its tokens",
    "memory-grows",
)
BROKEN_REWARD = Threshold(
    0.3, "largest fall of the reward in one step, as a share of its median over the ten steps before", "policy-breaks"
)
BROKEN_CUT = Threshold(
    0.08, "largest rise of the share of rollouts that limits cut off, in one step or over fifteen", "policy-breaks"
)
BROKEN_NORM = Threshold(
    2.5, "largest gradient norm, as a multiple of the median of the ten steps before, in a step whose reward falls",
    "policy-breaks",
)  # fmt: skip
BROKEN_ENTROPY = Threshold(
    0.05, "largest change of entropy in a step whose reward falls, in nats, that is never counted", "policy-breaks"
)
BROKEN_DRIFT = Threshold(
    1.5, "largest factor by which entropy or length may change in a step whose reward falls", "policy-breaks"
)
SLOW_DRIFT = Threshold(
    1.3, "largest factor by which entropy or length may change over fifteen steps in which good rollouts become less likely",
    "policy-breaks",
)  # fmt: skip
GOOD_SURE = Threshold(
    5.0, "standard errors of the last twenty measurements of good rollouts by which their fall must be more than chance: over 300 "
    "steps, four of them name a cause in one of a hundred runs by noise alone",
    "policy-breaks",
)  # fmt: skip
GOOD_FALL = Threshold(
    1e-3, "largest mean fall of the log-probabilities of good rollouts' tokens in a step, in nats", "policy-breaks"
)
GAP_RISE = Threshold(
    3.0, "largest difference of engine and trainer in the last five steps, as a multiple of the first five, if it rises "
    "steadily", "mismatch-grows",
)  # fmt: skip
SORTED_TASKS = Threshold(
    5.0, "rank correlation of a task's place with the length of its oracle's transcript, in standard deviations of an "
    "order by chance, above which tasks are sorted: by chance in one of two million orders",
    "task-order-drifts",
)  # fmt: skip
HARDER = Threshold(
    0.25, "largest rise of the tasks' difficulty over a run, as a share of its start, while the reward does not rise",
    "task-order-drifts",
)  # fmt: skip
LIVE_FEWEST = Threshold(
    10, "number of rollouts in groups with a signal, in a step, below which a step is hardly more than one example",
    "few-groups-differ",
)  # fmt: skip
LIVE_SHARE = Threshold(
    0.3, "smallest share of groups with a signal in a run's first steps, as the probes ask for before a run",
    "few-groups-differ",
)  # fmt: skip
RATE_SHARE = Threshold(
    0.2, "smallest learning rate in effect, as a share of what the settings say", "schedule-hides-rate"
)
RATE_BELOW = Threshold(
    0.65, "smallest share that the first step's learning rate, relative to that of the settings, may be of the fifth step's; it is "
    "below where the schedule is made for more steps than the run has",
    "schedule-hides-rate",
)  # fmt: skip
FIRST_STEP = Threshold(
    1.5, "largest change of the weights in step 1, in learning rates per update (root mean square): Adam divides the first "
    "gradient by its own size, so that no weight changes by more than one", "schedule-hides-rate",
)  # fmt: skip
STILL = Threshold(
    1e-3, "smallest root mean square change of the weights, in learning rates, of steps whose gradient norm is at least "
    "1e-3: Adam divides the gradient by its own size, so even a hundred times its epsilon would change them by more",
    "schedule-hides-rate",
)  # fmt: skip
MASKED_SHARE = Threshold(
    0.2, "smallest share of rollouts taken out by --overlong mask at which their length is judged", "drops-are-biased"
)
FEWEST_DROPPED = Threshold(
    8, "fewest rollouts left out in the last five steps whose length is compared with that of the others",
    "drops-are-biased",
)  # fmt: skip
MISSING_LENGTH = Threshold(
    3.0, "largest difference in length or reward, in standard errors, between finished rollouts that are missing from their "
    "groups and the others", "drops-are-biased",
)  # fmt: skip
MISSING_SHARE = Threshold(
    0.25,
    "largest share of the finished rollouts that may be missing from their groups, whichever they are",
    "too-little-signal",
)
FEW_TASKS_SEEN = Threshold(
    16, "number of training tasks, each seen four times, at or below which a run has few: a step of the default size "
    "holds all of them",
    "few-distinct-tasks",
)  # fmt: skip
EMPTY_IN_A_RUN = Threshold(
    0.9, "largest share of tool results that may be empty, or the same to different calls. Programs that print nothing "
    "are common, so it is high",
    "tools-return-nothing",
)  # fmt: skip
DOWN_RESULTS = Threshold(
    0.2, "largest share of tool results that may be a server's errors, written as text; as for rollouts that fail",
    "tools-fail",
)  # fmt: skip
RISING_NORMS = Threshold(
    10, "fewest gradient norms of steps with a signal that must rise, all but one, before it is more than chance (of random "
    "orders of ten, 3 in 10,000 do)",
    "gradients-not-cleared",
)  # fmt: skip
NORM_SUM = Threshold(
    3.0,
    "how many times the first norm the last one must be where norms rise from step to step, beyond the growth of the signal",
    "gradients-not-cleared",
)
CUT_APART = Threshold(
    0.5, "largest difference of the shares of held-out and training rollouts that limits cut off, at the same temperature",
    "evaluation-prompted-differently",
)  # fmt: skip
FIRST_UPDATES = Threshold(
    0.9, "smallest size of an update from the tenth step on, in learning rates, as a share of the largest of the first five "
    "steps, at which Adam has no memory (first updates below .5 are not judged); healthy runs of the bundled policies have .3 "
    "to .8",
    "optimizer-state-lost",
)  # fmt: skip
BEYOND_REACH = Threshold(
    5.0, "largest difference of engine and trainer, as a multiple of all that the policy has changed by in one direction, that "
    "weights of an earlier step explain",
    "engine-trainer-mismatch",
)  # fmt: skip
AS_FIRST = Threshold(
    0.95, "smallest size of a later update, as a share of the first one's, at which it counts as a first one, if the one before "
    "was far smaller",
    "optimizer-state-lost",
)  # fmt: skip
SMALLER = Threshold(0.8, "largest size of the update before it, as a share of the first one's", "optimizer-state-lost")
GROWN = Threshold(
    2.0, "smallest growth of a gradient's norm in a step that explains a larger update", "optimizer-state-lost"
)
FIRST_SIZE = Threshold(
    0.2, "smallest root mean square of the first update of the weights that it moves, in learning rates: Adam's moves each by "
    "nearly one where its epsilon is small against the gradient",
    "optimizer-moves-nothing",
)  # fmt: skip
KL_GONE = Threshold(
    0.1, "share of the KL divergence from the reference policy, before a step, that must exceed what rounding makes of one of 0, "
    "for its disappearance within a step to count", "reference-is-another-policy",
)  # fmt: skip
ADAPTER_SCALE = Threshold(
    1 / 24, "smallest alpha / rank of an adapter with the default learning rate", "learning-rate-too-low"
)
GRADIENT_GONE = Threshold(
    0.1, "largest share of a gradient's entries other than 0 that may be 0 where the optimizer sees them", "no-gradient"
)
OPPOSITE = Threshold(
    0.5,
    "size of a negative cosine of the two above which the optimizer sees the gradient's negative",
    "gradient-backwards",
)
