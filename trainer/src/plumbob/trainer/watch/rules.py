"""The rules of the watch. Each checks one property of a run's metrics so far, in constant time.

A rule waits for five steps, unless fewer are conclusive. Whether the reward rises is judged by an interval over groups
(`History.rises`). Rules that a gain only excuses, such as those about lengths, accept the rise itself as well
(`History.gained`): there, chance can delay a warning, but not make one.
"""

from __future__ import annotations

from plumbob.trainer.watch.drift_rules import LEAST_GAIN, abandoned, growing_gap, harder, length, repetition, spikes
from plumbob.trainer.watch.environment_rules import (
    STOPS,
    errors,
    first_turns,
    hangs,
    malformed_calls,
    tool_errors,
    truncation,
    unread_calls,
    unused_tools,
)
from plumbob.trainer.watch.history import WINDOW, History, Rule, fails
from plumbob.trainer.watch.late_rules import breaks, memory
from plumbob.trainer.watch.optimizer_rules import cleared, state_kept
from plumbob.trainer.watch.ratio_rules import ROOM, clipping, on_policy, room
from plumbob.trainer.watch.reward_rules import (
    components,
    hacking,
    held_out,
    limits_of_evaluation,
    live_groups,
    prompted,
    scaling,
    seen_again,
    variety,
)
from plumbob.trainer.watch.row_rules import (
    advantages,
    all_move,
    apart,
    downhill,
    ends,
    headers,
    kept,
    masks,
    misplaced,
    one_task,
    own_rollouts,
    reference,
    steady,
    tools_shown,
    weighed,
    weights,
)
from plumbob.trainer.watch.sampling_rules import correction, dropped_lengths, gap, sampling, staleness
from plumbob.trainer.watch.settings_rules import (
    ADAPTER,
    HAS_DIRECTION,
    REACHES_PEAK,
    adapter_scale,
    kl_estimator,
    warm_up,
)
from plumbob.trainer.watch.update_rules import (
    breaking,
    decay,
    entropy,
    finite,
    gradient,
    kl_penalty,
    movement,
    schedule,
)

RULES: tuple[Rule, ...] = (
    Rule("top-p, top-k and min-p do not bias training", sampling),
    Rule("prompts name the environment's tools", tools_shown),
    Rule("first prompts open an assistant turn", headers),
    Rule("rows are the step's own rollouts", own_rollouts),
    Rule("the loss mask is on the sampled tokens", masks),
    Rule("the rollouts of a group are of one task", one_task),
    Rule("turns end where the policy ends them", ends),
    Rule("a step begins with the weights of the step before", kept),
    Rule("all microbatches of an update see the same weights", steady),
    Rule("engine and trainer agree on sampled tokens", gap),
    Rule("engine and trainer stay as close as they were", growing_gap),
    Rule("the importance correction leaves most of the gradient", correction),
    Rule("rollouts are recent enough to be used", staleness),
    Rule("tools and rewards return in time", hangs),
    Rule("rollouts end without errors", errors),
    Rule("rollouts that are left out are no longer than others", dropped_lengths),
    Rule("rollouts reach their first turn", first_turns),
    Rule("the tools work", tool_errors),
    Rule("tool calls can be parsed", malformed_calls),
    Rule("tool calls are in a form that is read", unread_calls),
    Rule("tools are called", unused_tools),
    Rule("rollouts end by themselves", truncation),
    Rule("rollouts do not end in repetitions", repetition),
    Rule("each rollout is trained with its own reward", misplaced),
    Rule("advantages follow from the rewards", advantages),
    Rule("tokens have the weights of the loss type", weights),
    Rule("the loss weighs tokens by their advantages", weighed),
    Rule("groups have a signal", variety),
    Rule("enough groups of a step have a signal", live_groups),
    Rule("there are many tasks", seen_again),
    Rule("reward scaling does not amplify tiny differences", scaling),
    Rule("the signal comes from the answer, not from the format", components),
    Rule("held-out tasks are not trained on", apart),
    Rule("training and held-out rewards agree before training", held_out),
    Rule("held-out rollouts have the limits of training", limits_of_evaluation),
    Rule("held-out and new training tasks earn the same", prompted),
    Rule("the held-out reward follows the training reward", hacking),
    Rule("rewards and gradients are finite", finite),
    Rule("groups with a signal give a gradient", gradient),
    Rule("the learning rate is that of the settings", schedule),
    Rule(REACHES_PEAK, lambda h: warm_up(h.config)),
    Rule(ADAPTER, lambda h: adapter_scale(h.config)),
    Rule("weight decay leaves the weights", decay),
    Rule("updates change the weights and the policy", movement),
    Rule("the first update follows its gradient downhill", downhill),
    Rule("an update moves every trained tensor", all_move),
    Rule("the reference policy is the initial policy", reference),
    Rule("steps are small enough", breaking),
    Rule(HAS_DIRECTION, lambda h: kl_estimator(h.config)),
    Rule("the KL penalty pulls less than the advantage", kl_penalty),
    Rule("the ratio clip leaves a gradient", clipping),
    Rule(ROOM, room),
    Rule("the importance ratio is 1 where each batch has one update", on_policy),
    Rule("each update has its own gradient", cleared),
    Rule("the optimizer remembers earlier gradients", state_kept),
    Rule("gradient norms stay in bounds", spikes),
    Rule("the entropy stays in bounds", entropy),
    Rule("tools are used as at first", abandoned),
    Rule("rollouts stay as long as they were", length),
    Rule("tasks stay as hard as they were", harder),
    Rule("the policy keeps what it has learned", breaks),
    Rule("memory lasts to the run's end", memory),
)
"""All rules, in the order of the doctor's probes: an earlier failure may cause later ones."""


def contradicted(h: History, cause: str | None) -> bool:
    """Whether later steps contradict a cause that a run's first steps showed."""
    if h.steps < 2 * WINDOW:
        return False
    if cause == "task-solved":  # the first tasks were easy, and the later ones are not
        return not h.solved and h.gain < -LEAST_GAIN
    if cause in {named for named, _ in STOPS.values()}:  # the policy learned to be brief
        return not fails(truncation(h))
    # Steps that are too large, and decay, lose what was learned.
    return cause in ("learning-rate-too-high", "policy-changes-in-vain", "weight-decay-too-high") and h.gained(
        LEAST_GAIN
    )
