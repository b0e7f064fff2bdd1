"""The seen half of the twenty-first set of the field's faults: those on which the doctor's rules may be developed.

The set is a sample of what people ask about the trainer's side: threads in the order in which plain searches return them,
listed in docs/results/field21_threads.md.
"""

from __future__ import annotations

from plumbob.testing.faults import field21_seen_doubles as doubles
from plumbob.testing.faults.field import EVERYWHERE, MISMATCH, UNCHECKED, FieldFault, ids
from plumbob.testing.faults.field_parts import batches_changed, engine_prompts, engine_updates

SEEN = (
    # The schedule
    FieldFault(
        "rate schedule stepped once per batch",
        "The scheduler moves on with each batch in place of each step, so that the rate is next to nothing after a few steps.",
        "leftthomas/SRGAN#94, Lornatang/SRGAN-PyTorch#1, mindee/doctr#374",
        ids("schedule-hides-rate"),
        EVERYWHERE,
        start=doubles.stepped_per_batch,
    ),
    FieldFault(
        "rate cut tenfold again and again",
        "The condition for a cut of the rate stays true, so that each update has a tenth of the rate of the one before.",
        "amoudgl/pygoturn#16",
        ids("schedule-hides-rate"),
        EVERYWHERE,
        start=doubles.cut_again,
        probes=False,  # it begins with the third step
    ),
    FieldFault(
        "schedule made for minus one steps",
        "The number of steps is not known when the schedule is made, and counts as -1: the rate is 0 from the first step on.",
        "keras-team/keras#18722",
        ids("schedule-hides-rate", "optimizer-moves-nothing"),
        EVERYWHERE,
        start=doubles.steps_unknown,
    ),
    # The optimizer
    FieldFault(
        "moments forgotten when training is taken up again",
        "A checkpoint has no optimizer state, so that a run that goes on from it begins with moments of zero.",
        "pytorch/rl#4188, Astera-org/simplexity#48, p-doom/jasmine#17, Denys88/rl_games#173",
        ids("optimizer-state-lost"),
        EVERYWHERE,
        start=doubles.moments_forgotten,
        options="--lr-scheduler-type constant",
        probes=False,  # it happens once, between the fifth and the sixth step
        steps=10,
    ),
    FieldFault(
        "optimizer built before some tensors were replaced",
        "Half of the trained tensors were replaced after the optimizer had been given them: it moves the old ones.",
        "openvinotoolkit/nncf#327, spro/practical-pytorch#9, pytorch/pytorch#14467",
        ids("optimizer-moves-nothing"),
        EVERYWHERE,
        start=doubles.half_replaced,
    ),
    FieldFault(
        "gradients cleared in every backward pass",
        "zero_grad is called for each microbatch, so that an update has the gradient of the last one alone.",
        "bytetriper/RAE#67, huggingface/trl#583, HorizonRobotics/alf#1788, gaozhihan/PreDiff#33",
        ids("normaliser-depends-on-microbatches"),
        EVERYWHERE,
        start=doubles.cleared_in_every_pass,
        options="--microbatch-tokens 2048",
    ),
    FieldFault(
        "optimizer stepped after every microbatch",
        "Gradients are not added up: each microbatch has an update of its own, with the full rate.",
        "huggingface/trl#2618",
        ids("normaliser-depends-on-microbatches", "schedule-hides-rate"),
        EVERYWHERE,
        start=doubles.stepped_in_every_pass,
        options="--microbatch-tokens 2048",
    ),
    # The loss
    FieldFault(
        "entropy coefficient with the other sign",
        "The entropy's coefficient has another sign in this algorithm than in the others: entropy is penalised.",
        "ray-project/ray#4369",
        ids("loss-differs-from-settings"),
        EVERYWHERE,
        start=doubles.entropy_penalised,
        watch_causes=ids("entropy-collapse"),
    ),
    FieldFault(
        "KL to the policy of the step before",
        "The KL term compares the policy with that of the step before, not with the one with which the run began.",
        "lucidrains/PaLM-rlhf-pytorch#41",
        ids("reference-is-another-policy"),
        EVERYWHERE,
        inject=doubles.reference_follows,
        options="--kl-beta 0.05",
        probes=False,  # in the first step the reference is the right one
        steps=8,
    ),
    FieldFault(
        "adapter dropout of three tenths",
        "The adapter's dropout, useful in other training, is on while gradients are computed and off in rollouts.",
        "magenta/magenta#434, eLifePathways/sciencebeam-gym#10",
        ids("dropout-in-training"),
        EVERYWHERE,
        options="--peft --lora-dropout 0.3",
        watch_causes=MISMATCH,
    ),
    # Rollouts
    FieldFault(
        "rewards of the batch before",
        "Rewards are computed from one batch, and multiplied with the log-probabilities of the next.",
        "iwangjian/textsum-gan#19",
        ids("rewards-of-other-rollouts"),
        EVERYWHERE,
        start=lambda stack, env: batches_changed(doubles.RewardsBefore())(stack, env),
        probes=False,  # the first batch has none before it
    ),
    FieldFault(
        "temperature of every request ignored by the server",
        "The server samples at a temperature of its own, whatever temperature a request asks for.",
        "vllm-project/vllm#15241",
        ids("temperature-not-applied"),
        EVERYWHERE,
        start=engine_prompts(doubles.own_temperature),
        options="--temperature 0.6",
        watch_causes=MISMATCH,
    ),
    FieldFault(
        "end token not given to the sampler",
        "No end token is set for sampling, so that every turn goes on to its longest length.",
        "huggingface/trl#2387, NVIDIA/TensorRT-LLM#250",
        ids("stop-token-wrong"),
        ("gsm8k", "musique"),
        start=engine_prompts(doubles.without_end),
        watch_causes=ids("truncated-turns"),
    ),
    FieldFault(
        "last turns squeezed by a full context",
        "The conversation fills the context, so that its later turns are cut off, and scored as if they were the model's.",
        "agentscope-ai/Trinity-RFT#608",
        ids("truncated-context"),
        ("lookup",),
        options="--max-context 256",
    ),
    # Weight sync
    FieldFault(
        "tensors missing from a sync only logged",
        "Tensors of a layer are missing from what is sent; the engine logs it, goes on, and keeps their first values.",
        "InternLM/xtuner#1993",
        ids("weights-not-synced"),
        EVERYWHERE,
        start=engine_updates(doubles.first_layer_missing),
        watch_causes=MISMATCH,
        watch_options=UNCHECKED,
    ),
    FieldFault(
        "norms synced without their offset",
        "The engine adds 1 to the weights of norms when it is made, and not when they are synced.",
        "tenstorrent/tt-metal#49504",
        ids("weights-not-synced") | MISMATCH,
        EVERYWHERE,
        start=engine_updates(doubles.without_offset),
        options="--max-tokens 64",
        watch_options=UNCHECKED,
    ),
    FieldFault(
        "sync that loads memory nobody has written",
        "A sync reports success without having sent anything: the engine loads whatever its memory holds.",
        "lightseekorg/tokenspeed#1373",
        ids("weights-not-synced"),
        EVERYWHERE,
        start=engine_updates(doubles.unwritten_memory),
        options="--max-tokens 64",
        watch_causes=MISMATCH,
        watch_options=UNCHECKED,
    ),
)
