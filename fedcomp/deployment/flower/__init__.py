"""Deployments over stock Flower processes: `--transport flower` of `fedcomp server start` and `fedcomp client`.

The server starts `flower-superlink` and submits an App to it that names installed modules of fedcomp. The App's ServerApp runs the
rounds, and `fedcomp server start` displays their progress. The client starts `flower-supernode`, whose ClientApp keeps its state in the
client's folder.
"""
