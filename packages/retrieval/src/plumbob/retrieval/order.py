"""Select the highest scores, with ties in a fixed order."""

from __future__ import annotations

import numpy as np
from plumbob.retrieval.documents import check_top_k


def best(scores: np.ndarray, top_k: int) -> np.ndarray:
    """Indices of the `top_k` highest of `scores` [N], highest first, with equal scores in order of index."""
    check_top_k(top_k)
    if len(scores) > 64 and top_k < len(scores):
        # A partition finds the k-th score. Sorting all scores that reach it keeps ties at the k-th place in order.
        floor = -np.partition(-scores, top_k - 1)[top_k - 1]
        reached = np.flatnonzero(scores >= floor)
        return reached[np.argsort(-scores[reached], kind="stable")][:top_k]
    return np.argsort(-scores, kind="stable")[:top_k]
