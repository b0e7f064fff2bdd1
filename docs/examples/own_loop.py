"""GRPO in plain torch and transformers that writes records for plumbob.doctor: python own_loop.py MODEL FOLDER"""

import sys
from pathlib import Path

import torch
from plumbob.doctor import record as r
from plumbob.doctor.measuring import SampledTensors, numbers
from transformers import AutoModelForCausalLM, AutoTokenizer

MODEL, FOLDER, GROUPS, GROUP, TOKENS, RATE, STEPS = sys.argv[1], Path(sys.argv[2]), 4, 4, 32, 1e-4, 2
tokenizer = AutoTokenizer.from_pretrained(MODEL)
model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
settings = r.Settings(model=MODEL, temperature=1.0, max_tokens=TOKENS, group_size=GROUP, scale="none",
                      learning_rate=RATE, num_steps=STEPS, max_norm=1.0)  # fmt: skip
sampling = r.Sampling(TOKENS, stop_token_ids=[tokenizer.eos_token_id])
FOLDER.mkdir(parents=True, exist_ok=True)
torch.manual_seed(0)


def logprobs(ids: list[int], start: int) -> torch.Tensor:
    """Of each id from `start` on, given those before it."""
    logits = model(torch.tensor([ids])).logits[0, start - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(ids[start:])[:, None])[:, 0]


for step in range(STEPS):
    record = r.StepRecord(step, settings, trainer="own loop")
    for g in range(GROUPS):
        messages = [{"role": "user", "content": f"What is {step} + {g}?"}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        replies = []
        for _ in range(GROUP):
            out = model.generate(torch.tensor([prompt]), do_sample=True, top_k=0, max_new_tokens=TOKENS)[0].tolist()
            replies.append((out, tokenizer.decode(out[len(prompt) :], skip_special_tokens=True)))
        rewards = [sum(c.isdigit() for c in text) / (len(text) + 1) for _, text in replies]
        for m, (ids, text) in enumerate(replies):
            advantage = rewards[m] - sum(rewards) / GROUP
            # For the record: what was sampled, and the row that is trained.
            with torch.no_grad():
                sampled = numbers(logprobs(ids, len(prompt)))
            request = r.Request(torch.tensor(prompt).numpy(), torch.tensor(ids[len(prompt) :]).numpy(), sampled, sampling,
                                "stop" if ids[-1] in sampling.stop_token_ids else "length")  # fmt: skip
            said = [*messages, {"role": "assistant", "content": text}]
            record.rollouts.append(
                r.Rollout(f"{g}.{m}", f"{step} + {g}", rewards[m], requests=[request], messages=said)
            )
            mask = torch.arange(len(ids)) >= len(prompt)
            record.rows.append(r.Row(f"{g}.{m}", str(g), m, torch.tensor(ids).numpy(), mask.numpy(), rewards[m], advantage,
                                     sampling_logprobs=sampled))  # fmt: skip
    update = r.Update(members=list(range(len(record.rows))))
    for i, row in enumerate(record.rows):
        own = logprobs(row.token_ids.tolist(), int((~row.loss_mask).sum()))
        own.retain_grad()  # its gradient is the slope of the loss in each token's log-probability
        weights = torch.full_like(own, 1 / (len(record.rows) * len(own)))
        ratio = (own - own.detach()).exp()
        loss = -(weights * ratio * row.advantage).sum()
        loss.backward()
        row.logprobs = numbers(own)
        update.trained.append(r.TrainedRow(i, i, numbers(torch.full_like(own, row.advantage)), numbers(weights),
                              row.logprobs, row.logprobs, numbers(ratio), slopes=numbers(own.grad)))  # fmt: skip
    tensors = SampledTensors(dict(model.named_parameters()), optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_norm)
    optimizer.step()
    optimizer.zero_grad()
    tensors.updated()
    update.tensors = tensors.samples
    record.updates.append(update)
    r.write(record, FOLDER / f"step_{step + 1:05}.npz")
