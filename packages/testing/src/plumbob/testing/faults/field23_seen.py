"""The seen half of the twenty-third set of the field's faults: those on which the doctor's rules may be developed.

The set is about the trainer's side: threads in the order in which plain searches return them, listed in
docs/results/field23_threads.md.
"""

from __future__ import annotations

from plumbob.testing.faults import field23_seen_doubles as doubles
from plumbob.testing.faults.field import EVERYWHERE, MISMATCH, UNCHECKED, WITH_TOOLS, FieldFault, ids
from plumbob.testing.faults.field_parts import engine_prompts, engine_updates, policy_scores

SEEN = (
    # Weight sync
    FieldFault(
        "weight broadcast that reaches the last layer alone",
        "The broadcast after each step updates some layers of the engine, here the last one, and leaves the others as they were.",
        "OpenRLHF/OpenRLHF#660",
        ids("weights-not-synced"),
        EVERYWHERE,
        start=engine_updates(doubles.last_layer_alone),
        watch_causes=MISMATCH,
        watch_options=UNCHECKED,
    ),
    FieldFault(
        "base weights trained beside the adapter and never sent",
        "The base model is not frozen when the adapter is loaded: it is trained too, but only the adapter reaches the engine.",
        "Blaizzy/mlx-vlm#2181",
        ids("weights-not-synced") | MISMATCH,
        EVERYWHERE,
        start=doubles.base_trained_unsent,
        options="--peft",
        watch_causes=ids("saved-model-differs", "learning-rate-too-high"),
        watch_options=UNCHECKED,
    ),
    FieldFault(
        "prefixes cached before a sync are used after it",
        "The engine's cache of prompts is kept when weights are updated, so that rollouts begin with old keys and values.",
        "pytorch/rl#4016, modelscope/ms-swift#3640, verl-project/verl#6523",
        ids("engine-stale"),
        EVERYWHERE,
        start=doubles.prefixes_kept,
        watch_causes=MISMATCH,
    ),
    # Sampling
    FieldFault(
        "copies of a prompt all sampled at temperature zero",
        "The rollouts of a group are asked for one by one, and each is sampled at temperature 0, so that all are the same.",
        "stanfordnlp/dspy#8747",
        ids("groups-without-variety", "temperature-not-applied"),
        EVERYWHERE,
        start=engine_prompts(doubles.greedy),
        watch_causes=MISMATCH,
    ),
    FieldFault(
        "tasks of eight links and more for a small model",
        "The tasks are too hard for the model: hardly any rollout succeeds, and filtering leaves no group to train on.",
        "BytedTsinghua-SIA/DAPO#22",
        ids("never-succeeds", "too-little-signal", "few-groups-differ"),
        ("lookup",),
        options="-a difficulty=extreme",
    ),
    # The schedule
    FieldFault(
        "schedule sized in rollouts and stepped for each turn",
        "The schedule's length counts rollouts, but it goes on with each turn of a rollout: the rate is 0 long before the end.",
        "alibaba/ROLL#407",
        ids("schedule-hides-rate"),
        WITH_TOOLS,
        start=doubles.stepped_for_each_turn,
        watch_causes=ids("learning-rate-too-low"),
        steps=10,
    ),
    # The objective
    FieldFault(
        "KL penalty in the reward sums over tool results too",
        "The KL penalty that is subtracted from the reward is not masked: prompt and tool results are counted in it.",
        "radixark/miles#557, PeterGriffinJin/Search-R1#21",
        ids("advantages-wrong"),
        WITH_TOOLS,
        start=doubles.kl_of_every_token,
        options="--kl-beta 0.05 --kl-placement reward",
        probes=False,  # before the first step the policy is its own reference, and the penalty is 0 for every token
        watch_causes=ids("kl-too-large", "context-tokens-trained"),
        steps=8,
    ),
    FieldFault(
        "each rank divides its loss by the tokens of its own rows",
        "Every rank averages over its own tokens and the ranks' gradients are averaged: a token counts more where rows are short.",
        "NVIDIA-NeMo/Megatron-Bridge#5243, NVIDIA/Megatron-LM#7452, vllm-project/speculators#942, huggingface/trl#3231, "
        "PrimeIntellect-ai/prime-rl#2358",
        ids("normaliser-depends-on-microbatches", "loss-differs-from-settings"),
        EVERYWHERE,
        start=doubles.own_tokens_of_each_rank,
        options="--loss-type bnpo",
    ),
    FieldFault(
        "token mean computed as a mean of row means",
        "The loss that is to weigh all tokens alike averages over each row first, so that tokens of long rows count less.",
        "akaszubski/autonomous-dev#413",
        ids("loss-differs-from-settings"),
        EVERYWHERE,
        start=doubles.row_means,
        options="--loss-type dapo",
        watch_causes=ids("normaliser-depends-on-microbatches"),
    ),
    FieldFault(
        "entropy term with the sign turned round",
        "The entropy is added to the loss where it was to be subtracted: the policy is trained to be certain.",
        "pukkapies/dl-imperial-maths#8, datawhalechina/joyrl#23",
        ids("loss-differs-from-settings"),
        EVERYWHERE,
        start=doubles.entropy_punished,
        watch_causes=ids("entropy-collapse"),
    ),
    # Log-probabilities and gradients
    FieldFault(
        "end tokens scored as token zero because they are padding",
        "The padding token is the end token, and the trainer writes 0 over padding before it looks log-probabilities up.",
        "allenai/open-instruct#1817",
        ids("logprobs-permuted") | MISMATCH,
        EVERYWHERE,
        start=doubles.ends_as_padding,
        watch_causes=ids("stop-token-wrong", "row-not-what-was-sampled"),
        watch_options=UNCHECKED,
    ),
    FieldFault(
        "gradients of half of the ranks never added",
        "A setting of the sharding switches the sum of gradients off, so that the rows of the other ranks train nothing.",
        "verl-project/verl#7493",
        ids("sampled-tokens-masked", "no-gradient"),
        EVERYWHERE,
        start=policy_scores(doubles.first_rank_alone),
    ),
    FieldFault(
        "AdamW directly on bfloat16 weights",
        "The weights are loaded in bfloat16 and the optimizer updates them there, where a small update rounds to nothing.",
        "NVIDIA-NeMo/Automodel#3444",
        ids("weights-in-bf16"),
        EVERYWHERE,
        start=doubles.bf16_weights,
        options="--learning-rate 5e-5",
        watch_causes=ids("optimizer-moves-nothing", "weights-lost"),
    ),
    # Saving and rewards
    FieldFault(
        "final model saved without merging its adapter",
        "Checkpoints are written without the adapter merged in: whoever loads one gets the base model.",
        "MSIIP/MedM-VL#4",
        ids("saved-model-differs"),
        EVERYWHERE,
        start=doubles.unmerged,
        options="--peft",
    ),
    FieldFault(
        "rewards divided by a deviation that is updated with each reply",
        "A wrapper divides each reward by the deviation of all rewards so far: the same reply earns more or less by its turn.",
        "tristandeleu/pytorch-maml-rl#14",
        ids("reward-nondeterministic"),
        EVERYWHERE,
        start=doubles.running_scale,
    ),
    # Between the steps
    FieldFault(
        "second stage that begins with a fresh adapter",
        "The second stage of a run does not load the adapter of the first: it initialises a new one, and what was learned is lost.",
        "verl-project/verl#3400",
        ids("weights-lost"),
        EVERYWHERE,
        start=doubles.second_stage,
        options="--peft",
        probes=False,  # it happens in the middle of a run
        watch_causes=ids("optimizer-state-lost"),
    ),
    FieldFault(
        "greedy evaluation that samples after all",
        "The setting that asks for greedy evaluations does not reach the engine: held-out rollouts are sampled like training ones.",
        "PeterGriffinJin/Search-R1#21",
        ids("evaluation-prompted-differently", "evaluation-differs"),
        EVERYWHERE,
        start=doubles.sampled_at_all_times,
        options="--temperature 1.2 --eval-examples 32 --eval-steps 3",
        watch_causes=ids("temperature-not-applied"),
    ),
)
