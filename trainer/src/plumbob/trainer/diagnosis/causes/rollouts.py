"""Causes in the rollouts: they fail, are cut off, or are grouped wrongly."""

from __future__ import annotations

from plumbob.trainer.diagnosis.findings import Cause

CAUSES = (
    Cause(
        "environment-fails",
        "Many rollouts end in errors of the environment: the remaining rollouts of their groups are not a fair sample.",
        "Correct the error, whose message `doctor ENV` and the run's traces/ show: that of a tool, of a reward, of a time limit "
        "or of the environment's own code. `evaluate ENV --oracle` shows whether the environment works without a model.",
        ("H05",),
        includes=("environment-hangs", "tools-fail"),
    ),
    Cause(
        "engine-fails",
        "Many rollouts, or always those of one kind, such as long ones, end because no turn could be sampled, in the "
        "engine or where the chat template turns messages into tokens: their groups are left out. The environment's "
        "code did not fail.",
        "Read the error, which `doctor ENV` and the run's traces/ show. With --engine vllm, read the server's log "
        "(vllm.log in the run directory, if the run started it); if memory is short, lower --max-concurrent; if long "
        "requests are refused, raise the server's limit (vLLM: --max-model-len) or lower --max-context; report an error "
        "that you cannot explain as a bug of plumbob.",
        (),
    ),
    Cause(
        "environment-hangs",
        "A tool, hook or reward of the environment often does not return within --max-tool-seconds: its rollouts fail, "
        "and other rollouts wait for it.",
        "Give what it waits for (a server, a program, a lock) a time limit of its own, and make it raise an error then. "
        "If it is only slow, make it `async` or raise --max-tool-seconds.",
        ("H05",),
    ),
    Cause(
        "groups-mixed",
        "A group holds rollouts of different tasks: advantages mostly measure how easy a task is, not how good a "
        "rollout is.",
        "Give all rollouts of a task in a step the same `Sample.group`, and rollouts of different tasks different "
        "ones.",
        ("H05",),
        "PeterGriffinJin/Search-R1#88",
    ),
    Cause(
        "rollouts-repeated",
        "Rows that are trained on are not the rollouts that were sampled for this step, but older ones: the policy that they "
        "show is not the one that is updated.",
        "Empty the buffer of rollouts after each step, and number them, so that a step takes its own alone.",
        ("H06",),
        "PrimeIntellect-ai/prime-rl#491",
    ),
    Cause(
        "held-out-in-training",
        "Some tasks are both trained on and held out: the held-out reward does not show whether the model learns to "
        "generalise.",
        "Remove the held-out tasks from the training data, or give --eval-datasets other tasks or another split.",
        (),
    ),
    Cause(
        "stop-token-wrong",
        "Turns do not end with the end token of the model's chat template: they continue up to a limit or stop too "
        "early, and are scored as if they were complete.",
        "Add the chat template's end token to eos_token_id in the model's generation_config.json, or use the model's "
        "own chat template; if turns end where the policy would go on, remove a stop string from the server's requests.",
        ("H04",),
        "huggingface/trl#7039",
    ),
    Cause(
        "truncated-turns",
        "Turns are cut off at --max-tokens before the model has finished: the reward scores incomplete answers. Either the "
        "limit is too low, or the model does not come to an end.",
        "Read a few of these turns in traces/. If they lead to an answer, raise --max-tokens; if they repeat themselves or make "
        "no sense, look at prompt, chat template and sampling.",
        ("H04",),
        "arXiv:2503.14476, sec. 3.4",
        symptom=True,
    ),
    Cause(
        "truncated-context",
        "The conversation is cut off at the context limit, so evidence or answer is missing: the reward scores "
        "incomplete rollouts.",
        "Raise --max-context and the engine's own limit (vLLM: --max-model-len), or make the tools return less text.",
        ("H04",),
    ),
    Cause(
        "truncated-rollouts",
        "Rollouts are cut off by --max-turns or --max-seconds before the model has answered. Either the limit is too low, or "
        "episodes do not end when they should.",
        "Read a few of these rollouts in traces/. If they lead to an answer, raise --max-turns or --max-seconds, whichever the "
        "evidence names; if not, look at what tools return and at the condition by which an episode ends.",
        ("H04", "H07"),
        symptom=True,
    ),
    Cause(
        "signal-masked",
        "Groups have a signal, but --overlong mask takes all their rollouts out of the loss because they were cut off.",
        "Use --overlong keep, and raise the limit that cuts rollouts off (--max-context, --max-tokens or --max-turns).",
        ("H02", "H04"),
    ),
    Cause(
        "tools-fail",
        "A large part of the tool calls ends in an error: the policy is trained on broken tool results.",
        "Read the tool messages in the run's traces/ and correct the tool that fails; `evaluate ENV --oracle` shows "
        "whether the tools work without a model.",
        ("H07",),
    ),
    Cause(
        "calls-malformed",
        "A large part of the tool calls cannot be parsed: the tools are hardly ever used.",
        "Read the tool calls in the run's traces/; use a --model whose chat template supports tools, and raise "
        "--max-tokens if calls are cut off.",
        ("H07",),
        symptom=True,
    ),
    Cause(
        "calls-in-unread-form",
        "Replies name a tool and its arguments in a form that is not read: the model calls its tools, and nothing "
        "answers.",
        "Give the --tool-format in which the quoted reply is written, or a --model whose chat template has a form for "
        "tool calls; or teach the form first (`sft ENV --model MODEL --demonstrations oracle`).",
        ("H07",),
        "Visual-Agent/DeepEyes#55",
    ),
    Cause(
        "call-tokens-untrained",
        "The chat template writes tool calls with tokens that the model cannot write: their embeddings were never trained, "
        "and many unused tokens have the same. A reply has any of these in their place, and LoRA cannot change that.",
        "Leave out --tool-format: the tools are then described, and called, in ordinary text. Or use a --model that was "
        "trained to call tools.",
        ("H07",),
    ),
    Cause(
        "tools-never-used",
        "The environment offers tools, and its own perfect transcripts use them, but hardly any rollout calls one, or "
        "the one that hands in the answer: what is never sampled cannot be reinforced.",
        "Read the prompt and a few replies. Use a --model whose chat template describes tools, ask for their use in the "
        "prompt, or teach their use first (`sft ENV --model MODEL --demonstrations oracle`). An answer can also be taken "
        "in the form in which the model gives it (an environment may have a setting for it, such as musique's -a "
        "answer_style=tags).",
        ("H07",),
        "volcengine/verl#1569",
        symptom=True,
    ),
    Cause(
        "tools-return-nothing",
        "Tool results say nothing: they are empty, or the same whatever is asked, so that no policy can learn to use "
        "them.",
        "Look at the first tool result of a rollout, and mend the tool: a search that finds nothing often reads an empty "
        "index or returns headings without their texts.",
        ("H07",),
        "rllm-org/rllm#392",
    ),
    Cause(
        "tool-results-cut",
        "Tool results reach the model shortened: what the tasks need is often in the part that is missing.",
        "Remove the limit on the length of tool results, or make the tool itself return less text and all of it that "
        "matters.",
        ("H04", "H07"),
    ),
    Cause(
        "tools-abandoned",
        "The policy uses its tools, or takes turns, less than half as often as at first, and earns no more: it has learned "
        "to guess.",
        "Make guesses earn less than answers that were looked up, take the price off calls if there is one, and leave out "
        "tasks that can be guessed. Until then, go back to a checkpoint from before the fall.",
        ("H07", "H05"),
        "verl-project/verl#1569",
        symptom=True,
    ),
    Cause(
        "length-collapse",
        "Rollouts become several times shorter and earn no more: the policy stops thinking or looking things up.",
        "Look at how the reward depends on length, which the evidence gives, and take that out of the reward; use "
        "--loss-type dr_grpo (the default) or dapo, which weigh all tokens alike.",
        ("H05",),
        "om-ai-lab/VLM-R1#280; arXiv:2503.20783, sec. 3.1",
        symptom=True,
    ),
    Cause(
        "length-runaway",
        "Rollouts become several times longer, or reach their limits more and more often, and earn no more.",
        "Use --loss-type dr_grpo (the default) or dapo, and --overlong penalise, so that rollouts which a limit cuts off "
        "earn less; look at how the reward depends on length, which the evidence gives.",
        ("H04", "H05"),
        "langfengQ/verl-agent#188; huggingface/trl#3138",
        symptom=True,
    ),
    Cause(
        "degenerate-repetition",
        "Many rollouts end in the same few words again and again: what they earn says nothing about the task.",
        "If it begins during the run, lower --learning-rate and go back to a checkpoint from before. If the untrained model "
        "does it, check its chat template and end token, and do not raise --max-tokens: loops fill any limit.",
        ("H05",),
        "unslothai/unsloth#2424",
        symptom=True,
    ),
    Cause(
        "task-order-drifts",
        "The tasks become harder during the run: a reward that stays the same hides what the policy learns.",
        "Use --task-order shuffle (and no setting of the environment that sorts its tasks), or compare the reward of tasks "
        "of the same difficulty, and the held-out reward.",
        ("H05",),
        "NVIDIA-NeMo/RL#3117",
    ),
    Cause(
        "tool-arguments-changed",
        "Tools get other arguments than the model wrote, or none: numbers in place of texts, or texts that are cut or have "
        "something added.",
        "Pass the arguments on as they were read, let the tool's own schema decide about their types, and look for a limit "
        "on the length of a query, such as that of the encoder of a search.",
        (),
        "ml-explore/mlx-lm#1910",
    ),
    Cause(
        "tool-results-too-long",
        "Tool results fill most of the context, so that rollouts are cut off, or the policy loses its way in them.",
        "Return less: fewer or shorter documents, a part of a page; or raise --max-context, if the model can use it.",
        ("H04",),
        "huggingface/smolagents#2164",
    ),
)


def failure_cause(failed: float, by_engine: float) -> str:
    """The cause of many failed rollouts. `failed`: how many (or which share); `by_engine`: those of the engine."""
    return "engine-fails" if by_engine > failed - by_engine else "environment-fails"
