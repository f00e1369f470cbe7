"""Comparisons: run each combination of option values (alternative) that a command gives, show the progress, and compare the results."""
