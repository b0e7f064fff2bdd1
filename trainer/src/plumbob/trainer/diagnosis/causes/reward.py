"""Causes in the reward: what it measures, and whether it tells one rollout from another."""

from __future__ import annotations

from plumbob.trainer.diagnosis.findings import Cause

CAUSES = (
    Cause(
        "reward-not-finite",
        "Rewards are NaN or infinite.",
        "Make the environment's reward functions return finite numbers, preferably between 0 and 1.",
        ("H05",),
    ),
    Cause(
        "reward-nondeterministic",
        "The same transcript gets a different reward when it is scored again: advantages are partly random.",
        "Make the reward a function of the transcript alone: no random numbers, no clock, no judge model with a "
        "temperature above 0.",
        ("H05",),
    ),
    Cause(
        "reward-constant",
        "Every transcript earns the same reward, whether it is perfect or empty: no group has an advantage.",
        "Correct the environment's reward functions until `evaluate ENV --oracle` prints a reward of 1.",
        ("H05",),
    ),
    Cause(
        "oracle-fails",
        "The environment's own perfect transcript earns no more than an empty one, or answers something else than what "
        "it has read says: right answers are not rewarded.",
        "Correct the environment's reward functions, the `oracle` method of its task, or the answers in its data, until "
        "`evaluate ENV --oracle` prints a reward of 1 for answers that are right.",
        ("H05",),
        includes=("answers-not-parsed", "grader-swallows-errors"),
    ),
    Cause(
        "answers-not-parsed",
        "Replies contain the right answer, but the reward's parser does not find it and counts them as wrong.",
        "Make the prompt ask for the format that the reward parses (an environment may have a setting for it, such as "
        "gsm8k's -a answer_style=...), or make the reward parse the format that the model uses.",
        ("H05",),
        "modelscope/ms-swift#4570",
    ),
    Cause(
        "evaluation-parses-differently",
        "The same transcript of the same task gets another reward as a held-out task than as a training task, or held-out "
        "tasks have the answers of other tasks: the evaluation does not measure what is trained.",
        "Use the same reward functions, parser and settings for the environment's training tasks and held-out tasks, and "
        "compare questions and answers of the held-out data row by row.",
        (),
    ),
    Cause(
        "reward-wrong",
        "Rewards do not follow whether answers are right: a right answer earns as little as a wrong one where it is put "
        "in other words, or something else than the answer decides. The evidence does not say whether answers are read "
        "wrongly, graded wrongly, or outweighed.",
        "Score the transcripts that the evidence names by hand, beside what each reward function and judge returns for "
        "them, and correct the one that does not follow the answer.",
        ("H05",),
        includes=(
            "answers-not-parsed",
            "oracle-fails",
            "reward-constant",
            "reward-exploitable",
            "reward-format-dominated",
            "grader-swallows-errors",
        ),
    ),
    Cause(
        "never-succeeds",
        "The model never succeeds: all rollouts of a group earn the lowest reward, so no rollout is better than "
        "another. Either the tasks are too hard for it, or something that no check found hides what they need, ends "
        "rollouts too early or counts right answers as wrong.",
        "Read a few rollouts in traces/ beside the environment's own transcripts (`evaluate ENV --oracle`). If the model "
        "sees what it needs and answers wrongly, make the tasks easier with the environment's settings (`train ENV --help` "
        "lists them), use a stronger "
        "--model, or teach the model to start, by imitation of the environment's own transcripts (`sft ENV --model "
        "MODEL --demonstrations oracle`), and then train the run directory of `sft` (`train ENV --model runs/NAME`).",
        ("H05",),
        "arXiv:2503.14476, sec. 3.2",
        symptom=True,
    ),
    Cause(
        "task-solved",
        "The model already succeeds: in nearly every group all rollouts earn the highest reward, so there is nothing "
        "to learn.",
        "Make the tasks harder with the environment's settings (`train ENV --help` lists them), or train on other "
        "tasks with --datasets.",
        ("H05",),
        "arXiv:2503.14476, sec. 3.2",
        symptom=True,
    ),
    Cause(
        "groups-without-variety",
        "In nearly every group the rollouts either all succeed or all fail, because they hardly differ, or are copies: there is "
        "nothing to compare.",
        "Raise --temperature if it is below 1 (1 samples from the policy itself), or raise --num-generations. At temperature 1, "
        "see that the engine samples as it is asked to, with a seed of its own for each rollout, and that no rollout stands for "
        "others.",
        ("H05",),
        "arXiv:2503.14476, sec. 3.2",
        includes=("temperature-not-applied", "sampling-truncated", "rollouts-repeated"),
    ),
    Cause(
        "temperature-too-high",
        "The sampling temperature is so high that hardly any rollout succeeds.",
        "Set --temperature 1, which is the default.",
        ("H05",),
    ),
    Cause(
        "reward-format-dominated",
        "Nearly all differences in reward within a group come from how replies are written, not from whether they are "
        "right: training improves the format and not the answers.",
        "Lower the weight of the reward component that the evidence names (`@vf.reward(weight=...)`), or give that "
        "component only to right answers.",
        ("H05",),
        "modelscope/ms-swift#4570",
    ),
    Cause(
        "reward-hacked",
        "The training reward rises while the held-out reward falls: the policy learns what the reward measures, not "
        "what it is meant to measure.",
        "Read the rollouts with the highest rewards in the run's traces/, and correct the reward functions that they "
        "exploit. Until then, use the checkpoint with the best evaluation (--save-total-limit sets how many are kept).",
        ("H05",),
        symptom=True,
    ),
    Cause(
        "tiny-std-scaling",
        "Advantages are divided by a standard deviation close to 0: meaningless differences in reward become "
        "full-size advantages and outweigh meaningful ones.",
        "Leave out --scale-rewards (the default is none), or use --scale-rewards batch.",
        ("H01",),
        "arXiv:2503.20783, sec. 3.1; arXiv:2508.08221",
    ),
    Cause(
        "reward-exploitable",
        "Transcripts that solve nothing earn nearly as much as perfect ones: the policy will learn to write those, and "
        "the reward rises without better answers.",
        "Make the reward refuse the transcript that the evidence quotes: compare whole answers rather than parts of them, "
        "read one answer only, and give nothing for form, or for calls, alone.",
        ("H05",),
        "Liuziyu77/Visual-RFT#176, #79",
        includes=("reward-format-dominated",),
    ),
    Cause(
        "grader-swallows-errors",
        "A reward function fails on some replies and returns 0 for them in place of raising an error, so the policy is "
        "taught to avoid what may be right.",
        "Score the transcripts of the tasks that the evidence names by hand; make the reward raise what it cannot "
        "handle in place of returning 0, so that the rollout leaves its group, and correct or remove tasks whose own "
        "answer is wrong. `evaluate ENV --oracle` shows the reward of every task.",
        ("H05",),
        "huggingface/Math-Verify#50; meta-pytorch/OpenEnv#1025",
    ),
    Cause(
        "answer-in-prompt",
        "The first prompt, or the result of the first tool call, holds the right answer at a place where a policy can read "
        "it: the reward rises by copying, and the held-out reward of tasks without it does not.",
        "Remove the answer from where the evidence shows it: a few-shot example, a template or a column of the data in the "
        "prompt, or what a tool returns beside what it was asked for.",
        ("H05",),
    ),
    Cause(
        "few-distinct-tasks",
        "The run takes the same few tasks again and again: the policy can learn their answers by heart, and the training "
        "reward says little about other tasks.",
        "Train on more tasks (the environment's settings in `train ENV --help`, such as its number of examples, or "
        "--datasets), on tasks that are no copies, or lower --max-steps.",
        ("H05",),
        includes=("duplicate-tasks",),
    ),
    Cause(
        "duplicate-tasks",
        "Many training tasks are copies of others: they are trained on more often than the rest, and the number of tasks "
        "says too much.",
        "Remove the copies from the training data.",
        ("H05",),
    ),
    Cause(
        "evaluation-differs",
        "Held-out tasks earn something else than training tasks that the policy has not been trained on: the evaluation does "
        "not measure what is trained. The evidence does not say whether prompts, limits, sampling, tasks, their answers or "
        "rewards differ.",
        "Compare rollouts of held-out tasks (`predict ENV` prints some) with those of training tasks in traces/: first their "
        "prompts, then how they end, then what the same answer earns.",
        (),
        includes=("evaluation-prompted-differently", "evaluation-parses-differently", "oracle-fails"),
    ),
    Cause(
        "evaluation-prompted-differently",
        "Held-out tasks are prompted, limited or sampled otherwise than training tasks: the evaluation measures another task "
        "than the one that is trained.",
        "Compare the prompt of a held-out task with that of a training task (`predict ENV` prints rollouts of held-out "
        "tasks; traces/ has those of training), and give both the same system prompt, tools and limits.",
        (),
        "verl-project/verl#6202",
    ),
    Cause(
        "too-little-signal",
        "In too many groups all rollouts earn the same reward, so that a step has hardly any group to learn from: the "
        "gradient is mostly chance.",
        "Raise --num-generations to the number that the evidence names, or --batch-size for more groups in a step; use "
        "--zero-signal refill; or choose tasks that succeed about half of the time.",
        ("H05",),
        "huggingface/trl#3017; huggingface/trl#2872; arXiv:2503.14476, sec. 3.2",
    ),
    Cause(
        "few-groups-differ",
        "In most groups of a step all rollouts earned the same reward: the gradient of a step is mostly chance. Groups are too "
        "small for how seldom the model succeeds, or something that no check found makes it succeed so seldom, or so often.",
        "Read rollouts of several groups in traces/ for what decides their reward. If it is the model's skill, raise "
        "--num-generations to the number that the evidence names, or --batch-size for more groups in a step; use --zero-signal "
        "refill; or choose tasks that succeed about half of the time.",
        ("H05",),
        "huggingface/trl#3017; huggingface/trl#2872; arXiv:2503.14476, sec. 3.2",
        includes=("too-little-signal",),
        symptom=True,
    ),
    Cause(
        "rewards-of-other-rollouts",
        "Samples are trained with the rewards of other rollouts, or what a rollout earns depends on those that are scored at the "
        "same time: the policy learns which rollouts came before or after good ones. The mean reward of a step looks right.",
        "Keep each reward in one object with its rollout, from scoring to the loss; where rewards are a list beside the "
        "rollouts, sort, filter and gather both in the same way.",
        ("H05",),
        "PeterGriffinJin/Search-R1#88, tenstorrent/tt-metal#46412",
        includes=("reward-nondeterministic",),
    ),
    Cause(
        "advantages-wrong",
        "Advantages are not what the settings say of the rollouts' rewards (--scale-rewards, --baseline, "
        "--overlong): with a mean over the whole step, for example, easy tasks are reinforced "
        "whatever the policy does.",
        "Compute the baseline over the rollouts of one task, and check grouping, scale and sign of the advantages against "
        "the formula in the help of these options; and see that each rollout keeps its own reward until then.",
        ("H01", "H05"),
        "sail-sg/oat#33",
        includes=("rewards-of-other-rollouts",),
    ),
    Cause(
        "tool-results-wrong",
        "What rollouts show as tool results is not what the tools return, or not what the tasks need, and the evidence does not "
        "say where it is lost: the model learns from evidence that is not there.",
        "Call the tool by hand with the arguments that the evidence names, and follow its result through cache, parser and "
        "template to the conversation in traces/.",
        ("H05", "H07"),
        includes=(
            "tools-fail",
            "tools-return-nothing",
            "tool-results-cut",
            "tool-results-mixed",
            "tool-arguments-changed",
        ),
    ),
    Cause(
        "tool-results-mixed",
        "Tool results in a rollout are those of another rollout's calls, or say something else than the tool returned, or change "
        "from one time to the next where the tool's own do not: the policy is trained on evidence that it did not ask for.",
        "Keep what a tool remembers of a rollout in that rollout's own state, not in a global variable or an attribute "
        "that concurrent rollouts share; --max-concurrent 1 shows whether that is the reason. "
        "If it is not, look at what stands between tool and conversation: a cache, a proxy, or a model that plays the tool.",
        ("H05", "H07"),
    ),
)
