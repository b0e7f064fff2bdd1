"""Faults that are injected into healthy runs, to test whether the doctor names them."""
