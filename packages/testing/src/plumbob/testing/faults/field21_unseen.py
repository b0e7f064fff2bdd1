"""The unseen half of the twenty-first set of the field's faults: for measuring alone.

The set is a sample of what people ask about the trainer's side: threads in the order in which plain searches return them,
listed in docs/results/field21_threads.md.
"""

from __future__ import annotations

from plumbob.testing.faults import field21_unseen_doubles as doubles
from plumbob.testing.faults.field import EVERYWHERE, MISMATCH, UNCHECKED, FieldFault, ids
from plumbob.testing.faults.field2_parts import before_updates, engine_completions, losses
from plumbob.testing.faults.field_parts import engine_logits, engine_updates, graded, policy_scores, rows_changed

UNSEEN = (
    # The schedule
    FieldFault(
        "warm-up of four hundred steps",
        "The warm-up has more steps than the run, whose number of steps was given in epochs.",
        "Lightning-AI/pytorch-lightning#18570",
        ids("warmup-too-long"),
        EVERYWHERE,
        options="--warmup-steps 400",
        watch_causes=ids("learning-rate-too-low"),
    ),
    # The loss
    FieldFault(
        "KL term averaged by itself",
        "The KL term is a mean of its own over all tokens, added to a loss that is averaged in another way.",
        "allenai/open-instruct#535",
        ids("loss-differs-from-settings", "kl-too-large"),
        EVERYWHERE,
        start=doubles.kl_by_itself,
        options="--kl-beta 0.02",
    ),
    FieldFault(
        "first-order KL estimate in the loss",
        "The KL estimate k1 is part of the loss, where the reference policy has no effect on its gradient.",
        "allenai/open-instruct#535, allenai/open-instruct#534",
        ids("kl-backwards"),
        EVERYWHERE,
        options="--kl-beta 0.05 --kl-estimator k1 --kl-placement loss",
    ),
    FieldFault(
        "gradient through the importance weights",
        "Importance weights of engine and trainer are not detached, so that the gradient flows through them too.",
        "verl-project/verl#4105",
        ids("loss-differs-from-settings"),
        EVERYWHERE,
        start=losses(doubles.weights_with_gradient),
        options="--loss-type cispo --importance-correction token_truncate",
    ),
    FieldFault(
        "row means over the padded length",
        "A row's losses are divided by the length to which its batch is padded, not by its own length.",
        "huggingface/trl#7024, huggingface/trl#7044",
        ids("normaliser-depends-on-microbatches", "loss-differs-from-settings"),
        EVERYWHERE,
        start=losses(doubles.over_padded_length),
        options="--loss-type grpo --microbatch-tokens 2048",
    ),
    FieldFault(
        "ratio clipped before it meets the advantage",
        "The smaller one of ratio and clipped ratio is multiplied by the advantage, in place of the smaller product.",
        "tensorlayer/TensorLayer#1072",
        ids("loss-differs-from-settings"),
        EVERYWHERE,
        start=doubles.clipped_before,
        options="--num-iterations 4 --epsilon 0.05 --lr-scheduler-type constant",
    ),
    FieldFault(
        "baseline over each process's part of a group",
        "Rewards are not gathered: each process compares its own rollouts of a group with each other.",
        "tulerfeng/Video-R1#35, huggingface/trl#5030",
        ids("advantages-wrong"),
        EVERYWHERE,
        start=doubles.baseline_of_a_part,
    ),
    # Gradients
    FieldFault(
        "adapter loaded for inference",
        "The adapter is loaded without being made trainable, so that no log-probability has a gradient.",
        "huggingface/trl#3031",
        ids("no-gradient"),
        EVERYWHERE,
        start=policy_scores(doubles.frozen),
        options="--peft",
    ),
    FieldFault(
        "adapter gradients lost in recomputation",
        "What the adapter needs is not there when activations are computed again: its gradients are zeros.",
        "huggingface/peft#2826",
        ids("no-gradient"),
        EVERYWHERE,
        start=before_updates(doubles.gradients_lost),
        options="--peft --gradient-checkpointing",
        watch_causes=ids("optimizer-moves-nothing"),
    ),
    FieldFault(
        "no call that clears gradients",
        "Nobody calls zero_grad, so that gradients of all steps add up.",
        "yastrebksv/TennisCourtDetector#7",
        ids("gradients-not-cleared"),
        EVERYWHERE,
        start=doubles.never_cleared,
        steps=12,
    ),
    # Rows
    FieldFault(
        "shorter rows padded in front without a mask",
        "Rows are padded in front to the longest of their batch, and attend to the padding.",
        "unslothai/unsloth#6738",
        ids("rows-see-each-other"),
        EVERYWHERE,
        start=policy_scores(doubles.padded_in_front),
        watch_causes=MISMATCH,
    ),
    FieldFault(
        "end tokens taken for padding",
        "Padding and end token are one, so that a mask that leaves out padding leaves out the end of each turn.",
        "rllm-org/rllm#238, huggingface/trl#5303",
        ids("sampled-tokens-masked"),
        EVERYWHERE,
        start=rows_changed(doubles.without_end_tokens),
    ),
    # The engine
    FieldFault(
        "log-probabilities reported before the temperature",
        "The engine samples at a temperature and reports the log-probabilities of logits that it was not applied to.",
        "sgl-project/sglang-omni#785",
        ids("temperature-not-applied") | MISMATCH,
        EVERYWHERE,
        start=doubles.reported_before_temperature,
        options="--temperature 0.7",
    ),
    FieldFault(
        "cached system prompts kept over weight updates",
        "The prefix cache keeps the keys and values of system prompts over weight updates.",
        "PrimeIntellect-ai/prime-rl#2270, NVIDIA-NeMo/RL#4018",
        ids("engine-stale"),
        ("lookup", "musique"),
        start=doubles.beginnings_kept,
        watch_causes=MISMATCH | ids("mismatch-grows"),
        steps=10,
    ),
    FieldFault(
        "repetition penalty that divides negative logits",
        "A repetition penalty divides every logit of a token that the text has, which makes negative ones likelier.",
        "huggingface/transformers#2302, huggingface/transformers#2303",
        ids("sampling-penalised"),
        EVERYWHERE,
        start=engine_logits(doubles.penalised),
        watch_causes=MISMATCH,
    ),
    FieldFault(
        "end token appended to cut turns",
        "A turn that was cut at its limit gets an end token, which is trained on as if the model had sampled it.",
        "NovaSky-AI/SkyRL#508",
        ids("stop-token-wrong", "truncated-turns"),
        ("gsm8k",),
        start=engine_completions(doubles.end_appended),
        options="--max-tokens 48",
        watch_causes=MISMATCH,
    ),
    FieldFault(
        "one seed for several rollouts of a group",
        "Each process has one seed for all its rollouts of a group, which are the same then.",
        "yifan123/flow_grpo#7",
        ids("groups-without-variety"),
        EVERYWHERE,
        start=doubles.two_seeds,
        watch_causes=ids("too-little-signal"),
    ),
    FieldFault(
        "layers exchanged in a packed sync",
        "Weights are received in another order than they were sent, so that layers of the same shape change places.",
        "lightseekorg/tokenspeed#546",
        ids("weights-not-synced"),
        EVERYWHERE,
        start=engine_updates(doubles.layers_exchanged),
        options="--max-tokens 64",
        watch_causes=MISMATCH,
        watch_options=UNCHECKED,
    ),
    # Rewards
    FieldFault(
        "second reward with ten times the range",
        "Rewards of different ranges are added up, so that the one with the wide range decides every advantage.",
        "yifan123/flow_grpo#188",
        ids("reward-format-dominated", "reward-exploitable"),
        ("gsm8k", "lookup"),
        start=graded(length=doubles.ten_for_length),
        watch_causes=ids("reward-hacked", "length-runaway"),
    ),
    # Files
    FieldFault(
        "adapter file whose alpha is zero",
        "The saved adapter's settings have an alpha of 0, so that whoever loads it gets the base model.",
        "verl-project/verl#1821",
        ids("saved-model-differs"),
        EVERYWHERE,
        start=doubles.saved_without_alpha,
        options="--peft",
    ),
    FieldFault(
        "adapter left out of the merged model",
        "Merging the adapter into the model at the end of the run has no effect: the saved model is the base model.",
        "NVIDIA-NeMo/Automodel#1226, unslothai/unsloth#1877",
        ids("saved-model-differs"),
        EVERYWHERE,
        start=doubles.base_alone,
        options="--peft",
    ),
    FieldFault(
        "best checkpoint never replaced",
        "The best value so far is not brought up to date, so that the first checkpoint stays the one that is kept.",
        "CAREamics/careamics#71, facebookresearch/fairchem#349, ZijiaLewisLu/CVPR2024-FACT#9",
        ids("saved-model-differs"),
        EVERYWHERE,
        start=doubles.first_stays_best,
        options="--keep-best reward/mean",
        probes=False,  # which checkpoint is kept shows at the end of a run
        steps=8,
    ),
)
