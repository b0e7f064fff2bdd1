"""Doubles, faults and programs that the tests of several packages and the benchmarks share; never published."""
