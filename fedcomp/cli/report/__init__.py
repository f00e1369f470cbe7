"""The report on runs: one HTML page with a verdict, charts, and tables of results and settings."""
