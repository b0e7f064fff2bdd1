"""Causes in gradients and updates: absent, wrong, too small or too large."""

from __future__ import annotations

from plumbob.trainer.diagnosis.findings import Cause

CAUSES = (
    Cause(
        "no-gradient",
        "Rollouts with an advantage give no gradient in the trained weights: they are left out of the loss, or something cuts "
        "the weights off from it.",
        "Check that the trained parameters have `requires_grad=True` and that no `detach()` or `torch.no_grad()` lies "
        "between them and the loss; with --peft, that the adapter is not frozen; and that masks, clip bounds and "
        "--importance-correction leave tokens in the loss.",
        ("H06",),
        "huggingface/trl#3452",
        includes=(
            "correction-mutes-rollouts",
            "signal-masked",
            "sampled-tokens-masked",
            "policy-term-missing",
            "ratio-clipped",
        ),
    ),
    Cause(
        "gradient-not-finite",
        "Gradients or log-probabilities are NaN or infinite: the optimizer steps or rollouts with such values are "
        "skipped.",
        "Lower --learning-rate and keep --max-grad-norm 1. If that does not help, check that rewards and the model's "
        "logits are finite.",
        ("H08",),
        "huggingface/trl#6266",
    ),
    Cause(
        "gradient-backwards",
        "A step along the gradient makes tokens with a positive advantage less likely, or tokens with a negative one "
        "more likely.",
        "Check the signs of advantage and loss: the loss to minimise is minus advantage times log-probability.",
    ),
    Cause(
        "loss-differs-from-settings",
        "The loss makes something else of a token than its rollout's advantage and the settings give: it has a term, a weight "
        "or a ratio of its own, or changes advantages that reach it right.",
        "Compare the loss with the formula in the help of --loss-type, term by term, and look for what is added (an entropy "
        "bonus, a second KL term), for advantages that are normalised again, and for sums in place of means: the evidence says "
        "how the slopes differ.",
        ("H01",),
        "verl-project/verl#514",
        includes=(
            "advantages-wrong",
            "normaliser-depends-on-microbatches",
            "kl-backwards",
            "policy-term-missing",
            "ratio-to-reference",
            "gradient-backwards",
            "reference-is-another-policy",
            "logprobs-permuted",
            "ratio-clipped",
            "sampled-tokens-masked",
        ),
    ),
    Cause(
        "normaliser-depends-on-microbatches",
        "The gradient depends on how a step is divided into microbatches: the loss, or its advantages, are normalised per "
        "microbatch and not over the whole step, or rows that are packed together change each other.",
        "Divide the loss by totals of the whole step (rows or tokens), computed before the first microbatch; and see that what "
        "belongs to a row, such as its log-probabilities, stays with it where rows are packed.",
        (),
        "huggingface/trl#6024, modelscope/ms-swift#10116",
        includes=("rows-see-each-other", "logprobs-permuted", "advantages-wrong"),
    ),
    Cause(
        "kl-backwards",
        "The KL term does not pull the policy towards the reference policy: it pushes it away, or has a gradient that is 0 on "
        "average.",
        "Check the sign of the KL term, and use --kl-estimator k2 with --kl-placement loss and k1 with --kl-placement "
        "reward, which are the defaults.",
        ("H03",),
        "arXiv:2512.21852",
    ),
    Cause(
        "kl-too-large",
        "The KL term holds the policy so close to the reference policy that the reward cannot change it.",
        "Lower --kl-beta, or leave it out (the default is 0).",
        ("H03",),
    ),
    Cause(
        "ratio-clipped",
        "The ratio clip removes a large part of the sampled tokens from the gradient.",
        "Raise --epsilon and --epsilon-high, or make fewer updates on the same rollouts with a lower --num-iterations "
        "or --num-minibatches.",
        (),
        "arXiv:1707.06347, sec. 3",
    ),
    Cause(
        "gradient-clipped-to-nothing",
        "Gradient clipping leaves a gradient so small that the optimizer's epsilon outweighs it: updates are a "
        "fraction of the learning rate.",
        "Raise --max-grad-norm (the default is 1; 0 turns clipping off).",
        (),
        "arXiv:1412.6980, sec. 2",
    ),
    Cause(
        "weights-in-bf16",
        "The trained weights are stored in bfloat16 or another low precision, in which updates of this size round "
        "to nothing.",
        "Store the trained weights in float32. --bf16 does so: it computes in bfloat16, but stores the trained "
        "weights in float32.",
        ("H06",),
        "areal-project/AReaL#1634",
    ),
    Cause(
        "optimizer-moves-nothing",
        "The trained weights have a gradient, but the optimizer's step changes none of them, few, or all by next to nothing: it "
        "holds other tensors, the gradient is lost on its way to it or made small, its rate is too low, or the weights' precision "
        "rounds the change away.",
        "Create the optimizer from the tensors that the model computes with, after the model was moved to its device "
        "or sharded; clear gradients after its step and not before; look at its own learning rate; and keep trained weights in "
        "float32.",
        includes=(
            "no-gradient",
            "schedule-hides-rate",
            "weights-in-bf16",
            "gradient-clipped-to-nothing",
            "learning-rate-too-low",
        ),
    ),
    Cause(
        "update-without-effect",
        "The trained weights change but the log-probabilities do not: the adapter is bound to no module, or is "
        "multiplied by 0.",
        "Check that --lora-targets names modules of the model, and that --lora-alpha is not 0.",
        ("H06",),
        "verl-project/verl-omni#552",
    ),
    Cause(
        "warmup-too-long",
        "The learning rate stays far below its peak, because the warm-up takes up most of the run or more than all of it.",
        "Lower --warmup-steps, or raise --max-steps.",
    ),
    Cause(
        "learning-rate-too-low",
        "Updates are so small that a hundred of them hardly change the policy.",
        "Raise --learning-rate, or leave it out for a default that suits the model's size and --peft; LoRA needs "
        "about ten times the learning rate of full training.",
        (),
        "Schulman et al., LoRA Without Regret, 2025; huggingface/trl#2872",
    ),
    Cause(
        "learning-rate-too-high",
        "One optimizer step changes the policy so much that it loses what it has learned.",
        "Lower --learning-rate, for example to a tenth.",
        ("H08",),
        "areal-project/AReaL#1634",
    ),
    Cause(
        "policy-changes-in-vain",
        "Each step changes the policy a lot and the reward does not rise, although the learning rate is a default.",
        "Run the probes with the run's options (`doctor ENV --model MODEL ...`), which find out whether the gradient follows "
        "the rewards; then try a tenth of the learning rate, or a lower --kl-beta.",
        ("H08",),
        includes=("learning-rate-too-high",),
        symptom=True,
    ),
    Cause(
        "policy-term-missing",
        "The gradient is the same whatever the advantages are: no reward reaches the weights, and at most the KL term moves "
        "them.",
        "Compute the importance ratio from log-probabilities that have a gradient, exp(new - old.detach()), and multiply it by "
        "the advantage.",
        (),
        "Goekdeniz-Guelmez/mlx-lm-lora#55",
    ),
    Cause(
        "weight-decay-too-high",
        "Weight decay takes a large part of all trained weights away in the course of the run, whatever the gradient is.",
        "Lower --weight-decay: its product with the learning rate and a hundred updates should be below 0.1.",
        (),
        "modelscope/ms-swift#3931; Loshchilov & Hutter, arXiv:1711.05101, algorithm 2",
    ),
    Cause(
        "ratio-to-reference",
        "The importance ratio compares the policy with another one than that with which the step began, such as the reference "
        "policy: the clip removes more and more tokens as the policy learns.",
        "Take the ratio's denominator from the weights before the step's first update: with one update per batch it is "
        "exp(new - new.detach()), which is 1.",
        (),
        "huggingface/trl#2837",
    ),
    Cause(
        "optimizer-state-lost",
        "The optimizer begins anew in every step, without moments: each update is as large as Adam's first one, in the "
        "direction of the signs of one noisy gradient.",
        "Create the optimizer once, and keep it and its state between steps, also where weights are offloaded, synced or "
        "wrapped again.",
        (),
        "OpenPipe/ART#72, NVIDIA-NeMo/RL#3171; arXiv:1412.6980, sec. 2.1",
    ),
    Cause(
        "gradients-not-cleared",
        "Gradients are not set to zero after an update: each update has the sum of the gradients of all steps before it, and "
        "old rollouts count as much as new ones.",
        "Call zero_grad() once per optimizer step, after the update and before the next backward pass, also where an update "
        "is skipped.",
        (),
        "tenstorrent/tt-blacksmith#711",
    ),
    Cause(
        "does-not-overfit",
        "Updates on one group do not make its better rollouts more likely than its worse ones.",
        "If all earlier checks passed, examine what those checks do not cover: the optimizer (--adam-beta1, "
        "--adam-beta2, --weight-decay), its schedule (--lr-scheduler-type) and the objective (--loss-type, "
        "--epsilon, --kl-beta).",
        includes=(
            "no-gradient",
            "gradient-backwards",
            "gradient-clipped-to-nothing",
            "gradients-not-cleared",
            "weights-in-bf16",
            "optimizer-moves-nothing",
            "optimizer-state-lost",
            "update-without-effect",
            "loss-differs-from-settings",
            "normaliser-depends-on-microbatches",
            "learning-rate-too-high",
            "advantages-wrong",
            "rewards-of-other-rollouts",
        ),
    ),
    Cause(
        "entropy-collapse",
        "The policy has become nearly deterministic without a better reward: it no longer explores.",
        "Try one of --epsilon-high 0.28, a higher --temperature, a lower --learning-rate, and --kl-beta 0.001.",
        (),
        "arXiv:2503.14476, sec. 3.1; arXiv:2505.22617",
        symptom=True,
    ),
    Cause(
        "entropy-explosion",
        "The policy becomes more and more random while the reward falls.",
        "Lower --learning-rate, keep --max-grad-norm 1, or add --kl-beta 0.001.",
        (),
        "arXiv:2505.22617",
        symptom=True,
    ),
    Cause(
        "policy-breaks",
        "A policy that had learned breaks: its reward falls while gradients, lengths or entropy leave their usual range, or good "
        "rollouts become less likely with the bad ones.",
        "Go back to the checkpoint before it (--resume DIR/checkpoints/step_N) with half the --learning-rate, or with "
        "--kl-beta 0.001; --keep-best keeps the best checkpoint of the next run.",
        ("H08",),
        "arXiv:2512.04220; BeastyZ/ConvSearch-R1#6",
        symptom=True,
    ),
    Cause(
        "memory-grows",
        "Each step takes more memory than the one before, although it computes no more tokens at once: something is never freed, "
        "and the run will end for it.",
        "Report it with config.toml and metrics.jsonl. Until it is mended, --save-steps 10 keeps what is lost small, and "
        "--resume begins with empty memory; custom code that keeps tensors, traces or hooks from step to step is a likely reason.",
        symptom=True,
    ),
    Cause(
        "gradient-explodes",
        "A gradient norm is a hundred times the usual one: a few tokens decide the update.",
        "Keep --max-grad-norm 1, look at the rollouts of that step in traces/, and lower --learning-rate. If it happens "
        "again and again, look for rewards far from the others, or for tokens with extreme importance ratios "
        "(correction/mean_weight, sync/largest_gap).",
        ("H08",),
        "arXiv:2501.06842",
        symptom=True,
    ),
    Cause(
        "schedule-hides-rate",
        "The optimizer uses another learning rate than --learning-rate, --lr-scheduler-type and --warmup-steps say: the "
        "printed rate, and every setting, look right.",
        "Look for a second scheduler, a hook or a wrapper around the optimizer that writes `param_groups[...]['lr']` "
        "or scales the update (also one of a DeepSpeed or accelerate configuration), and remove it; a scheduler must be "
        "stepped once per training step.",
        (),
        "huggingface/accelerate#963",
    ),
    Cause(
        "weights-lost",
        "A step begins with other weights than those with which the step before ended: what was learned in between is "
        "lost or replaced.",
        "Look for code that loads weights or a checkpoint while the run goes on, such as a resume, an evaluation of "
        "another model, or a merge that is not undone.",
        (),
        "huggingface/lerobot#3459",
    ),
    Cause(
        "reference-is-another-policy",
        "The reference policy of the KL term is not the policy with which the run begins, or is scored otherwise, as at another "
        "temperature: the KL term pulls towards another model.",
        "Load the reference from the same weights as the policy, at the run's start, and score both with the same code. A new "
        "adapter must add nothing: its second matrices are 0.",
        ("H03",),
        "huggingface/trl#3194",
        includes=("temperature-not-applied",),
    ),
)
