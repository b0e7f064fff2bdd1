"""Thresholds of what is measured in a run, or in rollouts and steps of the doctor's own."""

from __future__ import annotations

from plumbob.trainer.diagnosis.thresholds.kinds import ByPrecision, Threshold

# Engine and trainer

SYNC_PARITY = ByPrecision(
    1e-3, 0.25, "largest mean |difference| of engine and trainer log-probabilities on fixed tokens after a weight "
    "sync, in nats per token; above it the run stops (--parity-limit)",
    "weights-not-synced",
)  # fmt: skip
SAMPLING_GAP = ByPrecision(
    1e-3, 0.05, "largest mean |difference| of engine and trainer log-probabilities on sampled tokens, in nats per "
    "token. Healthy runs have 5e-7 in float32 and about 0.012 in bfloat16 (huggingface/trl#4772)",
    "engine-trainer-mismatch", "sampling-truncated", "weights-not-synced", "saved-model-differs",
)  # fmt: skip
ROUNDING_GAP = Threshold(
    1e-4, "largest mean difference of engine and trainer on sampled tokens if both compute in float32 in one process, in nats. "
    "Rounding there gives 1e-7 to 1e-5; weights or positions in bfloat16 give 1e-4 and more",
    "engine-trainer-mismatch",
)  # fmt: skip
GAP_GROWTH = Threshold(
    100,
        "largest mean |difference| of engine and trainer log-probabilities on sampled tokens, as a multiple of its "
        "value in the first step, in float32; up to 1e-5 nats per token is always allowed",
    "engine-trainer-mismatch", "weights-not-synced",
)  # fmt: skip
OTHER_TOKENS = ByPrecision(
    1e-3, 0.05, "largest change of a token's log-probability by other rows of its microbatch or by later tokens of its row, in "
    "nats; in bfloat16 the mean over tokens, because rounding alone changes one of thousands by 0.1",
    "rows-see-each-other",
)  # fmt: skip
BLIND = Threshold(
    1e-6, "smallest mean change of log-probabilities that another prompt, or other tool results, must cause, in nats",
    "loss-mask-as-attention-mask",
)  # fmt: skip
PERMUTED = Threshold(
    0.1, "largest difference of engine and trainer after the log-probabilities of each rollout are sorted, as a share of the "
    "difference before: they are the same numbers, at other tokens",
    "logprobs-permuted",
)  # fmt: skip
PERMUTED_GAP = Threshold(
    0.02, "smallest mean difference of engine and trainer at which it is asked whether sorting takes it away, in nats per "
    "token. Sorting makes small noise smaller, too; in bfloat16 it is 0.005",
    "logprobs-permuted",
)  # fmt: skip
SAVED_GAP = ByPrecision(
    1e-5, 0.01, "largest mean difference of the trained model and the one that the run saved, loaded afresh, in nats per "
    "token on fixed ids. Both are computed in float32, with --bf16 too, where the limit is higher because that was measured on "
    "CPUs only; it is also higher for a model whose float32 log-probabilities have larger rounding errors, as measured when it "
    "is loaded",
    "saved-model-differs",
)  # fmt: skip
LOOKALIKE = Threshold(
    0.1, "largest distance of two tokens' rows of the output embedding at which a model cannot tell them apart, as a share "
    "of the row's length. Of the tokens that Qwen2.5-Coder writes, none has another within it",
    "call-tokens-untrained",
)  # fmt: skip
MANY_LOOKALIKES = Threshold(
    8, "smallest number of other tokens within that distance of a token of tool calls at which the model cannot write it",
    "call-tokens-untrained",
)  # fmt: skip
LEFT_OUT = Threshold(
    0.1, "largest part of the trainer's probability that may lie on tokens which the engine can never sample, as a "
    "share of the probability of all tokens that were not sampled",
    "sampling-truncated",
)  # fmt: skip
LEFT_OUT_MASS = Threshold(
    0.01, "largest part of the trainer's probability that may lie on tokens which the engine can never sample, as a "
    "share of all probability",
    "sampling-truncated",
)  # fmt: skip
ARRIVED = Threshold(
    0.1, "largest share of a large known weight change that may be missing from the engine's log-probabilities",
    "weights-not-synced", "engine-stale", "adapter-not-applied", "adapter-bound-to-no-module",
)  # fmt: skip
ROUNDED = Threshold(
    0.3, "largest share of a small known weight change that may be missing from the engine's log-probabilities; above "
    "it, rounding lost the change",
    "merged-in-bf16",
)  # fmt: skip
UNEXPLAINED_REST = Threshold(
    0.05, "largest share of a difference of engine and trainer that may remain under a condition which explains it. A "
    "wrong condition seldom leaves less than a third; a fitted number that is off by 1% leaves about 1%",
    "temperature-not-applied", "positions-shifted", "adapter-scale-differs", "head-not-tied", "prompt-replaced",
    "logprobs-permuted",
)  # fmt: skip
OTHER_ORDER = ByPrecision(
    1e-3, 0.05, "largest share of pairs of tokens that engine and model may have in another order of probability after the same "
    "prompts, where they agree on given tokens; 0 in float32 whatever a sampler does to the prompt's own logits, and up to a half "
    "in another context",
    "prompt-replaced",
)  # fmt: skip
ARITHMETIC = Threshold(
    0.15, "largest share of such pairs after a prompt of one token that wrong arithmetic turns, such as a cache of 8 bits (0.1 to "
    "0.15); another context must then turn twice as many after longer prompts", "prompt-replaced",
)  # fmt: skip
SAME_BIAS = Threshold(
    0.5, "share of the pairs of tokens whose difference the engine changes, that it changes by the same amount after each "
    "prompt, above which it is a logit bias and not another prompt",
    "prompt-replaced",
)  # fmt: skip
MUTED_TOKENS = Threshold(
    0.1, "largest share of sampled tokens that --importance-correction may mask", "correction-mutes-rollouts"
)
MUTED_WEIGHT = Threshold(
    0.7, "smallest mean importance weight of sampled tokens, before --importance-correction bounds it",
    "correction-mutes-rollouts",
)  # fmt: skip
STALE_SHARE = Threshold(
    0.3, "largest share of rollouts that may be discarded for being older than --max-staleness", "rollouts-too-old"
)

STALE_LENGTH = Threshold(
    1.5, "largest ratio of the mean length (in tokens, or in seconds) of the rollouts that training leaves out to that "
    "of the others",
    "drops-are-biased",
)  # fmt: skip
STALE_NOTICED = Threshold(
    0.05, "smallest share of rollouts that --max-staleness discards, or that fail, at which their length is judged",
    "drops-are-biased",
)  # fmt: skip

# Environment and limits

FAILED_ROLLOUTS = Threshold(
    0.2,
        "largest share of rollouts that may end in an error; above it, the remaining rollouts of their groups are "
        "not a fair sample",
    "environment-fails", "engine-fails",
)  # fmt: skip
BROKEN_GROUPS = Threshold(
    0.3, "largest share of groups that may be left out because the engine failed on one of their rollouts or more",
    "engine-fails",
)  # fmt: skip
STUCK_ROLLOUTS = Threshold(
    0.02, "largest share of rollouts in which a tool, hook or reward may exceed --max-tool-seconds", "environment-hangs"
)
NO_TURN = Threshold(0.1, "largest share of rollouts that may end before the model's first turn", "truncated-context")
TOOL_ERRORS = Threshold(
    0.5, "largest share of tool calls that may end in an error. Where tools run programs that the policy wrote, it is "
    "normal that a third of the calls fails, and the policy learns from it",
    "tools-fail",
)  # fmt: skip
MALFORMED_CALLS = Threshold(
    0.7, "largest share of a run's first tool calls that may be impossible to parse", "calls-malformed"
)
UNREAD_CALLS = Threshold(
    0.3, "largest share of a run's first tool calls that may be in a form that is not read", "calls-in-unread-form"
)
CUT_SHARE = Threshold(
    0.3, "largest share of rollouts that a limit may cut off",
    "truncated-turns", "truncated-context", "truncated-rollouts",
)  # fmt: skip
ALL_TURNS = Threshold(
    0.9, "share of --max-turns that rollouts may take on average, or of rollouts that may take all of them, where some end there",
    "truncated-rollouts",
)  # fmt: skip
CUT_STEPS = Threshold(
    20, "number of steps after which a share of cut-off rollouts of up to a half counts, if it has not fallen",
    "truncated-turns", "truncated-context", "truncated-rollouts",
)  # fmt: skip
NONE_TRAINED = Threshold(
    0.9, "share of the sampled tokens that the loss mask leaves out above which it is on other tokens altogether, and not shifted",
    "context-tokens-trained",
)  # fmt: skip
COPIED_ROWS = Threshold(
    0.5, "share of a step's rows above which copies of other rows leave its groups without variety, and do not only "
    "repeat rollouts",
    "groups-without-variety",
)  # fmt: skip
CALIBRATED = Threshold(
    6.0, "largest number of standard errors by which the sampled tokens' log-probabilities may differ, over stored rollouts, from "
    "what the entropies of the policy lead to expect",
    "temperature-not-applied", "engine-trainer-mismatch",
)  # fmt: skip
CALIBRATED_SHARE = Threshold(
    0.05, "largest such difference, as a share of the entropies' sum",
    "temperature-not-applied", "engine-trainer-mismatch",
)  # fmt: skip
UNLIKELY_END = Threshold(
    -11.5, "log-probability of an end token, in nats (1e-5), below which something else than the policy has ended a turn: even of "
    "turns of a thousand tokens, a policy would so end 1% at most",
    "stop-token-wrong",
)  # fmt: skip
RUN_ON_SHARE = Threshold(
    0.05, "largest share of turns that may continue after an end token, stop at a token that is not the chat template's end "
    "token, or end with one that the policy hardly ever samples there",
    "stop-token-wrong",
)  # fmt: skip

# Reward and groups

REWARD_TOLERANCE = Threshold(
    1e-6, "largest difference of two rewards that count as equal",
    "reward-nondeterministic", "reward-constant", "evaluation-parses-differently", "oracle-fails",
)  # fmt: skip
SAME_POSITIONS = Threshold(
    0.02, "largest share of a row's positions at which the loss mask may say otherwise than the gradient: a token that "
    "is certain has none",
    "loss-mask-shifted", "context-tokens-trained", "sampled-tokens-masked",
)  # fmt: skip
ADVANTAGE_TOLERANCE = Threshold(
    1e-6, "largest difference of an advantage from its value by the settings' formula, as a share of the largest "
    "advantage (at least 1). Both are computed in float64, which rounds at 1e-16",
    "advantages-wrong", "rewards-of-other-rollouts",
)  # fmt: skip
ADVANTAGE_OF_TOKEN = Threshold(
    1e-4, "largest difference of an advantage that reaches the loss, in float32, from its value by the settings' formula, "
    "as a share of the largest advantage (at least 1)",
    "advantages-wrong", "rewards-of-other-rollouts",
)  # fmt: skip
LARGE_REWARD = Threshold(
    10.0, "absolute value of a reward above which the doctor's verdict is unsure", "reward-not-finite"
)
NOT_FINITE = Threshold(0.1, "largest share of rollouts whose reward may be NaN or infinite", "reward-not-finite")
LITTLE_SIGNAL = Threshold(
    0.3, "smallest share of groups, before a run, in which the rewards must differ",
    "never-succeeds", "task-solved", "groups-without-variety", "too-little-signal", "few-groups-differ",
)  # fmt: skip
NO_SIGNAL = Threshold(
    0.8,
        "share of groups without a signal (all rollouts succeed, or all fail), in a run's first steps, at or above "
        "which there is too little to learn from",
    "never-succeeds", "task-solved", "groups-without-variety", "temperature-too-high",
)  # fmt: skip
SOLVED = Threshold(
    0.95,
    "mean reward before a run, as a share of the best reward, at or above which the tasks count as solved",
    "task-solved",
)
FORM_SHARE = Threshold(
    0.8, "largest share of the reward's variance within groups that may come from the format of replies",
    "reward-format-dominated",
)  # fmt: skip
TINY_DEVIATION = Threshold(
    0.05,
        "standard deviation of a group's rewards, as a share of the standard deviation of the step's rewards, "
        "below which it counts as tiny",
    "tiny-std-scaling",
)  # fmt: skip
TINY_SHARE = Threshold(
    0.1, "largest share of the summed |advantage| that may come from groups with a tiny standard deviation",
    "tiny-std-scaling",
)  # fmt: skip
TINY_SPREAD = Threshold(
    0.02, "largest difference of two rewards of a group, as a share of the largest reward, below which "
    "`groups/tiny_spread_share` counts the group",
    "tiny-std-scaling",
)  # fmt: skip
TINY_EARNED = Threshold(
    0.02, "standard deviation of a group's rewards, as a share of what its task's perfect transcript earns above an empty reply, "
    "below which scaling them makes them large", "tiny-std-scaling",
)  # fmt: skip
TINY_GROUPS = Threshold(
    0.25, "largest share of the groups with a signal that `groups/tiny_spread_share` may count", "tiny-std-scaling"
)
HELD_OUT_APART = Threshold(
    0.3, "largest difference of held-out and training reward before training, as a share of the reward's scale. It is "
    "a failure only if the difference also exceeds three standard errors",
    "evaluation-differs",
)  # fmt: skip
HELD_OUT_FALL = Threshold(
    0.1, "largest fall of the held-out reward from its best value while the training reward rises, as a share of the "
    "reward's scale. It is a failure only if the fall also exceeds chance",
    "reward-hacked",
)  # fmt: skip
HOT = Threshold(
    1.5, "--temperature at or above which failing rollouts are attributed to the temperature", "temperature-too-high"
)

# The update

NO_GRADIENT = Threshold(
    1e-12, "gradient norm below which a step with a signal counts as having no gradient", "no-gradient"
)
GRADIENT_REPEATS = ByPrecision(
    1e-3, 0.05, "largest relative difference of two gradients of the same rows, divided into the same or other "
    "microbatches",
    "normaliser-depends-on-microbatches", "dropout-in-training",
)  # fmt: skip
DROPOUT_NOISE = Threshold(
    0.45, "largest relative difference of two gradients of the same rows that dropout may cause. Dropout of 0.05, 0.1, 0.3 "
    "and 0.5 causes 0.12 to 0.3, 0.18, 0.59 and 0.5",
    "dropout-in-training",
)  # fmt: skip
EPSILONS_LEFT = Threshold(
    2,
    "smallest gradient per weight after clipping, in multiples of the optimizer's epsilon",
    "gradient-clipped-to-nothing",
)
GRADIENT_LEFT = Threshold(
    0.1,
    "smallest share of the clipped gradient's norm that must be left where the optimizer sees it",
    "gradient-clipped-to-nothing",
)
STILL_TENSORS = Threshold(
    0.2, "largest share of the trained tensors that may stand still in each of five steps, such as experts that no token "
    "reached", "optimizer-moves-nothing",
)  # fmt: skip
REFERENCE_KL = ByPrecision(
    1e-5, 1e-3, "largest KL divergence from the reference policy before the first update, in nats per token. It is 0 where both "
    "are computed alike",
    "reference-is-another-policy",
)  # fmt: skip
MISWEIGHTED = Threshold(
    0.01, "largest share of a step's sampled tokens at which the loss may have another slope than their advantage says",
    "loss-differs-from-settings",
)  # fmt: skip
MOVED_SHARE = Threshold(
    0.5, "smallest share of the weights with a gradient that one update must change",
    "weights-in-bf16", "optimizer-moves-nothing",
)  # fmt: skip
SAME_DIRECTION = Threshold(
    0.9, "smallest cosine of the gradient that was computed and the one that the optimizer sees; 1 in a correct run",
    "does-not-overfit",
)  # fmt: skip
UPHILL = Threshold(
    0.2, "largest share of weights with a large gradient that the first update may move along it; 0 in a correct run, and half of "
    "them where the optimizer sees another gradient. With so few against it, it is the gradient's negative",
    "gradient-backwards", "does-not-overfit",
)  # fmt: skip
STEP_OF_RATE = Threshold(
    0.01, "smallest share of the learning rate by which Adam's first update must move weights with a gradient, on average; about 1 "
    "where its epsilon is small against the gradient",
    "optimizer-moves-nothing",
)  # fmt: skip
WARMED_UP = Threshold(
    0.5, "smallest share of --learning-rate that the schedule must reach in the course of the run", "warmup-too-long"
)
TOO_FAR = Threshold(
    0.03, "largest change of the policy on other rollouts by one update, in nats per token. The bundled models change "
    "by up to 0.001 at their default learning rates, by 0.025 to 0.05 at ten times these, and by 2 at a hundred times",
    "learning-rate-too-high",
)  # fmt: skip
TOO_NEAR = Threshold(
    1e-3, "smallest change of the policy by a hundred updates in the same direction, or by those of the run if they are more, "
    "in nats per token",
    "learning-rate-too-low",
)  # fmt: skip
BREAKING_KL = Threshold(
    1.0,
        "largest change of the policy in one step, in nats per token; if the reward falls after a larger change, "
        "the step is the cause. Healthy steps of the bundled models, which have high learning rates, reach 0.2",
    "learning-rate-too-high",
)  # fmt: skip
LARGE_STEP = Threshold(
    0.05, "change of the policy in one step, in nats per token, that is the cause if the three steps after it earn less than a "
    "tenth of the reward before",
    "learning-rate-too-high",
)  # fmt: skip
RESTLESS = Threshold(
    0.05, "largest median change of the policy per step, in nats per token, while the reward does not rise",
    "learning-rate-too-high", "policy-changes-in-vain",
)  # fmt: skip
RATE_APART = Threshold(
    0.2, "largest |log ratio| of the learning rate that an update has by its size, and of that of the settings. Rounding "
    "of the weights changes the measured rate by up to 2%; a schedule that counts one step too many in a run of 200 "
    "changes it by 1%, and Adam without its bias correction by 68%",
    "schedule-hides-rate",
)  # fmt: skip
KL_PULL = Threshold(
    1.0, "largest strength of the KL term's gradient, as a multiple of that of the advantages", "kl-too-large"
)
KL_SETTLED = Threshold(
    1e-4, "smallest KL divergence from the reference policy, in nats per token, at which reward and KL term may pull "
    "equally after the first update. With 7e-4, the bundled policy learned MuSiQue, at a divergence that rose to 0.01",
    "kl-too-large",
)  # fmt: skip
CLIPPED = Threshold(
    0.3, "largest share of sampled tokens whose gradient the ratio clip may remove (gspo: 0.7)", "ratio-clipped"
)
CLIP_ROOM = Threshold(
    10, "largest root mean square change of tokens' log-probabilities by the updates of a step, in multiples of the wider clip "
    "bound. At the default bounds the bundled models have 0.2; gspo's bounds with token ratios give 100 and more",
    "ratio-clipped",
)  # fmt: skip
ENTROPY_FALL = Threshold(
    0.2, "smallest entropy, as a share of its value in the first steps, while the reward does not rise",
    "entropy-collapse",
)  # fmt: skip
ENTROPY_RISE = Threshold(
    2, "largest entropy, as a multiple of its value in the first steps, while the reward falls", "entropy-explosion"
)
SAME_GRADIENT = Threshold(
    1e-5, "largest difference of the gradients with advantages of +1 and of -1, as a share of their norms, at which rewards "
    "have no effect; without a KL term it is 1",
    "policy-term-missing",
)  # fmt: skip
DECAYED = Threshold(
    0.9, "smallest share of every weight that decay may leave of it in a hundred updates (or in the run, if it has fewer), "
    "without any gradient: .82 after 12 steps destroys the bundled policy",
    "weight-decay-too-high",
)  # fmt: skip
DECAYED_BY_THE_END = Threshold(
    0.5, "smallest share of every weight that decay may leave at the end of a run, however long it is",
    "weight-decay-too-high",
)  # fmt: skip
