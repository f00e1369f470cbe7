"""Comparisons: run all combinations of option values (alternatives) of one command, show their progress, and compare their results."""
