"""The unseen half of the twelfth set of healthy settings: they are run only to measure."""

from __future__ import annotations

from plumbob.testing.faults.field import HealthySetting

UNSEEN = (HealthySetting("beta2 of 0.98", "lookup", "--adam-beta2 0.98", steps=6),)
