"""What the watch remembers of a run: a few rows of metrics and a few numbers, however long the run is."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.diagnosis import thresholds

Z95 = 1.96
"""Half the width of a 95% interval, in standard errors."""
WINDOW = 5
"""Number of steps that a rule averages over, and that it waits for unless fewer are conclusive."""
LAST = 3 * WINDOW
"""Number of rows that rules about late steps look at."""
MEMORIES = (("memory/peak_gib", "memory/gpu_gib"), ("memory/resident_gib", "memory/main_gib"))
"""Metrics of memory: (what a step takes, what there is)."""
COLLAPSED = 3
"""Number of steps after a large one by whose rewards a collapse is judged."""

Row = Mapping[str, float]

NORMS = 20
"""Number of gradient norms whose median a new one is compared with."""
DIFFICULTY = ("tasks/difficulty", "env/difficulty", "env/hops", "env/level")
"""Metrics that say how hard the step's tasks are; the first one that a row has counts."""


RIGHT = ("correct", "exact_match", "f1", "accuracy", "em", "solved")
"""Names of metrics and of components of the reward that say whether an answer is right."""


def names_right(name: str) -> bool:
    """Whether a row's metric of this name says whether answers are right.

    Examples: names_right("env/exact_match") -> True; names_right("reward/mean") -> False
    """
    return name.startswith(("env/", "reward/")) and name.split("/")[-1] in RIGHT


@dataclass
class Trend:
    """A straight line through all values so far, by least squares, in constant memory."""

    n: int = 0
    x: float = 0.0
    y: float = 0.0
    """Means of the positions and of the values."""
    xx: float = 0.0
    xy: float = 0.0
    yy: float = 0.0
    """Sums of products of deviations from the means."""

    def add(self, x: float, y: float) -> None:
        """Take in one more value (Welford's update)."""
        self.n += 1
        dx, dy = x - self.x, y - self.y
        self.x += dx / self.n
        self.y += dy / self.n
        self.xx += dx * (x - self.x)
        self.xy += dx * (y - self.y)
        self.yy += dy * (y - self.y)

    @property
    def slope(self) -> float:
        """Change of the value per step; 0 of fewer than two values."""
        return self.xy / self.xx if self.xx else 0.0

    @property
    def t(self) -> float:
        """The slope in units of its standard error; 0 of fewer than five values."""
        if self.n < WINDOW or not self.xx:
            return 0.0
        left = max(self.yy - self.slope * self.xy, 0.0) / (self.n - 2)
        return (
            self.slope / math.sqrt(left / self.xx) if left else math.copysign(math.inf, self.slope) * bool(self.slope)
        )


@dataclass
class History:
    """What the rules need to know of all rows of metrics so far, one row per training step."""

    config: TrainConfig
    first: list[Row] = field(default_factory=list)
    """Rows of the first `WINDOW` steps."""
    recent: deque[Row] = field(default_factory=lambda: deque(maxlen=WINDOW))
    """Rows of the last `WINDOW` steps."""
    last: deque[Row] = field(default_factory=lambda: deque(maxlen=LAST))
    """Rows of the last `LAST` steps."""
    steps: int = 0
    """Number of steps so far."""
    groups: float = 0.0
    """Number of groups so far."""
    updates: int = 0
    """Number of steps whose update was applied with a learning rate above 0."""
    best_reward: float = float("-inf")
    """Largest mean reward of `WINDOW` consecutive steps."""
    scale: float = 1.0
    """Scale of the rewards: the largest |mean reward| of a step, but at least 1."""
    negative: bool = False
    """Whether a mean reward was below 0 in some step or evaluation."""
    largest_std: float = 0.0
    """Largest standard deviation of the rewards of a step."""
    held_out: int | None = None
    """Number of held-out tasks that were evaluated; None if it is not known."""
    changes: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    """`policy_change` of the last `WINDOW` steps in which it was measured, in nats per token."""
    largest_change: float | None = None
    """Largest `policy_change` of a step so far, in nats per token; None until it is measured."""
    largest_update: float = 0.0
    """Largest change of the weights in a step so far, relative to their size: it includes the schedule's peak."""
    start: list[Row] = field(default_factory=list)
    """Rows of `first` whose rollouts come from the initial policy, as far as changes of the policy were measured."""
    changed: float = 0.0
    """Sum of all measured values of `policy_change`, in nats per token."""
    broken_by: Row | None = None
    """Row of the first step that changed the policy by more than `thresholds.BREAKING_KL`, or by more than `thresholds.LARGE_STEP`
    and left it earning hardly anything.
    """
    suspect: tuple[Row, float] | None = None
    """(row, mean reward of the last steps up to it) of the first step that changed the policy by more than `LARGE_STEP`."""
    reward_before: float = 0.0
    """Mean reward of the last `WINDOW` steps up to and including `broken_by`."""
    rewards_since: int = 0
    """Number of steps after `broken_by`."""
    evaluations: list[tuple[int, float, float | None]] = field(default_factory=list)
    """The best and the last evaluation: (step, greedy held-out reward, mean training reward of the `WINDOW` steps
    before or None).
    """
    norms: deque[float] = field(default_factory=lambda: deque(maxlen=NORMS))
    """Gradient norms of the last `NORMS` steps that had a signal and applied an update."""
    spike: tuple[float, float, float] | None = None
    """(step, gradient norm, median norm before it) of the first step whose norm is `thresholds.NORM_SPIKE` medians."""
    gaps: Trend = field(default_factory=Trend)
    """log(`sync/sampling_gap`) over the steps."""
    good_shifts: deque[float] = field(default_factory=lambda: deque(maxlen=NORMS))
    """The last `NORMS` values of `policy/good_rollouts_shift`, in nats per token."""
    memory: dict[str, Trend] = field(default_factory=lambda: {used: Trend() for used, _ in MEMORIES})
    """What steps take of each of `MEMORIES`, without the first steps, in which the optimizer's state is made."""
    difficulty: Trend = field(default_factory=Trend)
    """The first of `DIFFICULTY` over the steps."""
    sampled: tuple[int, float] | None = None
    """(step, held-out reward at the training temperature) of the last evaluation after the first step."""
    prompts_differ: bool = False
    """Whether held-out tasks were prompted otherwise than training tasks."""
    limits_differ: tuple[float, float, float] | None = None
    """Shares of the held-out and of the next step's rollouts that limits cut off, where they are far apart, and the
    number of the step's groups.
    """
    sampled_at_start: float | None = None
    """Held-out reward at the training temperature before the first step; None if it was not evaluated."""

    def add(self, row: Row) -> None:
        """Take in the metrics of the next step."""
        self.steps += 1
        if len(self.first) < WINDOW:
            self.first.append(row)
            if self.changed < thresholds.BREAKING_KL:
                self.start.append(row)
        self.recent.append(row)
        self.last.append(row)
        self.prompts_differ |= number(row, "eval/prompts_differ") > 0
        if "eval/cut_off" in row:
            groups = max(number(row, "groups/count"), 1)
            self.limits_differ = number(row, "eval/cut_off"), number(row, "rollout/truncated_share"), groups
        self.groups += number(row, "groups/count")
        self.updates += number(row, "optimizer/updates") > 0 and number(row, "optimizer/learning_rate") > 0
        self.scale = max(self.scale, abs(number(row, "reward/mean")))
        self.negative |= number(row, "reward/mean") < 0
        self.largest_std = max(self.largest_std, number(row, "reward/std"))
        self.largest_update = max(self.largest_update, number(row, "optimizer/relative_update"))
        if len(self.recent) == WINDOW:
            self.best_reward = max(self.best_reward, mean(self.recent, "reward/mean"))
        self.rewards_since += self.broken_by is not None
        self._collapse()
        self._follow(row)
        change = policy_change(row)
        # The change of a step cannot be measured if engine and trainer differ by more than it.
        mismatch = number(row, "sync/sampling_gap") > gap_limit(self.config) and not self.config.max_staleness
        if change is None or mismatch:
            return
        self.changes.append(change)
        self.changed += change
        if self.suspect is None and change > thresholds.LARGE_STEP:
            self.suspect = row, mean(self.recent, "reward/mean")
        self.largest_change = max(self.largest_change or 0.0, change)
        if change > thresholds.BREAKING_KL and self.broken_by is None:
            self.broken_by, self.rewards_since = row, 0
            self.reward_before = mean(self.recent, "reward/mean")

    def _collapse(self) -> None:
        """Take a large step for the one that broke the policy if the steps right after it earn hardly anything.

        Not if tools or rollouts begin to fail there: then rewards are gone for that reason.
        """
        if self.broken_by is not None or self.suspect is None:
            return
        step, before = number(self.suspect[0], "step"), self.suspect[1]
        after = [row for row in self.recent if number(row, "step") > step]
        if len(after) != COLLAPSED:
            return
        failed = share(after, "rollout/tool_errors", "rollout/tool_calls") > thresholds.TOOL_ERRORS
        failed |= share(after, "rollout/errored", "rollout/count") > thresholds.FAILED_ROLLOUTS
        gone = mean(after, "reward/mean") < 0.1 * before and before > 0.1 * self.scale
        if gone and not failed:
            self.broken_by, self.reward_before, self.rewards_since = self.suspect[0], before, len(after)

    def _follow(self, row: Row) -> None:
        """Take in what is followed over the whole run: gradient norm, gap of engine and trainer, difficulty."""
        norm = number(row, "optimizer/grad_norm")
        if norm > 0 and number(row, "advantage/mean_abs") > 0 and number(row, "optimizer/updates") > 0:
            usual = statistics.median(self.norms) if len(self.norms) >= WINDOW else math.inf
            # Norms below the clipping limit do no harm, however small those before were.
            if self.spike is None and norm > max(thresholds.NORM_SPIKE * usual, self.config.max_grad_norm or 1.0):
                self.spike = (number(row, "step"), norm, usual)
            self.norms.append(norm)
        if (gap := number(row, "sync/sampling_gap")) > 0:
            self.gaps.add(self.steps, math.log(gap))
        if "policy/good_rollouts_shift" in row:
            self.good_shifts.append(number(row, "policy/good_rollouts_shift"))
        for used, trend in self.memory.items():
            if self.steps > WINDOW and number(row, used) > 0:
                trend.add(self.steps, number(row, used))
        name = next((name for name in DIFFICULTY if name in row), "")
        if name and abs(value := number(row, name)) < 1e9:
            self.difficulty.add(self.steps, value)

    def evaluated(self, step: int, held_out: float, training: float | None) -> None:
        """Take in an evaluation: its greedy held-out reward, and the mean training reward before it if there is one."""
        self.negative |= held_out < 0
        best = max(self.evaluations, key=lambda evaluation: evaluation[1], default=None)
        self.evaluations = [*([best] if best is not None else []), (step, held_out, training)]

    @property
    def gain(self) -> float:
        """Rise of the mean reward from the first `WINDOW` steps to the last, in units of `scale`."""
        return (mean(self.recent, "reward/mean") - mean(self.first, "reward/mean")) / self.scale

    def gain_error(self, rows: Sequence[Row] | deque[Row] | None = None) -> float:
        """Standard error of `gain`, or of the mean reward of `rows`, in units of `scale`.

        The groups are the independent values, not their rollouts. Without `reward/group_std` (runs of earlier versions)
        the standard deviation of the rewards is taken, which is never smaller in expectation.
        """
        windows = [self.first, self.recent] if rows is None else [rows]
        everything = [row for window in (self.first, self.recent) for row in window]
        squares = [number(row, "reward/group_std", number(row, "reward/std")) / self.scale for row in everything]
        variance = sum(min(value, 1e150) ** 2 for value in squares) / max(len(squares), 1)
        return sum(variance / max(total(window, "groups/count"), 1.0) for window in windows) ** 0.5

    @property
    def rises(self) -> bool:
        """Whether the reward's rise is more than chance: its 95% interval lies above 0."""
        return self.gain > Z95 * self.gain_error()

    def gained(self, least: float) -> bool:
        """Whether the reward contradicts a cause: it has risen by `least` (in units of `scale`), or surely by less."""
        return self.gain >= least or self.rises

    @property
    def solved(self) -> bool:
        """Whether nearly every rollout earns the largest reward, so that the reward need not rise any more.

        If rewards exceed 1, their maximum is unknown (`scale` only follows the mean). Then the task counts as solved if
        all rollouts earn the same high reward in more than half of the groups: with 8 rollouts per group, that is when
        92% of the rollouts earn the maximum.
        """
        if self.scale > 1:
            return share(self.recent, "groups/all_pass", "groups/count") > 0.5
        return mean(self.recent, "reward/mean") > 0.9

    @property
    def deviation(self) -> float:
        """Upper bound of the standard deviation of rewards.

        Half the range 0..`scale`, or -`scale`..`scale` if some were negative; or the largest observed one, if that is
        larger.
        """
        return max(self.scale * (1.0 if self.negative else 0.5), self.largest_std)

    @property
    def fewest_held_out(self) -> int:
        """Number of held-out tasks; a low estimate if unknown, since there may be fewer than `--eval-examples`."""
        return max(self.held_out or min(self.config.eval_examples, 32), 1)


def is_exact(config: TrainConfig) -> bool:
    """Whether engine and trainer compute in float32 in the same process, so that they differ by rounding alone."""
    return not (config.bf16 or config.engine == "vllm")


def gap_limit(config: TrainConfig) -> float:
    """Largest mean difference of engine and trainer that is healthy, in nats per sampled token."""
    return thresholds.SAMPLING_GAP[not is_exact(config)]


def largest_gap(h: History) -> float:
    """The largest difference of engine and trainer that this run may have, in nats per token."""
    limit = gap_limit(h.config)
    if not is_exact(h.config):
        return limit
    # Rounding in float32 does not grow a hundredfold while the policy learns; a difference in weights does.
    grown = max(thresholds.GAP_GROWTH * number(h.first[0], "sync/sampling_gap"), 1e-5)
    return min(limit, grown, thresholds.ROUNDING_GAP)


Outcome = tuple[str | None, str] | None
"""Verdict of a rule: (id of a cause or None if all is well, evidence); None while there is too little evidence."""


def fails(outcome: Outcome) -> bool:
    """Whether a rule has named a cause."""
    return outcome is not None and outcome[0] is not None


@dataclass(frozen=True)
class Rule:
    """A check of a run's metrics, with the function that judges it."""

    check: str
    judge: Callable[[History], Outcome]


def number(row: Row, name: str, default: float = 0.0) -> float:
    """The metric `name` of a row; `default` if it is absent (as for a limit that no rollout reached) or not finite."""
    value = row.get(name, default)
    return value if isinstance(value, int | float) and math.isfinite(value) else default


def mean(rows: Sequence[Row] | deque[Row], name: str, default: float = 0.0) -> float:
    """Mean of a metric over rows, with `default` where it is absent; 0 without rows."""
    return sum(number(row, name, default) for row in rows) / len(rows) if rows else default


def total(rows: Sequence[Row] | deque[Row], name: str) -> float:
    """Sum of a metric over rows, with 0 where it is absent."""
    return sum(number(row, name) for row in rows)


def share(rows: Sequence[Row] | deque[Row], part: str, whole: str) -> float:
    """Sum of the metric `part` divided by the sum of the metric `whole`; 0 if the latter is 0."""
    return total(rows, part) / total(rows, whole) if total(rows, whole) > 0 else 0.0


def policy_change(row: Row) -> float | None:
    """Change of the policy in a step, in nats per token: `policy/step_kl` minus the mismatch of engine and trainer.

    None if it was not measured, which is not done in every step (see `plumbob.trainer.training.metrics.scored_again`),
    or if the mismatch hides it: a difference that is not above 0 says nothing then, because neither number is exact.
    Below `ROUNDING` there is nothing to hide.
    """
    change, mismatch = number(row, "policy/step_kl", math.nan), max(number(row, "sync/mismatch_kl"), 0.0)
    if math.isnan(change) or (change <= mismatch and mismatch > ROUNDING):
        return None
    return max(change - mismatch, 0.0)


ROUNDING = 1e-11
"""Largest apparent change of an unchanged policy, in nats per token: rounding in float32 causes about 1e-13."""
