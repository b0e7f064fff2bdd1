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
            "The run takes the same few tasks again and again, or many tasks are copies of others: the policy can "
            "learn their answers by heart, and the training reward says little about other tasks.",
            "Remove the copies that the evidence counts, see that a step takes other tasks than the steps before, "
            "train on more tasks (`train ENV --help` lists settings; --datasets), or lower --max-steps.",
        ),
        "held-out-in-training": Cause(
            "Some tasks are both trained on and held out: the held-out reward shows nothing of other tasks.",
            "Remove the held-out tasks from the training data, or give --eval-datasets other tasks or another split.",
        ),
        "task-order-drifts": Cause(
            "The tasks become harder, or easier, during the run: a reward that stays the same hides what is learned.",
            "Use --task-order shuffle (and no setting of the environment that sorts its tasks), or compare the reward "
            "of tasks of the same difficulty, and the held-out reward.",
            "NVIDIA-NeMo/RL#3117",
        ),
        "answer-in-prompt": Cause(
            "The first prompt, or the first tool result, holds the right answer at a place where a policy can read it: "
            "the reward rises by copying, and does not for tasks without it.",
            "Remove the answer from where the evidence shows it: a few-shot example, a template or a column of the "
            "data in the prompt, or what a tool returns beside what it was asked for.",
        ),
    },
    "grading": {
        "reward-nondeterministic": Cause(
            "The same transcript gets a different reward when it is scored again: advantages are partly random.",
            "Make the reward a function of the transcript alone: no random numbers, no clock, no state that outlives a "
            "rollout, no judge model with a temperature above 0.",
        ),
        "oracle-fails": Cause(
            "The environment's own perfect transcript earns no more than an empty or a wrong one, or answers something "
            "else than what it has read says: right answers are not rewarded.",
            "Correct the environment's reward functions, the `oracle` method of its task, or the answers in its data, "
            "until `evaluate ENV --oracle` prints a reward of 1 for answers that are right.",
            includes=("answers-not-parsed",),
        ),
        "answers-not-parsed": Cause(
            "A right answer earns as little as a wrong one where it is written otherwise: the reward's parser does not "
            "find it, or the grader fails on it and returns 0.",
            "Make the reward parse the form that the evidence quotes, or make the prompt ask for the form that it "
            "parses (an environment may have a setting for it, such as gsm8k's -a answer_style=...); and make it raise "
            "what it cannot handle in place of returning 0, so that the rollout leaves its group.",
            "modelscope/ms-swift#4570; huggingface/Math-Verify#50; meta-pytorch/OpenEnv#1025",
        ),
        "reward-exploitable": Cause(
            "Transcripts that solve nothing earn nearly as much as perfect ones, or how a reply is written decides "
            "more than whether it is right: the reward rises without better answers.",
            "Make the reward refuse the transcript that the evidence quotes: compare whole answers, read one answer "
            "only, and give nothing for form, or for calls, alone; give a component that pays for form a lower weight "
            "(`@vf.reward(weight=...)`), or give it only to right answers.",
            "Liuziyu77/Visual-RFT#176, #79; modelscope/ms-swift#4570",
        ),
        "reward-wrong": Cause(
            "Rewards do not follow whether answers are right: something else decides, or they are no numbers. The "
            "evidence does not say whether answers are read wrongly, graded wrongly, or outweighed.",
            "Score the transcripts that the evidence names by hand, beside what each reward function and judge returns "
            "for them, and correct the one that does not follow the answer.",
            includes=("answers-not-parsed", "oracle-fails", "reward-exploitable", "reward-nondeterministic"),
        ),
    },
    "tools": {
        "tools-fail": Cause(
            "A large part of the tool calls ends in an error: the policy is trained on broken tool results.",
            "Read the tool messages in the run's traces/ and correct the tool that fails; `evaluate ENV --oracle` "
            "shows whether the tools work without a model.",
        ),
        "tool-results-mixed": Cause(
            "Tool results in a rollout are those of another rollout's calls, or change from one time to the next for "
            "the same call: the policy is trained on evidence that it did not ask for.",
            "Keep what a tool remembers of a rollout in that rollout's own state, not in a global variable or an "
            "attribute that rollouts share; if --max-concurrent 1 changes nothing, look at what stands between tool "
            "and conversation: a cache, a proxy, or a model that plays the tool.",
        ),
        "tool-results-wrong": Cause(
            "What the model reads as tool results is not what the tools return for its call, or not what the tasks "
            "need: it is empty, cut, the same whatever is asked, or an answer to other arguments.",
            "Call the tool by hand with the arguments that the evidence names, and follow its result through cache, "
            "limits on length, parser and template to the conversation in traces/. A search that finds nothing often "
            "reads an empty index or returns headings without their texts.",
            "rllm-org/rllm#392; ml-explore/mlx-lm#1910",
            includes=("tools-fail", "tool-results-mixed"),
        ),
        "calls-not-read": Cause(
            "The environment offers tools, and its own perfect transcripts use them, but hardly any reply has a call "
            "that is read: the model writes none, or writes them in a form that nothing reads.",
            "Read the prompt and a few replies. If a reply names a tool and its arguments, give the --tool-format in "
            "which it is written, leave --tool-format out, or raise --max-tokens if calls are cut off. If not, use a "
            "--model whose chat template describes tools, teach their use first (`sft ENV --model MODEL "
            "--demonstrations oracle`), or take answers in the form in which the model gives them (as musique's -a "
            "answer_style=tags).",
            "verl-project/verl#1569; Visual-Agent/DeepEyes#55",
            symptom=True,
        ),
    },
    "evaluation": {
        "evaluation-differs": Cause(
            "Held-out tasks earn something else than training tasks that the policy has not been trained on, or are "
            "prompted, limited, sampled or scored otherwise: the evaluation does not measure what is trained.",
            "Give held-out tasks the prompt, tools, limits, parser and reward functions of training tasks, and compare "
            "both data sets row by row: rollouts of held-out tasks (`predict ENV` prints some) beside those in "
            "traces/.",
            "verl-project/verl#6202",
        ),
    },
    "rows": {
        "prompt-incomplete": Cause(
            "The prompt is not what the model's chat template makes of the conversation: the tools' descriptions, the "
            "system message, earlier turns or the header that opens the assistant's turn are missing, or it was "
            "applied twice.",
            "Give plain messages to the model's own chat template, once, with the same `tools` and with "
            "`add_generation_prompt=True`. If the template has no place for tools or for a system message, put them "
            "into the first user message or use a --model whose template has one.",
            "verifiers' GRPOTrainer, July-October 2025; google/tunix#1419",
        ),
        "row-not-what-was-sampled": Cause(
            "The token ids or sampling log-probabilities of the trained row differ from what the engine saw and "
            "returned for this rollout: they were tokenised again, reordered, cut, or are those of another step.",
            "Build the row from the engine's own ids and log-probabilities: prompt and completion of each turn, "
            "verbatim; and empty the buffer of rollouts after each step.",
            "huggingface/trl#5224; PrimeIntellect-ai/prime-rl#491",
            includes=("prompt-incomplete", "loss-mask-wrong"),
        ),
        "loss-mask-wrong": Cause(
            "The loss is on other tokens of the row than the sampled ones: tokens that the environment wrote are "
            "trained, or sampled ones are left out, or the mask is shifted by one.",
            "Set the loss mask to true exactly where a token was sampled, in every turn of the rollout; the logits "
            "that score token t are those after token t - 1, so shift logits, ids and mask once, in one direction.",
            "NVIDIA-NeMo/RL#2176; huggingface/trl#4970; PrimeIntellect-ai/prime-rl#1525",
        ),
    },
    "logprobs": {
        "engine-trainer-mismatch": Cause(
            "Engine and trainer compute different log-probabilities for the same tokens, or tokens are drawn by other "
            "probabilities than both report: the policy that is trained is not the one that samples.",
            "Use the same model, weights, precision, chat template and attention in engine and trainer, and tie "
            "embeddings in both as the model's config.json says. If the difference grows during a run with vLLM, turn "
            "cascade attention off (--disable-cascade-attn) and compute in float16. --importance-correction "
            "token_truncate reduces the effect but does not remove the cause.",
            "fengyao.notion.site/off-policy-rl; vllm-project/vllm#22103; huggingface/transformers#43429",
            includes=(
                "temperature-not-applied",
                "sampling-altered",
                "stop-token-wrong",
                "prompt-replaced",
                "loss-mask-as-attention-mask",
                "attention-or-positions-wrong",
                "dropout-in-training",
                "weights-not-synced",
                "adapter-scale-differs",
            ),
        ),
        "temperature-not-applied": Cause(
            "Engine and trainer use different temperatures: the log-probabilities, and with them the gradient, belong "
            "to another distribution than the sampled one.",
            "Compute log-probabilities at the temperature that sampled the tokens, and start vLLM with vf-vllm or with "
            "--logprobs-mode processed_logprobs.",
            "huggingface/trl#4159",
        ),
        "prompt-replaced": Cause(
            "The engine samples after another prompt than the one it was given, or after a part of it: the trainer "
            "scores every completion in a context in which it was not sampled.",
            "Send token ids to the engine, not text or messages; switch off what a server adds (a start token, a "
            "system prompt, its own chat template) or cuts off, and do not change ids on the way.",
            "huggingface/trl#3853",
            includes=("prompt-incomplete",),
        ),
        "loss-mask-as-attention-mask": Cause(
            "The trainer scores sampled tokens without seeing what comes before them: other prompts or tool results "
            "give the same log-probabilities. This happens if the loss mask is passed as the attention mask.",
            "Pass the model an attention mask that covers every token of the row, and keep the loss mask for the loss.",
            "verifiers' GRPOTrainer, July-October 2025",
        ),
        "attention-or-positions-wrong": Cause(
            "Engine or trainer (the evidence says which) lets a token see other rows, later tokens or only a part of "
            "its row, or gives it another position than the model was made for: it computes another distribution.",
            "Use an attention implementation that is causal and stops at the row boundaries of a packed microbatch, "
            "and give each row positions from 0 in steps of 1; padding on the left does not count.",
            "huggingface/trl#3526; verl-project/verl#4159",
        ),
        "dropout-in-training": Cause(
            "Dropout is on while gradients are computed and off while rollouts are sampled: the policy that is trained "
            "is not the one that samples.",
            "Set --lora-dropout 0, which is the default, and call the model's eval() in code that scores rollouts.",
            "Goekdeniz-Guelmez/mlx-lm-lora#50",
        ),
    },
    "sampling": {
        "rollouts-fail": Cause(
            "Many rollouts, or always those of one kind, end in errors or do not return in time: their groups are left "
            "out, or what remains of them is not a fair sample.",
            "Correct the error that the evidence quotes. If the environment's code raised it, `evaluate ENV --oracle` "
            "shows whether it works without a model; what waits needs a time limit of its own (or a higher "
            "--max-tool-seconds). If the engine raised it, read vllm.log in the run directory, lower --max-concurrent "
            "if memory is short, and raise vLLM's --max-model-len or lower --max-context if long requests are refused.",
            "vllm-project/vllm#1185",
        ),
        "sampling-altered": Cause(
            "Tokens are drawn by other probabilities than the trainer computes: some are left out (top-p, top-k, "
            "min-p), or penalties and a bias change them. The gradient is not that of the policy that samples.",
            "Train with --top-p 1 --top-k 0 --min-p 0, without penalties and logit bias, and remove the engine's own "
            "defaults: start vLLM with --generation-config vllm (vf-vllm does), or take them out of "
            "generation_config.json.",
            "huggingface/trl#6789; NVIDIA-NeMo/RL#3497; verl-project/verl#7270",
        ),
        "stop-token-wrong": Cause(
            "Turns do not end with the end token of the model's chat template: they continue up to a limit or stop too "
            "early, and are scored as if they were complete.",
            "Add the chat template's end token to eos_token_id in the model's generation_config.json, or use the "
            "model's own chat template; if turns end where the policy would go on, send the server no stop string.",
            "huggingface/trl#7039",
        ),
        "groups-without-variety": Cause(
            "The rollouts of a group hardly differ, or are copies of each other: there is nothing to compare.",
            "Raise --temperature if it is below 1 (1 samples from the policy itself). At temperature 1, see that the "
            "engine has a seed of its own for each rollout, and that no rollout stands for others.",
            "arXiv:2503.14476, sec. 3.2",
            includes=("temperature-not-applied", "sampling-altered"),
        ),
        "truncated-rollouts": Cause(
            "A limit cuts turns or rollouts off before the model has answered: the reward scores incomplete answers. "
            "Either the limit is too low, or they do not come to an end.",
            "Read a few of these rollouts in traces/. If they lead to an answer, raise the limit that the evidence "
            "names, and the engine's own (vLLM: --max-model-len), or make the tools return less text. If they make no "
            "sense, look at prompt, chat template, end token, sampling, and the condition by which an episode ends.",
            "arXiv:2503.14476, sec. 3.4; huggingface/smolagents#2164",
            symptom=True,
        ),
        "signal-left-out": Cause(
            "A setting leaves out rollouts or tokens that would have decided the update: many of them, or those that "
            "are longer, or earn less or more than the others.",
            "Change the setting that the evidence names: raise --max-staleness, --max-seconds or --max-tool-seconds, "
            "or sample fewer rollouts per step; use --overlong keep; use --importance-correction token_truncate, which "
            "masks nothing; raise --epsilon and --epsilon-high, or lower --num-iterations and --num-minibatches.",
            "thinking-machines-lab/tinker-cookbook#822; verl-project/verl#7495; huggingface/trl#5815; "
            "arXiv:1707.06347, sec. 3",
        ),
    },
    "advantages": {
        "rewards-of-other-rollouts": Cause(
            "Samples are trained with the rewards of other rollouts, or what a rollout earns depends on those that are "
            "scored at the same time: the policy learns which rollouts came before or after good ones.",
            "Keep each reward in one object with its rollout, from scoring to the loss; where rewards are a list "
            "beside the rollouts, sort, filter and gather both in the same way.",
            "PeterGriffinJin/Search-R1#88, tenstorrent/tt-metal#46412",
            includes=("reward-nondeterministic",),
        ),
        "advantages-wrong": Cause(
            "Advantages are not what the settings say of the rollouts' rewards (--scale-rewards, --baseline, "
            "--trained-reward, --overlong), or a group holds rollouts of different tasks: with a mean over the whole "
            "step, for example, easy tasks are reinforced whatever the policy does.",
            "Give all rollouts of a task in a step the same group, and those of different tasks different ones; "
            "compute the baseline over the rollouts of one group, and check scale and sign of the advantages against "
            "the formula in the help of these options.",
            "sail-sg/oat#33; PeterGriffinJin/Search-R1#88",
            includes=("rewards-of-other-rollouts",),
        ),
        "tiny-std-scaling": Cause(
            "Advantages are divided by a standard deviation close to 0: meaningless differences in reward become "
            "full-size advantages and outweigh meaningful ones.",
            "Leave out --scale-rewards (the default is none), or use --scale-rewards batch.",
            "arXiv:2503.20783, sec. 3.1; arXiv:2508.08221",
        ),
    },
    "loss": {
        "loss-differs-from-settings": Cause(
            "The loss makes something else of a token than its rollout's advantage and the settings give: it has a "
            "term, a sign, a weight or a ratio of its own, or compares different tokens or policies.",
            "Compare the loss with the formula in the help of --loss-type, and look for what is added (an entropy "
            "bonus, a second KL term), for advantages that are normalised again, for sums in place of means, and for "
            "old log-probabilities in another order or of another policy: with one update per batch the ratio is 1.",
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
            "The gradient depends on how a step is divided into microbatches: the loss, or its advantages, are "
            "normalised per microbatch and not over the whole step, or rows that are packed change each other.",
            "Divide the loss by totals of the whole step (rows or tokens), computed before the first microbatch; and "
            "see that what belongs to a row, such as its log-probabilities, stays with it where rows are packed.",
            "huggingface/trl#6024, modelscope/ms-swift#10116",
            includes=("attention-or-positions-wrong", "advantages-wrong"),
        ),
        "kl-term-wrong": Cause(
            "The KL term does not pull the policy towards the policy with which the run began: it pushes away, has a "
            "gradient that is 0 on average, or compares with another model or at another temperature.",
            "Check the sign of the KL term, and use --kl-estimator k2 in the loss, which is the "
            "default, or reward. Load the reference from the same weights as the policy, at "
            "the run's start, and score both with the same code; a new adapter must add nothing.",
            "arXiv:2512.21852; huggingface/trl#3194",
        ),
        "kl-too-large": Cause(
            "The KL term holds the policy so close to the reference policy that the reward cannot change it.",
            "Lower --kl-beta, or leave it out (the default is 0).",
        ),
    },
    "gradient": {
        "no-gradient": Cause(
            "Rollouts with an advantage give no gradient, or not theirs, in some or all of the trained weights: the "
            "reward does not reach these weights.",
            "Check that the trained parameters have `requires_grad=True`, that no `detach()` or `torch.no_grad()` lies "
            "between them and the loss, also in the importance ratio (exp(new - old.detach())), that --lora-targets "
            "names modules of the model and --lora-alpha is not 0, and that gradients of all microbatches are added.",
            "huggingface/trl#3452; Goekdeniz-Guelmez/mlx-lm-lora#55; verl-project/verl-omni#552",
        ),
        "not-finite": Cause(
            "Rewards, log-probabilities or gradients are NaN or infinite: such optimizer steps or rollouts are "
            "skipped.",
            "Make the environment's reward functions return finite numbers if the evidence names rewards. If not, "
            "lower --learning-rate, keep --max-grad-norm 1, and check that the model's logits are finite.",
            "huggingface/trl#6266",
        ),
    },
    "optimizer": {
        "update-differs-from-settings": Cause(
            "The optimizer's step is not the one that the settings give for this gradient: it holds other tensors, "
            "keeps no moments, adds earlier gradients, rounds the change away, or weights are replaced in between.",
            "Create the optimizer once, from the tensors that the model computes with, and keep its state between "
            "steps; call zero_grad() once per update, after it; keep trained weights in float32 (--bf16 does); and "
            "look for code that loads weights while the run goes on, such as a resume or a merge that is not undone.",
            "OpenPipe/ART#72; tenstorrent/tt-blacksmith#711; areal-project/AReaL#1634; huggingface/lerobot#3459; "
            "arXiv:1711.05101",
            includes=("schedule-hides-rate", "learning-rate-too-low"),
        ),
        "schedule-hides-rate": Cause(
            "The optimizer uses another learning rate than --learning-rate, --lr-scheduler-type and --warmup-steps "
            "say, for some or all weights: the printed rate, and every setting, look right.",
            "Look for a second scheduler, a hook or a wrapper around the optimizer that writes "
            "`param_groups[...]['lr']` or scales the update (also one of a DeepSpeed or accelerate configuration), and "
            "remove it; a scheduler must be stepped once per training step.",
            "huggingface/accelerate#963",
        ),
        "learning-rate-too-low": Cause(
            "By their settings updates are so small that the run hardly changes the policy: the learning rate is too "
            "low, the warm-up takes up most of the run, or gradients are clipped to nearly nothing.",
            "Change what the evidence names: raise --learning-rate, or leave it out for a default that suits the "
            "model's size and --peft (LoRA needs about ten times the rate of full training); lower --warmup-steps; "
            "raise --max-grad-norm (the default is 1).",
            "Schulman et al., LoRA Without Regret, 2025; huggingface/trl#2872; arXiv:1412.6980, sec. 2",
        ),
        "learning-rate-too-high": Cause(
            "One optimizer step changes the policy so much that it loses what it has learned, or weight decay takes a "
            "large part of all trained weights away.",
            "Lower --learning-rate, for example to a tenth; the product of --weight-decay, the learning rate and a "
            "hundred updates should be below 0.1.",
            "areal-project/AReaL#1634; modelscope/ms-swift#3931",
        ),
    },
    "sync": {
        "weights-not-synced": Cause(
            "The engine does not sample with the trainer's weights after a weight sync: they do not arrive, arrive "
            "late, rounded or in part, or old results stay in its cache.",
            "Compare tensor names with those of the engine's modules and make unknown names an error; send weights in "
            "float32, or the adapter itself (with --peft, --vllm-sync lora is the default); and clear the prefix cache "
            "after each sync (vLLM: POST /reset_prefix_cache).",
            "OpenRLHF/OpenRLHF#1349; verl-project/verl#7495; huggingface/trl#6688; verl-project/verl-omni#552",
        ),
        "adapter-scale-differs": Cause(
            "The engine multiplies the LoRA adapter by another number than the trainer, or does not compute with it: "
            "it samples from a policy that is further from the base model, or nearer to it, than the trained one.",
            "Request completions under the adapter's name, and use the same lora_alpha / r in engine and trainer: "
            "check adapter_config.json, which the engine reads, and that rank-stabilised scaling (alpha / sqrt(r)) is "
            "on in both or neither.",
            "vllm-project/vllm#10798; verl-project/verl#7495; huggingface/trl#2856",
        ),
    },
    "saved": {
        "saved-model-differs": Cause(
            "The model that a run saves is not the one that it trained: loaded afresh, it gives other "
            "log-probabilities, or it is an earlier checkpoint, chosen by a metric that is no reward.",
            "If --keep-best chose it, use --keep-best eval/greedy or reward/mean. If not, save the weights that are "
            "trained, with the adapter merged at the trainer's own scale (lora_alpha / r) and in float32, tie the "
            "embeddings again, and load what was saved before it is used.",
            "PrimeIntellect-ai/prime-rl#1456, unslothai/unsloth#2009",
        ),
    },
    "signal": {
        "never-succeeds": Cause(
            "The model never succeeds, so no rollout of a group is better than another. Either the tasks are too hard "
            "for it, or something hides what they need, ends rollouts too early or counts right answers as wrong.",
            "Read a few rollouts in traces/ beside the environment's own transcripts (`evaluate ENV --oracle`). If the "
            "model sees what it needs and answers wrongly, set --temperature 1, make the tasks easier (`train ENV "
            "--help` lists the environment's settings), use a stronger --model, or teach the model to start by "
            "imitation (`sft ENV --model MODEL --demonstrations oracle`) and train what it leaves (`train ENV --model "
            "runs/NAME`).",
            "arXiv:2503.14476, sec. 3.2",
            symptom=True,
        ),
        "too-little-signal": Cause(
            "In too many groups all rollouts earn the same reward, the lowest or the highest: gradients are mostly "
            "chance.",
            "Read rollouts of several groups in traces/ for what decides their reward. If it is the model's skill, "
            "raise --num-generations to the number that the evidence names, or --batch-size for more groups in a step; "
            "use --zero-signal refill; or choose tasks that succeed about half of the time (settings, --datasets).",
            "huggingface/trl#3017; huggingface/trl#2872; arXiv:2503.14476, sec. 3.2",
            symptom=True,
        ),
    },
    "trends": {
        "memory-grows": Cause(
            "Each step takes more memory than the one before, although it computes no more tokens at once: something "
            "is never freed, and the run will end for it.",
            "Report it with config.toml and metrics.jsonl. Until it is mended, --save-steps 10 keeps what is lost small, "
            "and --resume begins with empty memory; custom code that keeps tensors, traces or hooks from step to step "
            "is a likely reason.",
            symptom=True,
        ),
        "reward-hacked": Cause(
            "The training reward rises while the held-out reward falls: the policy learns what the reward measures, "
            "not what it is meant to measure.",
            "Read the rollouts with the highest rewards in the run's traces/, and correct the reward functions that "
            "they exploit. Until then, use the checkpoint with the best evaluation (kept: --save-total-limit).",
            symptom=True,
        ),
        "policy-breaks": Cause(
            "A policy that had learned breaks: its reward falls while gradients, lengths or entropy leave their usual "
            "range, or good rollouts become less likely with the bad ones.",
            "Go back to the checkpoint before it (--resume DIR/checkpoints/step_N) with half the --learning-rate, or "
            "with --kl-beta 0.001, and keep --max-grad-norm 1; --keep-best keeps the best checkpoint of the next run.",
            "arXiv:2512.04220; BeastyZ/ConvSearch-R1#6; arXiv:2501.06842; arXiv:2505.22617",
            symptom=True,
        ),
        "behaviour-narrows": Cause(
            "The policy does less of what could earn more, and earns no more: it becomes nearly deterministic, several "
            "times shorter or longer, or stops using its tools.",
            "See in the evidence how the reward depends on length, turns and calls, and take that out of the reward; "
            "use --loss-type dr_grpo (the default) or dapo, which weigh all tokens alike, --overlong penalise where "
            "rollouts grow to their limits, and --epsilon-high 0.28 or --kl-beta 0.001 where entropy is lost.",
            "arXiv:2503.14476, sec. 3.1; om-ai-lab/VLM-R1#280; langfengQ/verl-agent#188; verl-project/verl#1569",
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
