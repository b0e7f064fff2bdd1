"""The token route `/inference/v1/generate` of vLLM (0.25 and later) and of `serve`: requests written, answers read.

Token ids go in; token ids and log-probabilities come out. vLLM's log-probabilities are those before temperature and
truncation unless it runs with `--logprobs-mode processed_logprobs`, as `vf-vllm` starts it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from plumbob.rollout import Completion, Sampling

PATH = "/inference/v1/generate"

NO_LOGPROB = -9999.0
"""What vLLM writes where it has no log-probability."""


STATED: dict[str, Any] = {
    "n": 1,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_tokens": 0,
    "stop": [],
    "stop_token_ids": [],
    "ignore_eos": True,  # only stop_token_ids end a completion
}
"""Every setting that changes what is sampled, with the value that changes nothing.

All of them are in every request, because a server may have other defaults (the model's generation_config.json).
"""


class Aborted(Exception):
    """The server ended a completion before it was complete; another attempt may succeed."""


def sampling_params(sampling: Sampling, *, seeded: bool) -> dict[str, Any]:
    """vLLM's names for how a completion is sampled, with what makes the answer cheap for the server to give.

    `seeded`: send the seed. vLLM then samples request by request, which is slower, and is not exact to the bit.
    """
    params: dict[str, Any] = {
        **STATED,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "stop_token_ids": list(sampling.stop_token_ids),
        "logprobs": 0,  # of the sampled token alone
        "detokenize": False,
        "output_kind": 2,  # FINAL_ONLY: nothing is assembled for each token
    }
    if seeded and sampling.seed is not None:
        params["seed"] = sampling.seed % (1 << 63)
    return params


def read_completion(content: bytes, *, version: int, greedy: bool) -> Completion:
    """The completion in an answer. Raises Aborted, and ValueError for what cannot be trained on.

    `version`: the policy version that was asked. `greedy`: temperature 0, where a sampled token has log-probability 0.
    """
    choice = json.loads(content)["choices"][0]
    token_ids, items = choice["token_ids"], choice["logprobs"]["content"]
    logprobs = [item["logprob"] for item in items]
    finish = choice["finish_reason"]
    if finish in ("abort", "error"):
        raise Aborted
    if finish not in ("stop", "length") or not token_ids:
        raise ValueError(f"it ended for the reason {finish!r} after {len(token_ids)} tokens")
    # Until some version after 0.30, vLLM names each token as "token_id:17"; later versions give the number.
    named = [item.get("token_id", item.get("token")) for item in items]
    if named not in (list(token_ids), [f"token_id:{token}" for token in token_ids]):
        raise ValueError("its log-probabilities do not belong to its token ids")
    if not all(map(math.isfinite, logprobs)) or min(logprobs) <= NO_LOGPROB:
        raise ValueError("a token has no log-probability")
    if greedy:
        logprobs = [0.0] * len(logprobs)
    return Completion(tuple(token_ids), tuple(logprobs), finish, version)


def read_prompt_logprobs(content: bytes, *, token_ids: Sequence[int]) -> list[float]:
    """Log-probability of each prompt token but the first, [T - 1]. Raises ValueError."""
    given = json.loads(content)["prompt_logprobs"]
    if given is None or len(given) != len(token_ids):
        raise ValueError(f"{len(given or ())} log-probabilities for {len(token_ids)} ids")
    return [float(at[str(token)]["logprob"]) for at, token in zip(given[1:], token_ids[1:], strict=True)]
