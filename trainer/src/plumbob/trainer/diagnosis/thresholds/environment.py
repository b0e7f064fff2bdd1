"""Thresholds of data and environment, and of what the model makes of them."""

from __future__ import annotations

from plumbob.trainer.diagnosis.thresholds.kinds import ByPrecision, Threshold

FEW_TASKS = Threshold(
    32, "smallest number of different training tasks. With fewer, the share of solved tasks is known to no better than "
    "9 percent points (one standard error, at half of them solved), and it is for these tasks alone",
    "few-distinct-tasks",
)  # fmt: skip
LEFT_BY_LENGTH = Threshold(
    0.1, "share of the training tasks below which --max-prompt-length leaves so few that four times as many count as few",
    "few-distinct-tasks",
)  # fmt: skip
SEEN_OFTEN = Threshold(
    3,
    "smallest number of times that each of few tasks is taken in a run at which they are too few",
    "few-distinct-tasks",
)
DUPLICATES = Threshold(0.2, "largest share of training tasks that may be copies of other ones", "duplicate-tasks")
COMPARED_PROMPTS = Threshold(
    4, "smallest number of training prompts, and of held-out ones, that are compared", "evaluation-prompted-differently"
)
GIVEN_AWAY = Threshold(
    0.9, "smallest share of the prompts with a certain text in which the answer follows that text, so that the text gives "
    "it away. Where a prompt lists options, an option follows the text and is the answer in half of the prompts at most",
    "answer-in-prompt",
)  # fmt: skip
GIVEN_AWAY_SHARE = Threshold(
    0.15, "smallest share of all first prompts in which the answer must be given away", "answer-in-prompt"
)
GIVEN_AWAY_TASKS = Threshold(
    6, "smallest number of first prompts in which the answer must be given away", "answer-in-prompt"
)
SILENT_ZEROS = Threshold(
    0.5, "largest share of tasks whose oracle earns nothing that is attributed to single tasks; above it, the reward or the "
    "oracle is wrong for all",
    "grader-swallows-errors", "oracle-fails",
)  # fmt: skip
SLOW_SCORING = Threshold(
    5, "longest time that a reply of 10,000 characters may take to be scored without a remark, in seconds"
)
FORM_OUTWEIGHS = Threshold(
    0.75, "largest share of what a perfect transcript earns that one without content may earn by its form, where another "
    "component of the reward tells the two apart",
    "reward-format-dominated",
)  # fmt: skip
EXPLOITABLE = Threshold(
    0.5, "largest share of what an oracle earns above an empty reply that a transcript which solves nothing may earn",
    "reward-exploitable",
)  # fmt: skip
NEAR_ACCEPTED = Threshold(
    0.5, "largest share of tasks that may pay a wrong answer near to the right one as much as the right one",
    "reward-exploitable",
)  # fmt: skip
HELD_OUT_CHANCE = Threshold(
    0.02, "probability with which a model would by chance succeed in so few held-out tasks, below which it is asked whether "
    "its replies are right for other held-out tasks",
    "evaluation-parses-differently",
)  # fmt: skip
HELD_OUT_NEVER = Threshold(
    0.001, "the same probability, below which it is named that a model never succeeds in held-out tasks that are a random "
    "sample of the same tasks: about three standard errors, as in the watch", "evaluation-parses-differently",
)  # fmt: skip
RIGHT_ELSEWHERE = Threshold(
    4,
    "smallest number of held-out tasks, of 16, with a reply that is right for another one",
    "evaluation-parses-differently",
)
WRONG_ALIKE = Threshold(
    0.4, "largest difference between what a wrong answer earns in held-out and in training tasks, as a share of the right one",
    "evaluation-parses-differently",
)  # fmt: skip
EXPLOITABLE_EMPTY = Threshold(
    0.75, "largest share of the reward's range, from the worst transcript to the oracle's, that an empty reply may earn. A "
    "reward of -1, 0 and 1 for wrong, no and right answers gives it half",
    "reward-exploitable",
)  # fmt: skip
CHEAP_PLAYED = Threshold(
    6, "smallest number of tasks in which a kind of cheap transcript is played to be judged", "reward-exploitable"
)
JUDGED_RESULTS = Threshold(
    8, "smallest number of tool results of oracles that are judged", "tools-return-nothing", "tool-results-cut"
)
EMPTY_RESULTS = Threshold(0.5, "largest share of the tool results of oracles that may be empty", "tools-return-nothing")
NEEDS_HELD = Threshold(
    0.1, "share of an oracle's later arguments and answers that must stand in what it has read, if results are empty or all "
    "the same",
    "tools-return-nothing",
)  # fmt: skip
NEEDS_HELD_WHOLE = Threshold(
    0.5, "share of an oracle's later arguments and answers that must stand in what it has read, if tool results end inside "
    "texts of the task's data, are those of another task, or are the same for all calls",
    "tool-results-cut", "tool-results-mixed", "tools-return-nothing",
)  # fmt: skip
ANSWERS_UNREAD = Threshold(
    0.1, "largest share of last messages, beyond chance, that may end with the task's right answer in rollouts that all earn "
    "nothing",
    "answers-not-parsed",
)  # fmt: skip
EVER_RIGHT = Threshold(
    0.02, "smallest share of rollouts that are right, below which a reward that follows the form means nothing",
    "reward-format-dominated",
)  # fmt: skip
LIVE_GROUPS = Threshold(
    4, "smallest expected number of groups with a signal in a step. The mean of fewer is chance: its standard error is more "
    "than half of the spread of single groups",
    "too-little-signal", "few-groups-differ",
)  # fmt: skip
LIVE_ROLLOUTS = Threshold(
    32, "number of rollouts in groups with a signal, in a step, that is enough whatever the number of groups",
    "too-little-signal", "few-groups-differ",
)  # fmt: skip
ALIKE_PROMPTS = Threshold(
    0.2,
    "smallest share of tasks without tools whose prompts other tasks with other answers have, too",
    "truncated-context",
)
CAPITALS = Threshold(
    0.3,
    "largest difference of the share of capitals in training and in held-out prompts",
    "evaluation-prompted-differently",
)
NEVER_HELD = Threshold(
    50, "number of later arguments and answers of perfect transcripts from which on it is a fault that hardly one of them "
    "stands in what was read before",
    "tools-return-nothing",
)  # fmt: skip
COLD = Threshold(
    0.3, "largest temperature at which it, and not the task, is why most groups have no signal", "few-groups-differ"
)
DEAD_SHARE = Threshold(
    0.6,
    "largest share of groups without a signal that passes without a remark, and that must be exceeded for certain "
    "where a larger group size would give a signal",
    "few-groups-differ",
)
PENALISED = ByPrecision(
    0.01, 0.05, "smallest difference between tokens that the text already has and other tokens, in how the engine's "
    "log-probabilities differ from the trainer's, that counts as a penalty, in nats",
    "engine-trainer-mismatch",
)  # fmt: skip
OTHER_SAMPLING = Threshold(
    1e6, "likelihood ratio of other settings of the sampler, or of rollouts that are copies of others, against tokens that "
    "are drawn as the engine reports. Without a fault, at most one in a million examinations exceeds it",
    "sampling-penalised", "temperature-not-applied", "sampling-truncated", "groups-without-variety",
)  # fmt: skip
EMPTY_TURNS = Threshold(
    0.02, "share of turns that are an end token alone, from which on their probability is computed", "empty-completions"
)  # fmt: skip
UNLIKELY_EMPTY = Threshold(
    1e3, "mean over all turns of 1 / probability of those that are empty, above which the model did not make them; it is 1 "
    "if it did, and above k with a probability of at most 1/k", "empty-completions",
)  # fmt: skip
CONTRADICTED = Threshold(
    3, "smallest number of tasks whose answer is contradicted by what their perfect transcript read, or by their own data",
    "oracle-fails",
)  # fmt: skip
CONTRADICTED_SHARE = Threshold(0.05, "largest share of such tasks", "oracle-fails")
CONTRADICTED_LEAST = Threshold(
    12, "smallest number of tasks whose answer must follow a text, such as an equals sign, for that text to be the place of "
    "answers",
    "oracle-fails",
)  # fmt: skip
NOT_PERFECT = Threshold(
    0.05, "how much less than 1 a task's oracle may earn with the settings for which the environment says that it earns 1",
    "oracle-fails",
)  # fmt: skip
NEVER_CALLED = Threshold(
    0.05, "largest number of tool calls per rollout at which tools count as not used", "tools-never-used"
)
REACHED = Threshold(
    0.5, "share of what a task's perfect transcript earns above an empty reply that some rollout must earn, if hardly any "
    "rollout calls a tool that every perfect transcript calls, or if few groups have a signal",
    "tools-never-used", "never-succeeds",
)  # fmt: skip
UNREAD_REPLIES = Threshold(
    0.1, "largest share of rollouts with a reply that names a tool and its arguments in a form that is not read",
    "calls-in-unread-form",
)  # fmt: skip
OTHER_RESULTS = Threshold(
    0.3, "largest share of tool results that may be others than the tool returns when it is called directly",
    "tool-results-mixed", "tool-arguments-changed", "tools-fail", "tools-return-nothing", "tool-results-wrong",
)  # fmt: skip
SAME_CHANGE = Threshold(
    0.8, "smallest share of tool results, of those that are others than the tool returns, that it must return when its "
    "arguments are changed in one way",
    "tool-arguments-changed",
)  # fmt: skip
MADE_UP_RESULTS = Threshold(
    0.05, "largest share of tool results that may change from one time to the next although the tool, called directly, "
    "returns the same",
    "tool-results-wrong",
)  # fmt: skip
CHANGED_AT_ONCE = Threshold(
    3, "smallest number of tool results, of rewards or of failed rollouts by which tasks that are played at the same time "
    "differ from the same tasks played alone",
    "tool-results-mixed", "rewards-of-other-rollouts", "environment-fails", "environment-hangs",
)  # fmt: skip
HARDLY_HELD = Threshold(
    0.05, "share of the later arguments and answers of perfect transcripts that must stand in what was read before",
    "tools-return-nothing", "tool-results-mixed",
)  # fmt: skip
SUCCESSES_EXPECTED = Threshold(
    5, "smallest number of drawn rollouts that should have succeeded, by the policy's probability of perfect transcripts, at which "
    "tasks are not out of its reach although none did: chance alone gives none with a probability of exp(-5)",
    "never-succeeds", "tools-never-used",
)  # fmt: skip
PROMPT_IN_RESULTS = Threshold(
    0.9, "share of tool results with 60 characters of a message of the first prompt that the tool itself did not return",
    "tool-results-mixed",
)  # fmt: skip
SAME_RESULTS = Threshold(
    0.9, "share of the tasks with several different calls of a tool in which all of these get the same result, where less than "
    "half of what perfect transcripts need later stands in results",
    "tools-return-nothing",
)  # fmt: skip
RESULTS_FILL = Threshold(
    0.5, "share of --max-context that tool results fill in most of the rollouts that a limit cuts off, above which they "
    "are too long", "tool-results-too-long",
)  # fmt: skip
DOUBLE_TEMPLATE = Threshold(
    0.5, "largest share of first prompts with a token of the chat template inside a message's text",
    "template-applied-twice",
)  # fmt: skip
UNLIKE_RESULTS = Threshold(
    0.3, "largest share of tool calls that rollouts of a task make at the same place, with other results",
    "tool-results-mixed",
)  # fmt: skip
CUT_QUESTIONS = Threshold(
    0.25, "largest share of training questions that may break off after a letter or a digit where others end with a mark",
    "truncated-context",
)  # fmt: skip
WHOLE_QUESTIONS = Threshold(
    0.9, "smallest share of the other questions that end with a mark, for a question that breaks off to be taken for a cut one",
    "truncated-context",
)  # fmt: skip
ROUNDED_WEIGHTS = Threshold(
    0.1, "largest difference of a tensor in engine and trainer, relative to its norm, that low precision makes: four bits make "
    "about 0.08",
    "engine-trainer-mismatch",
)  # fmt: skip
PAID_CALLS = Threshold(
    0.1, "share of what a perfect transcript earns above an empty one that eight calls in vain may add to it",
    "reward-exploitable",
)  # fmt: skip
LENGTH_PAID = Threshold(
    0.3, "share of the variance of rewards within groups that is among rollouts that are equally right, above which what they "
    "earn for something else decides",
    "reward-wrong",
)  # fmt: skip
LENGTH_FITS = Threshold(
    0.9,
    "correlation of their rewards and their lengths, of either sign, above which it is their length",
    "reward-wrong",
)
SUCCESSES_RARE = Threshold(
    0.1, "number of the doctor's rollouts that should have succeeded, by the policy's probability of perfect transcripts, from "
    "which on it is not said that the model never succeeds",
    "never-succeeds",
)  # fmt: skip
TOLD_RIGHT = Threshold(
    0.05, "smallest share of rollouts that must seem right, and of those that must seem wrong, where it is judged whether rewards "
    "follow lengths",
    "reward-wrong",
)  # fmt: skip
