"""`evaluate`, `predict`, `benchmark` and `analyze`: rollouts that are scored and not trained on."""
