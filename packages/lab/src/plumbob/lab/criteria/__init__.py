"""Criteria: expressions over metrics, what they evaluate to, and what follows from them."""
