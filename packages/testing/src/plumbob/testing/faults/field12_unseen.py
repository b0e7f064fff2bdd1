"""The unseen half of the twelfth set of the field's faults: they are run only to measure."""

from __future__ import annotations

from plumbob.testing.faults.field import FieldFault

UNSEEN: tuple[FieldFault, ...] = ()
