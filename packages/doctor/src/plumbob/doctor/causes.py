"""The catalogue of causes: every reason why a run does not learn that the doctor can name.

A cause is what somebody does something about: two mistakes with the same remedy are one cause, and the evidence says which
of them fits the numbers. Where it was reported is an arXiv number, or owner/repository#issue on GitHub.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator

from plumbob.doctor.findings import Cause

CATALOGUE = """
tasks
  few-distinct-tasks
    The run takes the same few tasks again and again: their answers can be learned by heart.
    To do: Remove copies, train on more tasks (`train ENV --help` lists settings; --datasets), or lower --max-steps.
  held-out-in-training
    Some tasks are both trained on and held out: the held-out reward shows nothing of other tasks.
    To do: Take the held-out tasks out of the training data, or hold out others (--eval-datasets).
  task-order-drifts
    The tasks become harder, or easier, during the run: a reward that stays the same hides what is learned.
    To do: Use --task-order shuffle, and no setting of the environment that sorts its tasks.
    Reported: NVIDIA-NeMo/RL#3117
  answer-in-prompt
    The first prompt holds the right answer where a policy can read it: the reward rises by copying.
    To do: Remove it from where the evidence shows it: a few-shot example, a template or a column of the data.
grading
  reward-nondeterministic
    The same transcript gets a different reward when it is scored again, by chance or by what was scored before it.
    To do: Make the reward a function of the transcript alone: no random numbers, clock, state that outlives a rollout,
    or judge model with a temperature above 0.
  oracle-fails
    Right answers are not rewarded: the environment's own perfect transcript earns no more than an empty or a wrong one,
    or contradicts what it has read.
    To do: Correct the reward functions, the task's `oracle` method or the answers in the data, until `evaluate ENV
    --oracle` prints 1 for right answers.
    Includes: answers-not-parsed
  answers-not-parsed
    A right answer earns as little as a wrong one where it is written otherwise: it is not found, or the grader fails on
    it and returns 0.
    To do: Make the reward parse the form that the evidence quotes, or the prompt ask for the form that it parses, and
    let it raise what it cannot handle.
    Reported: modelscope/ms-swift#4570; huggingface/Math-Verify#50; meta-pytorch/OpenEnv#1025
  reward-exploitable
    Transcripts that solve nothing earn nearly as much as perfect ones, or how a reply is written decides more than
    whether it is right.
    To do: Make the reward refuse the transcript that the evidence quotes: compare whole answers, read one answer only,
    and give little for form or calls alone (`@vf.reward(weight=...)`).
    Reported: Liuziyu77/Visual-RFT#176, #79; modelscope/ms-swift#4570
  reward-wrong
    Rewards do not follow whether answers are right. The evidence does not say whether answers are read wrongly, graded
    wrongly, or outweighed.
    To do: Score the transcripts that the evidence names by hand, beside what each reward function returns.
    Includes: answers-not-parsed oracle-fails reward-exploitable reward-nondeterministic
tools
  tools-fail
    A large part of the tool calls ends in an error: the policy is trained on broken tool results.
    To do: Read the tool messages in the run's traces/ and correct the tool that fails; `evaluate ENV --oracle` shows
    whether the tools work without a model.
  tool-results-wrong
    What the model reads as tool results is not what the tools return for its call, or not what the tasks need: it is
    empty, cut, the same whatever is asked, or an answer to another call.
    To do: Call the tool by hand with the arguments that the evidence names, and follow its result through cache,
    limits, parser and template to traces/. Keep what a tool remembers in its rollout's own state, and look for an empty
    index.
    Includes: tools-fail
    Reported: rllm-org/rllm#392; ml-explore/mlx-lm#1910
  calls-not-read, a symptom
    The environment offers tools, but hardly any reply has a call that is read: the model writes none, or writes them in
    a form that nothing reads.
    To do: Read a few replies. If one names a tool and its arguments, give the --tool-format in which it is written, or
    raise --max-tokens if calls are cut off. If not, use a --model whose chat template describes tools, or teach their
    use first (`sft ENV --model MODEL --demonstrations oracle`).
    Reported: verl-project/verl#1569; Visual-Agent/DeepEyes#55
evaluation
  evaluation-differs
    Held-out tasks earn something else than new training tasks, or are prompted, limited, sampled or scored otherwise:
    the evaluation does not measure what is trained.
    To do: Give held-out tasks the prompt, tools, limits, parser and rewards of training tasks, and compare rollouts of
    both (`predict ENV` prints held-out ones; those of training are in traces/).
    Reported: verl-project/verl#6202
rows
  prompt-incomplete
    The prompt is not what the model's chat template makes of the conversation: tools, the system message, earlier turns
    or the header of the assistant's turn are missing, or it was applied twice.
    To do: Give plain messages to the model's own chat template, once, with the same `tools` and with
    `add_generation_prompt=True`. What it has no place for goes into the first user message.
    Reported: verifiers' GRPOTrainer, July-October 2025; google/tunix#1419
  row-not-what-was-sampled
    The ids or sampling log-probabilities of the trained row are not what the engine saw and returned: tokenised again,
    reordered, cut, or those of another step.
    To do: Build the row from the engine's own ids and log-probabilities, and empty the buffer of rollouts after each
    step.
    Includes: prompt-incomplete loss-mask-wrong
    Reported: huggingface/trl#5224; PrimeIntellect-ai/prime-rl#491
  loss-mask-wrong
    The loss is on other tokens than the sampled ones: what the environment wrote is trained, sampled tokens are left
    out, or the mask is shifted.
    To do: Set the loss mask to true exactly where a token was sampled, in every turn; the logits that score token t are
    those after token t - 1.
    Reported: NVIDIA-NeMo/RL#2176; huggingface/trl#4970; PrimeIntellect-ai/prime-rl#1525
logprobs
  engine-trainer-mismatch
    Engine and trainer compute different log-probabilities for the same tokens: the policy that is trained is not the
    one that samples.
    To do: Use the same model, weights, precision, attention and tied embeddings in both, and send token ids to the
    engine, not text. With vLLM, use --disable-cascade-attn and float16. --importance-correction token_truncate reduces
    the effect alone.
    Includes: temperature-not-applied sampling-altered stop-token-wrong loss-mask-as-attention-mask
    attention-or-positions-wrong dropout-in-training weights-not-synced
    Reported: fengyao.notion.site/off-policy-rl; vllm-project/vllm#22103; huggingface/trl#3853
  temperature-not-applied
    Engine and trainer use different temperatures: the gradient belongs to another distribution than the sampled one.
    To do: Compute log-probabilities at the temperature that sampled the tokens, and start vLLM with vf-vllm or with
    --logprobs-mode processed_logprobs.
    Reported: huggingface/trl#4159
  loss-mask-as-attention-mask
    The trainer scores sampled tokens without seeing what comes before them, as if the loss mask were passed as the
    attention mask.
    To do: Pass the model an attention mask that covers every token of the row, and keep the loss mask for the loss.
    Reported: verifiers' GRPOTrainer, July-October 2025
  attention-or-positions-wrong
    Engine or trainer (the evidence says which) lets a token see other rows, later tokens or only a part of its row, or
    gives it another position.
    To do: Use attention that is causal and stops at the row boundaries of a packed microbatch, and give each row
    positions 0, 1, 2, ...
    Reported: huggingface/trl#3526; verl-project/verl#4159
  dropout-in-training
    Dropout is on while gradients are computed: the policy that is trained is not the one that samples.
    To do: Set --lora-dropout 0, which is the default, and call the model's eval() in code that scores rollouts.
    Reported: Goekdeniz-Guelmez/mlx-lm-lora#50
sampling
  rollouts-fail
    Many rollouts, or those of one kind, end in errors or do not return in time: what remains is not a fair sample.
    To do: Correct the error that the evidence quotes. Of the environment: try `evaluate ENV --oracle`, and give what
    waits a time limit of its own. Of the engine: read vllm.log in the run directory, lower --max-concurrent or
    --max-context, or raise vLLM's --max-model-len.
    Reported: vllm-project/vllm#1185
  sampling-altered
    Tokens are drawn by other probabilities than the trainer computes: some are left out (top-p, top-k, min-p), or
    penalties and a bias change them.
    To do: Train with --top-p 1 --top-k 0 --min-p 0, without penalties and logit bias, and start vLLM with
    --generation-config vllm (vf-vllm does).
    Reported: huggingface/trl#6789; NVIDIA-NeMo/RL#3497; verl-project/verl#7270
  stop-token-wrong
    Turns do not end with the end token of the model's chat template: they continue up to a limit or stop too early, and
    are scored as if they were complete.
    To do: Add the chat template's end token to eos_token_id in the model's generation_config.json, or use the model's
    own chat template, and send no stop string.
    Reported: huggingface/trl#7039
  groups-without-variety
    The rollouts of a group hardly differ, or are copies of each other: there is nothing to compare.
    To do: Raise --temperature if it is below 1, and see that the engine has a seed of its own for each rollout.
    Includes: temperature-not-applied sampling-altered
    Reported: arXiv:2503.14476, sec. 3.2
  truncated-rollouts, a symptom
    A limit cuts turns or rollouts off before the model has answered. Either it is too low, or they do not come to an
    end.
    To do: Read a few of these rollouts in traces/. If they lead to an answer, raise the limit that the evidence names,
    and the engine's own (vLLM: --max-model-len). If not, look at prompt, chat template, end token, and the condition by
    which an episode ends.
    Reported: arXiv:2503.14476, sec. 3.4; huggingface/smolagents#2164
  signal-left-out
    A setting leaves out rollouts or tokens that would have decided the update: many, or those that are longer or earn
    otherwise.
    To do: Change the setting that the evidence names: raise --max-staleness or --max-seconds, use --overlong keep or
    --importance-correction token_truncate, or raise --epsilon and --epsilon-high.
    Reported: thinking-machines-lab/tinker-cookbook#822; verl-project/verl#7495; huggingface/trl#5815
advantages
  rewards-of-other-rollouts
    Samples are trained with the rewards of other rollouts, or what a rollout earns depends on those that are scored at
    the same time.
    To do: Keep each reward in one object with its rollout, and sort, filter and gather them together. In an environment
    of TRL, let reset() set every attribute that rewards read, on the object and not on its class.
    Includes: reward-nondeterministic
    Reported: PeterGriffinJin/Search-R1#88, tenstorrent/tt-metal#46412
  advantages-wrong
    Advantages are not what the settings say of the rewards (--scale-rewards, --baseline, --trained-reward, --overlong),
    or a group holds rollouts of different tasks.
    To do: Give the rollouts of one task in a step, and no others, the same group; compute the baseline over one group,
    and check scale and sign against the help of these options.
    Includes: rewards-of-other-rollouts
    Reported: sail-sg/oat#33; PeterGriffinJin/Search-R1#88
  tiny-std-scaling
    Advantages are divided by a standard deviation close to 0: meaningless differences in reward become full-size
    advantages.
    To do: Leave out --scale-rewards (the default is none), or use --scale-rewards batch.
    Reported: arXiv:2503.20783, sec. 3.1; arXiv:2508.08221
loss
  loss-differs-from-settings
    The loss makes something else of a token than its rollout's advantage and the settings give: it has a term, a sign,
    a weight or a ratio of its own, or compares different tokens or policies.
    To do: Compare the loss with the formula in the help of --loss-type, and look for what is added (an entropy bonus, a
    second KL term), for advantages that are normalised again, and for old log-probabilities in another order: with one
    update per batch the ratio is 1.
    Includes: advantages-wrong normaliser-depends-on-microbatches kl-term-wrong loss-mask-wrong no-gradient
    Reported: verl-project/verl#514; modelscope/ms-swift#8196; huggingface/trl#2837
  normaliser-depends-on-microbatches
    The gradient depends on how a step is divided into microbatches: something is normalised per microbatch and not over
    the whole step, or packed rows change each other.
    To do: Divide the loss by totals of the whole step (rows or tokens), computed before the first microbatch.
    Includes: attention-or-positions-wrong advantages-wrong
    Reported: huggingface/trl#6024, modelscope/ms-swift#10116
  kl-term-wrong
    The KL term does not pull the policy towards the policy with which the run began: it pushes away, has a gradient
    that is 0 on average, or compares with another model or at another temperature.
    To do: Check its sign, and use --kl-estimator k2 in the loss, which is the default. Load the reference from the
    weights with which the run begins, and score both with the same code.
    Reported: arXiv:2512.21852; huggingface/trl#3194
  kl-too-large
    The KL term holds the policy so close to the reference policy that the reward cannot change it.
    To do: Lower --kl-beta, or leave it out (the default is 0).
gradient
  no-gradient
    Rollouts with an advantage give no gradient, or not theirs, in some or all of the trained weights.
    To do: Check that the trained parameters have `requires_grad=True`, that no `detach()` or `torch.no_grad()` lies
    between them and the loss, that --lora-targets names modules of the model and --lora-alpha is not 0, and that
    gradients of all microbatches are added.
    Reported: huggingface/trl#3452; Goekdeniz-Guelmez/mlx-lm-lora#55; verl-project/verl-omni#552
  not-finite
    Rewards, log-probabilities or gradients are NaN or infinite: such updates or rollouts are skipped.
    To do: Make the reward functions return finite numbers if the evidence names rewards. If not, lower --learning-rate,
    keep --max-grad-norm 1, and check that the logits are finite.
    Reported: huggingface/trl#6266
optimizer
  update-differs-from-settings
    The optimizer's step is not the one that the settings give for this gradient: it holds other tensors, keeps no
    moments, adds earlier gradients, rounds the change away, or weights are replaced in between.
    To do: Create the optimizer once, from the tensors that the model computes with, and keep its state; call
    zero_grad() once per update, after it; keep trained weights in float32 (--bf16 does); and look for code that loads
    weights while the run goes on, such as a merge that is not undone.
    Includes: schedule-hides-rate learning-rate-too-low
    Reported: OpenPipe/ART#72; areal-project/AReaL#1634; huggingface/lerobot#3459
  schedule-hides-rate
    The optimizer uses another learning rate than --learning-rate, --lr-scheduler-type and --warmup-steps say, for some
    or all weights.
    To do: Look for a second scheduler, a hook or a wrapper (DeepSpeed's and accelerate's too) that writes
    `param_groups[...]['lr']`; a scheduler must be stepped once per training step.
    Reported: huggingface/accelerate#963
  learning-rate-too-low
    Updates are so small that the run hardly changes the policy: the learning rate is too low, the warm-up too long, or
    gradients are clipped to nearly nothing.
    To do: Raise --learning-rate, or leave it out for a default that suits the model and --peft (LoRA needs about ten
    times the rate); lower --warmup-steps; keep --max-grad-norm 1.
    Reported: Schulman et al., LoRA Without Regret, 2025; huggingface/trl#2872; arXiv:1412.6980, sec. 2
  learning-rate-too-high
    One optimizer step changes the policy so much that it loses what it has learned.
    To do: Lower --learning-rate, for example to a tenth.
    Reported: areal-project/AReaL#1634; modelscope/ms-swift#3931
sync
  weights-not-synced
    The engine does not sample with the trainer's weights after a weight sync: they arrive late, rounded, in part or
    never, an adapter is left out or scaled otherwise, or old results stay in its cache.
    To do: Compare tensor names with those of the engine's modules; send weights in float32, or the adapter itself
    (--peft) with the same lora_alpha / r on both sides; and clear the prefix cache after each sync (vLLM: POST
    /reset_prefix_cache).
    Reported: OpenRLHF/OpenRLHF#1349; vllm-project/vllm#10798; verl-project/verl#7495; huggingface/trl#6688
saved
  saved-model-differs
    The model that a run saves is not the one that it trained: loaded afresh, it gives other log-probabilities, or it is
    an earlier checkpoint, chosen by a metric that is no reward.
    To do: Use --keep-best eval/greedy or reward/mean. If it was not chosen so, save the trained weights in float32,
    with the adapter merged at the trainer's own scale (lora_alpha / r).
    Reported: PrimeIntellect-ai/prime-rl#1456, unslothai/unsloth#2009
signal
  never-succeeds, a symptom
    The model never succeeds, so no rollout of a group is better than another. Either the tasks are too hard, or
    something hides what they need, ends rollouts too early or counts right answers as wrong.
    To do: Read a few rollouts in traces/ beside those of `evaluate ENV --oracle`. If the model sees what it needs and
    answers wrongly, set --temperature 1, make the tasks easier (`train ENV --help` lists settings), or teach the model
    to start (`sft ENV --model MODEL --demonstrations oracle`) and train what it leaves.
    Reported: arXiv:2503.14476, sec. 3.2
  too-little-signal, a symptom
    In too many groups all rollouts earn the same reward: gradients are mostly chance.
    To do: Read rollouts of several groups in traces/ for what decides their reward. If it is the model's skill, raise
    --num-generations or --batch-size, use --zero-signal refill, or choose tasks that succeed about half of the time
    (settings, --datasets).
    Reported: huggingface/trl#3017; huggingface/trl#2872; arXiv:2503.14476, sec. 3.2
trends
  memory-grows, a symptom
    Each step takes more memory than the one before, although it computes no more tokens at once: something is never
    freed.
    To do: Look for custom code that keeps tensors, traces or hooks, and report it with config.toml and metrics.jsonl.
    Until it is mended, use --save-steps 10: --resume begins with empty memory.
  reward-hacked, a symptom
    The training reward rises while the held-out reward falls: the policy learns what the reward measures, not what it
    should.
    To do: Read the rollouts with the highest rewards in traces/, and correct the reward functions that they exploit.
    Until then, use the checkpoint with the best evaluation (kept: --save-total-limit).
  policy-breaks, a symptom
    A policy that had learned breaks: its reward falls while gradients, lengths or entropy leave their usual range, or
    good rollouts become less likely with the bad ones.
    To do: Go back to the checkpoint before it (--resume DIR/checkpoints/step_N) with half the --learning-rate, or with
    --kl-beta 0.001; --keep-best keeps the best checkpoint of the next run.
    Reported: arXiv:2512.04220; BeastyZ/ConvSearch-R1#6; arXiv:2501.06842; arXiv:2505.22617
"""
"""Stages, and below each of them its causes: id, sentence, what to do, ids of more specific causes, and where it was reported."""


def _read(catalogue: str) -> Iterator[Cause]:
    for stage, causes in re.findall(r"^(\w+)\n((?:  .*\n)+)", catalogue, re.MULTILINE):
        for name, text in re.findall(r"^  (\S.*)\n((?:    .*\n)+)", causes, re.MULTILINE):
            sentence, *labelled = re.split(r" (To do|Includes|Reported): ", " ".join(text.split()))
            given = defaultdict(str, zip(labelled[::2], labelled[1::2], strict=True))
            own, _, symptom = name.partition(", a ")
            includes = tuple(given["Includes"].split())
            yield Cause(sentence, given["To do"], given["Reported"], includes, symptom == "symptom", own, stage)


CAUSES = {cause.id: cause for cause in _read(CATALOGUE)}
"""Id of a cause -> the cause, in the order of the stages."""


def is_symptom(cause: str) -> bool:
    """Whether a cause of this id says only what is seen, not why. An id that the catalogue lacks does not."""
    return cause in CAUSES and CAUSES[cause].symptom
