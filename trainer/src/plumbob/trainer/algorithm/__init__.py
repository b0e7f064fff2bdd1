"""The mathematics of GRPO as pure functions: advantages, losses, KL estimates, importance weights."""
