"""The catalogue of causes: every reason why a run does not learn that the doctor can name.

A cause is what somebody does something about: two mistakes with the same remedy are one cause, and the evidence says which
of them fits the numbers. A source is an arXiv number, or owner/repository#issue on GitHub.
"""

from __future__ import annotations

from dataclasses import replace

from plumbob.doctor.findings import Cause, Stage

_ALL: dict[Stage, dict[str, Cause]] = {
    "tasks": {
        "few-distinct-tasks": Cause(
            "The run takes the same few tasks again and again: their answers can be learned by heart.",
            "Remove copies, train on more tasks (`train ENV --help` lists settings; --datasets), or lower --max-steps.",
        ),
        "held-out-in-training": Cause(
            "Some tasks are both trained on and held out: the held-out reward shows nothing of other tasks.",
            "Take the held-out tasks out of the training data, or hold out others (--eval-datasets).",
        ),
        "task-order-drifts": Cause(
            "The tasks become harder, or easier, during the run: a reward that stays the same hides what is learned.",
            "Use --task-order shuffle, and no setting of the environment that sorts its tasks.",
            "NVIDIA-NeMo/RL#3117",
        ),
        "answer-in-prompt": Cause(
            "The first prompt holds the right answer where a policy can read it: the reward rises by copying.",
            "Remove it from where the evidence shows it: a few-shot example, a template or a column of the data.",
        ),
    },
    "grading": {
        "reward-nondeterministic": Cause(
            "The same transcript gets a different reward when it is scored again: advantages are partly random.",
            "Make the reward a function of the transcript alone: no random numbers, clock, state that outlives a "
            "rollout, or judge model with a temperature above 0.",
        ),
        "oracle-fails": Cause(
            "Right answers are not rewarded: the environment's own perfect transcript earns no more than an empty or a "
            "wrong one, or contradicts what it has read.",
            "Correct the reward functions, the task's `oracle` method or the answers in the data, until `evaluate ENV "
            "--oracle` prints 1 for right answers.",
            includes=("answers-not-parsed",),
        ),
        "answers-not-parsed": Cause(
            "A right answer earns as little as a wrong one where it is written otherwise: it is not found, or the "
            "grader fails on it and returns 0.",
            "Make the reward parse the form that the evidence quotes, or the prompt ask for the form that it parses, "
            "and let it raise what it cannot handle.",
            "modelscope/ms-swift#4570; huggingface/Math-Verify#50; meta-pytorch/OpenEnv#1025",
        ),
        "reward-exploitable": Cause(
            "Transcripts that solve nothing earn nearly as much as perfect ones, or how a reply is written decides "
            "more than whether it is right.",
            "Make the reward refuse the transcript that the evidence quotes: compare whole answers, read one answer "
            "only, and give little for form or calls alone (`@vf.reward(weight=...)`).",
            "Liuziyu77/Visual-RFT#176, #79; modelscope/ms-swift#4570",
        ),
        "reward-wrong": Cause(
            "Rewards do not follow whether answers are right. The evidence does not say whether answers are read "
            "wrongly, graded wrongly, or outweighed.",
            "Score the transcripts that the evidence names by hand, beside what each reward function returns.",
            includes=("answers-not-parsed", "oracle-fails", "reward-exploitable", "reward-nondeterministic"),
        ),
    },
    "tools": {
        "tools-fail": Cause(
            "A large part of the tool calls ends in an error: the policy is trained on broken tool results.",
            "Read the tool messages in the run's traces/ and correct the tool that fails; `evaluate ENV --oracle` "
            "shows whether the tools work without a model.",
        ),
        "tool-results-wrong": Cause(
            "What the model reads as tool results is not what the tools return for its call, or not what the tasks "
            "need: it is empty, cut, the same whatever is asked, or an answer to another call.",
            "Call the tool by hand with the arguments that the evidence names, and follow its result through cache, "
            "limits, parser and template to traces/. Keep what a tool remembers in its rollout's own state, and look "
            "for an empty index.",
            "rllm-org/rllm#392; ml-explore/mlx-lm#1910",
            includes=("tools-fail",),
        ),
        "calls-not-read": Cause(
            "The environment offers tools, but hardly any reply has a call that is read: the model writes none, or "
            "writes them in a form that nothing reads.",
            "Read a few replies. If one names a tool and its arguments, give the --tool-format in which it is written, "
            "or raise --max-tokens if calls are cut off. If not, use a --model whose chat template describes tools, or "
            "teach their use first (`sft ENV --model MODEL --demonstrations oracle`).",
            "verl-project/verl#1569; Visual-Agent/DeepEyes#55",
            symptom=True,
        ),
    },
    "evaluation": {
        "evaluation-differs": Cause(
            "Held-out tasks earn something else than new training tasks, or are prompted, limited, sampled or scored "
            "otherwise: the evaluation does not measure what is trained.",
            "Give held-out tasks the prompt, tools, limits, parser and rewards of training tasks, and compare rollouts "
            "of both (`predict ENV` prints held-out ones; those of training are in traces/).",
            "verl-project/verl#6202",
        ),
    },
    "rows": {
        "prompt-incomplete": Cause(
            "The prompt is not what the model's chat template makes of the conversation: tools, the system message, "
            "earlier turns or the header of the assistant's turn are missing, or it was applied twice.",
            "Give plain messages to the model's own chat template, once, with the same `tools` and with "
            "`add_generation_prompt=True`. What it has no place for goes into the first user message.",
            "verifiers' GRPOTrainer, July-October 2025; google/tunix#1419",
        ),
        "row-not-what-was-sampled": Cause(
            "The ids or sampling log-probabilities of the trained row are not what the engine saw and returned: "
            "tokenised again, reordered, cut, or those of another step.",
            "Build the row from the engine's own ids and log-probabilities, and empty the buffer of rollouts after "
            "each step.",
            "huggingface/trl#5224; PrimeIntellect-ai/prime-rl#491",
            includes=("prompt-incomplete", "loss-mask-wrong"),
        ),
        "loss-mask-wrong": Cause(
            "The loss is on other tokens than the sampled ones: what the environment wrote is trained, sampled tokens "
            "are left out, or the mask is shifted.",
            "Set the loss mask to true exactly where a token was sampled, in every turn; the logits that score token t "
            "are those after token t - 1.",
            "NVIDIA-NeMo/RL#2176; huggingface/trl#4970; PrimeIntellect-ai/prime-rl#1525",
        ),
    },
    "logprobs": {
        "engine-trainer-mismatch": Cause(
            "Engine and trainer compute different log-probabilities for the same tokens: the policy that is trained is "
            "not the one that samples.",
            "Use the same model, weights, precision, attention and tied embeddings in both, and send token ids to the "
            "engine, not text. With vLLM, use --disable-cascade-attn and float16. --importance-correction "
            "token_truncate reduces the effect alone.",
            "fengyao.notion.site/off-policy-rl; vllm-project/vllm#22103; huggingface/trl#3853",
            includes=(
                "temperature-not-applied",
                "sampling-altered",
                "stop-token-wrong",
                "loss-mask-as-attention-mask",
                "attention-or-positions-wrong",
                "dropout-in-training",
                "weights-not-synced",
            ),
        ),
        "temperature-not-applied": Cause(
            "Engine and trainer use different temperatures: the gradient belongs to another distribution than the "
            "sampled one.",
            "Compute log-probabilities at the temperature that sampled the tokens, and start vLLM with vf-vllm or with "
            "--logprobs-mode processed_logprobs.",
            "huggingface/trl#4159",
        ),
        "loss-mask-as-attention-mask": Cause(
            "The trainer scores sampled tokens without seeing what comes before them, as if the loss mask were passed "
            "as the attention mask.",
            "Pass the model an attention mask that covers every token of the row, and keep the loss mask for the loss.",
            "verifiers' GRPOTrainer, July-October 2025",
        ),
        "attention-or-positions-wrong": Cause(
            "Engine or trainer (the evidence says which) lets a token see other rows, later tokens or only a part of "
            "its row, or gives it another position.",
            "Use attention that is causal and stops at the row boundaries of a packed microbatch, and give each row "
            "positions 0, 1, 2, ...",
            "huggingface/trl#3526; verl-project/verl#4159",
        ),
        "dropout-in-training": Cause(
            "Dropout is on while gradients are computed: the policy that is trained is not the one that samples.",
            "Set --lora-dropout 0, which is the default, and call the model's eval() in code that scores rollouts.",
            "Goekdeniz-Guelmez/mlx-lm-lora#50",
        ),
    },
    "sampling": {
        "rollouts-fail": Cause(
            "Many rollouts, or those of one kind, end in errors or do not return in time: what remains is not a fair "
            "sample.",
            "Correct the error that the evidence quotes. Of the environment: try `evaluate ENV --oracle`, and give what "
            "waits a time limit of its own. Of the engine: read vllm.log in the run directory, lower --max-concurrent "
            "or --max-context, or raise vLLM's --max-model-len.",
            "vllm-project/vllm#1185",
        ),
        "sampling-altered": Cause(
            "Tokens are drawn by other probabilities than the trainer computes: some are left out (top-p, top-k, "
            "min-p), or penalties and a bias change them.",
            "Train with --top-p 1 --top-k 0 --min-p 0, without penalties and logit bias, and start vLLM with "
            "--generation-config vllm (vf-vllm does).",
            "huggingface/trl#6789; NVIDIA-NeMo/RL#3497; verl-project/verl#7270",
        ),
        "stop-token-wrong": Cause(
            "Turns do not end with the end token of the model's chat template: they continue up to a limit or stop too "
            "early, and are scored as if they were complete.",
            "Add the chat template's end token to eos_token_id in the model's generation_config.json, or use the "
            "model's own chat template, and send no stop string.",
            "huggingface/trl#7039",
        ),
        "groups-without-variety": Cause(
            "The rollouts of a group hardly differ, or are copies of each other: there is nothing to compare.",
            "Raise --temperature if it is below 1, and see that the engine has a seed of its own for each rollout.",
            "arXiv:2503.14476, sec. 3.2",
            includes=("temperature-not-applied", "sampling-altered"),
        ),
        "truncated-rollouts": Cause(
            "A limit cuts turns or rollouts off before the model has answered. Either it is too low, or they do not "
            "come to an end.",
            "Read a few of these rollouts in traces/. If they lead to an answer, raise the limit that the evidence "
            "names, and the engine's own (vLLM: --max-model-len). If not, look at prompt, chat template, end token, and "
            "the condition by which an episode ends.",
            "arXiv:2503.14476, sec. 3.4; huggingface/smolagents#2164",
            symptom=True,
        ),
        "signal-left-out": Cause(
            "A setting leaves out rollouts or tokens that would have decided the update: many, or those that are longer "
            "or earn otherwise.",
            "Change the setting that the evidence names: raise --max-staleness or --max-seconds, use --overlong keep "
            "or --importance-correction token_truncate, or raise --epsilon and --epsilon-high.",
            "thinking-machines-lab/tinker-cookbook#822; verl-project/verl#7495; huggingface/trl#5815",
        ),
    },
    "advantages": {
        "rewards-of-other-rollouts": Cause(
            "Samples are trained with the rewards of other rollouts, or what a rollout earns depends on those that are "
            "scored at the same time.",
            "Keep each reward in one object with its rollout; where rewards are a list beside the rollouts, sort, "
            "filter and gather both in the same way.",
            "PeterGriffinJin/Search-R1#88, tenstorrent/tt-metal#46412",
            includes=("reward-nondeterministic",),
        ),
        "advantages-wrong": Cause(
            "Advantages are not what the settings say of the rewards (--scale-rewards, --baseline, --trained-reward, "
            "--overlong), or a group holds rollouts of different tasks.",
            "Give the rollouts of one task in a step, and no others, the same group; compute the baseline over one "
            "group, and check scale and sign against the help of these options.",
            "sail-sg/oat#33; PeterGriffinJin/Search-R1#88",
            includes=("rewards-of-other-rollouts",),
        ),
        "tiny-std-scaling": Cause(
            "Advantages are divided by a standard deviation close to 0: meaningless differences in reward become "
            "full-size advantages.",
            "Leave out --scale-rewards (the default is none), or use --scale-rewards batch.",
            "arXiv:2503.20783, sec. 3.1; arXiv:2508.08221",
        ),
    },
    "loss": {
        "loss-differs-from-settings": Cause(
            "The loss makes something else of a token than its rollout's advantage and the settings give: it has a "
            "term, a sign, a weight or a ratio of its own, or compares different tokens or policies.",
            "Compare the loss with the formula in the help of --loss-type, and look for what is added (an entropy "
            "bonus, a second KL term), for advantages that are normalised again, and for old log-probabilities in "
            "another order: with one update per batch the ratio is 1.",
            "verl-project/verl#514; modelscope/ms-swift#8196; huggingface/trl#2837",
            includes=(
                "advantages-wrong",
                "normaliser-depends-on-microbatches",
                "kl-term-wrong",
                "loss-mask-wrong",
                "no-gradient",
            ),
        ),
        "normaliser-depends-on-microbatches": Cause(
            "The gradient depends on how a step is divided into microbatches: something is normalised per microbatch "
            "and not over the whole step, or packed rows change each other.",
            "Divide the loss by totals of the whole step (rows or tokens), computed before the first microbatch.",
            "huggingface/trl#6024, modelscope/ms-swift#10116",
            includes=("attention-or-positions-wrong", "advantages-wrong"),
        ),
        "kl-term-wrong": Cause(
            "The KL term does not pull the policy towards the policy with which the run began: it pushes away, has a "
            "gradient that is 0 on average, or compares with another model or at another temperature.",
            "Check its sign, and use --kl-estimator k2 in the loss, which is the default. Load the reference from the "
            "weights with which the run begins, and score both with the same code.",
            "arXiv:2512.21852; huggingface/trl#3194",
        ),
        "kl-too-large": Cause(
            "The KL term holds the policy so close to the reference policy that the reward cannot change it.",
            "Lower --kl-beta, or leave it out (the default is 0).",
        ),
    },
    "gradient": {
        "no-gradient": Cause(
            "Rollouts with an advantage give no gradient, or not theirs, in some or all of the trained weights.",
            "Check that the trained parameters have `requires_grad=True`, that no `detach()` or `torch.no_grad()` lies "
            "between them and the loss, that --lora-targets names modules of the model and --lora-alpha is not 0, and "
            "that gradients of all microbatches are added.",
            "huggingface/trl#3452; Goekdeniz-Guelmez/mlx-lm-lora#55; verl-project/verl-omni#552",
        ),
        "not-finite": Cause(
            "Rewards, log-probabilities or gradients are NaN or infinite: such updates or rollouts are skipped.",
            "Make the reward functions return finite numbers if the evidence names rewards. If not, lower "
            "--learning-rate, keep --max-grad-norm 1, and check that the logits are finite.",
            "huggingface/trl#6266",
        ),
    },
    "optimizer": {
        "update-differs-from-settings": Cause(
            "The optimizer's step is not the one that the settings give for this gradient: it holds other tensors, "
            "keeps no moments, adds earlier gradients, rounds the change away, or weights are replaced in between.",
            "Create the optimizer once, from the tensors that the model computes with, and keep its state; call "
            "zero_grad() once per update, after it; keep trained weights in float32 (--bf16 does); and look for code "
            "that loads weights while the run goes on, such as a merge that is not undone.",
            "OpenPipe/ART#72; areal-project/AReaL#1634; huggingface/lerobot#3459",
            includes=("schedule-hides-rate", "learning-rate-too-low"),
        ),
        "schedule-hides-rate": Cause(
            "The optimizer uses another learning rate than --learning-rate, --lr-scheduler-type and --warmup-steps say, "
            "for some or all weights.",
            "Look for a second scheduler, a hook or a wrapper (DeepSpeed's and accelerate's too) that writes "
            "`param_groups[...]['lr']`; a scheduler must be stepped once per training step.",
            "huggingface/accelerate#963",
        ),
        "learning-rate-too-low": Cause(
            "Updates are so small that the run hardly changes the policy: the learning rate is too low, the warm-up too "
            "long, or gradients are clipped to nearly nothing.",
            "Raise --learning-rate, or leave it out for a default that suits the model and --peft (LoRA needs about ten "
            "times the rate); lower --warmup-steps; keep --max-grad-norm 1.",
            "Schulman et al., LoRA Without Regret, 2025; huggingface/trl#2872; arXiv:1412.6980, sec. 2",
        ),
        "learning-rate-too-high": Cause(
            "One optimizer step changes the policy so much that it loses what it has learned, or weight decay takes a "
            "large part of all trained weights away.",
            "Lower --learning-rate, for example to a tenth; --weight-decay times the rate should be below 0.001.",
            "areal-project/AReaL#1634; modelscope/ms-swift#3931",
        ),
    },
    "sync": {
        "weights-not-synced": Cause(
            "The engine does not sample with the trainer's weights after a weight sync: they arrive late, rounded, in "
            "part or never, an adapter is left out or scaled otherwise, or old results stay in its cache.",
            "Compare tensor names with those of the engine's modules; send weights in float32, or the adapter itself "
            "(--peft) with the same lora_alpha / r on both sides; and clear the prefix cache after each sync (vLLM: "
            "POST /reset_prefix_cache).",
            "OpenRLHF/OpenRLHF#1349; vllm-project/vllm#10798; verl-project/verl#7495; huggingface/trl#6688",
        ),
    },
    "saved": {
        "saved-model-differs": Cause(
            "The model that a run saves is not the one that it trained: loaded afresh, it gives other "
            "log-probabilities, or it is an earlier checkpoint, chosen by a metric that is no reward.",
            "Use --keep-best eval/greedy or reward/mean. If it was not chosen so, save the trained weights in float32, "
            "with the adapter merged at the trainer's own scale (lora_alpha / r).",
            "PrimeIntellect-ai/prime-rl#1456, unslothai/unsloth#2009",
        ),
    },
    "signal": {
        "never-succeeds": Cause(
            "The model never succeeds, so no rollout of a group is better than another. Either the tasks are too hard, "
            "or something hides what they need, ends rollouts too early or counts right answers as wrong.",
            "Read a few rollouts in traces/ beside those of `evaluate ENV --oracle`. If the model sees what it needs and "
            "answers wrongly, set --temperature 1, make the tasks easier (`train ENV --help` lists settings), or teach "
            "the model to start (`sft ENV --model MODEL --demonstrations oracle`) and train what it leaves.",
            "arXiv:2503.14476, sec. 3.2",
            symptom=True,
        ),
        "too-little-signal": Cause(
            "In too many groups all rollouts earn the same reward: gradients are mostly chance.",
            "Read rollouts of several groups in traces/ for what decides their reward. If it is the model's skill, "
            "raise --num-generations or --batch-size, use --zero-signal refill, or choose tasks that succeed about half "
            "of the time (settings, --datasets).",
            "huggingface/trl#3017; huggingface/trl#2872; arXiv:2503.14476, sec. 3.2",
            symptom=True,
        ),
    },
    "trends": {
        "memory-grows": Cause(
            "Each step takes more memory than the one before, although it computes no more tokens at once: something is "
            "never freed.",
            "Look for custom code that keeps tensors, traces or hooks, and report it with config.toml and "
            "metrics.jsonl. Until it is mended, use --save-steps 10: --resume begins with empty memory.",
            symptom=True,
        ),
        "reward-hacked": Cause(
            "The training reward rises while the held-out reward falls: the policy learns what the reward measures, not "
            "what it should.",
            "Read the rollouts with the highest rewards in traces/, and correct the reward functions that they exploit. "
            "Until then, use the checkpoint with the best evaluation (kept: --save-total-limit).",
            symptom=True,
        ),
        "policy-breaks": Cause(
            "A policy that had learned breaks: its reward falls while gradients, lengths or entropy leave their usual "
            "range, or good rollouts become less likely with the bad ones.",
            "Go back to the checkpoint before it (--resume DIR/checkpoints/step_N) with half the --learning-rate, or "
            "with --kl-beta 0.001; --keep-best keeps the best checkpoint of the next run.",
            "arXiv:2512.04220; BeastyZ/ConvSearch-R1#6; arXiv:2501.06842; arXiv:2505.22617",
            symptom=True,
        ),
    },
}

CAUSES = {name: replace(c, id=name, stage=stage) for stage, own in _ALL.items() for name, c in own.items()}
"""Id of a cause -> the cause, in the order of the stages."""


def is_symptom(cause: str) -> bool:
    """Whether a cause of this id says only what is seen, not why. An id that the catalogue lacks does not."""
    return cause in CAUSES and CAUSES[cause].symptom


def stands_for(cause: str) -> set[str]:
    """Its own id and those of the more specific causes that it includes, directly."""
    return {cause, *(CAUSES[cause].includes if cause in CAUSES else ())}
