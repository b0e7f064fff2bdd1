"""Rollouts that are scored and not trained on, and their statistics."""
